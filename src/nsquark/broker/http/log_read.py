"""Answers the Log API: topics are files that can be read by range, and channels are positions in them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from nsquark.base.durations import NS_PER_MS
from nsquark.broker.channel import Channel
from nsquark.broker.http.arguments import NsqdArguments, disk_error, extra_headers, require_stored, require_topic
from nsquark.broker.http.auth import HttpAuth, Rule
from nsquark.broker.http.channel_messages import ChannelMessages
from nsquark.broker.http.log_append import AppendApi
from nsquark.broker.http.log_plan import (
    RANGES_MAX,
    READ,
    LogRange,
    LogRanges,
    PlanApi,
    decoded,
    range_of,
    refused_part,
    require_allowed,
)
from nsquark.broker.http.log_positions import MOVE, ChannelPositions
from nsquark.broker.places import NoPlace, Places
from nsquark.broker.topic import Topic
from nsquark.log.range_heads import HeadsReader
from nsquark.log.range_read import RangeGroup, RangeReader, Readable, TimeEnd, TimeSearch
from nsquark.web.arguments import INT64_MAX, Refusal
from nsquark.web.fairness import TurnPace
from nsquark.web.messages import JSON_TYPE, Answer, Handler, Pending, Request, Response, StreamResponse, encode_json
from nsquark.web.router import Router

if TYPE_CHECKING:
    from nsquark.broker.nsqd import Nsqd

INFO_WAIT_S_MAX = 60.0
INFO_WAITERS_MAX = 1024
INFO_WAITERS_PER_PEER_MAX = 512
"""At most this many requests of one peer may wait for news; with more than INFO_WAITERS_MAX in all, the one that waits
longest is answered early.
"""
READ_PIECE_BYTES = 512 << 10
READS_MAX = 128
"""At most this many ranges are streamed at once: each costs a piece and the connection's buffer in memory."""
READS_PER_PEER_MAX = 64
READ_PATIENCE_S = 1.0
"""A reader that read nothing for this long is cut off when its place is needed."""
READ_THREADS_MAX = 2
OCTETS = "application/octet-stream"

KNOWN = Rule(is_ours=True)
APPEND = Rule("publish", is_ours=True)

JsonHandler = Callable[[NsqdArguments, Request], Awaitable[dict[str, Any]]]


class _AskedTopics(msgspec.Struct):
    topics: Annotated[list[str], msgspec.Meta(max_length=RANGES_MAX)]


class LogApi:
    """Answers requests for logs; it reads in its own threads, so that neither the event loop nor syncs wait."""

    def __init__(self, nsqd: Nsqd, auth: HttpAuth) -> None:
        self.nsqd = nsqd
        self.auth = auth
        self.threads = ThreadPoolExecutor(READ_THREADS_MAX, thread_name_prefix="read")
        self.channels = ChannelPositions(self)
        self._messages = ChannelMessages(self)
        self._append = AppendApi(self)
        self._plan = PlanApi(self)
        self._waiters = Places(INFO_WAITERS_MAX, INFO_WAITERS_PER_PEER_MAX, 0.0)
        self._reads = Places(READS_MAX, READS_PER_PEER_MAX, READ_PATIENCE_S)

    def add_routes(self, router: Router) -> None:
        body_bytes = self.nsqd.options.max_body_size
        router.add("GET", "/log/info", self._info_or_list(), log=False)
        router.add("GET", "/log/at", self._json(self.at, READ))
        router.add("POST", "/log/at", self._answering(self.at_many), log=False)
        router.add("GET", "/log/runs", self._json(self.runs, KNOWN))
        router.add("GET", "/log/plan", self._json(self._plan.plan, READ))
        router.add("POST", "/log/plan", self._answering(self._plan.plan_many), log=False)
        router.add("GET", "/log/read", self._guarded(self.read, READ))
        router.add("POST", "/log/read", self.read_many, log=False)
        router.add("GET", "/channel/messages", self._json(self._messages.listing, MOVE))
        router.add("GET", "/channel/seek", self._json(self.channels.preview, MOVE))
        router.add("POST", "/channel/seek", self._json(self.channels.seek, MOVE))
        router.add("POST", "/channel/commit", self._one_or_many_commits(), log=False)
        router.add("POST", "/log/stage", self._json(self._append.stage, APPEND), log=False, max_body_bytes=body_bytes)
        router.add("POST", "/log/append", self._json(self._append.append, APPEND))
        router.add("POST", "/log/abort", self._json(self._append.abort, APPEND))

    # -- answers -----------------------------------------------------------------------------------------

    def _guarded(self, handler: Handler, rule: Rule) -> Handler:
        return self.auth.guarded(handler, rule, self.refuse)

    def _json(self, handler: JsonHandler, rule: Rule) -> Handler:
        return self._guarded(self._answering(handler), rule)

    def _answering(self, handler: JsonHandler) -> Handler:
        async def answer(request: Request) -> Answer:
            try:
                return self.answer(await handler(NsqdArguments(self.nsqd, request), request))
            except Refusal as refusal:
                return self.refuse(refusal)
            except OSError as error:
                return self.refuse(disk_error(error))

        return answer

    def answer(self, fields: dict[str, Any], status: int = 200) -> Response:
        node, run = self.nsqd.node.id, self.nsqd.runs[-1].id
        body = encode_json({**fields, "nsqd_id": node, "nsqd_run": run})
        return Response(status, body, JSON_TYPE, extra_headers(node, status))

    def refuse(self, refusal: Refusal) -> Response:
        return self.answer({"message": refusal.code, **refusal.fields}, refusal.status)

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        return await self.nsqd.loop.run_in_executor(self.threads, work)

    # -- /log/info ---------------------------------------------------------------------------------------

    def _info_or_list(self) -> Handler:
        """Chooses between one topic's answer and the list, which is for everybody: each sees in it
        what they may read.
        """
        info, listing = self._json(self.info, READ), self._answering(self.list)

        def answer(request: Request) -> Answer | Pending | Coroutine[Any, Any, Answer]:
            return (info if "topic" in request.query else listing)(request)

        return answer

    def _one_or_many_commits(self) -> Handler:
        one, many = self._json(self.channels.commit, MOVE), self._answering(self.channels.commit_many)

        def answer(request: Request) -> Answer | Pending | Coroutine[Any, Any, Answer]:
            return (one if "topic" in request.query or not request.body else many)(request)

        return answer

    async def list(self, arguments: NsqdArguments, request: Request) -> dict[str, Any]:
        allowed = await self.auth.among([*self.nsqd.topics, *self.nsqd.unopened_topics], request, READ)
        pace = TurnPace()
        topics = []
        for topic in list(self.nsqd.topics.values()):
            if topic.name in allowed:
                owned = [_owned(channel) for channel in topic.channels.values() if channel.owner]
                topics.append({**_heads(topic), **({"owned": owned} if owned else {})})
            await pace.step()
        unopened = sorted(name for name in self.nsqd.unopened_topics if name in allowed)
        missing = {"unopened": unopened} if unopened else {}
        return {"topics": topics, **missing, "disk": await self.in_thread(self._disk)}

    def _disk(self) -> dict[str, int]:
        """Measures the disk below the data path, and how much of it is ours."""
        nsqd = self.nsqd
        room = os.statvfs(nsqd.data.path)
        return {
            "free_bytes": room.f_bavail * room.f_frsize,
            "total_bytes": (room.f_blocks - room.f_bfree + room.f_bavail) * room.f_frsize,
            "used_bytes": nsqd.logs.disk_bytes,
            "limit_bytes": nsqd.options.max_disk_bytes,
        }

    async def info(self, arguments: NsqdArguments, request: Request) -> dict[str, Any]:
        topic = arguments.topic()
        wait_s = arguments.seconds("wait", INFO_WAIT_S_MAX)
        after = arguments.number("after", 0, INT64_MAX, topic.log.head)
        if wait_s and topic.log.head <= after:
            await self._wait_beyond(topic, after, wait_s, request)
        if topic.is_exiting:
            raise Refusal(404, "TOPIC_NOT_FOUND")
        return _info(topic)

    async def _wait_beyond(self, topic: Topic, after: int, wait_s: float, request: Request) -> None:
        ended = asyncio.Event()
        try:
            place = self._waiters.occupy(request.peer, ended.set)
        except NoPlace as full:
            raise Refusal(503, "TOO_MANY_WAITERS", reason=f"{full}; try again later") from None
        request.on_left = ended.set
        # This is nsqd's own task, which ends when nsqd is told to stop; this request is then answered at once.
        waiting = self.nsqd.spawn(_until_beyond(topic, after, wait_s, ended))
        try:
            await ended.wait()
        finally:
            place.free()
            waiting.cancel()

    async def runs(self, arguments: NsqdArguments, request: Request) -> dict[str, Any]:
        """Lists each start of this nsqd, the latest last."""
        return {"runs": [msgspec.structs.asdict(run) for run in self.nsqd.runs]}

    # -- /log/at -----------------------------------------------------------------------------------------

    async def at(self, arguments: NsqdArguments, request: Request) -> dict[str, Any]:
        return await self._place(arguments.name("topic"), _time_ns(arguments), _is_end(arguments))

    async def at_many(self, arguments: NsqdArguments, request: Request) -> dict[str, Any]:
        """Finds positions by time in many topics; each has its own answer, a place or why there is none."""
        time_ns, is_end = _time_ns(arguments), _is_end(arguments)
        topics = decoded(request, _AskedTopics).topics
        allowed = await self.auth.among(topics, request, READ)
        places: list[dict[str, Any]] = []
        for name in topics:
            try:
                require_allowed(name, allowed)
                places.append(await self._place(name, time_ns, is_end))
            except Refusal as refusal:
                places.append(refused_part(name, refusal))
        return {"places": places}

    async def _place(self, name: str, time_ns: int, is_end: bool) -> dict[str, Any]:
        topic = require_topic(self.nsqd, name)
        require_stored(topic)
        if is_end:
            assert topic.log.segments is not None
            seq = await self._search(TimeEnd(topic.log.segments, time_ns).find)
        else:
            seq = await self.first_at_time(topic, time_ns)
        return {"topic": name, "id": topic.id, "seq": seq, "first": topic.log.extents.first, "next": topic.log.head}

    async def first_at_time(self, topic: Topic, time_ns: int) -> int:
        """Finds the first message, in the order of the log, published at this time or later, or the head."""
        assert topic.log.segments is not None
        head = topic.log.head
        found = await self._search(TimeSearch(topic.log.segments, time_ns).find)
        return head if found is None else found

    async def _search(self, find: Callable[[], int | None]) -> int | None:
        try:
            found: int | None = await self.in_thread(find)
        except OSError as error:
            raise disk_error(error) from None
        return found

    # -- /log/read ---------------------------------------------------------------------------------------

    async def read(self, request: Request) -> Answer:
        """Streams one range. Its first piece is read before the answer begins, so that a range that cannot be read is
        refused with a status and a reason.
        """
        try:
            arguments = NsqdArguments(self.nsqd, request)
            wanted, bodies = range_of(arguments), arguments.one_of("bodies", ("true", "false")) == "true"
            self._reads.check(request.peer)
            stream = _RangeStream(self._opened_reader(wanted, bodies), self._reads, request.peer, self.threads)
            pieces = await stream.begun()
        except NoPlace as full:
            return self.refuse(Refusal(503, "TOO_MANY_READS", reason=f"{full}; try again later"))
        except Refusal as refusal:
            return self.refuse(refusal)
        return StreamResponse(200, OCTETS, extra_headers(self.nsqd.node.id, 200), pieces)

    async def read_many(self, request: Request) -> Answer:
        """Streams many ranges, one behind the other; each gives its batches or says why it cannot be read."""
        try:
            asked = decoded(request, LogRanges)
            allowed = await self.auth.among({wanted.topic for wanted in asked.ranges}, request, READ)
            self._reads.check(request.peer)
        except NoPlace as full:
            return self.refuse(Refusal(503, "TOO_MANY_READS", reason=f"{full}; try again later"))
        except Refusal as refusal:
            return self.refuse(refusal)
        pieces = self._pieces_of_many(asked, allowed, request.peer)
        return StreamResponse(200, OCTETS, extra_headers(self.nsqd.node.id, 200), pieces)

    async def _pieces_of_many(self, asked: LogRanges, allowed: set[str], peer: str) -> AsyncIterator[bytes]:
        sending = asyncio.current_task()
        assert sending is not None
        place = self._reads.occupy(peer, sending.cancel)
        group = RangeGroup(lambda number, error: _refused_range(asked.ranges[number], disk_error(error)))
        try:
            for number, wanted in enumerate(asked.ranges):
                group.add(number, self._reader_or_refusal(wanted, allowed, asked.bodies))
                if group.is_full or number == len(asked.ranges) - 1:
                    while piece := await self.in_thread(functools.partial(group.read, READ_PIECE_BYTES)):
                        yield piece
                        place.got_on()
        finally:
            place.free()
            self.threads.submit(group.close)

    def _reader_or_refusal(self, wanted: LogRange, allowed: set[str], bodies: bool) -> Readable | bytes:
        try:
            require_allowed(wanted.topic, allowed)
            return self._opened_reader(wanted, bodies)
        except Refusal as refusal:
            return _refused_range(wanted, refusal)

    def _opened_reader(self, wanted: LogRange, bodies: bool) -> Readable:
        reader = self._reader(wanted, bodies)
        try:
            reader.open()
        except OSError as error:
            reader.close()
            raise disk_error(error) from None
        return reader

    def _reader(self, wanted: LogRange, bodies: bool) -> Readable:
        topic, segments = wanted.found(self.nsqd)
        if wanted.low < segments.removed.to:
            raise Refusal(410, "REMOVED", first=topic.log.extents.first, removed_to=segments.removed.to)
        reader = RangeReader(segments, wanted.low, min(wanted.high, topic.log.head))
        return reader if bodies else HeadsReader(reader)


class _RangeStream:
    """Streams one range. It has open files and a place from its request on, and gives both up when it ends, or when it
    is dropped because the connection was closed before its turn came.
    """

    def __init__(self, reader: Readable, places: Places, peer: str, threads: ThreadPoolExecutor) -> None:
        self._reader = reader
        self._threads = threads
        self._sending: asyncio.Task[Any] | None = None
        self._has_left = False
        self._place = places.occupy(peer, self._leave)

    async def begun(self) -> AsyncIterator[bytes]:
        """Reads the first piece, and returns it with all that follow; raises Refusal if it cannot be read."""
        try:
            first = await self._next_piece()
        except BaseException as error:
            self._end()
            if isinstance(error, OSError):
                raise disk_error(error) from None
            raise
        pieces = self._pieces(first)
        weakref.finalize(pieces, self._end_later, asyncio.get_running_loop()).atexit = False
        return pieces

    async def _pieces(self, piece: bytes) -> AsyncIterator[bytes]:
        """Yields the pieces of the range; the next one is read while the last one is being sent."""
        self._sending = asyncio.current_task()
        if self._has_left:
            self._leave()
        following: asyncio.Future[bytes] | None = None
        try:
            while piece:
                following = self._next_piece()
                yield piece
                self._place.got_on()
                piece = await following
        finally:
            if following is not None:
                following.cancel()
            self._end()

    def _next_piece(self) -> asyncio.Future[bytes]:
        return asyncio.get_running_loop().run_in_executor(self._threads, self._reader.read, READ_PIECE_BYTES)

    def _leave(self) -> None:
        self._has_left = True
        if self._sending is not None:
            self._sending.cancel()

    def _end_later(self, loop: asyncio.AbstractEventLoop) -> None:
        """Asks the event loop to end this. Garbage is collected in any thread, and inside any lock: nothing else may be
        done there.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nsqd ends
            loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._place.free()
        # A read that is under way in a thread keeps `close` waiting.
        self._threads.submit(self._reader.close)


async def _until_beyond(topic: Topic, after: int, wait_s: float, ended: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(wait_s):
            while topic.log.head <= after and not topic.is_exiting:
                moved = asyncio.Event()
                topic.head_waiters.append(moved.set)
                try:
                    await moved.wait()
                finally:
                    with contextlib.suppress(ValueError):
                        topic.head_waiters.remove(moved.set)
    except TimeoutError:
        pass
    finally:
        ended.set()


def _refused_range(wanted: LogRange, refusal: Refusal) -> bytes:
    return encode_json(refused_part(wanted.topic, refusal))


def _time_ns(arguments: NsqdArguments) -> int:
    """Reads a time given as `ts`, `ts_ms`, or as `age_ms` before now by this nsqd's own clock."""
    if "age_ms" in arguments:
        return max(time.time_ns() - arguments.number("age_ms", 0, INT64_MAX // NS_PER_MS) * NS_PER_MS, 0)
    if "ts_ms" in arguments:
        return arguments.number("ts_ms", 0, INT64_MAX // NS_PER_MS) * NS_PER_MS
    return arguments.number("ts", 0, INT64_MAX)


def _is_end(arguments: NsqdArguments) -> bool:
    return arguments.one_of("side", ("start", "end")) == "end"


def _heads(topic: Topic) -> dict[str, Any]:
    extents = topic.log.extents
    return {
        "topic": topic.name,
        "id": topic.id,
        "first": extents.first,
        "next": topic.log.head,
        "count": extents.count,
    }


def _owned(channel: Channel) -> dict[str, Any]:
    """Describes a channel that is read by range: how far its owner is, and how long ago it was heard of."""
    return {
        "channel": channel.name,
        "owner": channel.owner,
        "position": channel.topic.log.extents.at_or_after(channel.ledger.floor),
        "ttl_s": channel.owner_ttl_ms / 1000,
        "idle_s": channel.owner_idle_ms / 1000,
    }


def _info(topic: Topic) -> dict[str, Any]:
    segments = topic.log.segments
    files = list(segments) if segments is not None else []
    return {
        **_heads(topic),
        "pump": topic.pump,
        "removed_to": segments.removed.to if segments is not None else 0,
        "bytes": sum(segment.size for segment in files),
        "segments": len(files),
        "oldest_ns": min((segment.time_min_ns for segment in files if segment.size), default=None),
        "newest_ns": max((segment.time_max_ns for segment in files if segment.size), default=None),
        "is_stored": segments is not None,
    }
