"""Measures how late the event loop is: every client waits for that besides its own work."""

import asyncio
import time
from typing import Final

from nsquark.base.histogram import Histogram

INTERVAL_S: Final = 0.1
BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class LoopDelay:
    """Has a timer that measures by how much it was called too late."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.seconds = Histogram(BOUNDS_S)
        self._loop = loop
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        # Not the loop's own clock, which stands still while the loop is busy.
        self._due_s = time.monotonic() + INTERVAL_S
        self._timer = self._loop.call_later(INTERVAL_S, self._measure)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _measure(self) -> None:
        self.seconds.observe(max(0.0, time.monotonic() - self._due_s))
        self.start()
