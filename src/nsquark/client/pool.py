"""Publishes to many nsqds: balanced, and past those that fail.

What a publish that returned without an error means: with `copies=1` one nsqd has the message, with `copies=N` N
different nsqds have it. A publish that failed may have left the message on some of them all the same. A message may
be there more than once, and order ends where an nsqd fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, Unpack

from nsquark.client.breaker import Member
from nsquark.client.checks import (
    check_addresses,
    check_count,
    check_flag,
    check_name,
    checked_bodies,
    checked_body,
    seconds_of,
)
from nsquark.client.config import Config, Options
from nsquark.client.documented import documented_like
from nsquark.client.errors import (
    ANOTHER_LOOP,
    NO_LOOP,
    AuthFailed,
    Closed,
    ConfigError,
    IdentifyFailed,
    NotConnected,
    NsqError,
)
from nsquark.client.logs import NamedLog
from nsquark.client.nsqds import NSQDS_MAX
from nsquark.client.packing import Packing, mpub_body, packed, packed_all
from nsquark.client.placing import Placing, Publish, Send
from nsquark.client.pool_discovery import PoolDiscovery
from nsquark.client.producer import Producer
from nsquark.wire.commands import MpubBody

RETRY_DEADLINE_S: Final = 30.0
OUTSTANDING_BYTES_MAX: Final = 64 << 20
OUTSTANDING_MAX: Final = 100_000
CLOSE_TIMEOUT_S: Final = 10.0
STALL_S_MAX: Final = 10.0
"""An nsqd that owes answers and gives none for so long is taken for dead, long before read_timeout says so."""


class NsqdStatus(NamedTuple):
    """Tells how an nsqd of a pool is now."""

    address: str
    """Is the address of its TCP port."""
    state: str
    """Is `"up"`, `"down"`, `"trial"` when it just came back, or `"silent"` when it owes answers for too long."""
    failures: int
    """Counts its failures since it was last up."""
    outstanding: int
    """Counts the publishes it has not answered yet."""
    outstanding_bytes: int
    """Counts the bytes of these publishes."""


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
        check_count("copies", copies, 1)
        check_flag("envelope", envelope)
        check_count("outstanding_bytes_max", outstanding_bytes_max, 0)
        check_count("outstanding_max", outstanding_max, 0)
        if lookupd_topic is not None:
            check_name("topic", lookupd_topic)
        self.copies = copies
        self.envelope = envelope or copies > 1
        self._retry_s = seconds_of("retry_deadline", retry_deadline)
        self._members: dict[str, Member] = {}
        self._placing = Placing(
            copies, self._retry_s, outstanding_bytes_max, outstanding_max, self._refusal, self._lookup_problem
        )
        self._leaving: dict[Member, asyncio.Task[None]] = {}
        """Has the members that are no longer used, and may still get answers."""
        self._ending: asyncio.Task[None] | None = None
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
        return self._placing.count

    @property
    def outstanding_bytes(self) -> int:
        return self._placing.bytes

    def nsqds(self) -> list[NsqdStatus]:
        """Lists the nsqds that are known, and how each of them is."""
        return [
            NsqdStatus(
                member.address,
                member.state.value,
                member.failures,
                member.producer.outstanding,
                member.producer.outstanding_bytes,
            )
            for member in list(self._members.values())  # nsquark.sync asks in another thread, while some come and go
        ]

    # -- publishing --------------------------------------------------------------------------------------

    async def publish(self, topic: str, body: Any, **packing: Unpack[Packing]) -> None:
        """Returns when `copies` nsqds have the message. Waits first while too much is outstanding.

        topic: its name.
        body: bytes, or with `encode` any value.
        """
        await self._outcome(self._pub(topic, body, packing))

    async def multi_publish(self, topic: str, bodies: Iterable[Any] | MpubBody, **packing: Unpack[Packing]) -> None:
        """Publishes all the messages in one command, to the same nsqds.

        topic: its name.
        bodies: of the messages, each as of `publish`.
        """
        await self._outcome(self._mpub(topic, bodies, packing))

    async def deferred_publish(
        self, topic: str, delay: float | timedelta, body: Any, **packing: Unpack[Packing]
    ) -> None:
        await self._outcome(self._dpub(topic, delay, body, packing))

    def publish_nowait(self, topic: str, body: Any, **packing: Unpack[Packing]) -> asyncio.Future[None]:
        return self._send(self._pub(topic, body, packing))

    def multi_publish_nowait(
        self, topic: str, bodies: Iterable[Any] | MpubBody, **packing: Unpack[Packing]
    ) -> asyncio.Future[None]:
        return self._send(self._mpub(topic, bodies, packing))

    def deferred_publish_nowait(
        self, topic: str, delay: float | timedelta, body: Any, **packing: Unpack[Packing]
    ) -> asyncio.Future[None]:
        return self._send(self._dpub(topic, delay, body, packing))

    async def ping(self) -> None:
        """Connects to every nsqd that is known, after the first question to nsqlookupds; NotConnected if fewer than
        `copies` of them are there.
        """
        self._check_open()
        self._start()
        if self._discovery is not None:
            await self._discovery.asked(self._retry_s)
            self._check_open()
        members = list(self._members.values())
        outcomes = await asyncio.gather(*(member.ping() for member in members), return_exceptions=True)
        errors = [error for error in outcomes if error is not None]
        if len(members) - len(errors) < self.copies:
            raise NotConnected(f"{self._placing.missing()}{f' - {errors[0]}' if errors else ''}")

    def _pub(self, topic: str, body: Any, packing: Packing) -> tuple[Send, int]:
        check_name("topic", topic)
        ready = self._packed(body, packing)
        return lambda producer: producer.publish_nowait(topic, ready), len(ready)

    def _mpub(self, topic: str, bodies: Iterable[Any] | MpubBody, packing: Packing) -> tuple[Send, int]:
        check_name("topic", topic)
        if packing or self.envelope:
            bodies = packed_all(self.envelope, bodies, **packing)
        ready = bodies if isinstance(bodies, MpubBody) else mpub_body(map(checked_body, checked_bodies(bodies)))
        if not ready.count:
            raise ValueError("multi_publish needs at least one message")
        return lambda producer: producer.multi_publish_nowait(topic, ready), len(ready.data)

    def _dpub(self, topic: str, delay: float | timedelta, body: Any, packing: Packing) -> tuple[Send, int]:
        check_name("topic", topic)
        delay_s = seconds_of("delay", delay)
        ready = self._packed(body, packing)
        return lambda producer: producer.deferred_publish_nowait(topic, delay_s, ready), len(ready)

    def _packed(self, body: Any, packing: Packing) -> bytes:
        """Makes what goes to nsqd: the same bytes in every copy and every attempt."""
        if packing or self.envelope:
            body = packed(self.envelope, body, **packing)
        return checked_body(body)

    # -- sending -----------------------------------------------------------------------------------------

    def _send(self, what: tuple[Send, int]) -> asyncio.Future[None]:
        self._check_room(what[1])
        return self._submit(what).future

    def _size_of(self, what: tuple[Send, int]) -> int:
        return what[1]

    def _check_room(self, size: int, count: int = 1) -> None:
        """Raises TooMuchOutstanding if so many publishes of this size together would be too much."""
        self._check_open()
        self._placing.check_room(size, count)

    def _submit(self, what: tuple[Send, int]) -> Publish:
        self._check_open()
        loop = self._own_loop()
        self._start()
        return self._placing.submit(*what, loop)

    def _send_when_room(self, what: tuple[Send, int]) -> asyncio.Future[None]:
        return self._submit(what).future

    async def _outcome(self, what: tuple[Send, int]) -> None:
        await self._placing.outcome(self._submit(what))

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise NsqError(f"the pool: {NO_LOOP}") from None
        if self._loop is None:
            self._loop = loop
        elif loop is not self._loop:
            raise NsqError(f"the pool: {ANOTHER_LOOP}")
        return loop

    # -- nsqds come and go -------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._is_started:
            self._is_started = True
            if self._discovery is not None:
                self._discovery.start()

    def _add(self, address: str, *, is_fixed: bool) -> None:
        if address not in self._members:
            self._members[address] = Member(
                address,
                self.config,
                is_fixed=is_fixed,
                silence_s_max=self._retry_s / 3,
                stall_s=min(STALL_S_MAX, self._retry_s * 2 / 3),
                on_usable=self._placing.place_homeless,
                on_down=self._lost_one,
                log=self._log,
            )
            self._placing.use(self._members.values())

    def _found(self, present: list[str], absent: list[str]) -> None:
        for address in present:
            if len(self._members) < NSQDS_MAX:
                self._add(address, is_fixed=False)
        for address in absent:
            member = self._members.get(address)
            if member is not None and not member.is_fixed:
                del self._members[address]
                self._placing.use(self._members.values())
                self._leave(member)
        self._placing.place_homeless()

    def _leave(self, member: Member) -> None:
        leaving = asyncio.create_task(member.close(CLOSE_TIMEOUT_S), name=f"nsquark leave {member.address}")
        self._leaving[member] = leaving
        leaving.add_done_callback(lambda _: self._leaving.pop(member))

    def _refusal(self) -> BaseException | None:
        """Finds why every nsqd refuses the connection itself: waiting for the deadline would only hide the mistake."""
        if not self._members and self._discovery is not None:
            return self._discovery.wrong
        errors = [member.error for member in self._members.values()]
        is_refused = bool(errors) and all(isinstance(error, IdentifyFailed | AuthFailed) for error in errors)
        return errors[0] if is_refused else None

    def _lookup_problem(self) -> BaseException | None:
        """Finds what the nsqlookupds failed with that know fewer nsqds than are needed."""
        return self._discovery.error if self._discovery is not None and len(self._members) < self.copies else None

    def _lost_one(self) -> None:
        if self._refusal() is not None:
            self._placing.place_homeless()
        if self._discovery is not None:
            self._discovery.poll_soon()

    # -- the end -----------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the pool is stopped")

    async def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Ends when every outstanding publish has its outcome, retries included.

        timeout: seconds to wait for them.
        """
        timeout_s = seconds_of("timeout", timeout)
        if not self._is_closed:
            self._own_loop()
        self._is_closed = True
        try:
            await self._placing.close(timeout_s)
        finally:  # whoever cancels this wants an end, not open connections
            if self._ending is None:
                self._ending = asyncio.create_task(self._end(), name="nsquark close pool")
            await asyncio.shield(self._ending)

    async def _end(self) -> None:
        if self._discovery is not None:
            await self._discovery.close()
        ends = [member.close(0) for member in (*self._members.values(), *self._leaving)]
        await asyncio.gather(*ends, *self._leaving.values())
        self._placing.end()
