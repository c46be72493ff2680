"""Who may do what."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from nsquark.admin.options import Options
from nsquark.base.logs import Logger

routes: list[web.RouteDef] = []


class Access:
    def __init__(self, options: Options, logger: Logger) -> None:
        self._options = options


def middlewares(access: Access) -> list[Any]:
    return []


def require(request: web.Request, action: str) -> None:
    """Raises 403 unless the request may do this."""
