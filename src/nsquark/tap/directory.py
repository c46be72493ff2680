"""Tells readers where the logs of the tapped nsqds are, as an nsqlookupd would, and operators whether all is well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nsquark.base.exposition import CONTENT_TYPE, Family
from nsquark.base.hosts import HOSTNAME
from nsquark.base.version import NSQ_VERSION
from nsquark.tap.options import TapOptions
from nsquark.tap.tapped_nsqd import TappedNsqd
from nsquark.web.messages import Request, Response, error, json, plain
from nsquark.web.router import Router


class TapDirectory:
    """Answers requests to the tap's own port. Messages are read from the ports of the tapped nsqds' logs."""

    def __init__(self, sources: Mapping[str, TappedNsqd], options: TapOptions) -> None:
        self._sources = sources
        self._broadcast_address = options.broadcast_address

    def router(self) -> Router:
        router = Router()
        for path, handler in (
            ("/ping", self.ping),
            ("/info", self.info),
            ("/lookup", self.lookup),
            ("/nodes", self.nodes),
            ("/topics", self.topics),
            ("/metrics", self.metrics),
        ):
            router.add("GET", path, handler, log=False)
        return router

    def ping(self, request: Request) -> Response:
        ill = [f"{source.address}: {source.log.health}" for source in self._running() if source.log.health != "OK"]
        return plain(500, "NOK - " + "; ".join(ill)) if ill else plain(200, "OK")

    def info(self, request: Request) -> Response:
        return json({"version": NSQ_VERSION})

    def topics(self, request: Request) -> Response:
        return json({"topics": sorted({topic for source in self._running() for topic in source.log.topics})})

    def lookup(self, request: Request) -> Response:
        topic = request.query.get("topic", "")
        found = [source for source in self._running() if topic in source.log.topics]
        if not found:
            return error(404, "TOPIC_NOT_FOUND")
        return json({"channels": [], "producers": [self._producer(source) for source in found]})

    def nodes(self, request: Request) -> Response:
        producers = []
        for source in self._running():
            topics = list(source.log.topics)
            producers.append({**self._producer(source), "tombstones": [False] * len(topics), "topics": topics})
        return json({"producers": producers})

    def metrics(self, request: Request) -> Response:
        stored = Family("nsquark_tap_messages_total", "counter", "Messages stored.")
        repeated = Family("nsquark_tap_redeliveries_total", "counter", "Messages dropped: the log had them.")
        connected = Family("nsquark_tap_connected", "gauge", "1 while the nsqd is connected.")
        paused = Family("nsquark_tap_paused", "gauge", "1 while none is taken (RDY 0): the log cannot be written to.")
        for source in self._running():
            for topic, tap in source.taps.items():
                labels = f'nsqd="{source.address}",topic="{topic}"'
                stored.add(tap.stored, labels)
                repeated.add(tap.repeated, labels)
                connected.add(int(tap.is_connected), labels)
                paused.add(int(tap.is_paused), labels)
        text = "".join(family.text for family in (stored, repeated, connected, paused))
        return Response(body=text.encode(), content_type=CONTENT_TYPE)

    def _running(self) -> list[TappedNsqd]:
        """Returns the tapped nsqds whose logs are open to readers."""
        return [source for source in self._sources.values() if source.log.http_port]

    def _producer(self, source: TappedNsqd) -> dict[str, Any]:
        """Describes a tapped nsqd's log as an nsqlookupd does an nsqd. It has no TCP port: there are no consumers."""
        return {
            "remote_address": source.address,
            "hostname": HOSTNAME,
            "broadcast_address": self._broadcast_address,
            "tcp_port": 0,
            "http_port": source.log.http_port,
            "version": NSQ_VERSION,
        }
