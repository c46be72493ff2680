"""This is the HTTP/1.1 server of the daemons: it listens, admits connections, watches their time, and closes.

`Router` says which handler answers, `HttpConnection` reads and writes; a handler can import all names it needs from
here.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Final

from nsquark.base.addresses import Listener
from nsquark.base.logs import Logger
from nsquark.web.browsers import BrowserGuard
from nsquark.web.connection import HttpConnection
from nsquark.web.descriptors import Descriptors
from nsquark.web.limits import HttpLimits
from nsquark.web.messages import (
    Answer,
    Handler,
    Pending,
    Request,
    Response,
    StreamResponse,
    empty,
    error,
    json,
    plain,
    text,
)
from nsquark.web.reader import INTERNAL_ERROR
from nsquark.web.router import Router

__all__ = [
    "Answer",
    "Handler",
    "HttpLimits",
    "HttpServer",
    "Pending",
    "Request",
    "Response",
    "Router",
    "StreamResponse",
    "empty",
    "error",
    "json",
    "plain",
    "text",
]

TICK_SECONDS: Final = 1.0
"""The time limits of connections are looked at this often; one pass for all costs requests nothing."""


class HttpServer:
    """Serves any number of listening sockets with one set of routes."""

    def __init__(self, router: Router, browsers: BrowserGuard, limits: HttpLimits, logger: Logger) -> None:
        self.router = router
        self.browsers = browsers
        self.descriptors = Descriptors()
        self.limits = limits
        self.logger = logger
        self.tick = 1
        """Counts seconds, for the time limits of connections."""
        self._connections: set[HttpConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[Listener] = []
        self._servers: list[asyncio.AbstractServer] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    async def serve(self, listener: Listener, tls: ssl.SSLContext | None = None) -> None:
        """Answers on one more listening socket, which is closed with the server."""
        self._servers.append(await listener.serve(lambda: HttpConnection(self), tls))
        self._listeners.append(listener)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._on_tick)

    async def close(self) -> None:
        """Stops listening, closes idle connections, and gives those being answered a bounded time."""
        self._closing = True
        for server in self._servers:
            server.close()
        for listener in self._listeners:
            listener.remove_file()
        for connection in list(self._connections):
            connection.shut_down()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.limits.close_seconds):
                await self._empty.wait()
        for connection in list(self._connections):
            connection.abort()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.limits.close_seconds)
        await self._empty.wait()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- for connections ---------------------------------------------------------------------------------

    def admit(self, connection: HttpConnection) -> bool:
        """Counts a new connection in; returns False if it is one too many."""
        self._connections.add(connection)
        self._empty.clear()
        return not self._closing and not 0 < self.limits.connections < len(self._connections)

    def forget(self, connection: HttpConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine to its end even if nobody else refers to its task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def run(
        self, handler: Coroutine[Any, Any, Answer], on_answer: Callable[[Answer], None], request: Request
    ) -> asyncio.Task[None]:
        """Runs a handler that waits, and passes its answer on; a fault in it becomes an internal error."""
        return self.spawn(self._run(handler, on_answer, request))

    async def _run(
        self, handler: Coroutine[Any, Any, Answer], on_answer: Callable[[Answer], None], request: Request
    ) -> None:
        try:
            answer = await handler
        except Exception as failure:
            self.logger.failure(f"HTTP: {request.method} {request.uri} failed", failure)
            answer = INTERNAL_ERROR
        on_answer(answer)

    def _on_tick(self) -> None:
        self.tick += 1
        for connection in list(self._connections):
            connection.check_time(self.tick)
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._on_tick)
