"""Asks nsqlookupds and nsqds over HTTP, for nsq_stat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

import msgspec

from nsquark.base.durations import Duration
from nsquark.web.fetch import FetchError, fetch
from nsquark.wire.documents import decode_json
from nsquark.wire.lookup_answer import read_producers

T = TypeVar("T")

SHOWN_ANSWER_BYTES_MAX: Final = 200


class Unanswered(Exception):
    """Says that a request got no usable answer; `reason` is the part of the text that says why."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason or text


class ChannelCounters(msgspec.Struct):
    """Holds the counters of a channel, on one nsqd or on all."""

    channel_name: str = ""
    depth: int = 0
    backend_depth: int = 0
    in_flight_count: int = 0
    deferred_count: int = 0
    requeue_count: int = 0
    timeout_count: int = 0
    message_count: int = 0
    client_count: int = 0
    paused: bool = False

    def add(self, other: ChannelCounters) -> None:
        self.depth += other.depth
        self.backend_depth += other.backend_depth
        self.in_flight_count += other.in_flight_count
        self.deferred_count += other.deferred_count
        self.requeue_count += other.requeue_count
        self.timeout_count += other.timeout_count
        self.message_count += other.message_count
        self.client_count += other.client_count
        self.paused |= other.paused


class TopicCounters(msgspec.Struct):
    topic_name: str
    depth: int = 0
    backend_depth: int = 0
    message_count: int = 0
    paused: bool = False
    channels: list[ChannelCounters] | None = None


class _TopicStats(msgspec.Struct):
    topics: list[TopicCounters] | None = None


def _read_stats(body: bytes) -> list[TopicCounters]:
    return decode_json(body, _TopicStats).topics or []


class StatCluster:
    """Asks the nsqds that are given, or that nsqlookupds know, at their HTTP addresses."""

    def __init__(
        self, nsqds: Sequence[str], lookupds: Sequence[str], connect_timeout: Duration, request_timeout: Duration
    ) -> None:
        self._nsqds = nsqds
        self._lookupds = lookupds
        self._connect_timeout_s = connect_timeout.seconds
        self._request_timeout_s = request_timeout.seconds

    async def nsqds(self) -> list[str]:
        """Returns the addresses of all nsqds."""
        return await self._found("/nodes") if self._lookupds else list(self._nsqds)

    async def nsqds_of(self, topic: str) -> list[str]:
        """Returns the nsqds that may have a topic: those that nsqlookupds name or, without nsqlookupds, all of them."""
        return await self._found(f"/lookup?{urlencode({'topic': topic})}") if self._lookupds else list(self._nsqds)

    async def stats(self, nsqd: str, topic: str = "") -> list[TopicCounters]:
        """Asks an nsqd for the counters of all topics, or of one, and their channels."""
        wanted = {"format": "json", "topic": topic, "include_clients": "false", "include_mem": "false"}
        query = urlencode({name: value for name, value in wanted.items() if value})
        return await self._get(f"http://{nsqd}/stats?{query}", _read_stats)

    async def _found(self, question: str) -> list[str]:
        answers = await together(
            "nsqlookupd", (self._get(f"http://{address}{question}", read_producers) for address in self._lookupds)
        )
        return list(dict.fromkeys(found.http_address for answer in answers for found in answer))

    async def _get(self, url: str, read: Callable[[bytes], T]) -> T:
        try:
            status, _, body = await fetch(
                url, connect_timeout=self._connect_timeout_s, request_timeout=self._request_timeout_s
            )
        except FetchError as error:
            raise Unanswered(str(error), error.reason) from None
        if status != 200:
            reason = f"got response {status} {body[:SHOWN_ANSWER_BYTES_MAX]!r}"
            raise Unanswered(f"GET {url} {reason}", reason)
        try:
            return read(body)
        except ValueError as error:
            raise Unanswered(f"GET {url} failed - {error}", str(error)) from None


async def together(who: str, questions: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns all answers, or raises Unanswered if a single one is missing."""
    answers = await asyncio.gather(*questions, return_exceptions=True)
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    for error in failed:
        if not isinstance(error, Unanswered):
            raise error
    if failed:
        start = f"failed to query any {who}: " if len(failed) == len(answers) else ""
        raise Unanswered(start + "; ".join(map(str, failed)))
    return [answer for answer in answers if not isinstance(answer, BaseException)]
