"""Has clients that are fast because they look at no single message, one that measures, and the broker's memory."""

import contextlib
import threading
import time
from pathlib import Path

from harness import ClosedError, Message, Nsqd, Wire, mpub_body
from nsquark.kernel.frames import FrameScanner, finish_all

READ_BYTES = 256 << 10
BATCH_MESSAGES = 500
WINDOW_BATCHES = 4
PROBE_EVERY_S = 0.01
STALLED_S = 30.0
"""A broker that gives nothing for so long, while there is something, is stuck."""
NO_HEARTBEATS = -1
MIB = 1 << 20


def memory_mib(daemon: Nsqd) -> tuple[float, float]:
    """Returns resident memory now and at its highest."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines())
    return tuple(int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def publish_many(daemon: Nsqd, topic: str, count: int, size: int = 200) -> None:
    """Sends MPUB after MPUB, some on their way at a time; returns after the last OK."""
    batch = f"MPUB {topic}\n".encode() + mpub_body([b"x" * size] * BATCH_MESSAGES)
    with daemon.connect(timeout_s=STALLED_S) as wire:
        wire.identify(heartbeat_interval=NO_HEARTBEATS)
        on_their_way = 0
        for _ in range(-(-count // BATCH_MESSAGES)):
            wire.send(batch)
            on_their_way += 1
            if on_their_way == WINDOW_BATCHES:
                wire.expect_ok()
                on_their_way -= 1
        wire.expect_ok(on_their_way)


def finish_many(wire: Wire, count: int) -> int:
    """Finishes at least `count` messages; how many it really were. Ends early if nothing comes any more."""
    wire.socket.settimeout(STALLED_S)
    buffer, out = bytearray(READ_BYTES), bytearray(READ_BYTES)
    rest = wire.take_pending()
    done = 0
    while done < count:
        buffer[: len(rest)] = rest
        try:
            end = len(rest) + wire.socket.recv_into(memoryview(buffer)[len(rest) :])
        except TimeoutError:
            break
        if end == len(rest):
            raise ClosedError
        consumed, messages, written, others = finish_all(buffer, 0, end, out)
        if written:
            wire.socket.sendall(memoryview(out)[:written])
        done += messages
        rest = bytes(memoryview(buffer)[consumed:end])
        for _, text in others:
            assert text == b"_heartbeat_", text
            wire.socket.sendall(b"NOP\n")
    return done


def requeue_many(wire: Wire, count: int, delay_ms: int) -> None:
    wire.socket.settimeout(STALLED_S)
    scanner, rest, done = FrameScanner(), wire.take_pending(), 0
    while done < count:
        data = rest + wire.receive()
        consumed, messages, _ = scanner.scan(data, 0, len(data))
        rest = data[consumed:]
        wire.socket.sendall(b"".join(b"REQ %b %d\n" % (message[2], delay_ms) for message in messages))
        done += len(messages)


class Probe(threading.Thread):
    """Measures, as another client with a topic of its own, how long a message takes from publishing to delivery."""

    def __init__(self, daemon: Nsqd) -> None:
        super().__init__(daemon=True)
        self.daemon_under_test = daemon
        self.latencies_s: list[float] = []
        self._stopping = threading.Event()
        self._was_served = False

    def __enter__(self) -> "Probe":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.join(STALLED_S)

    def run(self) -> None:
        daemon = self.daemon_under_test
        with contextlib.suppress(ClosedError), daemon.connect() as publisher, daemon.connect() as consumer:
            publisher.identify(heartbeat_interval=NO_HEARTBEATS)
            consumer.subscribe("probe", rdy=10)
            while not self._stopping.wait(PROBE_EVERY_S):
                begun, waited_s = time.monotonic(), self._waited_for_a_cpu_s()
                publisher.publish("probe", b"x")
                consumer.FIN(self._next_message(consumer).id)
                withheld_s = self._waited_for_a_cpu_s() - waited_s
                self.latencies_s.append(max(0.0, time.monotonic() - begun - withheld_s))
            self._was_served = True

    def _waited_for_a_cpu_s(self) -> float:
        """Returns how long nsqd and this thread were ready to run while others had the CPUs: no delay of nsqd's
        making.
        """
        total_ns = 0
        for path in (f"/proc/{self.daemon_under_test.pid}/schedstat", "/proc/thread-self/schedstat"):
            with contextlib.suppress(FileNotFoundError):  # as where the kernel does not tell
                total_ns += int(Path(path).read_text().split()[1])
        return total_ns / 1e9

    @staticmethod
    def _next_message(consumer: Wire) -> Message:
        frame = consumer.read_frame(STALLED_S)
        while frame.data == b"_heartbeat_":
            consumer.NOP()
            frame = consumer.read_frame(STALLED_S)
        return Message.parse(frame.data)

    @property
    def p99_s(self) -> float:
        # A message that never came has no latency, and would be missing here.
        assert self._was_served, "the probe was cut off, or waited in vain"
        assert self.latencies_s, "no probe came through"
        return sorted(self.latencies_s)[int(len(self.latencies_s) * 0.99)]


def disk_mib(daemon: Nsqd) -> float:
    total = 0
    for path in daemon.data_path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total / MIB
