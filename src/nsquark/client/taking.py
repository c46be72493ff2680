"""Takes the next message for those who ask: handlers of `run`, iterations, `get` and batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor

from nsquark.client.copies import Copies
from nsquark.client.errors import ANOTHER_LOOP, NOT_STARTED, NsqError
from nsquark.client.giving_up import GivingUp
from nsquark.client.inbox import LOOP_TURN_S, Inbox
from nsquark.client.message import Message
from nsquark.client.subscription import Subscription


class Taking:
    """Takes messages out of the inbox. Invariants:

    * A message that is returned is in flight, not answered, and has most of its timeout before it. If there is a store
      of keys, the message is the first of its copies, and has its claim.
    * One that is not returned after it left the inbox is answered: given up, finished as a copy, or on its way back.
    * Nothing is returned once `is_stopped`: what waits goes back.
    * The event loop has its turn every LOOP_TURN_S, however many messages are here.
    """

    def __init__(
        self,
        inbox: Inbox,
        copies: Copies | None,
        giving_up: GivingUp,
        subscriptions: Callable[[], list[Subscription]],
        name: str,
    ) -> None:
        self._inbox = inbox
        self._copies = copies
        self._giving_up = giving_up
        self._subscriptions = subscriptions
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self.gathered = inbox.gathered
        """Has the messages of batches that are still being gathered."""
        self.is_stopped = False
        """No more messages are taken. Any thread may set it."""

    def begin(self) -> None:
        """Is called before the first message can come, in the event loop that messages are handled in."""
        self._loop = asyncio.get_running_loop()

    def next_now(self) -> Message | None:
        """Returns the next message if it is here and nothing has to be awaited before it is
        handled, as is mostly so.
        """
        inbox = self._inbox
        if self.is_stopped or self._copies is not None or not inbox.ready:
            return None
        now_s = time.monotonic()  # event loops count from the same moment, and asking them too would be slower
        if now_s - inbox.loop_turn_at_s > LOOP_TURN_S:
            return None
        message = inbox.hand_out(now_s)
        if message is not None and message.attempts >= self._giving_up.attempts_max:
            inbox.put_back(message)
            return None
        return message

    async def next(self, executor: Executor | None = None, deadline_s: float | None = None) -> Message | None:
        """Returns the next message; None if the loop's clock reached the deadline before there was one, and at the end.

        Those that failed too often are given up on the way; with `executor`, that is where the hook is called.
        """
        loop = self._loop
        if loop is None:
            raise NsqError(NOT_STARTED)
        while True:
            if time.monotonic() - self._inbox.loop_turn_at_s > LOOP_TURN_S:
                await self._inbox.let_loop_turn()
            self._giving_up.check_exit()
            if self.is_stopped:
                return None  # what waits goes back
            message = self._inbox.hand_out(loop.time())
            if message is None:
                if deadline_s is not None and loop.time() >= deadline_s:
                    return None
                if asyncio.get_running_loop() is not loop:
                    raise NsqError(f"{self._name}: {ANOTHER_LOOP}")
                await self._inbox.wait(deadline_s)
            elif self._copies is not None and not await self._is_first(message, self._copies):
                pass  # it is answered
            elif message.attempts < self._giving_up.attempts_max or not self._giving_up.is_due(message):
                return message
            else:
                await self._giving_up.conclude(message, executor)

    async def next_by(self, deadline_s: float | None) -> Message | None:
        """Returns the next message for someone who may never answer it."""
        message = await self.next(None, deadline_s)
        if message is not None and self._copies is not None:
            self._copies.taken(message)
        return message

    def refresh(self, message: Message) -> bool:
        """Lets who gets a message that was taken earlier have time for it; False if it is answered instead."""
        assert self._loop is not None
        return self._inbox.refresh(message, self._loop.time())

    def has_all(self) -> bool:
        """Tells whether no more can come before something is answered."""
        return not self._inbox.ready and all(len(nsqd.in_flight) >= nsqd.rdy for nsqd in self._subscriptions())

    async def _is_first(self, message: Message, copies: Copies) -> bool:
        """Tells whether a message is to be handled, and keeps it alive while the store is asked; if not, it is
        answered.
        """
        self._inbox.gathered.add(message)
        try:
            is_first = await copies.is_first(message)
        finally:
            self._inbox.gathered.discard(message)
        if is_first and self.refresh(message) and self.is_stopped:
            message.give_back()
        return not message.is_answered
