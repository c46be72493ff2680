"""Runs a user's handler over messages, several at once, in the event loop or in threads."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from types import CoroutineType
from typing import Any, Final

from nsquark.client.checks import is_async
from nsquark.client.errors import ConfigError, NsqError, WrongHandler
from nsquark.client.logs import Log
from nsquark.client.message import Message
from nsquark.client.tasks import OwnThreads, cancel_tasks, check_ended, check_function, end_tasks

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

Handler = Callable[[Message], Any]


def check_handler(handler: Callable[[Any], Any], concurrency: int, threads: int) -> None:
    """Raises for what could only go wrong with the first message."""
    check_function(handler, "a handler")
    for name, value, least in (("concurrency", concurrency, 1), ("threads", threads, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"concurrency is 1 or more, threads 0 or more; {name} is {value!r}")
    if threads and is_async(handler):
        raise WrongHandler("threads are for plain functions: give an async handler `concurrency`")


class Handlers:
    """Runs the tasks of `Consumer.run`. `next_message` gives a message, and None when there are no more; it is told
    where handlers run, None for the event loop. `next_now` gives one that is here already, which saves a coroutine for
    each.
    """

    def __init__(
        self,
        next_message: Callable[[Executor | None], Awaitable[Message | None]],
        next_now: Callable[[], Message | None],
        threads: OwnThreads,
        name: str,
        log: Log,
    ) -> None:
        self._next_message = next_message
        self._next_now = next_now
        self._threads = threads
        self._name = name
        self._log = log
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: weakref.WeakSet[asyncio.Task[None]] = weakref.WeakSet()
        """Has the tasks that were told to end. Code inside a handler may cancel its task too, and not mean that."""
        self._in_threads: set[asyncio.Task[None]] = set()
        """Has the tasks whose handler is in a thread now, where nobody can end it."""
        self.use_threads = False
        """Handlers may block, and so may hooks."""

    @property
    def is_one_of_them(self) -> bool:
        """Tells whether this code is called from a handler."""
        return asyncio.current_task() in self._tasks

    async def run(self, handler: Handler, concurrency: int, threads: int) -> None:
        """Runs handlers until there are no more messages; raises what a handler may not raise. When it ends before
        that, handlers in threads go on and answer their messages, and `end` waits for them.
        """
        loop = asyncio.get_running_loop()
        pool = None
        if threads:
            pool = ThreadPoolExecutor(threads, f"nsquark {self._name}")
        self.use_threads = threads > 0
        runner = asyncio.current_task()
        assert runner is not None
        cancelled_before = runner.cancelling()

        def is_over() -> bool:
            return runner.cancelling() > cancelled_before

        tasks = [
            loop.create_task(self._work(handler, pool, is_over), name=f"nsquark handler {self._name}")
            for _ in range(threads or concurrency)
        ]
        self._tasks.update(tasks)
        for task in tasks:
            task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self._ended.update(tasks)
            for task in self._in_threads.intersection(tasks):
                task.add_done_callback(_pass_over_error)
            cancelled = [task for task in tasks if task not in self._in_threads]
            cancel_tasks(cancelled)
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
            if cancelled:
                await asyncio.wait(cancelled)
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _work(self, handler: Handler, pool: Executor | None, is_over: Callable[[], bool]) -> None:
        """Handles one message after another. `is_over` tells whether `run` itself was cancelled."""
        next_message, next_now = self._next_message, self._next_now
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)  # an eager one begins before whoever made it knows it
        is_ending = False
        while not is_ending:
            try:
                message = next_now() or await next_message(pool)
            except asyncio.CancelledError:
                if self._is_ended(task, is_over):
                    raise
                continue  # the last handler cancelled its task as it returned
            if message is None:
                return
            try:
                if pool is None:
                    outcome = handler(message)
                    if outcome is not None:
                        if type(outcome) is CoroutineType or inspect.isawaitable(outcome):  # mostly the first
                            outcome = await outcome
                        if outcome is not None:
                            check_ended(outcome, "the handler")
                        is_ending = task.cancelling() > 0 and self._is_ended(task, is_over)
                else:
                    self._in_threads.add(task)
                    try:
                        check_ended(await self._threads.call(pool, handler, message), "the handler")
                    finally:
                        self._in_threads.discard(task)
                        is_ending = task in self._ended
            except WrongHandler:
                message.give_back()
                raise
            except asyncio.CancelledError as error:
                if self._is_ended(task, is_over):
                    message.conclude(error)
                    raise
                message.fail(error)  # something inside the handler was cancelled, not the handler
            except BaseException as error:
                if not message.conclude(error):
                    raise
                is_ending = self._is_ended(task, is_over)
            else:
                if message.auto_response:
                    message.finish()

    def _is_ended(self, task: asyncio.Task[None], is_over: Callable[[], bool]) -> bool:
        """Tells whether a task was told to end, also by who ends the event loop: that cancels all tasks at once, and
        this one may hear of it before `run` does. Other cancellations are forgotten, since they are over with a
        message: a timeout that does not take its own back would end all that follows.
        """
        if task in self._ended or is_over():
            return True
        while task.cancelling():
            task.uncancel()
        return False

    def _cancel(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        self._ended.update(tasks)
        cancel_tasks(tasks)

    def cancel(self) -> None:
        """Cancels what they do, except for the one that calls this."""
        self._cancel(self._tasks)

    async def end(self, timeout_s: float) -> None:
        """Waits for what they do, except for the one that calls this; cancels those that are late."""
        await end_tasks(self._tasks, timeout_s, "handlers", self._log, self._cancel)


def _pass_over_error(task: asyncio.Task[None]) -> None:
    """Takes what a handler in a thread raised after `run` had ended: its message went back, and nobody waits for it."""
    if not task.cancelled():
        task.exception()


_stops: Final[list[Callable[[], None]]] = []
"""Has what the next signal calls: a program may run several consumers, and one signal stops them all."""
_before: Final[dict[signal.Signals, Any]] = {}
"""Has what handled the signals before that."""


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], None], numbers: Sequence[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
    """Lets the first of these signals call `stop`, while it lasts; the next has the effect that it had before."""
    if not numbers:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise NsqError("stop_on_signals works in the main thread only: call `stop` from your own signal handler")
    _stops.append(stop)
    try:
        for number in numbers:
            if (handler := signal.getsignal(number)) is not _received:
                _before[number] = handler  # first, since the signal may come as soon as it has an effect
                signal.signal(number, _received)
        yield
    finally:
        _stops.remove(stop)
        if not _stops:
            _handle_as_before()


def _received(_: int, __: object) -> None:
    _handle_as_before()
    for stop in list(_stops):
        stop()


def _handle_as_before() -> None:
    while _before:
        number, handler = _before.popitem()
        # None was set by C code, and cannot be set again; and another may have been set since.
        if handler is not None and signal.getsignal(number) is _received:
            signal.signal(number, handler)
