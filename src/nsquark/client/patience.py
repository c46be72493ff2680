"""Limits how long something may take that others have to do, by a clock that runs only while the event loop turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

LATE_S_MAX: Final = 0.05
"""A timer that is later than this was held up, and with it all that came meanwhile."""
HELD_UP_MAX: Final = 10
"""Time is added so often at the most: a loop that is always held up would never come to an end."""


@contextlib.asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Ends its block with a TimeoutError after so many seconds. If the program held up its loop meanwhile, as much time
    is added: an answer may have come that nobody could look at.
    """
    loop = asyncio.get_running_loop()
    held_up = 0
    timer: asyncio.TimerHandle

    def end(due_s: float) -> None:
        nonlocal timer, held_up
        late_s = loop.time() - due_s
        if late_s > LATE_S_MAX and held_up < HELD_UP_MAX:
            held_up += 1
            timer = loop.call_later(late_s, end, loop.time() + late_s)
        else:
            limit.reschedule(loop.time())

    timer = loop.call_later(seconds, end, loop.time() + seconds)
    try:
        async with asyncio.timeout(None) as limit:
            yield
    finally:
        timer.cancel()
