"""NSQ's /api."""

from __future__ import annotations

from aiohttp import web


async def ping(request: web.Request) -> web.Response:
    return web.Response(text="OK")


routes: list[web.RouteDef] = [web.get("/ping", ping)]
