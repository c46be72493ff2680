"""Gives places to what takes memory and time: so many in this process, however many ask."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Final

from aiohttp import web

from nsquark.admin.access import refusal

SEARCHES_AT_ONCE_MAX: Final = 3
SEARCHES_WAITING_MAX: Final = 24
TAILS_MAX: Final = 32
DOWNLOADS_MAX: Final = 4


class _Places:
    def __init__(self) -> None:
        self.free = asyncio.Semaphore(SEARCHES_AT_ONCE_MAX)
        self.waiting = 0
        self.tails = 0
        self.downloads = 0


_places: Final = _Places()


@contextlib.asynccontextmanager
async def searching() -> AsyncIterator[None]:
    """Takes a place; who finds none free waits, as long as few do."""
    if _places.waiting >= SEARCHES_WAITING_MAX:
        raise refusal(web.HTTPServiceUnavailable, "TOO_MANY_SEARCHES", reason="try again in a moment")
    _places.waiting += 1
    try:
        await _places.free.acquire()
    finally:
        _places.waiting -= 1
    try:
        yield
    finally:
        _places.free.release()


@contextlib.contextmanager
def tailing() -> Iterator[None]:
    if _places.tails >= TAILS_MAX:
        reason = f"{TAILS_MAX} live tails are open: close one"
        raise refusal(web.HTTPServiceUnavailable, "TOO_MANY_TAILS", reason=reason)
    _places.tails += 1
    try:
        yield
    finally:
        _places.tails -= 1


@contextlib.contextmanager
def downloading() -> Iterator[None]:
    if _places.downloads >= DOWNLOADS_MAX:
        reason = f"{DOWNLOADS_MAX} downloads are under way: try again later"
        raise refusal(web.HTTPServiceUnavailable, "TOO_MANY_DOWNLOADS", reason=reason)
    _places.downloads += 1
    try:
        yield
    finally:
        _places.downloads -= 1
