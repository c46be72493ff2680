"""Has clients that note everything they do, so that afterwards it can be judged what the broker owed them."""

import contextlib
import http.client
import random
import struct
import threading
import time
from dataclasses import dataclass, field

from harness import ClosedError, Nsqd, Wire, body_of, mpub_body, mpub_messages
from harness.wire import READ_TIMEOUT_S
from nsquark.kernel.frames import FrameScanner

READ_BYTES = 256 << 10
POLL_S = 0.01
BARRIER_EVERY_S = 0.03
BARRIER = b"PUB barrier#ephemeral\n" + body_of(b"x")
OK = b"OK"
HEARTBEAT = b"_heartbeat_"

STEADY_RDY = 500
UNSTEADY_RDY = 300
STEADY_MSG_TIMEOUT_MS = 60_000
UNSTEADY_MSG_TIMEOUT_MS = 1_000


@dataclass(frozen=True, slots=True)
class Sent:
    """Is a message that was sent to be published; `due` is the earliest time it may be delivered."""

    topic: str
    body: bytes
    publisher: str
    number: int
    due: float
    is_deferred: bool


class Client(threading.Thread):
    """Is a connection in a thread of its own. It ends when told to, or when the broker is gone."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name=name, daemon=True)
        self.random = random.Random(seed)
        self.stopping = threading.Event()
        self.faults: list[tuple[float, str]] = []
        """Holds what should not have happened, unless the broker was killed before."""

    def run(self) -> None:
        try:
            self.work()
        except (ClosedError, OSError, http.client.HTTPException) as error:
            self.faults.append((time.time(), f"{self.name}: {type(error).__name__} {error}"))

    def work(self) -> None:
        raise NotImplementedError


class Publisher(Client):
    """Sends PUB, MPUB and DPUB, several at a time without waiting, to several topics."""

    def __init__(self, daemon: Nsqd, name: str, topics: list[str], seed: int) -> None:
        super().__init__(name, seed)
        self.daemon_under_test = daemon
        self.topics = topics
        self.sent: list[Sent] = []
        self.acknowledged: set[bytes] = set()
        self._number = 0

    def work(self) -> None:
        with self.daemon_under_test.connect() as wire:
            while not self.stopping.is_set():
                commands = [self._command() for _ in range(self.random.randint(1, 8))]
                wire.send(b"".join(data for data, _ in commands))
                for _, bodies in commands:
                    answer = wire.read_frame()
                    if answer.data == OK:
                        self.acknowledged.update(bodies)
                    else:
                        self.faults.append((time.time(), f"{self.name}: {answer}"))
                        return
                time.sleep(self.random.uniform(0, 0.02))

    def _command(self) -> tuple[bytes, list[bytes]]:
        topic = self.random.choice(self.topics)
        kind = self.random.random()
        if kind < 0.5:
            body = self.message(topic)
            return f"PUB {topic}\n".encode() + body_of(body), [body]
        if kind < 0.75:
            bodies = [self.message(topic) for _ in range(int(self.random.expovariate(1 / 15)) + 1)]
            return f"MPUB {topic}\n".encode() + mpub_body(bodies), bodies
        delay_ms = self.random.randint(2000, 6000) if kind > 0.95 else self.random.randint(1, 400)
        body = self.message(topic, delay_ms)
        return f"DPUB {topic} {delay_ms}\n".encode() + body_of(body), [body]

    def message(self, topic: str, delay_ms: int = 0) -> bytes:
        """Makes a body that no other message has."""
        self._number += 1
        size = 8000 if self.random.random() < 0.01 else self.random.randint(0, 250)
        body = f"{self.name}/{self._number}/".encode() + b"." * size
        due = time.time() + delay_ms / 1000
        self.sent.append(Sent(topic, body, self.name, self._number, due, delay_ms > 0))
        return body


class HttpPublisher(Publisher):
    """Sends /pub, /pub with a delay, and /mpub in its binary form, one request after another."""

    def work(self) -> None:
        connection = http.client.HTTPConnection(*self.daemon_under_test.http, timeout=READ_TIMEOUT_S)
        with contextlib.closing(connection):
            while not self.stopping.is_set():
                target, content, bodies = self._request()
                connection.request("POST", target, content)
                answer = connection.getresponse()
                text = answer.read()
                if answer.status == 200 and text == OK:
                    self.acknowledged.update(bodies)
                else:
                    self.faults.append((time.time(), f"{self.name}: HTTP {answer.status} {text!r}"))
                    return
                time.sleep(self.random.uniform(0, 0.01))

    def _request(self) -> tuple[str, bytes, list[bytes]]:
        topic = self.random.choice(self.topics)
        kind = self.random.random()
        if kind < 0.5:
            body = self.message(topic)
            return f"/pub?topic={topic}", body, [body]
        if kind < 0.75:
            delay_ms = self.random.randint(1, 1500)
            body = self.message(topic, delay_ms)
            return f"/pub?topic={topic}&defer={delay_ms}", body, [body]
        bodies = [self.message(topic) for _ in range(self.random.randint(1, 20))]
        return f"/mpub?topic={topic}&binary=true", mpub_messages(bodies), bodies


@dataclass(frozen=True, slots=True)
class Delivery:
    time: float
    id: bytes
    attempts: int
    body: bytes


@dataclass(slots=True)
class Answer:
    """Is a FIN, or a REQ with a delay. It is confirmed if the broker surely carried it out and noted it."""

    time: float
    id: bytes
    requeue_ms: int | None = None
    confirmed: bool = False
    refused: bool = False
    """Says that the answer came too late: the message had timed out."""


@dataclass
class _Barrier:
    """Makes two publishes, one after the other's OK: then the turn of the loop that saw the first one is over."""

    answers: int = 0
    stage: int = 0
    last: float = 0.0


class Consumer(Client):
    """Consumes: a steady one finishes everything at once, in order; an unsteady one does whatever consumers may do."""

    def __init__(
        self, daemon: Nsqd, name: str, topic: str, channel: str, seed: int, troubled: set[bytes] | None = None
    ) -> None:
        """Gets in `troubled` the ids that an unsteady consumer did not finish at once; it will next time, or no
        floor ever moves.
        """
        super().__init__(name, seed)
        self.daemon_under_test = daemon
        self.topic = topic
        self.channel = channel
        self.steady = troubled is None
        self.troubled = set() if troubled is None else troubled
        self.calm = False
        """Says that from now on everything is finished at once."""
        self.events: list[Delivery | Answer] = []
        self.answers: list[Answer] = []
        self.lag_s = 0.0
        """Is the longest it took to look at what came, or for a round trip to be over: how busy the machine is."""
        self.confirmed = 0
        self._held: list[bytes] = []
        self._barrier = _Barrier()

    @property
    def has_confirmed_all(self) -> bool:
        return self.confirmed == len(self.answers)

    def work(self) -> None:
        timeout_ms = STEADY_MSG_TIMEOUT_MS if self.steady else UNSTEADY_MSG_TIMEOUT_MS
        rdy = STEADY_RDY if self.steady else UNSTEADY_RDY
        with self.daemon_under_test.connect() as wire:
            wire.subscribe(self.topic, self.channel, rdy=rdy, msg_timeout=timeout_ms)
            wire.socket.settimeout(POLL_S)
            scanner, rest = FrameScanner(), wire.take_pending()
            turn = time.monotonic()
            while not self.stopping.is_set():
                self.lag_s, turn = max(self.lag_s, time.monotonic() - turn), time.monotonic()
                data = rest
                with contextlib.suppress(TimeoutError):
                    data = rest + wire.receive()
                consumed, messages, others = scanner.scan(data, 0, len(data))
                rest = data[consumed:]
                for kind, text in others:
                    self._other_frame(wire, kind, text)
                self._answer(wire, messages)
                self._confirm(wire)
                wire.socket.settimeout(POLL_S)

    def _other_frame(self, wire: Wire, kind: int, text: bytes) -> None:
        barrier = self._barrier
        if text == HEARTBEAT:
            wire.NOP()
        elif text == OK and barrier.stage == 1:
            barrier.stage = 2
            wire.send(BARRIER)
        elif text == OK:
            barrier.stage = 0
            self.lag_s = max(self.lag_s, time.monotonic() - barrier.last)
            for answer in self.answers[self.confirmed : barrier.answers]:
                answer.confirmed = True
            self.confirmed = barrier.answers
        elif not self.steady and text.startswith((b"E_FIN_FAILED", b"E_REQ_FAILED")):
            self._refuse(text.split(b" ")[2], is_requeue=text.startswith(b"E_REQ"))
        else:
            self.faults.append((time.time(), f"{self.name}: frame {kind} {text!r}"))

    def _refuse(self, message_id: bytes, is_requeue: bool) -> None:
        """Is told that nsqd refused an answer: it says so in their order, so it means the first of that kind not
        refused yet.
        """
        for answer in self.answers:
            is_kind = (answer.requeue_ms is not None) is is_requeue
            if answer.id == message_id and is_kind and not answer.refused:
                answer.refused = True
                return

    def _answer(self, wire: Wire, messages: list[tuple[int, int, bytes, bytes]]) -> None:
        now = time.time()
        for _, attempts, message_id, body in messages:
            self.events.append(Delivery(now, message_id, attempts, body))
        ids = [message[2] for message in messages]
        if self.steady or self.calm:
            finish, self._held = self._held + ids, []
            requeue: list[tuple[bytes, int]] = []
        else:
            finish, requeue = self._choose(messages)
        data = b"".join(b"FIN %b\n" % message_id for message_id in finish)
        data += b"".join(b"REQ %b %d\n" % choice for choice in requeue)
        now = time.time()
        for answer in [Answer(now, one) for one in finish] + [Answer(now, *choice) for choice in requeue]:
            self.events.append(answer)
            self.answers.append(answer)
        wire.send(data)

    def _choose(self, messages: list[tuple[int, int, bytes, bytes]]) -> tuple[list[bytes], list[tuple[bytes, int]]]:
        requeue: list[tuple[bytes, int]] = []
        for _, attempts, message_id, _ in messages:
            luck = self.random.random() * (0.82 if message_id in self.troubled else 1.0)
            if luck < 0.8 or attempts > 4:
                self._held.append(message_id)
            elif luck < 0.9:
                requeue.append((message_id, 0))
            elif luck < 0.97:
                requeue.append((message_id, self.random.randint(30, 1200)))
            # else it is left to time out
            if luck >= 0.8:
                self.troubled.add(message_id)
        self.random.shuffle(self._held)
        keep = len(self._held) // 4
        finish, self._held = self._held[keep:], self._held[:keep]
        return finish, requeue

    def _confirm(self, wire: Wire) -> None:
        barrier, now = self._barrier, time.monotonic()
        if barrier.stage == 0 and not self.has_confirmed_all and now - barrier.last > BARRIER_EVERY_S:
            barrier.stage, barrier.last, barrier.answers = 1, now, len(self.answers)
            wire.send(BARRIER)


@dataclass
class Round:
    """Holds what all clients did from one start of the broker to its end."""

    number: int
    publishers: list[Publisher] = field(default_factory=list)
    consumers: list[Consumer] = field(default_factory=list)
    ended: float = float("inf")

    @property
    def clients(self) -> list[Client]:
        return [*self.publishers, *self.consumers]

    def start(self) -> None:
        for client in self.clients:
            client.start()

    def finish(self) -> None:
        for client in self.clients:
            client.stopping.set()
        for client in self.clients:
            client.join(30)
            assert not client.is_alive(), f"{client.name} hangs"

    @property
    def faults(self) -> list[str]:
        return [text for client in self.clients for at, text in client.faults if at < self.ended]


def sequence_of(message_id: bytes) -> int:
    """Ids count up in the order of the log; the upper ten of their 63 bits are the node's."""
    return int(struct.unpack(">Q", bytes.fromhex(message_id.decode()))[0]) & ((1 << 53) - 1)
