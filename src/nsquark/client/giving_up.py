"""Gives up messages that failed too often: they are handed to the user's hook, then finished. None goes that was not
handled here.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final

from nsquark.client.checks import is_async
from nsquark.client.logs import Log, shown_id
from nsquark.client.message import Message
from nsquark.client.tasks import OwnThreads, cancel_tasks, check_ended, end_tasks, is_cancelled

PASTS_MAX: Final = 100_000
"""The pasts of so many messages are remembered; one that is forgotten costs another attempt, never a message."""
ATTEMPTS_END: Final = 65_536
HOOKS_MAX: Final = 1000
"""So many hooks run at once for messages that cannot be decoded: nsqd delivers these again after each timeout, and
hooks that hang would gather for ever.
"""

Hook = Callable[[Message], Any]


@dataclass(slots=True)
class Past:
    """Holds what a consumer knows of a message's earlier deliveries."""

    unfailed_count: int = 0
    """Is the number of deliveries that count as attempts and did not fail: no handler here had the message, or not to
    the end, or it could not be finished any more: the connection was lost, or its time was over.
    """
    last_attempt: int | None = None
    """Is the attempt that failed here when the message had no more left."""
    reason: str = ""
    """Says why it was given up, if the hook failed then: deliveries for the hook alone are no reason."""


class GivingUp:
    """Decides which messages are given up: those that failed max_attempts times as far as this consumer can know, the
    last time here.

    Attempts alone prove nothing: they count deliveries that were lost, timed out or went back before any handler saw
    the message. Those that happened here are known and do not count; of those in other processes only the number is
    known, and they count as failures, or a message that fails on many machines would never be given up.
    """

    def __init__(
        self,
        max_attempts: int,
        hook: Hook | None,
        is_off_loop: Callable[[], bool],
        wake_takers: Callable[[], None],
        threads: OwnThreads,
        log: Log,
    ) -> None:
        self._wake_takers = wake_takers
        self._exit: BaseException | None = None
        """Is what a hook that ran in a task of its own ended with, such as `sys.exit` in a thread."""
        self._hook = hook
        self._is_off_loop = is_off_loop
        """Tells whether the hook may block, and is called in a thread."""
        self._threads = threads
        self._log = log
        self._pasts: OrderedDict[tuple[str, bytes], Past] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self.attempts_max = max_attempts or ATTEMPTS_END
        self.count = 0

    @property
    def is_one_of_them(self) -> bool:
        """Tells whether this code is called from a hook that runs in a task of its own."""
        return asyncio.current_task() in self._tasks

    def is_due(self, message: Message) -> bool:
        """Tells whether a message is given up; to be asked of each with `attempts_max` or more attempts before it is
        handed to a handler.
        """
        past = self._pasts.get(_key(message))
        return past is not None and past.last_attempt is not None and self._failures(message) >= self.attempts_max

    def failed(self, message: Message) -> None:
        """Is told that a message comes again which was handled in vain, or not answered in time. Only then it may be
        given up: of one that was lost with its connection nobody knows how it ended, and its handler may still run.
        """
        if message.attempts >= self.attempts_max and self._failures(message) >= self.attempts_max - 1:
            self._past(_key(message)).last_attempt = message.attempts

    def did_not_fail(self, message: Message, is_counted: bool) -> None:
        """Is told that a message comes again without having failed; nsqd counts this delivery all the same, or not."""
        message.give_up_reason = ""
        if is_counted:
            self._past(_key(message)).unfailed_count += 1
        past = self._pasts.get(_key(message))
        if past is not None and past.last_attempt == message.attempts:
            past.last_attempt = None

    def ended_well(self, nsqd_address: str, message_id: bytes) -> None:
        """Is told that a message comes again which was handled well, but later than nsqd waited."""
        past = self._past((nsqd_address, message_id))
        past.unfailed_count += 1
        past.last_attempt = None

    def _failures(self, message: Message) -> int:
        """Returns how often a message failed before this delivery: at most so often, as far as is known here."""
        past = self._pasts.get(_key(message))
        return message.attempts - 1 - (0 if past is None else past.unfailed_count)

    def _past(self, key: tuple[str, bytes]) -> Past:
        past = self._pasts.setdefault(key, Past())
        self._pasts.move_to_end(key)
        if len(self._pasts) > PASTS_MAX:
            self._pasts.popitem(last=False)
        return past

    async def conclude(self, message: Message, executor: Executor | None) -> None:
        """Finishes the message if the hook succeeds, else requeues it, to be given up again later. Nobody can end a
        hook in a thread: it goes on if who waits here is cancelled, and its message is answered all the same.
        """
        if self._is_for_threads(executor):
            await asyncio.wait([self._begin(message, executor)])
        else:
            await self._conclude(message, executor)

    async def _conclude(self, message: Message, executor: Executor | None) -> None:
        past = self._pasts.get(_key(message))
        message.give_up_reason = (
            message.give_up_reason
            or (past.reason if past is not None else "")
            or f"attempted {self._failures(message)} times"
        )
        try:
            if self._hook is not None:
                await self._call(self._hook, message, executor)
        except BaseException as error:
            if not isinstance(error, Exception | asyncio.CancelledError) or is_cancelled():
                message.give_back()
                raise
            self._log.error(  # also when something inside the hook was cancelled, not the hook
                "on_give_up failed for message %s of %s: it comes again",
                shown_id(message.id),
                message.nsqd_address,
                exc_info=error,
            )
            self._past(_key(message)).reason = message.give_up_reason
            message.requeue()
            return
        if not message.give_up_reason:  # the hook requeued it, or someone closed the consumer meanwhile
            self._log.warning(
                "message %s of %s went back before on_give_up ended: it comes again",
                shown_id(message.id),
                message.nsqd_address,
            )
            return
        self._log.warning(
            "message %s of %s %s, giving up", shown_id(message.id), message.nsqd_address, message.give_up_reason
        )
        self.count += 1
        message.finish()

    def begin(self, message: Message, reason: str) -> None:
        """Gives up a message that another attempt would not help, whatever its attempts. It comes again, to be given up
        later, while too many are.
        """
        if len(self._tasks) >= HOOKS_MAX:
            self._log.warning("%d on_give_up run: message %s comes again", len(self._tasks), shown_id(message.id))
            message.requeue()
            return
        message.give_up_reason = reason
        self._begin(message, None)

    def _begin(self, message: Message, executor: Executor | None) -> asyncio.Task[None]:
        work = self._conclude_alone(message, executor)
        task = asyncio.get_running_loop().create_task(work, name="nsquark give up")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def _conclude_alone(self, message: Message, executor: Executor | None) -> None:
        """Concludes in a task of its own, which is one of `_tasks` from its first step on: an eager task begins before
        whoever made it knows it.
        """
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        await self._conclude(message, executor)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, SystemExit | KeyboardInterrupt):  # these end the loop
            self._exit = error
            self._wake_takers()

    def check_exit(self) -> None:
        """Raises, for who takes messages, what a hook may not raise."""
        error, self._exit = self._exit, None
        if error is not None:
            raise error

    async def end(self, timeout_s: float) -> None:
        """Waits for hooks that run, except for the one that calls this; cancels those that are late."""
        await end_tasks(self._tasks, timeout_s, "on_give_up", self._log)

    def cancel(self) -> None:
        """Cancels hooks that still run, except for the one that calls this."""
        cancel_tasks(self._tasks)

    def _is_for_threads(self, executor: Executor | None) -> bool:
        """Tells whether the hook is called in a thread."""
        return self._hook is not None and (executor is not None or self._is_off_loop()) and not is_async(self._hook)

    async def _call(self, hook: Hook, message: Message, executor: Executor | None) -> None:
        """Calls the hook where handlers run, so that it may do what they do. What it returns to be awaited is awaited
        here, in the event loop.
        """
        if self._is_for_threads(executor):
            outcome = await self._threads.call(executor, hook, message)
        else:
            outcome = hook(message)
        if inspect.isawaitable(outcome):
            outcome = await outcome
        check_ended(outcome, "on_give_up")


def _key(message: Message) -> tuple[str, bytes]:
    return message.nsqd_address, message.id
