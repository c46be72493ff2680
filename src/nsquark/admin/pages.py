"""The pages."""

from aiohttp import web

from nsquark.admin.state import Live, State

routes: list[web.RouteDef] = []


def live(state: State, page: str) -> Live:
    return Live()
