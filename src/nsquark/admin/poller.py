"""Polls the cluster for all tabs in one loop: fast while somebody looks, and slowly otherwise, for the history.

A server that does not answer holds up nobody: a poll waits a moment for all, then shows the rest and says what is
missing. A late answer is used by the next poll.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Generic, TypeVar

import msgspec

from nsquark.admin.announced import AnnouncedNsqd, AnnouncedNsqds
from nsquark.admin.assembly import build, read_rows
from nsquark.admin.attention import Attention, Watch
from nsquark.admin.clients import Clients
from nsquark.admin.cluster import ClusterClient
from nsquark.admin.errors import UpstreamError
from nsquark.admin.history import History
from nsquark.admin.snapshot import (
    EMPTY,
    DescribedNsqd,
    Failure,
    LogHeads,
    Lookupd,
    NodeAnswer,
    Snapshot,
    StatsAnswer,
    StatsRows,
)
from nsquark.base.logs import Logger

T = TypeVar("T")

LOOKUPD_WAIT_S: Final = 0.6
NSQD_WAIT_S: Final = 0.8
"""An nsqd has this long to answer. With the wait for nsqlookupds and the time to put it together, a page is shown
within two seconds, whichever server stalls.
"""
IDLE_INTERVAL_S: Final = 15.0
"""This is the time between polls while nobody looks."""
LOOKED_S: Final = 10.0
"""A page counts as looked at for this long after it was asked for."""
NODES_MAX: Final = 1000
STATS_TARGET: Final = "/stats?format=json&include_clients=false"
HEADS_TARGET: Final = "/log/info"


class Source(Generic[T]):
    """Asks one nsqd or nsqlookupd again and again, with at most one request at a time."""

    def __init__(self, kind: str, address: str, ask: Callable[[], Awaitable[T]]) -> None:
        self.kind = kind
        self.address = address
        self._ask = ask
        self._task: asyncio.Task[None] | None = None
        self._asked_at = 0.0
        self.value: T | None = None
        self.answered_at = 0.0
        self.failure = ""
        self.failing_since = 0.0

    def refresh(self) -> asyncio.Task[None]:
        if self._task is None or self._task.done():
            self._asked_at = time.time()
            self._task = asyncio.create_task(self._run())
        return self._task

    async def _run(self) -> None:
        try:
            value = await self._ask()
        except UpstreamError as error:
            self.value = None
            self._fail(str(error))
        else:
            self.value, self.answered_at = value, time.time()
            self.failure, self.failing_since = "", 0.0

    def _fail(self, text: str) -> None:
        self.failure = text
        self.failing_since = self.failing_since or self._asked_at

    def stayed_silent(self, patience_s: float) -> None:
        """Sets a failure if a poll goes on without the answer. The last value stays until it is `patience_s` old."""
        if self._task is None or self._task.done():
            return
        silent_s = time.time() - self._asked_at
        self._fail(f"no answer for {silent_s:.1f} s")
        if time.time() - self.answered_at > patience_s:
            self.value = None

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class NsqdAnswer(msgspec.Struct, kw_only=True):
    stats: StatsAnswer
    heads: LogHeads | None
    info: AnnouncedNsqd | None


class Poller:
    """Polls the cluster. Its `snapshot` is always whole, of one moment, and replaced rather than changed."""

    def __init__(
        self,
        cluster: ClusterClient,
        history: History,
        clients: Clients,
        logger: Logger,
        interval_s: float,
        patience_s: float,
    ) -> None:
        self.snapshot: Snapshot = EMPTY
        self.attention: tuple[Attention, ...] = ()
        self._cluster = cluster
        self._history = history
        self._clients = clients
        self._logger = logger
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._watch = Watch()
        self._lookupds: dict[str, Source[AnnouncedNsqds]] = {}
        self._nsqds: dict[str, Source[NsqdAnswer]] = {}
        self._previous: dict[str, NodeAnswer] = {}
        self._not_ours: dict[str, int] = {}
        self._watchers = 0
        self._looked_at = -LOOKED_S
        self._began_at = 0.0
        """This is when the poll of `snapshot` began, in unix seconds."""
        self._wanted = asyncio.Event()
        self._polled = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop_task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        for source in self._sources():
            source.cancel()
        if self._loop_task is not None:
            self._loop_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop_task

    # -- for pages and streams ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Makes polls come at the full pace inside the `with`."""
        self._watchers += 1
        self._hasten()
        try:
            yield
        finally:
            self._watchers -= 1

    async def next(self, after: float) -> Snapshot:
        """Waits for the first snapshot whose `at` is later than `after`."""
        while self.snapshot.at <= after:
            await self._polled.wait()
        return self.snapshot

    async def fresh(self) -> Snapshot:
        """Returns a snapshot that is at most two intervals old, and waits for a new one if there is none."""
        self._looked_at = time.monotonic()
        if time.time() - self.snapshot.at > 2 * self._interval_s:
            self._hasten()
            await self.next(self.snapshot.at)
        return self.snapshot

    async def again(self) -> Snapshot:
        """Returns a snapshot whose poll began after this call, for a caller that has just changed something."""
        now = time.time()
        while self._began_at < now:
            self._wanted.set()
            await self._polled.wait()
        return self.snapshot

    def _hasten(self) -> None:
        if time.time() - self.snapshot.at >= self._interval_s:
            self._wanted.set()

    # -- the loop ----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            began, began_at = time.monotonic(), time.time()
            self._wanted.clear()
            try:
                await self._poll()
            except Exception as error:
                # A bug in how we read one answer must not end the polling of all.
                self._logger.failure("POLL: failed", error)
            self._began_at = began_at
            polled, self._polled = self._polled, asyncio.Event()
            polled.set()
            await self._pause(began)

    async def _pause(self, began: float) -> None:
        while True:
            is_watched = self._watchers or time.monotonic() - self._looked_at < LOOKED_S
            left_s = began + (self._interval_s if is_watched else IDLE_INTERVAL_S) - time.monotonic()
            if left_s <= 0 or self._wanted.is_set():
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), left_s)

    async def _poll(self) -> None:
        producers = await self._producers() if self._cluster.lookupds else {}
        answers, _ = await asyncio.gather(self._answers(producers), self._clients.refresh(self.snapshot))
        at = time.time()
        lookupds = [
            Lookupd(
                address=source.address,
                failure=source.failure,
                node_count=len(source.value.producers or ()) if source.value is not None else None,
            )
            for source in self._lookupds.values()
        ]
        self.snapshot = build(at, answers, lookupds, self._failures(), self._previous, self.snapshot)
        self._previous = {answer.producer.address: answer for answer in answers if answer.stats is not None}
        self._history.add(self.snapshot)
        self.attention = self._watch.update(self.snapshot)

    def _failures(self) -> list[Failure]:
        return [
            Failure(kind=source.kind, address=source.address, text=source.failure, since=source.failing_since)
            for source in self._sources()
            if source.failure
        ]

    def _sources(self) -> list[Source[Any]]:
        return [*self._lookupds.values(), *self._nsqds.values()]

    async def _refresh_all(self, sources: list[Source[Any]], wait_s: float) -> None:
        tasks = [source.refresh() for source in sources]
        if tasks:
            await asyncio.wait(tasks, timeout=wait_s)
        for source in sources:
            source.stayed_silent(self._patience_s)

    # -- asking nsqlookupds and nsqds --------------------------------------------------------------------

    async def _producers(self) -> dict[str, DescribedNsqd]:
        _match_sources(self._lookupds, self._cluster.lookupds, self._lookupd_source)
        await self._refresh_all(list(self._lookupds.values()), LOOKUPD_WAIT_S)
        found: dict[str, DescribedNsqd] = {}
        for source in self._lookupds.values():
            for node in (source.value.producers or ()) if source.value is not None else ():
                if len(found) >= NODES_MAX:
                    break
                address = node.http_address
                known = found.get(address)
                found[address] = _producer(address, node, source.address, known)
        return found

    def _lookupd_source(self, address: str) -> Source[AnnouncedNsqds]:
        return Source("nsqlookupd", address, lambda: self._cluster.get(address, "/nodes", AnnouncedNsqds))

    async def _answers(self, producers: dict[str, DescribedNsqd]) -> list[NodeAnswer]:
        addresses = list(producers) or self._cluster.nsqds
        _match_sources(self._nsqds, addresses, self._nsqd_source)
        await self._refresh_all(list(self._nsqds.values()), NSQD_WAIT_S)
        answers = []
        for address, source in self._nsqds.items():
            value = source.value
            producer = producers.get(address) or _self_described(address, value.info if value is not None else None)
            answers.append(
                NodeAnswer(
                    producer=producer,
                    stats=value.stats if value is not None else None,
                    heads=value.heads if value is not None else None,
                    stats_at=source.answered_at,
                    failure=source.failure,
                )
            )
        return answers

    def _nsqd_source(self, address: str) -> Source[NsqdAnswer]:
        return Source("nsqd", address, lambda: self._ask_nsqd(address))

    async def _ask_nsqd(self, address: str) -> NsqdAnswer:
        last = self._nsqds[address].value
        rows = await self._cluster.get(address, STATS_TARGET, StatsRows)
        try:
            stats = read_rows(rows, last.stats if last is not None else None)
        except ValueError as error:
            raise UpstreamError(str(error)) from None
        heads = await self._heads(address, stats.start_time)
        info = None if self._cluster.lookupds else await self._cluster.get(address, "/info", AnnouncedNsqd)
        return NsqdAnswer(stats=stats, heads=heads, info=info)

    async def _heads(self, address: str, start_time: int) -> LogHeads | None:
        """Asks for the heads of the logs. NSQ's own nsqd has no logs, and is asked once after each of its starts."""
        if self._not_ours.get(address) == start_time:
            return None
        try:
            return await self._cluster.get(address, HEADS_TARGET, LogHeads)
        except UpstreamError as error:
            if error.status == 404:
                self._not_ours[address] = start_time
            return None


def _match_sources(sources: dict[str, Source[T]], addresses: list[str], make: Callable[[str], Source[T]]) -> None:
    """Adds and removes sources until there is one for each of these addresses."""
    for address in [each for each in sources if each not in addresses]:
        sources.pop(address).cancel()
    for address in addresses:
        if address not in sources:
            sources[address] = make(address)


def _producer(address: str, node: AnnouncedNsqd, lookupd: str, known: DescribedNsqd | None) -> DescribedNsqd:
    """Describes an nsqd as this nsqlookupd does, and adds what other nsqlookupds said of it."""
    remote = f"{lookupd}/{node.remote_address or 'N/A'}"
    topics = node.topics or []
    tombstones = {topic for place, topic in enumerate(topics) if node.is_tombstoned(place)}
    return DescribedNsqd(
        address=address,
        hostname=node.hostname,
        broadcast_address=node.broadcast_address,
        tcp_port=node.tcp_port,
        http_port=node.http_port,
        version=node.version,
        remote_addresses=(*(known.remote_addresses if known is not None else ()), remote),
        topics=tuple(sorted({*topics, *(known.topics if known is not None else ())})),
        tombstones=frozenset(tombstones | (known.tombstones if known is not None else set())),
    )


def _self_described(address: str, info: AnnouncedNsqd | None) -> DescribedNsqd:
    if info is None or not info.broadcast_address:
        host, _, port = address.rpartition(":")
        known = info or AnnouncedNsqd()
        return DescribedNsqd(
            address=address,
            hostname=known.hostname or host.strip("[]"),
            broadcast_address=host.strip("[]"),
            http_port=int(port) if port.isdecimal() else 0,
            version=known.version,
        )
    return DescribedNsqd(
        address=info.http_address,
        hostname=info.hostname,
        broadcast_address=info.broadcast_address,
        tcp_port=info.tcp_port,
        http_port=info.http_port,
        version=info.version,
    )
