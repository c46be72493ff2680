"""Answers /config/<name>: it shows an option by its name in the config file, and sets two of them.

It answers only clients in the network of --allow-config-from-cidr, if that is set.
"""

from __future__ import annotations

import ipaddress
from typing import Any, Final

import msgspec
from aiohttp import web

from nsquark.admin import access, audit
from nsquark.admin.api import ApiError, answer_v1
from nsquark.admin.options import SPEC, NsqadminOptions
from nsquark.admin.routing import v1_json, v1_text
from nsquark.admin.state import AdminState
from nsquark.base.logs import Level

VALUE_BYTES_MAX: Final = 1 << 20
_BY_KEY: Final = {row.key: row for row in SPEC if row.key is not None}


@answer_v1
async def read(request: web.Request, state: AdminState) -> web.Response:
    _check_network(request, state.options)
    return _shown(state.options, request.match_info["option"])


@answer_v1
async def write(request: web.Request, state: AdminState) -> web.Response:
    _check_network(request, state.options)
    access.require(request, "config")
    name = request.match_info["option"]
    body = await _body(request)
    if not body:
        raise ApiError(413, "INVALID_VALUE")
    try:
        if name == "nsqlookupd_http_addresses":
            state.options.lookupd_http_address = msgspec.json.decode(body, type=list[str] | None) or []
        elif name == "log_level":
            state.options.log_level = state.logger.level = Level.parse(body.decode("ascii"))
        else:
            raise ApiError(400, "INVALID_OPTION")
    except (ValueError, RecursionError):
        raise ApiError(400, "INVALID_VALUE") from None
    await audit.changed(request, "config", result=f"{name}: {body.decode('utf-8', 'backslashreplace')}")
    return _shown(state.options, name)


def _shown(options: NsqadminOptions, name: str) -> web.Response:
    row = _BY_KEY.get(name)
    if row is None:
        raise ApiError(400, "INVALID_OPTION")
    value: Any = getattr(options, row.attribute)
    if name == "base_path":
        value = "/" + value.strip("/")
    if isinstance(value, str):
        return v1_text(value)
    return v1_json(value if isinstance(value, (bool, list)) else int(value))


def _check_network(request: web.Request, options: NsqadminOptions) -> None:
    if not options.allow_config_from_cidr:
        return
    try:
        remote = ipaddress.ip_address(request.remote or "")
    except ValueError:
        raise ApiError(400, "INVALID_REMOTE_ADDR") from None
    if isinstance(remote, ipaddress.IPv6Address) and remote.ipv4_mapped is not None:
        remote = remote.ipv4_mapped
    network = ipaddress.ip_network(options.allow_config_from_cidr, strict=False)
    if remote.version != network.version or remote not in network:
        raise ApiError(403, "FORBIDDEN")


async def _body(request: web.Request) -> bytes:
    body = bytearray()
    async for piece in request.content.iter_any():
        body += piece
        if len(body) > VALUE_BYTES_MAX:
            raise ApiError(413, "INVALID_VALUE")
    return bytes(body)


routes: list[web.RouteDef] = [web.get("/config/{option}", read), web.put("/config/{option}", write)]
