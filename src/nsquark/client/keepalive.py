"""Keeps messages alive that wait for a handler, and lets no more come than handlers can take in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from nsquark.client.inbox import Inbox
from nsquark.client.logs import Log
from nsquark.client.message import Message
from nsquark.client.rdy import Flow

if TYPE_CHECKING:
    from nsquark.client.subscription import Subscription

ROUNDS_PER_TIMEOUT: Final = 4
ROUND_S_MAX: Final = 15.0
LOOKS_PER_BLOCK: Final = 2
TOUCH_FRACTION: Final = 0.75
"""A message with less than this fraction of its timeout left is touched: at the latest when half of it is over."""
RETURN_FRACTION: Final = 0.5
"""A message that cannot be touched any further goes back with this fraction left, while nsqd still takes it from us."""


class KeepAlive:
    """Makes a round four times in each msg_timeout: what waits is touched, as long as nsqd's max-msg-timeout allows,
    and then given back unhandled; what someone took and did not answer in time is forgotten: nsqd has taken it back.
    """

    def __init__(self, inbox: Inbox, auto_touch: bool) -> None:
        self._inbox = inbox
        self._auto_touch = auto_touch
        self._loop = asyncio.get_running_loop()

    def make_round(self, subscriptions: Iterable[Subscription]) -> bool:
        """Makes a round; returns True if something had to wait for long."""
        now_s = self._loop.time()
        waiting, gathered = set(self._inbox.ready), self._inbox.gathered
        is_late = False
        for subscription in subscriptions:
            for message in list(subscription.in_flight):
                if message in waiting:
                    is_late |= self._keep_waiting(message, now_s)
                elif message in gathered:
                    self._keep_waiting(message, now_s)
                elif message.deadline_s <= now_s:
                    subscription.forget(message)
                elif self._auto_touch and message.deadline_s - now_s < TOUCH_FRACTION * subscription.timeout_s:
                    message.touch()
            subscription.flush()
        self._inbox.clean()
        return is_late

    def _keep_waiting(self, message: Message, now_s: float) -> bool:
        left_s, timeout_s = message.deadline_s - now_s, message.subscription.timeout_s
        if left_s <= 0:
            self._inbox.expire(message)
        elif left_s >= TOUCH_FRACTION * timeout_s:
            return False
        elif message.deadline_s < message.last_deadline_s:
            message.touch()
        elif left_s < RETURN_FRACTION * timeout_s:
            message.give_back()
        return True


class Pace:
    """Limits what is in flight to what handlers can take before it must be touched.

    It shrinks when messages have to wait for long, to what was taken in a quarter of msg_timeout, and doubles in each
    round in which none had to.
    """

    def __init__(self, flow: Flow, inbox: Inbox) -> None:
        self._flow = flow
        self._inbox = inbox
        self._loop = asyncio.get_running_loop()
        self._round_s = self._loop.time()
        self._handed_out_count = 0
        self._rate = 0.0
        self._limit: int | None = None

    def measure(self, is_late: bool, in_flight: int, timeout_s: float) -> None:
        now_s = self._loop.time()
        passed_s = max(now_s - self._round_s, 0.001)
        handed_out = self._inbox.handed_out_count - self._handed_out_count
        self._rate = max(handed_out / passed_s, self._rate / 2)
        self._round_s, self._handed_out_count = now_s, self._inbox.handed_out_count
        if is_late:
            in_hand = in_flight - len(self._inbox.ready)
            self._limit = max(1, in_hand + int(self._rate * timeout_s / ROUNDS_PER_TIMEOUT))
        elif self._limit is not None:
            self._limit *= 2
            if self._limit >= self._flow.wanted:
                self._limit = None
        self._flow.limit(self._limit)


class Rounds:
    """Calls `make_round` four times in each msg_timeout, and tells of an event loop that was blocked."""

    def __init__(self, make_round: Callable[[], None], blocked_s_max: float, log: Log) -> None:
        self._make_round = make_round
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._interval_s = ROUND_S_MAX
        self._watch = LoopWatch(blocked_s_max, log)

    def every(self, timeout_s: float) -> None:
        """Takes the shortest msg_timeout of all connections; the next round comes as soon as that asks for."""
        interval_s = min(timeout_s / ROUNDS_PER_TIMEOUT, ROUND_S_MAX)
        if self._timer is None or interval_s < self._interval_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(interval_s, self._round)
        self._interval_s = interval_s

    def close(self) -> None:
        self._watch.close()
        if self._timer is not None:
            self._timer.cancel()

    def _round(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._round)
        self._make_round()


class LoopWatch:
    """Tells by how much the event loop was late, if that was more than it may be. It looks twice in that time, so that
    no block of one and a half times as long falls between two looks.
    """

    def __init__(self, blocked_s_max: float, log: Log) -> None:
        self._blocked_s_max = blocked_s_max
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._look_later()

    def close(self) -> None:
        self._timer.cancel()

    def _look_later(self) -> None:
        interval_s = self._blocked_s_max / LOOKS_PER_BLOCK
        self._timer = self._loop.call_later(interval_s, self._look, self._loop.time() + interval_s)

    def _look(self, due_s: float) -> None:
        late_s = self._loop.time() - due_s
        if late_s > self._blocked_s_max:
            self._log.warning(
                "the event loop was blocked for %.1f s: heartbeats wait meanwhile, and nsqd closes connections that "
                "do not answer them; give `run` threads= for a handler that blocks",
                late_s,
            )
        self._look_later()
