"""Gives places to what takes memory and time: so many in this process, however many ask."""

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
        """How many tails and downloads there are."""


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


def tailing() -> contextlib.AbstractContextManager[None]:
    return _place("tail", TAILS_MAX, "TOO_MANY_TAILS", f"{TAILS_MAX} live tails are open: close one")


def downloading() -> contextlib.AbstractContextManager[None]:
    reason = f"{DOWNLOADS_MAX} downloads are under way: try again later"
    return _place("download", DOWNLOADS_MAX, "TOO_MANY_DOWNLOADS", reason)


@contextlib.contextmanager
def _place(kind: str, places_max: int, code: str, reason: str) -> Iterator[None]:
    """Takes a place of this kind; who finds none free is refused."""
    if _places.in_use[kind] >= places_max:
        raise refusal(web.HTTPServiceUnavailable, code, reason=reason)
    _places.in_use[kind] += 1
    try:
        yield
    finally:
        _places.in_use[kind] -= 1
