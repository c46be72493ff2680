"""Keeps a consumer's messages until someone waits for one, and those who wait until there are messages."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from nsquark.client.message import Message

if TYPE_CHECKING:
    from nsquark.client.subscription import Subscription

LOOP_TURN_S: Final = 0.02
"""Messages are handled for so long without the event loop having its turn, in which heartbeats are answered."""
FRESH_FRACTION: Final = 0.9
"""A message with less than this fraction of its timeout left is touched before it is handed out."""
HAND_OUT_FRACTION: Final = 0.75
"""A message that has less than this fraction left, and cannot be touched any further, is not handed out."""


class Inbox:
    """Keeps in `ready` what came and waits: it is in flight on a subscription that is connected, and not answered.

    As many of those who wait are woken as messages come; one that finds nothing, since another was faster, waits again.
    """

    def __init__(self) -> None:
        self.ready: deque[Message] = deque()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self.gathered: set[Message] = set()
        """Has the messages of batches that are still being gathered, and those about which a store of keys is being
        asked: they wait as well.
        """
        self.fresh_s = 0.0
        """Messages that have so much time left are handed out as they are."""
        self.loop_turn_at_s = 0.0
        self.handed_out_count = self.expired_count = 0

    def put(self, messages: list[Message]) -> None:
        self.ready.extend(messages)
        if self._waiters:
            self._wake(len(messages))

    def hand_out(self, now_s: float) -> Message | None:
        """Hands out the next message that nsqd has not taken back."""
        ready = self.ready
        while ready:
            message = ready.popleft()
            if message.deadline_s - now_s >= self.fresh_s or self.refresh(message, now_s):
                self.handed_out_count += 1
                return message
        return None

    def refresh(self, message: Message, now_s: float) -> bool:
        """Lets who gets a message now have the time of its timeout, or nearly, however long it waited. Returns False if
        it is answered instead: nsqd has taken it back, or would too soon.
        """
        subscription = message.subscription
        if message.deadline_s < now_s:
            self.expire(message)
            return False
        if message.deadline_s - now_s < FRESH_FRACTION * subscription.timeout_s:
            message.touch()
            subscription.flush()  # at once: who gets it may block the loop
        if message.deadline_s - now_s < HAND_OUT_FRACTION * subscription.timeout_s:
            message.give_back()
            return False
        return True

    def put_back(self, message: Message) -> None:
        """Puts back a message that was only looked at."""
        self.handed_out_count -= 1
        self.ready.appendleft(message)

    def expire(self, message: Message) -> None:
        """Drops a message that nsqd has taken back: it is never handled here."""
        self.expired_count += 1
        message.is_answered = True
        message.subscription.expired(message)

    def give_back(self, of: Subscription | None = None) -> None:
        """Returns to nsqd what waits, of one subscription or of all."""
        for message in self.ready:
            if of is None or message.subscription is of:
                message.give_back()
        self.clean()

    def forget(self, subscription: Subscription) -> list[Message]:
        """Forgets messages whose connection is lost, as nsqd knows; returns those that nobody had taken."""
        forgotten = [message for message in self.ready if message.subscription is subscription]
        self.ready = deque(message for message in self.ready if message.subscription is not subscription)
        for message in self.gathered:
            if message.subscription is subscription:
                message.give_back()
        return forgotten

    def clean(self) -> None:
        """Leaves out what was answered while it waited."""
        self.ready = deque(message for message in self.ready if not message.is_answered)

    def turn_loop_first(self) -> None:
        """Makes the next one who asks let the loop have its turn: something waits there that it must know."""
        self.loop_turn_at_s = -math.inf

    def wake_all(self) -> None:
        """Wakes all who wait: there is something to know besides messages, the end."""
        self._wake(len(self._waiters))

    async def let_loop_turn(self) -> None:
        """Lets the loop turn, for those who always find a message and so never wait, once `loop_turn_at_s` is
        LOOP_TURN_S ago.

        That takes two rounds: timers that became due run behind this task in the first one. Of several who wait here
        the first goes on; the others wait for another turn if what it did took long.
        """
        try:
            while time.monotonic() - self.loop_turn_at_s > LOOP_TURN_S:
                before_s = self.loop_turn_at_s
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                if self.loop_turn_at_s == before_s:
                    self.loop_turn_at_s = time.monotonic()
        except asyncio.CancelledError:
            self._wake(1)  # who was woken for a message may get here first: it is another's now
            raise

    async def wait(self, deadline_s: float | None) -> None:
        """Waits until messages come, or the loop's clock has reached the deadline."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters.append(waiter)
        timer = None if deadline_s is None else loop.call_at(deadline_s, _end_wait, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._wake(1)  # it was our turn, and is another's now
            raise
        finally:
            if timer is not None:
                timer.cancel()
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)  # nobody woke it

    def _wake(self, count: int) -> None:
        self.loop_turn_at_s = time.monotonic()  # and not when each goes on: those before it may have taken long
        while self._waiters and count > 0:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1


def _end_wait(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
