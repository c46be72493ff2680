"""Waits for conditions, where a test would otherwise sleep and hope."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

EVENTUALLY_TIMEOUT_S = 20.0
"""This is much more than the five seconds in which NSQ's queue scan may not yet know a new channel: machines are
busy.
"""

POLL_INTERVAL_S = 0.01


def eventually(
    condition: Callable[[], T | None], timeout_s: float = EVENTUALLY_TIMEOUT_S, interval_s: float = POLL_INTERVAL_S
) -> T:
    """Returns the first true value of the condition; an assertion failing inside it counts as not yet true."""
    deadline = time.monotonic() + timeout_s
    while True:
        failure: AssertionError | None = None
        try:
            value = condition()
            if value:
                return value
        except AssertionError as error:
            failure = error
        if time.monotonic() > deadline:
            raise AssertionError(f"not so after {timeout_s} s: {failure or condition}") from failure
        time.sleep(interval_s)


async def until(condition: Callable[[], object], timeout_s: float = EVENTUALLY_TIMEOUT_S) -> None:
    """Waits as `eventually` does, while the event loop works on."""
    async with asyncio.timeout(timeout_s):
        while True:
            with contextlib.suppress(AssertionError):
                if condition():
                    return
            await asyncio.sleep(POLL_INTERVAL_S)
