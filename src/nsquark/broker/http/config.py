"""Answers /config/<name>: it shows options, as the config file names them, and sets two of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsquark.base.addresses import join_address
from nsquark.base.logs import Level
from nsquark.broker.http.auth import HttpAuth, Rule
from nsquark.broker.options import config_value
from nsquark.web.messages import Request, Response, error, json, text
from nsquark.web.router import Router
from nsquark.wire.documents import decode_json

if TYPE_CHECKING:
    from nsquark.broker.nsqd import Nsqd


class ConfigApi:
    def __init__(self, nsqd: Nsqd, auth: HttpAuth) -> None:
        self.nsqd = nsqd
        self._auth = auth

    def add_routes(self, router: Router) -> None:
        rule = Rule("admin")
        router.add_prefix("GET", "/config/", self._auth.guarded(self.read, rule))
        limit = self.nsqd.options.max_msg_size
        write = self._auth.guarded(self.write, rule)
        router.add_prefix("PUT", "/config/", write, max_body_bytes=limit, too_big="INVALID_VALUE")

    def read(self, request: Request) -> Response:
        nsqd, name = self.nsqd, request.tail
        try:
            value = config_value(nsqd.options, name)
        except KeyError:
            return error(400, "INVALID_OPTION")
        if name == "broadcast_tcp_port":
            value = nsqd.options.broadcast_tcp_port or nsqd.tcp_port
        elif name == "broadcast_http_port":
            value = nsqd.options.broadcast_http_port or nsqd.http_port
        elif name == "statsd_prefix":
            value = statsd_prefix(nsqd)
        return text(value) if isinstance(value, str) else json(value)

    def write(self, request: Request) -> Response:
        if not request.body:
            return error(413, "INVALID_VALUE")
        if request.tail == "nsqlookupd_tcp_addresses":
            return self._set_lookupds(request.body)
        if request.tail == "log_level":
            return self._set_log_level(request.body)
        return error(400, "INVALID_OPTION")

    def _set_lookupds(self, body: bytes) -> Response:
        try:
            addresses = None if body.strip() == b"null" else decode_json(body, list[str])
        except ValueError:
            return error(400, "INVALID_VALUE")
        self.nsqd.options.lookupd_tcp_address = addresses or []
        self.nsqd.lookup.set_addresses(addresses or [])
        return json(addresses)

    def _set_log_level(self, body: bytes) -> Response:
        try:
            level = Level.parse(body.decode("ascii"))
        except ValueError:
            return error(400, "INVALID_VALUE")
        self.nsqd.options.log_level = self.nsqd.logger.level = level
        return json(int(level))


def statsd_prefix(nsqd: Nsqd) -> str:
    """Returns the prefix as it stands before each key: %s is this nsqd's address, in characters a key may have."""
    options = nsqd.options
    address = join_address(options.broadcast_address, options.broadcast_http_port or nsqd.http_port)
    host_key = address.replace(".", "_").replace(":", "_")
    prefix = options.statsd_prefix.replace("%s", host_key)
    return prefix if not prefix or prefix.endswith(".") else prefix + "."
