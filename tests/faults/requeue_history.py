"""Gives messages back in every way, and kills nsqd: attempts grow, delays hold, everything comes.

An answer is confirmed once a later command of the same connection was answered. For each message the history knows what
the broker owes it: a message that was finished is gone, one that was requeued comes with more attempts than it was
requeued with, and not before its delay is over.
"""

import contextlib
import itertools
import random
import time
from dataclasses import dataclass, field

from harness import ClosedError, Nsqd, Wire, body_of
from nsquark.kernel.frames import FrameScanner

TOPIC, CHANNEL = "history", "ch"
RDY = 2500
ROUND_S = 0.8
DELAY_MS_MAX = 1500
MSG_TIMEOUT_MS = 60_000
DRAIN_TIMEOUT_S = 60.0
CLOCK_SLACK_S = 0.05
"""nsqd counts whole milliseconds on two clocks; a due message may be seen as due that much earlier."""


@dataclass(slots=True)
class RequeueFate:
    """Knows one message by its last delivery, and the last answer that was confirmed."""

    attempts: int = 0
    is_finished: bool = False
    requeued_attempts: int = 0
    not_before_s: float = 0.0
    deliveries: list[tuple[float, int]] = field(default_factory=list)


@dataclass(slots=True)
class SentAnswer:
    body: bytes
    attempts: int
    delay_ms: int | None
    """A FIN has None here."""
    sent_s: float


class RequeueHistory:
    """Leads one broker through several crashes; `faults` says what went wrong."""

    def __init__(self, daemon: Nsqd, seed: int) -> None:
        self.daemon = daemon
        self.random = random.Random(seed)
        self.fates: dict[bytes, RequeueFate] = {}
        self.faults: list[str] = []
        self.confirmed = 0
        self._numbers = itertools.count()
        self._unconfirmed: list[SentAnswer] = []

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self._round()
            self.daemon.kill()
            self._unconfirmed.clear()
            self.daemon.start()
        self._drain()

    # -- one round ---------------------------------------------------------------------------------------

    def _round(self) -> None:
        stubborn = self.random.choice([0.0, 0.2, 0.9])
        with self.daemon.connect() as wire, self.daemon.connect() as publisher:
            for _ in range(self.random.choice([1, 3, 10])):
                self._publish(publisher)
            wire.subscribe(TOPIC, CHANNEL, rdy=self.random.choice([1, 7, 100, RDY]), msg_timeout=MSG_TIMEOUT_MS)
            end_s = time.monotonic() + self.random.uniform(0, ROUND_S)
            reader = _Reader(wire)
            asked = 0
            while time.monotonic() < end_s:
                messages, oks = reader.read()
                if oks:
                    self._confirm(asked)
                    asked = 0
                self._answer(wire, messages, stubborn)
                if not asked and self._unconfirmed:
                    asked = len(self._unconfirmed)
                    wire.send(self._barrier())

    def _publish(self, publisher: Wire) -> None:
        bodies = [b"%d" % next(self._numbers) for _ in range(self.random.choice([1, 50, 2000]))]
        publisher.publish(TOPIC, *bodies)
        for body in bodies:
            self.fates[body] = RequeueFate()

    def _barrier(self) -> bytes:
        """Sends any command that is answered, now and then one whose answer needs no turn of the loop."""
        line = self.random.choice([b"PUB barrier#ephemeral", b"PUB barrier", b"DPUB barrier 3600000"])
        return line + b"\n" + body_of(b"x")

    def _answer(self, wire: Wire, messages: list[tuple[int, int, bytes, bytes]], stubborn: float) -> None:
        out = []
        now_s = time.monotonic()
        for _, attempts, message_id, body in messages:
            self._delivered(body, attempts, now_s)
            luck = self.random.random()
            if luck < 0.1:
                continue  # held: in flight at the crash
            if luck < 0.1 + stubborn:
                delay_ms = self.random.choice([0, 0, 0, self.random.randrange(1, DELAY_MS_MAX)])
                out.append(b"REQ %b %d\n" % (message_id, delay_ms))
                self._unconfirmed.append(SentAnswer(body, attempts, delay_ms, time.monotonic()))
            else:
                out.append(b"FIN %b\n" % message_id)
                self._unconfirmed.append(SentAnswer(body, attempts, None, time.monotonic()))
        wire.send(b"".join(out))

    def _confirm(self, count: int) -> None:
        for answer in self._unconfirmed[:count]:
            fate = self.fates[answer.body]
            if answer.delay_ms is None:
                fate.is_finished = True
            else:
                fate.requeued_attempts = answer.attempts
                fate.not_before_s = answer.sent_s + answer.delay_ms / 1000
        del self._unconfirmed[:count]
        self.confirmed += count

    def _delivered(self, body: bytes, attempts: int, now_s: float) -> None:
        fate = self.fates[body]
        fate.deliveries.append((now_s, attempts))
        if attempts <= fate.requeued_attempts:
            self._fault(body, f"attempt {attempts} after a REQ of attempt {fate.requeued_attempts}")
        early_s = fate.not_before_s - now_s
        if early_s > CLOCK_SLACK_S:
            self._fault(body, f"{early_s * 1000:.0f} ms before its delay is over")

    def _fault(self, body: bytes, text: str) -> None:
        self.faults.append(f"message {body.decode()}: {text}; {self.fates[body]}")

    # -- the end -----------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Checks that whatever was not finished comes, and that nothing is left then."""
        came: set[bytes] = set()
        deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
        with self.daemon.connect() as wire:
            wire.subscribe(TOPIC, CHANNEL, rdy=RDY, msg_timeout=MSG_TIMEOUT_MS)
            reader = _Reader(wire)
            while time.monotonic() < deadline_s:
                messages, _ = reader.read()
                now_s = time.monotonic()
                for _, attempts, _, body in messages:
                    self._delivered(body, attempts, now_s)
                    came.add(body)
                wire.send(b"".join(b"FIN %b\n" % message[2] for message in messages))
                if not messages and not self._left():
                    break
        if left := self._left():
            self.faults.append(f"not drained after {DRAIN_TIMEOUT_S} s: {left}")
        for body, fate in self.fates.items():
            if body not in came and not fate.is_finished and not fate.deliveries:
                self._fault(body, "never came")
        if "INTERNAL" in self.daemon.log:
            self.faults.append(self.daemon.log[self.daemon.log.index("INTERNAL") :][:500])

    def _left(self) -> dict[str, int]:
        shown = self.daemon.channel(TOPIC, CHANNEL)
        counts = {name: shown[name] for name in ("depth", "in_flight_count", "deferred_count")}
        return counts if any(counts.values()) else {}


class _Reader:
    """Frames as they come, many at a time."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._scanner = FrameScanner()
        self._rest = wire.take_pending()

    def read(self) -> tuple[list[tuple[int, int, bytes, bytes]], int]:
        """Reads what has come: returns messages, and how many OKs."""
        self._wire.socket.settimeout(0.01)
        with contextlib.suppress(TimeoutError):
            self._rest += self._wire.receive()
        used, messages, others = self._scanner.scan(self._rest, 0, len(self._rest))
        self._rest = self._rest[used:]
        for _, text in others:
            if text == b"_heartbeat_":
                self._wire.NOP()
            elif text != b"OK":
                raise ClosedError(text)
        return messages, sum(text == b"OK" for _, text in others)
