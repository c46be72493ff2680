"""Limits how many searches, live tails and downloads there are in this process at once."""

import asyncio
import contextlib
from collections import Counter
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
        self.in_use: Counter[str] = Counter()
        """Counts the live tails and downloads that are open."""


_places: Final = _Places()


@contextlib.asynccontextmanager
async def searching() -> AsyncIterator[None]:
    """Takes a place for a search. It waits for a free one, or refuses the request if too many wait already."""
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


def tailing() -> contextlib.AbstractContextManager[None]:
    return _place("tail", TAILS_MAX, "TOO_MANY_TAILS", f"{TAILS_MAX} live tails are open: close one")


def downloading() -> contextlib.AbstractContextManager[None]:
    reason = f"{DOWNLOADS_MAX} downloads are under way: try again later"
    return _place("download", DOWNLOADS_MAX, "TOO_MANY_DOWNLOADS", reason)


@contextlib.contextmanager
def _place(kind: str, places_max: int, code: str, reason: str) -> Iterator[None]:
    """Takes a place of this kind, or refuses the request if none is free."""
    if _places.in_use[kind] >= places_max:
        raise refusal(web.HTTPServiceUnavailable, code, reason=reason)
    _places.in_use[kind] += 1
    try:
        yield
    finally:
        _places.in_use[kind] -= 1
