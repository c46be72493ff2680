"""nsqd's HTTP API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsquark.web.messages import Request, Response, plain
from nsquark.web.router import Router

if TYPE_CHECKING:
    from nsquark.broker.daemon import Nsqd


class Api:
    def __init__(self, nsqd: Nsqd) -> None:
        self.nsqd = nsqd

    def router(self) -> Router:
        router = Router()
        router.add("GET", "/ping", self.ping)
        return router

    def ping(self, request: Request) -> Response:
        health = self.nsqd.health
        return plain(200 if health == "OK" else 500, health)
