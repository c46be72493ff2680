"""Makes long answers that many ask for at once, once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Round(Generic[T]):
    task: asyncio.Task[T]
    askers: int = 0


class Together(Generic[T]):
    """Does the same work once for all who ask for it before it begins.

    Whoever asks while it is being done shares the next round, so that no answer is older than its question; of each key
    at most one round is under way and one waits for it. A round that nobody waits for any more is cancelled.
    """

    def __init__(self) -> None:
        self._under_way: dict[Hashable, _Round[T]] = {}
        self._next: dict[Hashable, _Round[T]] = {}

    async def get(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        coming = self._next.get(key)
        if coming is None:
            coming = self._next[key] = _Round(asyncio.ensure_future(self._do(key, work)))
        coming.askers += 1
        try:
            return await asyncio.shield(coming.task)
        finally:
            coming.askers -= 1
            if not coming.askers and not coming.task.done():
                coming.task.cancel()
                if self._next.get(key) is coming:
                    del self._next[key]

    async def _do(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        own = self._next[key]
        while (before := self._under_way.get(key)) is not None:
            await asyncio.wait([before.task])
        del self._next[key]
        self._under_way[key] = own
        try:
            return await work()
        finally:
            del self._under_way[key]
