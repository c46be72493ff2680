"""Runs the event loop of a process that blocks: a thread of its own, one per process, to which others hand work."""

from __future__ import annotations

import _thread
import asyncio
import atexit
import concurrent.futures
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, TypeVar

from nsquark.client.errors import NsqError
from nsquark.client.logs import client_log
from nsquark.client.tasks import ThreadExit

BURST_MAX: Final = 1000
"""So much of what was handed over is done before the event loop has its turn."""
BURST_S: Final = 0.001
"""The loop waits so long for more: it and those who hand over keep each other from running."""

SIGNAL_WAIT_S: Final = 0.1
"""Signal handlers run late by so much at the most."""

EXIT_WAIT_S = 10.0
"""At exit, so long is waited for publishes that nobody waited for."""

THREAD_NAME: Final = "nsquark loop"

Result = TypeVar("Result")


class Call(Generic[Result]):
    """Is work that a loop does for a thread, which waits for its outcome and may be interrupted (Ctrl-C) meanwhile.

    They share a queue, and not a future of concurrent.futures: an interrupt there may leave the future's lock taken,
    and the loop's thread would wait for it for ever.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Result]) -> None:
        self._loop = loop
        self._work = work
        self._ended: queue.SimpleQueue[asyncio.Task[Result]] = queue.SimpleQueue()
        loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._ended.put)

    def result(self) -> Result:
        """Waits for the outcome, in slices: a signal that comes just before the thread falls asleep does not wake it,
        and its handler would have to wait for what may never come.
        """
        while True:
            try:
                task = self._ended.get(timeout=SIGNAL_WAIT_S)
            except queue.Empty:
                continue
            if task.cancelled():
                raise concurrent.futures.CancelledError
            return task.result()

    def end(self, undo: Callable[[Result], None] | None) -> None:
        """Cancels the work, since nobody waits for it any more; `undo` gets, on the loop, what it returns all the same,
        or has returned already.
        """

        def undo_result(task: asyncio.Task[Result]) -> None:
            if not task.cancelled() and task.exception() is None and undo is not None:
                undo(task.result())

        def cancel() -> None:
            self._loop.call_soon(self._task.cancel)  # when it has begun, or what it awaits would never be awaited
            self._task.add_done_callback(undo_result)

        self._loop.call_soon_threadsafe(cancel)


class LoopThread:
    """Runs an event loop which ends with its process."""

    def __init__(self) -> None:
        """Starts the thread without `threading.Thread`, whose start waits for the thread in Python: an interrupt
        (Ctrl-C) there may end in RuntimeError, or leave a lock taken.
        """
        self._handed: deque[Callable[[], None]] = deque()
        self._is_waking = False
        made: queue.SimpleQueue[asyncio.AbstractEventLoop | OSError] = queue.SimpleQueue()
        self._ident = _thread.start_new_thread(self._run, (made,))
        loop = made.get()
        if isinstance(loop, OSError):
            raise loop
        self._loop = loop

    def _run(self, made: queue.SimpleQueue[asyncio.AbstractEventLoop | OSError]) -> None:
        """Makes the loop, and not its caller does: asyncio logs when it makes one, and an interrupt (Ctrl-C), which
        only the main thread gets, could leave the lock of `logging` taken.
        """
        threading.current_thread().name = THREAD_NAME
        try:
            loop = asyncio.SelectorEventLoop()  # not the policy's: this one survives that its process is forked
        except OSError as error:
            made.put(error)
            return
        asyncio.set_event_loop(loop)
        made.put(loop)
        while not loop.is_closed():
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # of a callback: others need the loop
                _log_raised(error)

    def call(self, work: Coroutine[Any, Any, Result], undo: Callable[[Result], None] | None = None) -> Result:
        """Blocks until the work is done. An interrupt (Ctrl-C) ends the work too; if it was done already, `undo` gets
        the result that its caller does not get.
        """
        if threading.get_ident() == self._ident:
            work.close()
            raise NsqError("a blocking call on the event loop's own thread: use the asyncio client in callbacks")
        call = Call(self._loop, self._after_handed(work))
        try:
            return call.result()
        except ThreadExit as thread_exit:
            raise thread_exit.reason from None
        except BaseException:
            call.end(undo)
            raise

    async def _after_handed(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs the work after what was handed over before."""
        while self._handed:
            self._take_one()
        try:
            return await work
        except (SystemExit, KeyboardInterrupt) as error:
            raise ThreadExit(error) from None

    def hand_over(self, work: Callable[[], None]) -> None:
        """Has a function called on the loop, in order.

        To wake a thread costs far more than the rest, so what is handed over within a millisecond shares one wake-up.
        """
        self._handed.append(work)
        try:
            if not self._is_waking:
                self._is_waking = True
                self._loop.call_soon_threadsafe(self._loop.call_later, BURST_S, self._take_over)
        except BaseException:  # an interrupt (Ctrl-C), perhaps before the loop was woken
            self._is_waking = False
            self._loop.call_soon_threadsafe(self._take_over)
            raise

    def _take_over(self) -> None:
        self._is_waking = False  # before looking: what comes from now on wakes again
        for _ in range(min(len(self._handed), BURST_MAX)):
            self._take_one()
        if self._handed and not self._is_waking:
            self._is_waking = True
            self._loop.call_soon(self._take_over)

    def _take_one(self) -> None:
        try:
            self._handed.popleft()()
        except BaseException as error:  # of a callback of the outcome: others were handed over behind it
            _log_raised(error)


async def called(function: Callable[..., Result], *arguments: object) -> Result:
    """Calls a plain function in the loop's thread, to which the asyncio objects belong."""
    return function(*arguments)


def _log_raised(error: BaseException) -> None:
    client_log.error("a callback raised %r in the event loop's thread, where that ends nothing", error, exc_info=error)


class Process:
    """Holds what belongs to the current process: its loop thread, and what it inherited and must leave alone.

    An inherited loop shares its epoll with the parent's: to let it go would take the parent's sockets off it.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Is held by whoever makes what this process has once: its loop thread, a producer after a fork. A signal
        handler that publishes may interrupt one who holds it.
        """
        self.unanswered: set[concurrent.futures.Future[None]] = set()
        """Has the outcomes of publishes that the loop has taken over and nobody waits for."""
        self._thread: LoopThread | None = None
        self._inherited: list[object] = []

    def call(self, work: Coroutine[Any, Any, Result], undo: Callable[[Result], None] | None = None) -> Result:
        """Blocks until the loop thread has done the work; `undo` gets a result that came too late for an interrupt."""
        try:
            thread = self._loop_thread()
        except BaseException:
            work.close()
            raise
        return thread.call(work, undo)

    def hand_over(self, work: Callable[[], None]) -> None:
        """Has a function called on the loop thread, in order."""
        self._loop_thread().hand_over(work)

    def _loop_thread(self) -> LoopThread:
        if sys.is_finalizing():  # threads do not run any more: to wait for one would be for ever
            raise NsqError("the interpreter is ending, and its threads have ended: publish and close before that")
        with self.lock:
            if self._thread is None:
                thread = LoopThread()
                if self._thread is None:  # else a signal handler made one meanwhile, and this one has nothing to do
                    self._thread = thread
                    self._end_as_child()
            return self._thread

    def _end_as_child(self) -> None:
        """Has a child of multiprocessing wait for answers: one that was forked ends without `atexit`."""
        if (util := sys.modules.get("multiprocessing.util")) is not None:
            util.Finalize(None, self.wait_for_answers, exitpriority=0)

    def keep(self, inherited: object) -> None:
        self._inherited.append(inherited)

    def forked(self) -> None:
        """Begins anew in the child. Another thread may have held the lock at that moment, and never
        releases it here.
        """
        self.lock = threading.RLock()
        self.unanswered = set()
        if self._thread is not None:
            self.keep(self._thread)
            self._thread = None

    def wait_for_answers(self) -> None:
        """Waits, while the loop thread still runs, for publishes that a program left to themselves when it ended."""
        if self._thread is not None:
            has_all = threading.Event()
            self._thread.hand_over(has_all.set)
            has_all.wait(EXIT_WAIT_S)
        waiting = concurrent.futures.wait(list(self.unanswered), EXIT_WAIT_S).not_done
        if waiting:
            client_log.warning(
                "%d publishes had no answer %g s after the program's end, and may be lost: close the producer",
                len(waiting),
                EXIT_WAIT_S,
            )
            self.unanswered = set()  # this may be called twice


process: Final = Process()
atexit.register(process.wait_for_answers)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=process.forked)
