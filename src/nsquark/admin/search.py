"""Looks through a topic's log on all its nsqds at once, newest first, within limits of time and bytes."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from nsquark.admin.errors import UpstreamError
from nsquark.admin.filters import MessageFilter
from nsquark.admin.log_reader import BackwardReader, LogInfo, LogMessage, RemoteLog, Wanted

SEARCH_S_MAX: Final = 8.0
SEARCH_BYTES_MAX: Final = 128 << 20
FOUND_BYTES_MAX: Final = 8 << 20
"""A search that holds this many bytes of bodies ends, with fewer messages than were asked for."""


class Limits(NamedTuple):
    messages: int
    body_bytes_max: int
    seconds: float = SEARCH_S_MAX
    bytes: int = SEARCH_BYTES_MAX


class Searched(NamedTuple):
    """Tells what was looked at, so that nobody thinks that a message is not there when it was only not reached."""

    messages: int
    bytes: int
    seconds: float
    oldest_ns: int | None
    ended: str
    """This is why the search stopped: start (of all logs, or of what was asked for), limit, time or bytes."""
    damaged: int


class SearchResult(NamedTuple):
    messages: list[LogMessage]
    searched: Searched
    positions: dict[str, int]
    """The next search goes on below these positions; a log that was looked at as a whole has none."""
    failures: dict[str, str]


class SearchRange(NamedTuple):
    """Says which part of one nsqd's log to look through."""

    log: RemoteLog
    low: int
    high: int


async def search(ranges: Iterable[SearchRange], wanted: MessageFilter, limits: Limits) -> SearchResult:
    return await _Search([BackwardReader(*one) for one in ranges], wanted, limits).run()


class _Search:
    """Keeps the readers of all nsqds abreast of each other: the one that is latest in time makes the next step."""

    def __init__(self, readers: Sequence[BackwardReader], wanted: MessageFilter, limits: Limits) -> None:
        self._readers = {reader.log.node: reader for reader in readers}
        self._wanted = Wanted(wanted, limits.messages, limits.body_bytes_max)
        self._limits = limits
        self._failures: dict[str, str] = {}
        self._began_s = time.monotonic()

    async def run(self) -> SearchResult:
        await asyncio.gather(*map(self._step, self._readers.values()))
        while (ended := self._why_ended()) is None:
            await self._step(max(self._unfinished(), key=_frontier))
        chosen = _newest_first(reader.found for reader in self._readers.values())[: self._limits.messages]
        return SearchResult(chosen, self._searched(ended), self._positions(chosen), self._failures)

    async def _step(self, reader: BackwardReader) -> None:
        try:
            await reader.step(self._wanted)
        except UpstreamError as error:
            self._failures[reader.log.node] = str(error)

    def _unfinished(self) -> list[BackwardReader]:
        return [reader for node, reader in self._readers.items() if node not in self._failures and not reader.at_start]

    def _why_ended(self) -> str | None:
        readers = self._readers.values()
        unfinished = self._unfinished()
        if not unfinished:
            return "start" if sum(len(reader.found) for reader in readers) <= self._limits.messages else "limit"
        # A message is certain if no reader can still find a newer one, which would come before it.
        frontier = max(map(_frontier, unfinished))
        certain = sum(message.timestamp_ns >= frontier for reader in readers for message in reader.found)
        found_bytes = sum(len(message.body) for reader in readers for message in reader.found)
        if certain >= self._limits.messages or found_bytes >= FOUND_BYTES_MAX:
            return "limit"
        if time.monotonic() - self._began_s >= self._limits.seconds:
            return "time"
        return "bytes" if sum(reader.bytes_read for reader in readers) >= self._limits.bytes else None

    def _searched(self, ended: str) -> Searched:
        readers = self._readers.values()
        return Searched(
            messages=sum(reader.looked_at for reader in readers),
            bytes=sum(reader.bytes_read for reader in readers),
            seconds=round(time.monotonic() - self._began_s, 3),
            oldest_ns=min((reader.frontier_ns for reader in readers if reader.frontier_ns is not None), default=None),
            ended=ended,
            damaged=sum(reader.damaged for reader in readers),
        )

    def _positions(self, chosen: Sequence[LogMessage]) -> dict[str, int]:
        """Returns where the next search goes on in each log: at the first message that was found but not chosen, or
        where the reader stands if all were chosen.
        """
        counts: dict[str, int] = {}
        for message in chosen:
            counts[message.node] = counts.get(message.node, 0) + 1
        positions = {}
        for node, reader in self._readers.items():
            left = reader.found[counts.get(node, 0) :]
            if left:
                positions[node] = left[0].seq + 1
            elif not reader.at_start:
                positions[node] = reader.seq
        return positions


def _frontier(reader: BackwardReader) -> int:
    return reader.frontier_ns if reader.frontier_ns is not None else 1 << 63


def _newest_first(logs: Iterable[Sequence[LogMessage]]) -> list[LogMessage]:
    """Merges logs by time without changing the order within any: a deferred message has the time of its publish, but
    stays where it entered the log.
    """
    return [message for _, message in heapq.merge(*map(_by_arrival, logs), key=lambda pair: -pair[0])]


def _by_arrival(log: Sequence[LogMessage]) -> list[tuple[int, LogMessage]]:
    """Pairs each message with the latest time of itself and of all before it in the log."""
    latest, keyed = 0, []
    for message in reversed(log):
        latest = max(latest, message.timestamp_ns)
        keyed.append((latest, message))
    keyed.reverse()
    return keyed


async def infos(logs: Sequence[RemoteLog]) -> Mapping[str, LogInfo | UpstreamError]:
    """Returns what each nsqd says of its log, or the error of asking it."""
    answers = await asyncio.gather(*(log.info() for log in logs), return_exceptions=True)
    found: dict[str, LogInfo | UpstreamError] = {}
    for log, answer in zip(logs, answers, strict=True):
        if isinstance(answer, BaseException) and not isinstance(answer, UpstreamError):
            raise answer
        found[log.node] = answer
    return found
