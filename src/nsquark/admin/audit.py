"""What is told about changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from nsquark.admin.options import Options
from nsquark.base.logs import Logger

if TYPE_CHECKING:
    from nsquark.admin.cluster import Cluster


class Audit:
    def __init__(self, options: Options, cluster: Cluster, logger: Logger) -> None:
        self._logger = logger

    def start(self) -> None: ...

    async def stop(self) -> None: ...


async def changed(
    request: web.Request, action: str, *, topic: str = "", channel: str = "", node: str = "", result: str = "ok"
) -> None:
    """Tells the log and the notification endpoint of a change."""
