"""nsqd's HTTP API: one method per path. What is published here goes the same way as a PUB over TCP."""

from __future__ import annotations

import gc
import re
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from nsquark.base.exposition import CONTENT_TYPE
from nsquark.base.hosts import HOSTNAME
from nsquark.base.version import NSQ_VERSION
from nsquark.broker import topology
from nsquark.broker.channel import Channel
from nsquark.broker.commits import settled
from nsquark.broker.http.auth import HttpAuth, Rule
from nsquark.broker.http.config import ConfigApi
from nsquark.broker.http.log_read import LogApi
from nsquark.broker.observe import stats_text
from nsquark.broker.observe.metrics import metrics_text
from nsquark.broker.observe.process import memory_stats
from nsquark.broker.observe.stats import Pace, Stats, collect_stats, stats_as_json
from nsquark.broker.together import Together
from nsquark.broker.topic import Buffer, Topic, TopicExiting
from nsquark.kernel.commits import Commit
from nsquark.kernel.http_lane import HttpLane
from nsquark.kernel.mpub import measure_lines, size_lines
from nsquark.kernel.publish import MPUB_TURN_MESSAGES_MAX, MPUB_WHOLE_MESSAGES_MAX
from nsquark.kernel.records import MPUB_BAD_SIZE, MPUB_INCOMPLETE, MPUB_TOO_BIG, measure_mpub
from nsquark.kernel.replies import ReplyQueue
from nsquark.web.messages import (
    JSON_TYPE,
    NSQ_HEADER,
    TEXT_TYPE,
    Handler,
    Pending,
    Request,
    Response,
    empty,
    error,
    json,
    plain,
    text,
)
from nsquark.web.router import Router
from nsquark.wire.names import is_valid_name
from nsquark.wire.quote import quote

if TYPE_CHECKING:
    from nsquark.broker.nsqd import Nsqd

INT64_MAX: Final = 2**63 - 1
INT64_DIGITS: Final = len(str(INT64_MAX))
MESSAGE_BYTES_MIN: Final = 5
"""Of a message in a binary /mpub: its size and one byte."""

# Answers that are always the same: the server keeps their bytes.
OK: Final = text("OK")
DONE: Final = empty()
EXITING: Final = error(503, "EXITING")
MSG_EMPTY: Final = error(400, "MSG_EMPTY")
MSG_TOO_BIG: Final = error(413, "MSG_TOO_BIG")
BAD_BODY: Final = error(413, "BAD_BODY")
BAD_MESSAGE: Final = error(413, "BAD_MESSAGE")
INTERNAL_ERROR: Final = error(500, "INTERNAL_ERROR")

KNOWN: Final = Rule()
PUBLISH: Final = Rule("publish")
ADMIN: Final = Rule("admin")

CONTENT_LENGTH: Final = re.compile(rb"(?<=\r\ncontent-length: )[0-9]+(?=\r\n)", re.IGNORECASE)

OFF_WORDS: Final = ("false", "0")
ON_WORDS: Final = ("true", "1")

PublishAnswer = Response | Pending | Coroutine[Any, Any, Response]


class Refused(Exception):
    """The request is answered with an error."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.response = error(status, code)


class Publishing(Pending):
    """The answer to a publish, given by the commit that it waits for."""

    def settled(self, commit: Commit) -> None:
        self.resolve(_outcome(commit))


class PubReplies(ReplyQueue):
    """The answers to one connection's publishes."""

    def refusal(self, word: str, error: Exception) -> bytes:
        return _refusal(error).wire()


@dataclass(frozen=True, slots=True)
class StatsQuery:
    """What a request to /stats asks for; equal ones get the same answer."""

    topic: str
    channel: str
    include_clients: bool
    include_memory: bool
    as_json: bool


class Api:
    def __init__(self, nsqd: Nsqd) -> None:
        self.nsqd = nsqd
        self._auth = HttpAuth(nsqd)
        self.log_api = LogApi(nsqd, self._auth)
        self._started_ns = time.monotonic_ns()
        self._together: Together[Response] = Together()

    def router(self) -> Router:
        router = Router()
        options = self.nsqd.options
        # As in NSQ, publishing is not logged.
        router.add(
            "POST",
            "/pub",
            self._auth.guarded(self.pub, PUBLISH),
            log=False,
            max_body_bytes=options.max_msg_size,
            too_big="MSG_TOO_BIG",
            lane=self.pub_lane,
        )
        router.add(
            "POST", "/mpub", self._auth.guarded(self.mpub, PUBLISH), log=False, max_body_bytes=options.max_body_size
        )
        router.add("GET", "/ping", self.ping)
        for path, about in (("/info", self.info), ("/stats", self.stats), ("/metrics", self.metrics)):
            router.add("GET", path, self._auth.guarded(about, KNOWN))
        for path, verb in (
            ("/topic/create", self.create_topic),
            ("/topic/delete", self.delete_topic),
            ("/topic/empty", self.empty_topic),
            ("/topic/pause", self.pause_topic),
            ("/topic/unpause", self.unpause_topic),
            ("/channel/create", self.create_channel),
            ("/channel/delete", self.delete_channel),
            ("/channel/empty", self.empty_channel),
            ("/channel/pause", self.pause_channel),
            ("/channel/unpause", self.unpause_channel),
        ):
            rule = Rule("admin", of_channel=path.startswith("/channel/"))
            router.add("POST", path, self._auth.guarded(self._answering(verb), rule))
        ConfigApi(self.nsqd, self._auth).add_routes(router)
        self.log_api.add_routes(router)
        router.add("GET", "/debug/pprof/cmdline", self._auth.guarded(self.command_line, ADMIN), log=False)
        router.add("PUT", "/debug/setblockrate", self._auth.guarded(self.set_block_rate, ADMIN))
        router.add("POST", "/debug/freememory", self._auth.guarded(self.free_memory, ADMIN))
        return router

    def _answering(self, verb: Callable[[Request], Coroutine[Any, Any, Response] | None]) -> Handler:
        """A handler that says 200 with an empty body when the verb is done, unless it answers itself."""

        def handler(request: Request) -> Response | Coroutine[Any, Any, Response]:
            try:
                return verb(request) or DONE
            except Refused as refused:
                return refused.response
            except OSError as failure:  # what a verb changes is stored before it is answered
                self.nsqd.logs.disk.failed(failure)
                self.nsqd.logger.error(f"failed to store - {failure}")
                return _refusal(failure)

        return handler

    # -- about nsqd --------------------------------------------------------------------------------------

    def ping(self, request: Request) -> Response:
        health = self.nsqd.health
        return plain(200 if health == "OK" else 500, health)

    def info(self, request: Request) -> Response:
        nsqd, options = self.nsqd, self.nsqd.options
        about: dict[str, str | int] = {
            "version": NSQ_VERSION,
            "broadcast_address": options.broadcast_address,
            "hostname": HOSTNAME,
            "http_port": nsqd.http_port,
            "tcp_port": nsqd.tcp_port,
            "start_time": nsqd.start_time,
            "max_heartbeat_interval": int(options.max_heartbeat_interval),
            "max_output_buffer_size": options.max_output_buffer_size,
            "max_output_buffer_timeout": int(options.max_output_buffer_timeout),
            "max_deflate_level": options.max_deflate_level,
        }
        if topology.is_shown(options):
            about["topology_zone"] = options.topology_zone
            about["topology_region"] = options.topology_region
        return json(about)

    async def stats(self, request: Request) -> Response:
        if not request.query_ok:
            return error(400, "INVALID_REQUEST")
        query = request.query
        asked = StatsQuery(
            topic=query.get("topic", ""),
            channel=query.get("channel", ""),
            include_clients=query.get("include_clients") not in OFF_WORDS,
            include_memory=query.get("include_mem") not in OFF_WORDS,
            as_json=query.get("format") == "json",
        )
        return await self._together.get(asked, lambda: self._stats(asked))

    async def _stats(self, asked: StatsQuery) -> Response:
        stats = await collect_stats(
            self.nsqd, topic=asked.topic, channel=asked.channel, include_clients=asked.include_clients
        )
        if asked.include_memory:
            stats.memory = memory_stats()
        if not asked.as_json:
            return await self._stats_as_text(stats)
        return Response(body=await stats_as_json(stats), content_type=JSON_TYPE, headers=(NSQ_HEADER,))

    async def metrics(self, request: Request) -> Response:
        return await self._together.get("metrics", self._metrics)

    async def _metrics(self) -> Response:
        return Response(body=(await metrics_text(self.nsqd)).encode(), content_type=CONTENT_TYPE)

    async def _stats_as_text(self, stats: Stats) -> Response:
        lines: list[str] = []
        pace = Pace()
        for line in stats_text.lines(stats, time.monotonic_ns() - self._started_ns):
            lines.append(line)
            await pace.step()
        return text("\n".join(lines) + "\n")

    # -- publishing --------------------------------------------------------------------------------------

    def pub(self, request: Request) -> Response | Pending:
        body = request.body
        if not body:
            return MSG_EMPTY
        query = request.query
        try:
            # Nearly always the topic is there, and nothing else is asked for.
            topic = self.nsqd.topics.get(query.get("topic", "")) if request.query_ok else None
            if topic is None:
                topic = self._topic_to_publish(request)
            if "defer" in query:
                delay_ms = self._delay_ms(query["defer"])
                if delay_ms:
                    return _answered_by(topic.publish_deferred(body, delay_ms))
            return _answered_by(topic.publish(body, 0, len(body)))
        except Refused as refused:
            return refused.response
        except (TopicExiting, OSError) as failure:
            return _refusal(failure)

    def pub_lane(self, request: Request, write: Callable[[bytes], object]) -> HttpLane | None:
        """The short way for more requests like this one, as long as their topic is there."""
        if not self._auth.is_free(request):
            return None
        around_length = CONTENT_LENGTH.split(request.head)
        topic = self.nsqd.topics.get(request.query.get("topic", "")) if request.query_ok else None
        if topic is None or len(around_length) != 2 or "defer" in request.query:
            return None
        before, behind = around_length
        replies = PubReplies(OK.wire(), write, None)
        return HttpLane(topic.log.tail, replies, before, behind, self.nsqd.options.max_msg_size)

    def mpub(self, request: Request) -> PublishAnswer:
        try:
            topic = self._topic_to_publish(request)
            binary = request.query.get("binary", "false")
            if binary in OFF_WORDS:
                return self._mpub_text(topic, request.body)
            if binary not in ON_WORDS:
                shown = quote(binary.encode())[1:-1]
                self.nsqd.logger.warning(f"deprecated value '{shown}' used for /mpub binary param")
            return self._mpub_binary(topic, request.body)
        except Refused as refused:
            return refused.response
        except (TopicExiting, OSError) as failure:
            return _refusal(failure)

    def _mpub_text(self, topic: Topic, body: bytes) -> PublishAnswer:
        """A message per line."""
        count = measure_lines(body, self.nsqd.options.max_msg_size)
        if count <= 0:
            return MSG_TOO_BIG if count < 0 else OK
        if count > MPUB_WHOLE_MESSAGES_MAX:
            return self._publish_parts(topic, _parts_of_lines(body))
        sized, _, _ = size_lines(body, 0, count)
        return _answered_by(topic.publish_sized(sized, 0, len(sized), count))

    def _mpub_binary(self, topic: Topic, body: bytes) -> PublishAnswer:
        """As MPUB over TCP, without the size of the whole."""
        options = self.nsqd.options
        count = int.from_bytes(body[:4], "big", signed=True)
        if len(body) < 4 or not 0 < count <= (options.max_body_size - 4) // MESSAGE_BYTES_MIN:
            return BAD_BODY
        end, _, _, _ = measure_mpub(body, 4, len(body), count, options.max_msg_size)
        if end in (MPUB_INCOMPLETE, MPUB_BAD_SIZE, MPUB_TOO_BIG):
            return BAD_MESSAGE
        if count > MPUB_WHOLE_MESSAGES_MAX:
            return self._publish_parts(topic, _parts_of_sized(body[:end], count, options.max_msg_size))
        return _answered_by(topic.publish_sized(body, 4, end, count))

    async def _publish_parts(self, topic: Topic, parts: Iterator[tuple[Buffer, int, int, int]]) -> Response:
        """More than one turn may take: a commit for each part. The first that fails is the last; so it is in NSQ."""
        try:
            for part in parts:
                commit = topic.publish_sized(*part)
                await settled(commit)
                if commit.error is not None:
                    return _refusal(commit.error)
        except (TopicExiting, OSError) as failure:
            return _refusal(failure)
        return OK

    def _topic_to_publish(self, request: Request) -> Topic:
        """Made if it is not there, before the rest of the request is looked at, as in NSQ."""
        name = _argument(request, "topic")
        topic = self.nsqd.topics.get(name)
        return topic if topic is not None else self.nsqd.topic(_valid(name, "INVALID_TOPIC"))

    def _delay_ms(self, defer: str) -> int:
        delay_ms = _int64(defer)
        if delay_ms is None or not 0 <= delay_ms <= self.nsqd.options.max_req_timeout.ms:
            raise Refused(400, "INVALID_DEFER")
        return delay_ms

    # -- topics ------------------------------------------------------------------------------------------

    def create_topic(self, request: Request) -> None:
        self.nsqd.topic(_valid(_argument(request, "topic"), "INVALID_TOPIC"))

    def delete_topic(self, request: Request) -> None:
        self.nsqd.delete_topic(self._topic(_argument(request, "topic")).name)

    def empty_topic(self, request: Request) -> None:
        self._topic(_valid(_argument(request, "topic"), "INVALID_TOPIC")).empty()

    def pause_topic(self, request: Request) -> None:
        self._set_topic_paused(request, True)

    def unpause_topic(self, request: Request) -> None:
        self._set_topic_paused(request, False)

    def _set_topic_paused(self, request: Request, paused: bool) -> None:
        self._topic(_argument(request, "topic")).set_paused(paused)
        self.nsqd.write_metadata()

    def _topic(self, name: str) -> Topic:
        topic = self.nsqd.topics.get(name)
        if topic is None:
            raise Refused(404, "TOPIC_NOT_FOUND")
        return topic

    # -- channels ----------------------------------------------------------------------------------------

    def create_channel(self, request: Request) -> Coroutine[Any, Any, Response] | None:
        topic, name = self._channel_arguments(request)
        if "start" in request.query:  # ours: a position that may have to be looked up
            return self.log_api.channels.create(topic, name, request.query["start"])
        topic.channel(name)
        return None

    def delete_channel(self, request: Request) -> None:
        topic, name = self._channel_arguments(request)
        if not topic.delete_channel(name):
            raise Refused(404, "CHANNEL_NOT_FOUND")

    def empty_channel(self, request: Request) -> None:
        channel = self._channel(request)
        channel.empty()
        channel.topic.collect(newest_too=True)

    def pause_channel(self, request: Request) -> None:
        self._set_channel_paused(request, True)

    def unpause_channel(self, request: Request) -> None:
        self._set_channel_paused(request, False)

    def _set_channel_paused(self, request: Request, paused: bool) -> None:
        self._channel(request).set_paused(paused)
        self.nsqd.write_metadata()

    def _channel(self, request: Request) -> Channel:
        topic, name = self._channel_arguments(request)
        channel = topic.channels.get(name)
        if channel is None:
            raise Refused(404, "CHANNEL_NOT_FOUND")
        return channel

    def _channel_arguments(self, request: Request) -> tuple[Topic, str]:
        """The topic and the channel's name; that both names are valid comes before whether they exist."""
        topic_name = _valid(_argument(request, "topic"), "INVALID_ARG_TOPIC")
        name = _valid(_argument(request, "channel"), "INVALID_ARG_CHANNEL")
        return self._topic(topic_name), name

    # -- debugging ---------------------------------------------------------------------------------------

    def command_line(self, request: Request) -> Response:
        return Response(body="\0".join(sys.argv).encode("utf-8", "surrogateescape"), content_type=TEXT_TYPE)

    def set_block_rate(self, request: Request) -> Response:
        """Python has no such rate; the answers are those of NSQ, whose success is a 500."""
        rate = request.query.get("rate", "")
        if _int64(rate) is None:
            is_number = rate.removeprefix("-").removeprefix("+").isdecimal()
            reason = "value out of range" if is_number else "invalid syntax"
            return plain(400, f"invalid block rate : strconv.Atoi: parsing {quote(rate.encode())}: {reason}")
        return INTERNAL_ERROR

    def free_memory(self, request: Request) -> Response:
        """Does it; the answer is NSQ's, whose success is a 500."""
        gc.collect()
        return INTERNAL_ERROR


def _refusal(failure: object) -> Response:
    """Why nothing was stored: nsqd or the topic is going, or what the disk says."""
    return error(503, f"DISK_ERROR: {failure}") if isinstance(failure, OSError) else EXITING


def _outcome(commit: Commit) -> Response:
    return OK if commit.error is None else _refusal(commit.error)


def _parts_of_lines(body: bytes) -> Iterator[tuple[Buffer, int, int, int]]:
    """What `publish_sized` wants, for a turn each."""
    pos = 0
    while pos < len(body):
        sized, count, pos = size_lines(body, pos, MPUB_TURN_MESSAGES_MAX)
        if count:
            yield sized, 0, len(sized), count


def _parts_of_sized(body: bytes, left: int, size_max: int) -> Iterator[tuple[Buffer, int, int, int]]:
    """The same of messages that have their sizes and were measured before."""
    pos = 4
    while left:
        count = min(left, MPUB_TURN_MESSAGES_MAX)
        end = measure_mpub(body, pos, len(body), count, size_max)[0]
        yield body, pos, end, count
        pos, left = end, left - count


def _answered_by(commit: Commit) -> Response | Pending:
    if commit.is_settled:
        return _outcome(commit)
    answer = Publishing()
    commit.waiters.append(answer)
    return answer


def _argument(request: Request, name: str) -> str:
    if not request.query_ok:
        raise Refused(400, "INVALID_REQUEST")
    value = request.query.get(name)
    if value is None:
        raise Refused(400, f"MISSING_ARG_{name.upper()}")
    return value


def _valid(name: str, code: str) -> str:
    if not is_valid_name(name):
        raise Refused(400, code)
    return name


def _int64(word: str) -> int | None:
    """A decimal number as Go reads it: a sign may lead, nothing else is allowed, and it has 64 bits."""
    digits = word[1:] if word[:1] in ("+", "-") else word
    if not (digits.isascii() and digits.isdigit()) or len(digits.lstrip("0")) > INT64_DIGITS:
        return None
    value = int(digits.lstrip("0") or "0")
    value = -value if word[0] == "-" else value
    return value if -INT64_MAX - 1 <= value <= INT64_MAX else None
