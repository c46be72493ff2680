"""Publishes to many nsqds: balanced, and past those that fail.

What a publish that returned without an error means: with `copies=1` one nsqd has the message, with `copies=N` N
different nsqds have it. A publish that failed may have left the message on some of them all the same. A message may
be there more than once, and order ends where an nsqd fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, Unpack

from nsquark.base.addresses import split_address
from nsquark.client.breaker import LATENCY_STALE_S, Member, may_go_elsewhere
from nsquark.client.checks import check_addresses, check_name, checked_body
from nsquark.client.config import Config, Options
from nsquark.client.documented import documented_like
from nsquark.client.errors import (
    ANOTHER_LOOP,
    AuthFailed,
    Closed,
    ConfigError,
    IdentifyFailed,
    NotConnected,
    NsqError,
    TooMuchOutstanding,
)
from nsquark.client.logs import NamedLog
from nsquark.client.nsqds import NSQDS_MAX
from nsquark.client.packing import Packing, mpub_body, packed, packed_all
from nsquark.client.pool_discovery import PoolDiscovery
from nsquark.client.producer import Producer
from nsquark.wire.commands import MpubBody

RETRY_DEADLINE_S: Final = 30.0
OUTSTANDING_BYTES_MAX: Final = 64 << 20
OUTSTANDING_MAX: Final = 100_000
CLOSE_TIMEOUT_S: Final = 10.0
STALL_S_MAX: Final = 10.0
"""An nsqd that owes answers and gives none for so long is taken for dead, long before read_timeout says so."""
SLOW_TIMES: Final = 2
SLOW_S_MIN: Final = 0.01
"""An nsqd is slow if it takes so many times as long as the fastest, and so much longer."""
SLOW_BYTES: Final = 1
"""A slow nsqd is chosen only where all others have publishes to answer."""
SWEEP_INTERVAL_S: Final = 0.1
"""Deadlines are kept so exactly."""

Send = Callable[[Producer], "asyncio.Future[None]"]


class NsqdStatus(NamedTuple):
    """An nsqd of a pool as it is now."""

    address: str
    """The address of its TCP port."""
    state: str
    """`"up"`, `"down"`, `"trial"` when it just came back, or `"silent"` when it owes answers for too long."""
    failures: int
    """The number of failures since it was last up."""
    outstanding: int
    """The number of publishes it has not answered yet."""
    outstanding_bytes: int
    """The number of bytes it has not answered yet."""


class _Publish:
    """One call of a publish method, until every copy of it is taken or one cannot be."""

    __slots__ = ("deadline_s", "error", "future", "in_air", "is_admitted", "pending", "send", "size", "takers")

    def __init__(self, send: Send, size: int, copies: int, deadline_s: float, future: asyncio.Future[None]) -> None:
        self.send = send
        self.size = size
        self.deadline_s = deadline_s
        self.future = future
        self.pending = copies
        """The number of copies that no nsqd has said OK to."""
        self.in_air = 0
        """The number of copies that were sent and have no answer."""
        self.takers: list[Member] = []
        """The nsqds where a copy is or may soon be: the next one goes elsewhere."""
        self.error: BaseException | None = None
        self.is_admitted = False


@documented_like(Producer)
class ProducerPool:
    """Publishes to the nsqds of a list, or to those that nsqlookupds know, as to one.

    Each publish goes to the nsqd with the fewest bytes unanswered, among equals to a faster one. Where a connection
    is lost, or an nsqd answers nothing for long, what had no answer goes to another nsqd until `retry_deadline`; what
    nsqd refused is not tried again, except when it could not write it.

    addresses: one or several `host:port` of nsqds.
    lookupd: HTTP addresses of nsqlookupds; all nsqds are used that they know.
    lookupd_topic: of these only the nsqds that carry this topic.
    config: options, which `options` override.
    copies: on so many different nsqds each message must be before its publish returns.
    envelope: puts each message into an envelope, as `copies` does: it has a key for `dedupe`, and room for headers.
    retry_deadline: seconds after which a publish fails that no nsqd took.
    outstanding_bytes_max: so many bytes of publishes may wait for their answer.
    outstanding_max: so many publishes may wait for their answer.
    logger: instead of `nsquark.client`.

    Invariants: every publish in `_unsettled` is either in `_waiting`, or admitted with each pending copy in the air or
    in `_homeless`; outstanding are the admitted ones that are unsettled or still in the air.
    """

    def __init__(
        self,
        addresses: str | Iterable[str] = (),
        *,
        lookupd: str | Iterable[str] = (),
        lookupd_topic: str | None = None,
        config: Config | None = None,
        copies: int = 1,
        envelope: bool = False,
        retry_deadline: float | timedelta = RETRY_DEADLINE_S,
        outstanding_bytes_max: int = OUTSTANDING_BYTES_MAX,
        outstanding_max: int = OUTSTANDING_MAX,
        logger: logging.Logger | None = None,
        **options: Unpack[Options],
    ) -> None:
        self.config = Config.merge(config, options)
        self._log = NamedLog(logger, "pool")
        self.copies = copies
        self.envelope = envelope or copies > 1
        self._retry_s = retry_deadline.total_seconds() if isinstance(retry_deadline, timedelta) else retry_deadline
        self._bytes_max = outstanding_bytes_max
        self._count_max = outstanding_max
        self._members: dict[str, Member] = {}
        self._in_turn: deque[Member] = deque()
        self._count = 0
        self._bytes = 0
        self._waiting: deque[_Publish] = deque()
        self._homeless: deque[_Publish] = deque()
        self._unsettled: OrderedDict[_Publish, None] = OrderedDict()
        self._sweep: asyncio.TimerHandle | None = None
        self._fastest_s = 0.0
        self._leaving: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_started = self._is_closed = False
        for address in check_addresses("nsqd", addresses):
            self._add(address, is_fixed=True)
        lookupds = check_addresses("lookupd", lookupd)
        self._discovery = (
            PoolDiscovery(lookupds, lookupd_topic, self.config, self._found, self._log) if lookupds else None
        )
        self._check_arguments()

    def _check_arguments(self) -> None:
        if not self._members and self._discovery is None:
            raise ConfigError("a pool needs nsqds: give their addresses, or lookupd=")
        if self.copies < 1:
            raise ConfigError(f"invalid copies ! {self.copies} < 1")
        if self._discovery is None and len(self._members) < self.copies:
            raise ConfigError(f"copies={self.copies} needs as many different nsqds; {len(self._members)} given")
        if not self._retry_s > 0:
            raise ConfigError(f"invalid retry_deadline ! {self._retry_s} <= 0 seconds")

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def outstanding(self) -> int:
        return self._count

    @property
    def outstanding_bytes(self) -> int:
        return self._bytes

    def nsqds(self) -> list[NsqdStatus]:
        """Returns the nsqds that are known, and how each of them is."""
        return [
            NsqdStatus(
                member.address,
                member.state.value,
                member.failures,
                member.producer.outstanding,
                member.producer.outstanding_bytes,
            )
            for member in self._members.values()
        ]

    # -- publishing --------------------------------------------------------------------------------------

    async def publish(self, topic: str, body: Any, **packing: Unpack[Packing]) -> None:
        """Returns when `copies` nsqds have the message. Waits first while too much is outstanding.

        topic: its name.
        body: bytes, or with `encode` any value.
        """
        await self._outcome(self._submit(self._pub(topic, body, packing), must_wait=True))

    async def multi_publish(self, topic: str, bodies: Iterable[Any] | MpubBody, **packing: Unpack[Packing]) -> None:
        """Publishes all the messages in one command, to the same nsqds.

        topic: its name.
        bodies: of the messages, each as of `publish`.
        """
        await self._outcome(self._submit(self._mpub(topic, bodies, packing), must_wait=True))

    async def deferred_publish(
        self, topic: str, delay: float | timedelta, body: Any, **packing: Unpack[Packing]
    ) -> None:
        await self._outcome(self._submit(self._dpub(topic, delay, body, packing), must_wait=True))

    def publish_nowait(self, topic: str, body: Any, **packing: Unpack[Packing]) -> asyncio.Future[None]:
        return self._submit(self._pub(topic, body, packing), must_wait=False).future

    def multi_publish_nowait(
        self, topic: str, bodies: Iterable[Any] | MpubBody, **packing: Unpack[Packing]
    ) -> asyncio.Future[None]:
        return self._send(self._mpub(topic, bodies, packing))

    def deferred_publish_nowait(
        self, topic: str, delay: float | timedelta, body: Any, **packing: Unpack[Packing]
    ) -> asyncio.Future[None]:
        return self._send(self._dpub(topic, delay, body, packing))

    async def ping(self) -> None:
        """Connects to every nsqd that is known; NotConnected if fewer than `copies` of them are there."""
        self._check_open()
        self._start()
        members = list(self._members.values())
        outcomes = await asyncio.gather(*(member.producer.ping() for member in members), return_exceptions=True)
        errors = [error for error in outcomes if error is not None]
        if len(members) - len(errors) < self.copies:
            raise NotConnected(f"{self._missing()}{f' - {errors[0]}' if errors else ''}")

    def _pub(self, topic: str, body: Any, packing: Packing) -> tuple[Send, int]:
        check_name("topic", topic)
        ready = self._packed(body, packing)
        return lambda producer: producer.publish_nowait(topic, ready), len(ready)

    def _mpub(self, topic: str, bodies: Iterable[Any] | MpubBody, packing: Packing) -> tuple[Send, int]:
        check_name("topic", topic)
        if packing or self.envelope:
            bodies = packed_all(self.envelope, bodies, **packing)
        ready = bodies if isinstance(bodies, MpubBody) else mpub_body(map(checked_body, bodies))
        if not ready.count:
            raise ValueError("multi_publish needs at least one message")
        return lambda producer: producer.multi_publish_nowait(topic, ready), len(ready.data)

    def _dpub(self, topic: str, delay: float | timedelta, body: Any, packing: Packing) -> tuple[Send, int]:
        check_name("topic", topic)
        ready = self._packed(body, packing)
        return lambda producer: producer.deferred_publish_nowait(topic, delay, ready), len(ready)

    def _packed(self, body: Any, packing: Packing) -> bytes:
        """Makes the bytes that go to nsqd: the same in every copy and every attempt."""
        if packing or self.envelope:
            body = packed(self.envelope, body, **packing)
        return checked_body(body)

    # -- a publish's way -----------------------------------------------------------------------------------

    def _send(self, what: tuple[Send, int]) -> asyncio.Future[None]:
        return self._submit(what, must_wait=False).future

    def _size_of(self, what: tuple[Send, int]) -> int:
        return what[1]

    def _check_room(self, size: int, count: int = 1) -> None:
        """Raises TooMuchOutstanding if so many publishes of this size together would be too much."""
        self._check_open()
        if self._waiting or not self._has_room(size, count):
            raise TooMuchOutstanding(f"{self._count} publishes ({self._bytes} bytes) wait for their answer")

    def _submit(self, what: tuple[Send, int], must_wait: bool) -> _Publish:
        send, size = what
        if not must_wait:
            self._check_room(size)
        self._check_open()
        loop = self._own_loop()
        self._start()
        has_room = not self._waiting and self._has_room(size)
        publish = _Publish(send, size, self.copies, time.monotonic() + self._retry_s, loop.create_future())
        self._unsettled[publish] = None
        if self._sweep is None:
            self._sweep = loop.call_later(SWEEP_INTERVAL_S, self._sweep_up)
        if has_room:
            self._admit(publish)
        else:
            self._waiting.append(publish)
        return publish

    async def _outcome(self, publish: _Publish) -> None:
        try:
            await publish.future
        except asyncio.CancelledError:
            self._settled(publish)
            raise

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif loop is not self._loop:
            raise NsqError(f"the pool: {ANOTHER_LOOP}")
        return loop

    def _has_room(self, size: int, count: int = 1) -> bool:
        """Tells whether there is room; one publish is always let through, however big."""
        waiting = self._count + count
        return waiting == 1 or (self._bytes + size <= self._bytes_max and waiting <= self._count_max)

    def _admit(self, publish: _Publish) -> None:
        publish.is_admitted = True
        self._count += 1
        self._bytes += publish.size
        for _ in range(self.copies):
            self._place(publish)

    def _place(self, publish: _Publish) -> None:
        """Sends one copy to the best nsqd; it waits if none can be used now."""
        if publish.future.done():
            return
        member = self._best(publish.takers)
        if member is None:
            refusal = self._refusal()
            if refusal is None:
                self._homeless.append(publish)
            else:
                self._fail(publish, type(refusal)(*refusal.args))
            return
        self._give(publish, member)

    def _give(self, publish: _Publish, member: Member) -> None:
        sent_s = time.monotonic() if member.producer.is_connected else None  # to connect is not to answer
        try:
            answer = publish.send(member.producer)
        except Exception as error:
            self._fail(publish, error)
            return
        publish.in_air += 1
        publish.takers.append(member)
        member.sent()
        answer.add_done_callback(lambda answer: self._answered(publish, member, sent_s, answer.exception()))

    def _best(self, takers: list[Member]) -> Member | None:
        """Finds the nsqd with the fewest unanswered bytes; equals take turns, or those who await each publish would use
        one nsqd only. One that is much slower than others has no turn, but for one publish now and then that measures
        it anew.
        """
        best: Member | None = None
        best_bytes = 0
        self._in_turn.rotate(-1)
        slow_s = SLOW_S_MIN + SLOW_TIMES * self._fastest_s if self._fastest_s else 0.0
        for member in self._in_turn:
            if not member.is_usable or member in takers:
                continue
            waiting_bytes = member.producer.outstanding_bytes
            if 0 < slow_s < member.latency_s and time.monotonic() - member.measured_at_s < LATENCY_STALE_S:
                waiting_bytes += SLOW_BYTES
            if best is None or waiting_bytes < best_bytes:
                best, best_bytes = member, waiting_bytes
        return best

    def _answered(self, publish: _Publish, member: Member, sent_s: float | None, error: BaseException | None) -> None:
        publish.in_air -= 1
        if error is None:
            member.succeeded(sent_s)
            publish.pending = max(0, publish.pending - 1)
            if not publish.pending and not publish.future.done():
                publish.future.set_result(None)
        else:
            member.failed(error)
            publish.error = error
            publish.takers.remove(member)
            if not may_go_elsewhere(error):
                self._fail(publish, error)
            elif publish.in_air < publish.pending:
                self._place(publish)
        if publish.future.done():
            self._settled(publish)

    def _fail(self, publish: _Publish, error: BaseException) -> None:
        """Fails a publish, unless its future was cancelled."""
        if not publish.future.done():
            publish.future.set_exception(error)
        self._settled(publish)

    def _settled(self, publish: _Publish) -> None:
        """Is told that a publish has its outcome; copies still in the air take up room even if
        nobody waits for them.
        """
        self._unsettled.pop(publish, None)
        if publish.is_admitted and not publish.in_air:
            publish.is_admitted = False
            self._count -= 1
            self._bytes -= publish.size
            while self._waiting and self._has_room(self._waiting[0].size):
                next_one = self._waiting.popleft()
                if not next_one.future.done():
                    self._admit(next_one)

    def _place_homeless(self) -> None:
        for _ in range(len(self._homeless)):
            publish = self._homeless.popleft()
            self._place(publish)

    def _refusal(self) -> BaseException | None:
        """Returns the error where every nsqd refuses the connection itself: waiting for the deadline would only hide
        the mistake.
        """
        if not self._members and self._discovery is not None:
            return self._discovery.wrong
        errors = [member.error for member in self._in_turn]
        is_refused = bool(errors) and all(isinstance(error, IdentifyFailed | AuthFailed) for error in errors)
        return errors[0] if is_refused else None

    # -- deadlines -----------------------------------------------------------------------------------------

    def _sweep_up(self) -> None:
        self._sweep = None
        now_s = time.monotonic()
        silent = [member for member in self._in_turn if member.falls_silent(now_s)]
        for member in silent:
            self._send_elsewhere(member)
        measured = [member.latency_s for member in self._in_turn if member.is_usable and member.latency_s]
        self._fastest_s = min(measured, default=0.0)
        while self._unsettled:
            oldest = next(iter(self._unsettled))
            if oldest.deadline_s > now_s:
                break
            del self._unsettled[oldest]
            self._fail(oldest, self._too_late(oldest))
        if self._unsettled or self._count:
            self._sweep = asyncio.get_running_loop().call_later(SWEEP_INTERVAL_S, self._sweep_up)

    def _send_elsewhere(self, silent: Member) -> None:
        """Sends what this nsqd owes to another too, if there is one; whichever answers first counts."""
        for publish in list(self._unsettled):
            if silent in publish.takers and not publish.future.done():
                other = self._best(publish.takers)
                if other is None:
                    return
                self._give(publish, other)

    def _too_late(self, publish: _Publish) -> NotConnected:
        if not publish.is_admitted:
            reason = "waited for room: too much is outstanding"
        elif publish.error is not None:
            reason = f"last error: {publish.error}"
        elif publish.in_air:
            reason = "no answer"
        else:
            reason = self._missing()
        taken = self.copies - publish.pending
        done = f"{taken} of {self.copies} copies" if self.copies > 1 else "the message"
        verb = "were taken" if self.copies > 1 else "was not taken"
        return NotConnected(f"{done} {verb} within {self._retry_s:g} s - {reason}")

    def _missing(self) -> str:
        usable = sum(member.is_usable for member in self._in_turn)
        return f"{self.copies} nsqds needed, {len(self._members)} known, {usable} of them usable"

    # -- nsqds come and go ---------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._is_started:
            self._is_started = True
            if self._discovery is not None:
                self._discovery.start()

    def _add(self, address: str, *, is_fixed: bool) -> None:
        try:
            if not address.startswith("/"):  # a unix socket
                split_address(address)
        except ValueError as error:
            raise ConfigError(f"nsqd {error}") from None
        if address not in self._members:
            self._members[address] = Member(
                address,
                self.config,
                is_fixed=is_fixed,
                stall_s=min(STALL_S_MAX, self._retry_s / 3),
                on_usable=self._place_homeless,
                on_down=self._lost_one,
                log=self._log,
            )
            self._in_turn = deque(self._members.values())

    def _found(self, present: list[str], absent: list[str]) -> None:
        for address in present:
            if len(self._members) < NSQDS_MAX:
                self._add(address, is_fixed=False)
        for address in absent:
            member = self._members.get(address)
            if member is not None and not member.is_fixed:
                del self._members[address]
                self._in_turn = deque(self._members.values())
                leaving = asyncio.create_task(member.close(CLOSE_TIMEOUT_S), name=f"nsquark leave {address}")
                self._leaving.add(leaving)
                leaving.add_done_callback(self._leaving.discard)
        self._place_homeless()

    def _lost_one(self) -> None:
        if self._refusal() is not None:
            self._place_homeless()
        if self._discovery is not None:
            self._discovery.poll_soon()

    # -- the end -------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the pool is stopped")

    async def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Ends when the outstanding publishes have their outcome, retries included; then all are settled.

        timeout: seconds to wait for them.
        """
        self._is_closed = True
        while self._waiting:
            self._fail(self._waiting.popleft(), Closed("stopped before the message was sent"))
        unsettled = [publish for publish in self._unsettled if not publish.future.done()]
        try:
            if unsettled:
                await asyncio.wait([publish.future for publish in unsettled], timeout=timeout)
        finally:  # also when cancelled
            for publish in unsettled:
                self._fail(publish, Closed("closed before nsqd answered; it may or may not have the message"))
            await self._end()

    async def _end(self) -> None:
        if self._discovery is not None:
            await self._discovery.close()
        ends = [member.close(0) for member in self._in_turn]
        await asyncio.gather(*ends, *self._leaving)
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
