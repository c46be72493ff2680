"""Answers `GET /events?page=<path of the page>` with one stream of server-sent events for all that a tab shows.

    event: series    {"<key joined by commas>": {"t": [unix seconds, ...], "v": [number or null, ...]}}
    event: figures   {"<name of a place in the page>": "text", ...}

A stream begins with the past of each series and all figures; after each poll it sends what is new. Nothing is queued
for a tab: one that reads slowly gets fewer, larger steps, and one that does not read at all is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from aiohttp import web

from nsquark.admin.access import is_still_in
from nsquark.admin.history import Key
from nsquark.admin.state import STATE, AdminState, Live
from nsquark.web.messages import encode_json

STREAMS_MAX: Final = 256
STREAMS_PER_PEER_MAX: Final = 192
"""A peer may be a proxy, with the tabs of everybody; one that is not leaves some to the others."""
SERIES_PER_STREAM_MAX: Final = 2000
FIGURES_PER_STREAM_MAX: Final = 50_000
PAGE_CHARS_MAX: Final = 2048
HEARTBEAT_S: Final = 15.0
WRITE_S_MAX: Final = 20.0
"""A tab that reads nothing for this long is cut off."""
RETRY_MS: Final = 3000
"""A browser comes back after this time when its stream was cut."""

LiveOf = Callable[[AdminState, str], Live]


class Streams:
    """Keeps the open streams; `close` ends them, so that the server can stop."""

    def __init__(self, live: LiveOf, write_s_max: float = WRITE_S_MAX) -> None:
        self._live = live
        self.write_s_max = write_s_max
        self._peers: dict[str, int] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._cache_of: object = None
        self._cache: dict[str, Live] = {}

    @property
    def count(self) -> int:
        return len(self._tasks)

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    @contextlib.contextmanager
    def _place(self, peer: str) -> Iterator[None]:
        if len(self._tasks) >= STREAMS_MAX or self._peers.get(peer, 0) >= STREAMS_PER_PEER_MAX:
            raise web.HTTPServiceUnavailable(text="too many open pages", headers={"Retry-After": "10"})
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._peers[peer] = self._peers.get(peer, 0) + 1
        try:
            yield
        finally:
            self._tasks.discard(task)
            self._peers[peer] -= 1
            if not self._peers[peer]:
                del self._peers[peer]

    def live(self, state: AdminState, page: str) -> Live:
        """Returns what a page shows at the last poll, worked out once for all tabs that show it."""
        if self._cache_of is not state.snapshot:
            self._cache_of, self._cache = state.snapshot, {}
        if page not in self._cache:
            self._cache[page] = self._live(state, page)
        return self._cache[page]

    async def serve(self, request: web.Request) -> web.StreamResponse:
        state = request.app[STATE]
        page = request.query.get("page", "")
        if not page.startswith("/") or len(page) > PAGE_CHARS_MAX:
            raise web.HTTPBadRequest(text="page: give the path of the page that is shown")
        with self._place(request.remote or ""), state.poller.watching():
            response = web.StreamResponse(
                headers={
                    "Content-Type": "text/event-stream; charset=utf-8",
                    "Cache-Control": "no-store",
                    # A proxy that waits for the end of an answer before it passes it on would never do so.
                    "X-Accel-Buffering": "no",
                }
            )
            await response.prepare(request)
            await _Stream(self, state, page, request, response).run()
            return response


class _Stream:
    """Serves one tab, and remembers what the tab was sent last."""

    def __init__(
        self, streams: Streams, state: AdminState, page: str, request: web.Request, response: web.StreamResponse
    ) -> None:
        self._streams = streams
        self._state = state
        self._page = page
        self._request = request
        self._response = response
        self._figures: dict[str, str] = {}
        self._sent_to: dict[Key, float] = {}

    async def run(self) -> None:
        await self._write(f"retry: {RETRY_MS}\n\n".encode())
        await self._state.poller.next(0.0)
        while is_still_in(self._request):
            at = self._state.snapshot.at
            await self._write(self._step())
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._state.poller.next(at)
            except TimeoutError:
                await self._write(b": still here\n\n")

    async def _write(self, data: bytes) -> None:
        if data:
            async with asyncio.timeout(self._streams.write_s_max):
                await self._response.write(data)

    def _step(self) -> bytes:
        live = self._streams.live(self._state, self._page)
        series = live.series[:SERIES_PER_STREAM_MAX]
        self._state.history.watch(series)
        figures = {
            name: text
            for name, text in list(live.figures.items())[:FIGURES_PER_STREAM_MAX]
            if self._figures.get(name) != text
        }
        self._figures = live.figures
        return _event("series", self._new_points(series)) + _event("figures", figures)

    def _new_points(self, keys: Iterable[Key]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key in keys:
            times, values = self._state.history.points(key, self._sent_to.get(key, 0.0))
            if times:
                self._sent_to[key] = times[-1]
                found[",".join(key)] = {
                    "t": [round(at, 1) for at in times],
                    "v": [None if value is None else float(f"{value:.6g}") for value in values],
                }
        return found


def _event(name: str, data: dict[str, object] | dict[str, str]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode_json(data)) if data else b""


async def events(request: web.Request) -> web.StreamResponse:
    return await request.app[STATE].streams.serve(request)


routes: list[web.RouteDef] = [web.get("/events", events)]
