"""Runs a user's code: in threads if it blocks, and in tasks that a consumer ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

from nsquark.client.logs import Log

CANCEL_TIMEOUT_S: Final = 5.0
"""Whatever was cancelled may take so long to end."""

T = TypeVar("T")


def is_cancelled() -> bool:
    """Tells whether this task was asked to end, also by one who was not listened to."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def in_thread(executor: Executor | None, function: Callable[[T], Any], argument: T) -> Any:
    """Returns what the function does. StopIteration, which no future can carry, becomes a RuntimeError."""

    def call() -> Any:
        try:
            return function(argument)
        except StopIteration as error:
            raise RuntimeError(f"{function!r} raised StopIteration") from error

    return await asyncio.get_running_loop().run_in_executor(executor, call)


def cancel_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels these tasks, except for the one that calls this."""
    current = asyncio.current_task()
    for task in list(tasks):
        if task is not current:
            task.cancel()


async def end_tasks(tasks: Iterable[asyncio.Task[None]], timeout_s: float, name: str, log: Log) -> None:
    """Waits for these tasks, except for the one that calls this; cancels those that are late."""
    current = asyncio.current_task()
    others = [task for task in tasks if task is not current]
    if not others:
        return
    try:
        _, late = await asyncio.wait(others, timeout=timeout_s)
    except asyncio.CancelledError:
        cancel_tasks(others)
        raise
    cancel_tasks(late)
    if late:
        log.warning("%d %s still ran %g s after the stop; their messages were requeued", len(late), name, timeout_s)
        await asyncio.wait(late, timeout=CANCEL_TIMEOUT_S)
