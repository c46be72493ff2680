"""Gives every connection a budget for each turn of the event loop: one client must not use up the others' time.

A connection that has used it up stops reading and goes on in the next turn, after all others had theirs. What it has
received by then waits in its own memory, at most one read. A single step longer than the budget is cut into several.
"""

import asyncio
import time
from typing import Final

TURN_NS_MAX: Final = 2_000_000
"""A connection works this long in a turn before it gives way; the time is looked at after each command or request."""


class TurnPace:
    """Lets others run when a turn's time is used up; `step` is to be awaited after each row."""

    def __init__(self) -> None:
        self._until_ns = time.monotonic_ns() + TURN_NS_MAX

    async def step(self) -> None:
        if time.monotonic_ns() > self._until_ns:
            await asyncio.sleep(0)
            self._until_ns = time.monotonic_ns() + TURN_NS_MAX
