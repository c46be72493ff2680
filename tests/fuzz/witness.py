"""Runs well-behaved clients beside the hostile ones: whatever those send, these lose nothing and get nothing twice."""

import threading
import time
from collections import Counter

from harness import ClosedError, Nsqd
from harness.lookupd import MAGIC_V1, LookupWire, Nsqlookupd, identify_command
from harness.wire import HEARTBEAT, MESSAGE

TOPIC = "witness"
WAIT_S = 60.0
PAUSE_S = 0.005


class Witness(threading.Thread):
    """Publishes numbered messages and finishes each that it gets; `harmed` are those that went wrong."""

    def __init__(self, nsqd: Nsqd) -> None:
        super().__init__(daemon=True)
        self._publisher = nsqd.connect(timeout_s=WAIT_S)
        self._publisher.identify(heartbeat_interval=-1)
        self._consumer = nsqd.connect(timeout_s=WAIT_S).subscribe(TOPIC, rdy=10)
        self._stopping = threading.Event()
        self.sent = 0
        self.received: Counter[bytes] = Counter()
        self.failure = ""

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._publisher.publish(TOPIC, b"%d" % self.sent)
                self.sent += 1
                self._receive()
                time.sleep(PAUSE_S)
        except (ClosedError, AssertionError, OSError) as error:
            self.failure = repr(error)

    def _receive(self) -> None:
        frame = self._consumer.read_frame()
        while frame.data == HEARTBEAT:
            self._consumer.NOP()
            frame = self._consumer.read_frame()
        assert frame.kind == MESSAGE, frame
        self._consumer.FIN(frame.data[10:26])
        self.received[frame.data[26:]] += 1

    def stop(self) -> int:
        """Ends the witness, and returns how many messages were harmed; one more if it could not go on."""
        self._stopping.set()
        self.join(2 * WAIT_S)
        wanted = Counter(b"%d" % number for number in range(self.sent))
        harmed = sum(((wanted - self.received) + (self.received - wanted)).values())
        self._publisher.close()
        self._consumer.close()
        return harmed + bool(self.failure)


class LookupWitness:
    """Is an nsqd that is registered and stays so."""

    def __init__(self, lookupd: Nsqlookupd) -> None:
        self._lookupd = lookupd
        self._wire = LookupWire(lookupd.tcp)
        self._wire.ask(MAGIC_V1 + identify_command(broadcast_address=TOPIC))
        assert self._wire.ask(f"REGISTER {TOPIC} ch\n".encode()) == b"OK"

    def stop(self) -> int:
        harmed = int(self._wire.ask(b"PING\n") != b"OK")
        harmed += (TOPIC, 4150) not in self._lookupd.producers(TOPIC)
        harmed += self._lookupd.channels(TOPIC) != {"ch"}
        self._wire.socket.close()
        return harmed
