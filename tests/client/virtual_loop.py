"""Has an event loop whose clock stands still until a test moves it."""

import asyncio
import contextvars
import heapq
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now_s = 1000.0
        self._due: list[float] = []
        self.timers: list[asyncio.TimerHandle] = []
        """Has all timers that were ever set and are not yet over."""

    def time(self) -> float:
        # Before the constructor of the base class is done, too.
        return getattr(self, "_now_s", 0.0)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        heapq.heappush(self._due, when)
        timer = super().call_at(when, callback, *args, context=context)
        self.timers.append(timer)
        return timer

    def inside(self, call: Callable[[], T]) -> T:
        """Calls a function in the running loop."""

        async def do() -> T:
            return call()

        return self.run_until_complete(do())

    def advance(self, seconds: float) -> None:
        """Moves the clock: every timer goes off at its time and in its order, without waiting for it."""
        until_s = self._now_s + seconds
        while self._due and self._due[0] <= until_s:
            self._now_s = max(self._now_s, heapq.heappop(self._due))
            self.run_until_complete(asyncio.sleep(0))
        self._now_s = until_s
        self.run_until_complete(asyncio.sleep(0))
        self.timers = [timer for timer in self.timers if timer.when() > until_s]

    def hold_up(self, seconds: float) -> None:
        """Moves the clock as a program does that computes for so long: timers go off late, with the next turn."""
        self._now_s += seconds
