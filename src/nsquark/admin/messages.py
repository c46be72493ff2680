"""The message browser."""

from aiohttp import web

routes: list[web.RouteDef] = []
