"""Answers nsqd's HTTP API, by one method per path. Publishing is in publish.py, reading topics as
logs in log_read.py.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from nsquark.base.exposition import CONTENT_TYPE
from nsquark.base.hosts import HOSTNAME
from nsquark.base.version import NSQ_VERSION
from nsquark.broker import topology
from nsquark.broker.http.arguments import OFF_WORDS, NsqdArguments
from nsquark.broker.http.auth import HttpAuth, Rule
from nsquark.broker.http.commits import not_stored
from nsquark.broker.http.config import ConfigApi
from nsquark.broker.http.log_read import LogApi
from nsquark.broker.http.publish import PublishApi
from nsquark.broker.observe import stats_text
from nsquark.broker.observe.metrics import metrics_text
from nsquark.broker.observe.process import memory_stats
from nsquark.broker.observe.stats import NsqdStats, collect_stats, stats_as_json
from nsquark.broker.together import Together
from nsquark.web.arguments import Refusal, int64
from nsquark.web.fairness import TurnPace
from nsquark.web.messages import (
    JSON_TYPE,
    NSQ_HEADER,
    TEXT_TYPE,
    Handler,
    Request,
    Response,
    empty,
    error,
    json,
    plain,
    text,
)
from nsquark.web.router import Router
from nsquark.wire.quote import quote

if TYPE_CHECKING:
    from nsquark.broker.nsqd import Nsqd

DONE: Final = empty()
INTERNAL_ERROR: Final = error(500, "INTERNAL_ERROR")

KNOWN: Final = Rule()
ADMIN: Final = Rule("admin")


@dataclass(frozen=True, slots=True)
class StatsQuery:
    """Says what a request to /stats asks for; equal ones get the same answer."""

    topic: str
    channel: str
    include_clients: bool
    include_memory: bool
    as_json: bool


class NsqdApi:
    """Answers all requests to nsqd, and says which permission each needs."""

    def __init__(self, nsqd: Nsqd) -> None:
        self.nsqd = nsqd
        self._auth = HttpAuth(nsqd)
        self.log_api = LogApi(nsqd, self._auth)
        self._started_ns = time.monotonic_ns()
        self._together: Together[Response] = Together()

    def add_routes(self, router: Router) -> None:
        PublishApi(self.nsqd, self._auth).add_routes(router)
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

    def _answering(self, verb: Callable[[NsqdArguments], Coroutine[Any, Any, Response] | None]) -> Handler:
        """Makes a handler that says 200 with an empty body when the verb is done, unless the verb answers itself."""

        def handler(request: Request) -> Response | Coroutine[Any, Any, Response]:
            try:
                return verb(NsqdArguments(self.nsqd, request)) or DONE
            except Refusal as refusal:
                return refusal.response()
            except OSError as failure:  # what a verb changes is stored before it is answered
                self.nsqd.logs.disk.failed(failure)
                self.nsqd.logger.error(f"failed to store - {failure}")
                return not_stored(failure)

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

    async def _stats_as_text(self, stats: NsqdStats) -> Response:
        lines: list[str] = []
        pace = TurnPace()
        for line in stats_text.lines(stats, time.monotonic_ns() - self._started_ns):
            lines.append(line)
            await pace.step()
        return text("\n".join(lines) + "\n")

    # -- topics ------------------------------------------------------------------------------------------

    def create_topic(self, arguments: NsqdArguments) -> None:
        self.nsqd.topic(arguments.name("topic", "INVALID_TOPIC"))

    def delete_topic(self, arguments: NsqdArguments) -> None:
        self.nsqd.delete_topic(arguments.topic_named(arguments.get("topic")).name)

    def empty_topic(self, arguments: NsqdArguments) -> None:
        arguments.topic_named(arguments.name("topic", "INVALID_TOPIC")).empty()

    def pause_topic(self, arguments: NsqdArguments) -> None:
        self._set_topic_paused(arguments, True)

    def unpause_topic(self, arguments: NsqdArguments) -> None:
        self._set_topic_paused(arguments, False)

    def _set_topic_paused(self, arguments: NsqdArguments, paused: bool) -> None:
        arguments.topic_named(arguments.get("topic")).set_paused(paused)
        self.nsqd.write_metadata()

    # -- channels ----------------------------------------------------------------------------------------

    def create_channel(self, arguments: NsqdArguments) -> Coroutine[Any, Any, Response] | None:
        topic, name = arguments.topic_and_channel_name()
        if "start" in arguments:  # ours: a position that may have to be looked up
            return self.log_api.channels.create(topic, name, arguments.get("start"))
        topic.channel(name)
        return None

    def delete_channel(self, arguments: NsqdArguments) -> None:
        topic, name = arguments.topic_and_channel_name()
        if not topic.delete_channel(name):
            raise Refusal(404, "CHANNEL_NOT_FOUND")

    def empty_channel(self, arguments: NsqdArguments) -> None:
        channel = arguments.channel()
        channel.empty()
        channel.topic.collect_emptied()

    def pause_channel(self, arguments: NsqdArguments) -> None:
        self._set_channel_paused(arguments, True)

    def unpause_channel(self, arguments: NsqdArguments) -> None:
        self._set_channel_paused(arguments, False)

    def _set_channel_paused(self, arguments: NsqdArguments, paused: bool) -> None:
        arguments.channel().set_paused(paused)
        self.nsqd.write_metadata()

    # -- debugging ---------------------------------------------------------------------------------------

    def command_line(self, request: Request) -> Response:
        return Response(body="\0".join(sys.argv).encode("utf-8", "surrogateescape"), content_type=TEXT_TYPE)

    def set_block_rate(self, request: Request) -> Response:
        """Answers as NSQ does, whose success is a 500; Python has no such rate."""
        rate = request.query.get("rate", "")
        if int64(rate) is None:
            is_number = rate.removeprefix("-").removeprefix("+").isdecimal()
            reason = "value out of range" if is_number else "invalid syntax"
            return plain(400, f"invalid block rate : strconv.Atoi: parsing {quote(rate.encode())}: {reason}")
        return INTERNAL_ERROR

    def free_memory(self, request: Request) -> Response:
        """Frees memory; the answer is NSQ's, whose success is a 500."""
        gc.collect()
        return INTERNAL_ERROR
