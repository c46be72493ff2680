"""Runs a user's code: in threads if it blocks, and in tasks that a consumer ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

from nsquark.client.errors import WrongHandler
from nsquark.client.logs import Log

CANCEL_TIMEOUT_S: Final = 5.0
"""Whatever was cancelled may take so long to end."""

T = TypeVar("T")


def is_cancelled() -> bool:
    """Tells whether this task was asked to end, also by one who was not listened to."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class ThreadExit(BaseException):
    """Carries a SystemExit or KeyboardInterrupt (`reason`) out of a thread: an event loop through which one of these
    passed by itself would end, and with it all others that it serves.
    """

    def __init__(self, reason: BaseException) -> None:
        self.reason = reason


class OwnThreads:
    """Calls a consumer's handlers and hooks in threads, and tells these threads from others: who closes the consumer in
    one of them must not wait for itself. They have a mark and not their identifiers, which later threads get again.
    """

    def __init__(self) -> None:
        self._here = threading.local()

    @property
    def is_one_of_them(self) -> bool:
        """Tells whether this code is called from a handler or hook that runs in a thread."""
        return getattr(self._here, "is_calling", False)

    async def call(self, executor: Executor | None, function: Callable[[T], Any], argument: T) -> Any:
        """Returns what the function does. StopIteration, which no future can carry, becomes a RuntimeError."""

        def call() -> Any:
            self._here.is_calling = True
            try:
                return function(argument)
            except StopIteration as error:
                raise RuntimeError(f"{function!r} raised StopIteration") from error
            except (SystemExit, KeyboardInterrupt) as error:
                raise ThreadExit(error) from None
            finally:
                self._here.is_calling = False  # others use the event loop's own threads too

        return await asyncio.get_running_loop().run_in_executor(executor, call)


def check_ended(outcome: object, of: str) -> None:
    """Raises WrongHandler if something of what a user's function returned is still to be run or awaited: then nothing
    was done yet, and its message must not be finished.
    """
    parts: Iterable[Any] = ()
    if isinstance(outcome, list | tuple | set | frozenset):
        parts = outcome
    elif isinstance(outcome, dict):
        parts = outcome.values()
    if (
        inspect.isawaitable(outcome)
        or inspect.isgenerator(outcome)
        or inspect.isasyncgen(outcome)
        or isinstance(outcome, concurrent.futures.Future | map | filter)
        or any(map(_is_to_come, parts))
    ):
        for part in (outcome, *parts):
            if inspect.iscoroutine(part):
                part.close()
        raise WrongHandler(
            f"{of} returned {outcome!r}, which nobody waits for here: await it, give a plain "
            "function, or an async one with `concurrency` and without `threads`"
        )


def _is_to_come(part: object) -> bool:
    """Tells whether this is still to be run, or runs now: tasks that were awaited before they were returned do not."""
    if isinstance(part, asyncio.Future | concurrent.futures.Future):
        return not part.done()
    return inspect.iscoroutine(part)


def check_function(
    function: object, name: str, wrong: type[Exception] = WrongHandler, argument: str = "a message"
) -> None:
    """Raises `wrong` for what cannot be called with one argument, or would do nothing if it were. Each message would
    fail before the function has seen it, and be given up in the end.
    """
    if not callable(function):
        raise wrong(f"{name} is a function that takes {argument}, not {function!r}")
    if (problem := _call_problem(function)) is not None:
        raise wrong(f"{name} is a function that takes {argument} and needs nothing else; {function!r}: {problem}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise wrong(f"{name} with `yield` would never run: call what it yields to, and return")


def _call_problem(function: Callable[..., Any]) -> TypeError | None:
    """Returns why a function cannot be called with one argument. None also where nobody knows: functions that are
    written in C need not tell what they take, and `__signature__` may be that of another function.
    """
    if getattr(function, "__signature__", None) is not None:
        return None
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(None)
    except TypeError as error:
        return error
    return None


def cancel_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels these tasks, except for the one that calls this."""
    current = asyncio.current_task()
    for task in list(tasks):
        if task is not current:
            task.cancel()


async def end_tasks(
    tasks: Iterable[asyncio.Task[None]],
    timeout_s: float,
    name: str,
    log: Log,
    cancel: Callable[[Iterable[asyncio.Task[None]]], None] = cancel_tasks,
) -> None:
    """Waits for these tasks, except for the one that calls this; cancels those that are late. Who is cancelled here
    cancels them.
    """
    current = asyncio.current_task()
    others = [task for task in tasks if task is not current]
    if not others:
        return
    _, late = await asyncio.wait(others, timeout=timeout_s)
    cancel(late)
    if late:
        log.warning("%d %s still ran when their time was over; their messages were requeued", len(late), name)
        await asyncio.wait(late, timeout=CANCEL_TIMEOUT_S)
