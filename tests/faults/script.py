"""Does as one client everything that clients do, in an order that a seed decides, and keeps a book of it.

It is the workload of checks that interrupt nsqd at exact places: calls that fail, disks cut at a call. Many clients at
once are in load.py. Refusals are normal here: what was not acknowledged is not owed.
"""

import contextlib
import http.client
import random
import time
from collections.abc import Callable
from typing import Any

from faults.fates import Book
from harness import ClosedError, Message, Nsqd, Wire, eventually, mpub_messages
from harness.wire import ERROR, HEARTBEAT, MESSAGE

OK = b"OK"
SOON_MS = 2000
"""No message waits longer than this, so that everything can be drained."""
MSG_TIMEOUT_MS = 2000
NO_HEARTBEATS = -1
RDY = 40
MESSAGES_AT_A_TIME = 30
SYNC_LATE_S = 60.0
LIVELY, SECOND, HELD, SCRATCH = "lively", "second", "held", "scratch"


class Refused(Exception):
    """Says that nsqd said no, or went away."""


class Script:
    """Uses `orders` with two channels, `held` whose short messages are never finished, `scratch` that is emptied."""

    def __init__(self, daemon: Nsqd, book: Book, seed: int, body_bytes: int = 400, prefix: str = "") -> None:
        """Puts `prefix` before the names of topics."""
        self.daemon = daemon
        self.book = book
        self.random = random.Random(seed)
        self.refusals: list[str] = []
        self.slowest_answer_s = 0.0
        """Tells how busy the machine is: what nsqd does in the background may be as late. All waiting for nsqd counts:
        it may have stood still at any time.
        """
        self._body_bytes = body_bytes
        self._orders, self._held, self._scratch = (prefix + name for name in ("orders", "held", "scratch"))
        self._name = f"s{seed % 10**6}"
        self._number = 0
        self._publisher: Wire | None = None
        self._consumers: dict[tuple[str, str], Wire] = {}
        self._new_topics: list[str] = []
        self._unfinished_tokens: list[tuple[str, str, list[bytes]]] = []
        self._steps: list[tuple[int, Callable[[], None]]] = [
            (30, self.pub),
            (20, self.mpub),
            (15, self.dpub),
            (5, self.pub_by_http),
            (20, self.consume),
            (6, self.append_once),
            (4, self.new_topic),
            (2, self.pause),
            (1, self.empty),
            (1, self.seek),
            (1, self.make_and_delete),
            (1, self.make_and_delete_topic),
        ]

    # -- running -----------------------------------------------------------------------------------------

    def set_up(self) -> None:
        """Makes the channels, before anything is published to them."""
        for topic, channel in self._own_channels():
            self._carry_out(lambda topic=topic, channel=channel: self._make_channel(topic, channel))

    def _own_channels(self) -> list[tuple[str, str]]:
        orders, held, scratch = self._orders, self._held, self._scratch
        return [(orders, LIVELY), (orders, SECOND), (held, HELD), (scratch, SCRATCH)]

    def run(self, steps: int, pause_s: float = 0.0) -> None:
        weights = [weight for weight, _ in self._steps]
        for _ in range(steps):
            (_, step) = self.random.choices(self._steps, weights)[0]
            self._carry_out(step)
            if pause_s:
                time.sleep(self.random.uniform(0, 2 * pause_s))

    def _carry_out(self, step: Callable[[], None]) -> None:
        begun = time.monotonic()
        try:
            step()
        except (Refused, ClosedError, OSError, http.client.HTTPException) as error:
            self.refusals.append(f"{getattr(step, '__name__', 'set up')}: {error}")
            self._drop_publisher()
        if step != self.consume:  # that waits for messages, which need not come
            self._waited_since(begun)

    def _waited_since(self, begun: float) -> None:
        self.slowest_answer_s = max(self.slowest_answer_s, time.monotonic() - begun)

    def close(self) -> None:
        self._drop_publisher()
        for wire in self._consumers.values():
            wire.close()
        self._consumers = {}

    def pub_all_topics(self) -> int:
        """Publishes one message to each topic; returns how many were refused."""
        before = len(self.refusals)
        for topic in sorted({topic for topic, _ in self.book.channels}):
            self._carry_out(lambda topic=topic: self._pub_to(topic))
        return len(self.refusals) - before

    # -- publishing --------------------------------------------------------------------------------------

    def pub(self) -> None:
        self._pub_to(self._topic())

    def _pub_to(self, topic: str) -> None:
        self._publish(topic, 1, lambda wire, topic, bodies: wire.PUB(topic, bodies[0]))

    def mpub(self) -> None:
        count = self.random.randint(2, 20)
        self._publish(self._topic(), count, lambda wire, topic, bodies: wire.MPUB(topic, bodies))

    def dpub(self) -> None:
        delay_ms = self.random.randint(1, SOON_MS)
        self._publish(
            self._topic(), 1, lambda wire, topic, bodies: wire.DPUB(topic, delay_ms, bodies[0]), deferred=True
        )

    def pub_by_http(self) -> None:
        topic, bodies = self._topic(), self._bodies(1)
        self.book.send(topic, bodies)
        reply = self.daemon.post("/pub", bodies[0], topic=topic)
        if reply.status != 200:
            raise Refused(f"HTTP {reply.status} {reply.text}")
        self.book.acknowledge(bodies)

    def append_once(self) -> None:
        """Makes a staged append. One whose outcome is not known is tried again, as its writer would."""
        if self._unfinished_tokens:
            topic, token, bodies = self._unfinished_tokens[0]
        else:
            topic, token, bodies = (
                self._topic(),
                f"{self._name}.{self._number}",
                self._bodies(self.random.randint(1, 30)),
            )
            self._unfinished_tokens.append((topic, token, bodies))
        self.book.send(topic, bodies)
        for path, body in (("/log/stage", mpub_messages(bodies)), ("/log/append", b"")):
            reply = self.daemon.post(path, body, topic=topic, token=token, part=0)
            if reply.status != 200:
                raise Refused(f"{path} HTTP {reply.status} {reply.text}")
        self.book.append(topic, token, bodies)
        self._unfinished_tokens.pop(0)

    def _publish(
        self, topic: str, count: int, send: Callable[[Wire, str, list[bytes]], None], *, deferred: bool = False
    ) -> None:
        bodies = self._bodies(count)
        self.book.send(topic, bodies, deferred=deferred)
        if self._publisher is None:
            self._publisher = self.daemon.connect()
            self._publisher.identify(heartbeat_interval=NO_HEARTBEATS)
        send(self._publisher, topic, bodies)
        answer = self._publisher.read_frame()
        if answer.data != OK:
            raise Refused(answer.data.decode())
        self.book.acknowledge(bodies)

    def _topic(self) -> str:
        return self.random.choice([self._orders, self._orders, self._held, self._scratch, *self._new_topics[-3:]])

    def _bodies(self, count: int) -> list[bytes]:
        bodies = []
        for _ in range(count):
            self._number += 1
            size = self.random.choice((0, self._body_bytes, self.random.randint(0, 2 * self._body_bytes)))
            bodies.append(f"{self._name}/{self._number}/".encode() + b"." * size)
        return bodies

    def _drop_publisher(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    # -- consuming ---------------------------------------------------------------------------------------

    def consume(self) -> None:
        key = self.random.choice([(self._orders, LIVELY), (self._held, HELD)])
        wire = self._consumers.get(key)
        if wire is None:
            begun = time.monotonic()
            wire = self.daemon.connect()
            wire.subscribe(*key, rdy=RDY, msg_timeout=MSG_TIMEOUT_MS)
            self._consumers[key] = wire
            self._waited_since(begun)
        try:
            self._answer(wire, key[1])
        except (ClosedError, OSError):
            self._consumers.pop(key).close()
            raise

    def _answer(self, wire: Wire, channel: str) -> None:
        for _ in range(MESSAGES_AT_A_TIME):
            try:
                frame = wire.read_frame(0.02)
            except TimeoutError:
                return
            if frame.kind == ERROR and b"_FAILED" in frame.data:  # it had timed out meanwhile
                continue
            if frame.data == HEARTBEAT:
                wire.NOP()
                continue
            if frame.kind != MESSAGE:
                raise Refused(repr(frame))
            self._decide(wire, channel, Message.parse(frame.data))

    def _decide(self, wire: Wire, channel: str, message: Message) -> None:
        luck = self.random.random()
        if channel == HELD and message.body[-1:] == b"/":
            wire.TOUCH(message.id)  # short ones are never finished: they are parked, and kept
        elif luck < 0.75:
            self.book.release(channel, message.body)
            wire.FIN(message.id)
        elif luck < 0.9:
            wire.REQ(message.id, self.random.choice((0, 0, self.random.randint(1, SOON_MS))))

    # -- what operators do -------------------------------------------------------------------------------

    def new_topic(self, kind: str = "new") -> None:
        topic = f"{kind}.{self._name}.{len(self._new_topics)}"
        self._make_channel(topic, LIVELY)
        self._new_topics.append(topic)

    def fresh_topic(self) -> None:
        """Makes a topic whose name tells that nothing of it was synced when the fault began."""
        self._carry_out(lambda: self.new_topic("fresh"))

    def _make_channel(self, topic: str, channel: str) -> None:
        with self.daemon.connect() as wire:
            wire.SUB(topic, channel)
            answer = wire.read_frame()
        if answer.data != OK:
            raise Refused(answer.data.decode())
        self.book.add_channel(topic, channel)

    def pause(self) -> None:
        for verb in ("pause", "unpause"):
            self._post(f"/topic/{verb}", topic=self._orders)
            self._post(f"/channel/{verb}", topic=self._held, channel=HELD)

    def empty(self) -> None:
        self.book.empty(self._scratch, SCRATCH)
        self._post("/channel/empty", topic=self._scratch, channel=SCRATCH)

    def seek(self) -> None:
        """Sends a channel to the oldest message: it gets all again, but for deferred ones that are not due."""
        channel = self.random.choice((LIVELY, SECOND))
        for body, fate in self.book.fates.items():
            if fate.topic == self._orders and fate.is_deferred:
                self.book.release(channel, body)
        self._post("/channel/seek", topic=self._orders, channel=channel, to="oldest")

    def make_and_delete(self) -> None:
        self._post("/channel/create", topic=self._orders, channel="passing")
        self._post("/channel/delete", topic=self._orders, channel="passing")

    def make_and_delete_topic(self) -> None:
        """Makes and deletes a topic, always of the same name, so that what is left of the one before would be seen."""
        topic = f"{self._scratch}.passing"
        self._post("/topic/create", topic=topic)
        self._post("/pub", topic=topic, body=b"now")
        self._post("/pub", topic=topic, body=b"later", defer=SOON_MS)
        self._post("/topic/delete", topic=topic)

    def _post(self, path: str, body: bytes = b"", **query: Any) -> None:
        reply = self.daemon.post(path, body, **query)
        if reply.status != 200:
            raise Refused(f"{path} HTTP {reply.status} {reply.text}")


def settle(daemon: Nsqd) -> None:
    """Makes a round trip after everything else: what was sent before is carried out then."""
    with contextlib.suppress(ClosedError, OSError, AssertionError), daemon.connect() as wire:
        wire.assert_usable()


def sync_lag_s(daemon: Nsqd) -> float:
    """Returns for how long, as nsqd says, the oldest change has not been on the disk."""
    line = next(line for line in daemon.get("/metrics").text.splitlines() if line.startswith("nsqd_sync_lag_seconds "))
    return float(line.split()[1])


def wait_for_syncs(daemon: Nsqd, bound_s: float, timeout_s: float = SYNC_LATE_S) -> float:
    """Waits until nothing is unsynced for longer than `bound_s`, which nsqd keeps to unless it, or the disk, stands
    still; returns when it was so.
    """
    asked_s = 0.0

    def is_in_time() -> bool:
        nonlocal asked_s
        asked_s = time.time()
        return sync_lag_s(daemon) <= bound_s

    eventually(is_in_time, timeout_s)
    return asked_s
