"""The tasks of `Consumer.run`, each with one message in its hands at a time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nsquark.cli.logs import library_log
from nsquark.client.message import Message

Handler = Callable[[Message], Any]

log = library_log("nsquark.client")


class Handlers:
    """`take` gives the next message, and None when there are no more."""

    def __init__(self, take: Callable[[], Awaitable[Message | None]], name: str) -> None:
        self._take = take
        self._name = name
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_one_of_them(self) -> bool:
        """Whether this code is called from a handler."""
        return asyncio.current_task() in self._tasks

    async def run(self, handler: Handler, concurrency: int, threads: int) -> None:
        if concurrency < 1 or threads < 0:
            raise ValueError("concurrency is 1 or more, threads 0 or more")
        if threads and is_async(handler):
            raise ValueError("threads are for plain functions: give an async handler `concurrency`")
        pool = ThreadPoolExecutor(threads, thread_name_prefix=f"nsquark {self._name}") if threads else None
        loop = asyncio.get_running_loop()
        if pool is not None:
            handle: Handler = lambda message: loop.run_in_executor(pool, handler, message)  # noqa: E731
        else:
            handle = handler
        tasks = [
            loop.create_task(self._work(handle), name=f"nsquark handler {self._name}")
            for _ in range(threads or concurrency)
        ]
        self._tasks.update(tasks)
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._tasks.difference_update(tasks)
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    async def _work(self, handler: Handler) -> None:
        while (message := await self._take()) is not None:
            try:
                outcome = handler(message)
                if outcome is not None and inspect.isawaitable(outcome):
                    await outcome
            except BaseException as error:
                if not message.settle(error):
                    raise
            else:
                if message.auto_response:
                    message.finish()

    async def end(self, timeout_s: float) -> None:
        """Waits for what they do, except for the one that calls this; cancels those that are late."""
        current = asyncio.current_task()
        handlers = [task for task in self._tasks if task is not current]
        if handlers:
            try:
                _, late = await asyncio.wait(handlers, timeout=timeout_s)
            except asyncio.CancelledError:
                for task in handlers:
                    task.cancel()
                raise
            for task in late:
                task.cancel()
            if late:
                log.warning(
                    "%d handlers still ran %g s after the stop; their messages were requeued", len(late), timeout_s
                )
                await asyncio.wait(late)


def is_async(handler: Handler) -> bool:
    """Also of an object with `async def __call__`."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004
