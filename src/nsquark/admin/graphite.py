"""Reads rates from graphite, where statsd's figures may be, and passes requests for `/render` on to it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from aiohttp import web

from nsquark.admin.api import ApiError, v1
from nsquark.admin.cluster import decode
from nsquark.admin.errors import UpstreamError
from nsquark.admin.state import STATE, AdminState
from nsquark.web.query import parse_query

PIECE_BYTES: Final = 64 << 10
PASSED_ON: Final = ("Content-Type", "Cache-Control", "Expires", "Last-Modified")


class _Series(msgspec.Struct):
    datapoints: list[list[float | None]] = []


@v1
async def rate(request: web.Request, state: AdminState) -> dict[str, Any]:
    query, is_whole = parse_query(request.rel_url.raw_query_string.encode())
    if not is_whole:
        raise ApiError(400, "INVALID_REQUEST")
    if query.get("metric") != "rate":
        raise ApiError(400, "INVALID_ARG_METRIC")
    target = query.get("target")
    if target is None:
        raise ApiError(400, "INVALID_ARG_TARGET")
    seconds = int(state.options.statsd_interval.seconds)
    wanted = urlencode({"format": "json", "from": f"-{seconds * 2}sec", "target": target, "until": f"-{seconds}sec"})
    url = f"{state.options.graphite_url}/render?{wanted}"
    state.logger.info(f"GRAPHITE: {url}")
    try:
        found = decode(await state.cluster.ask("GET", url, shows_secret=False), list[_Series])
        value = found[0].datapoints[0][0]
    except (UpstreamError, IndexError) as error:
        state.logger.error(f"graphite request failed - {error}")
        raise ApiError(500, "INTERNAL_ERROR") from None
    if value is None or not seconds:
        raise ApiError(500, "INTERNAL_ERROR")
    return {"rate": "N/A" if value < 0 else f"{value / seconds:.2f}"}


async def render(request: web.Request) -> web.StreamResponse:
    """Passes a GET on to graphite, if --proxy-graphite is set."""
    state = request.app[STATE]
    if not state.options.proxy_graphite:
        raise web.HTTPNotFound
    url = f"{state.options.graphite_url.rstrip('/')}/render?{request.rel_url.raw_query_string}"
    async with AsyncExitStack() as stack:
        try:
            answer = await stack.enter_async_context(state.cluster.request("GET", url, shows_secret=False))
        except UpstreamError as error:
            state.logger.error(f"graphite request failed - {error}")
            return web.Response(status=502)
        headers = {name: answer.headers[name] for name in PASSED_ON if name in answer.headers}
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        async for piece in answer.content.iter_chunked(PIECE_BYTES):
            await response.write(piece)
        return response


routes: list[web.RouteDef] = [web.get("/api/graphite", rate), web.get("/render", render)]
