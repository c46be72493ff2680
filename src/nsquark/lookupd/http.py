"""Answers nsqlookupd's HTTP API, one method per path.

Long answers are joined from JSON written at IDENTIFY: a peer never changes, and names need no escaping.
"""

import time
from collections.abc import Callable

from nsquark.base.exposition import CONTENT_TYPE
from nsquark.base.logs import Logger
from nsquark.base.version import NSQ_VERSION
from nsquark.lookupd.metrics import Metrics
from nsquark.lookupd.registry import Registry, RegistryProducer
from nsquark.web.arguments import Arguments, Refusal
from nsquark.web.messages import JSON_TYPE, NSQ_HEADER, Request, Response, empty, error, json, plain
from nsquark.web.router import Router

NEVER_UNIX_NS = -6795364578871345152
"""NSQ shows a time that never was like this: as the year 1 in nanoseconds, overflowed."""

Handler = Callable[[Request], Response]


class LookupdApi:
    """Answers the requests of nsqlookupd's HTTP API."""

    def __init__(self, registry: Registry, metrics: Metrics, logger: Logger) -> None:
        self._registry = registry
        self._metrics = metrics
        self._logger = logger

    def router(self) -> Router:
        router = Router()
        for method, path, handler in (
            ("GET", "/ping", self.ping),
            ("GET", "/info", self.info),
            ("GET", "/topics", self.topics),
            ("GET", "/channels", self.channels),
            ("GET", "/lookup", self.lookup),
            ("GET", "/nodes", self.nodes),
            ("GET", "/debug", self.debug),
            ("GET", "/metrics", self.metrics),
            ("POST", "/topic/create", self.create_topic),
            ("POST", "/topic/delete", self.delete_topic),
            ("POST", "/topic/tombstone", self.tombstone_topic),
            ("POST", "/channel/create", self.create_channel),
            ("POST", "/channel/delete", self.delete_channel),
        ):
            router.add(method, path, self._counted(path, handler))
        return router

    def _counted(self, path: str, handler: Handler) -> Handler:
        def answer(request: Request) -> Response:
            try:
                response = handler(request)
            except Refusal as refusal:
                response = refusal.response()
            self._metrics.requests[path, response.status] += 1
            return response

        return answer

    # -- about nsqlookupd --------------------------------------------------------------------------------

    def ping(self, request: Request) -> Response:
        return plain(200, "OK")

    def info(self, request: Request) -> Response:
        return json({"version": NSQ_VERSION})

    def metrics(self, request: Request) -> Response:
        return Response(body=self._metrics.text().encode(), content_type=CONTENT_TYPE)

    # -- what consumers and operators ask ----------------------------------------------------------------

    def topics(self, request: Request) -> Response:
        return json({"topics": list(self._registry.topics)})

    def channels(self, request: Request) -> Response:
        return json({"channels": self._registry.channels_of(Arguments(request).get("topic"))})

    def lookup(self, request: Request) -> Response:
        topic = Arguments(request).get("topic")
        key = self._registry.topics.get(topic)
        if key is None:
            return error(404, "TOPIC_NOT_FOUND")
        channels = name_list(self._registry.channels_of(topic))
        producers = b",".join([producer.json for producer in self._registry.live_producers_of(key)])
        return written_json(b'{"channels":%s,"producers":[%s]}' % (channels, producers))

    def nodes(self, request: Request) -> Response:
        nodes = b",".join([self._node(producer) for producer in self._registry.active_producers()])
        return written_json(b'{"producers":[%s]}' % nodes)

    def debug(self, request: Request) -> Response:
        # The registry counts on a clock that is never set; people want the time of day.
        to_unix_ns = time.time_ns() - self._registry.clock_ns()
        table = {"client::": [debug_row(producer, None, to_unix_ns) for producer in self._registry.producers]}
        for key in self._registry.all_keys():
            table[f"{key.category}:{key.topic}:{key.channel}"] = [
                debug_row(producer, producer.tombstones.get(key), to_unix_ns) for producer in key.producers
            ]
        return json({name: table[name] for name in sorted(table) if table[name]})

    # -- what operators do -------------------------------------------------------------------------------

    def create_topic(self, request: Request) -> Response:
        topic = Arguments(request).name("topic")
        self._logger.info(f"DB: adding topic({topic})")
        self._registry.create_topic(topic)
        return empty()

    def delete_topic(self, request: Request) -> Response:
        for key in self._registry.delete_topic(Arguments(request).get("topic")):
            self._log_removal(key.topic, key.channel)
        return empty()

    def tombstone_topic(self, request: Request) -> Response:
        arguments = Arguments(request)
        topic, node = arguments.get("topic"), arguments.get("node")
        self._logger.info(f"DB: setting tombstone for producer@{node} of topic({topic})")
        self._registry.tombstone(topic, node)
        return empty()

    def create_channel(self, request: Request) -> Response:
        topic, channel = topic_and_channel(request)
        self._logger.info(f"DB: adding channel({channel}) in topic({topic})")
        self._logger.info(f"DB: adding topic({topic})")
        self._registry.create_channel(topic, channel)
        return empty()

    def delete_channel(self, request: Request) -> Response:
        topic, channel = topic_and_channel(request)
        if not self._registry.delete_channel(topic, channel):
            return error(404, "CHANNEL_NOT_FOUND")
        self._log_removal(topic, channel)
        return empty()

    # -- parts of answers --------------------------------------------------------------------------------

    def _node(self, producer: RegistryProducer) -> bytes:
        topics = producer.topics()
        if producer.tombstones:
            flags = ["true" if self._registry.is_tombstoned(producer, key) else "false" for key in topics]
        else:
            flags = ["false"] * len(topics)
        names = name_list([key.topic for key in topics])
        return b'%s,"tombstones":[%s],"topics":%s}' % (producer.json[:-1], ",".join(flags).encode(), names)

    def _log_removal(self, topic: str, channel: str) -> None:
        if channel:
            self._logger.info(f"DB: removing channel({channel}) from topic({topic})")
        else:
            self._logger.info(f"DB: removing topic({topic})")


def topic_and_channel(request: Request) -> tuple[str, str]:
    arguments = Arguments(request)
    return arguments.name("topic"), arguments.name("channel")


def name_list(names: list[str]) -> bytes:
    """Writes the JSON of registered names, which are plain ASCII without quotes."""
    return b'["%s"]' % '","'.join(names).encode() if names else b"[]"


def debug_row(producer: RegistryProducer, tombstoned_ns: int | None, to_unix_ns: int) -> dict[str, object]:
    info = producer.info
    return {
        "broadcast_address": info.broadcast_address,
        "hostname": info.hostname,
        "http_port": info.http_port,
        "id": producer.id,
        "last_update": producer.last_update_ns + to_unix_ns,
        "tcp_port": info.tcp_port,
        "tombstoned": tombstoned_ns is not None,
        "tombstoned_at": NEVER_UNIX_NS if tombstoned_ns is None else tombstoned_ns + to_unix_ns,
        "version": info.version,
    }


def written_json(body: bytes) -> Response:
    return Response(body=body, content_type=JSON_TYPE, headers=(NSQ_HEADER,))
