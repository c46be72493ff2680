"""Decides who may send how much: max_in_flight is shared over the connections as RDY counts, and held back after
failures.

RDY is a window: nsqd keeps that many messages in flight until it is told otherwise, so a count is sent when it changes
and never again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Final, Protocol

from nsquark.client.backoff import Backoff
from nsquark.client.config import Config
from nsquark.client.logs import Log, client_log

LOWERED_S_MIN: Final = 0.25
LOWERED_ROUND_TRIPS: Final = 2
LOWERED_S_MAX: Final = 2.0
"""So long after its RDY was lowered a connection may still bring what nsqd had sent before it knew. The round trip was
measured when the connection was made: one that took longer says that nsqd was busy then, not how far away it is.
"""
CLOCK_S: Final = 0.001
"""Timers may go off so much early."""
RAISE_STEPS: Final = 8
"""While a connection's part comes free by and by, it is raised in steps of an eighth, not with each answer."""


class Window(Protocol):
    """This is a connection as seen from here. `set_rdy` sends the count and keeps it in `rdy`, its time in
    `rdy_at_s`.
    """

    rdy: int
    rdy_max: int
    rdy_at_s: float
    last_message_at_s: float
    round_trip_s: float

    @property
    def in_flight_count(self) -> int: ...

    def set_rdy(self, count: int) -> None: ...


class Flow:
    """Shares out RDY. Invariants:

    * What connections have in flight, or may have by their RDY counts, is together at most max_in_flight; in backoff
      the counts are at most 1, and 0 while it waits.
    * Outside of backoff no connection stays below its share while some of max_in_flight is left over.
    * In backoff, unless it waits or is paused, one of the connections has the RDY count of 1, or gets it when there is
      room for a message.
    """

    def __init__(self, config: Config, log: Log = client_log) -> None:
        self._config = config
        self._log = log
        self._backoff = Backoff(config)
        self._loop = asyncio.get_running_loop()
        self._wait: asyncio.TimerHandle | None = None
        self._forgetting: asyncio.TimerHandle | None = None
        self._is_share_due = self._is_closed = False
        self.is_owing = False
        """Tells whether some connection has less than its share until something is answered."""
        self._wanted = config.max_in_flight
        self._limit: int | None = None
        self._lowered: dict[Window, tuple[int, float]] = {}
        """Has the count that a connection was lowered from, and until when what it allowed may still come."""
        self._left_behind: list[Window] = []
        """Has the connections that are no longer used, with messages that are not answered yet."""
        self.windows: list[Window] = []
        interval_s = config.rdy_redistribute_interval.seconds
        self._tick = self._loop.call_later(interval_s, self._redistribute_regularly, interval_s)

    @property
    def level(self) -> int:
        """Returns the level of backoff; 0 is normal work."""
        return self._backoff.level

    @property
    def is_waiting(self) -> bool:
        """Tells whether it is in backoff, with nothing asked for yet."""
        return self._wait is not None

    @property
    def wanted(self) -> int:
        """Returns max_in_flight as the user set it."""
        return self._wanted

    @property
    def max_in_flight(self) -> int:
        """Returns the max_in_flight that holds now: less than `wanted` while handlers are slow. Every connection may
        send something.
        """
        if self._limit is None:
            return self._wanted
        return min(self._wanted, max(self._limit, len(self.windows)))

    def join(self, window: Window) -> None:
        self.windows.append(window)
        self._share()

    def leave(self, window: Window) -> None:
        """Leaves out a connection that is closing, where what is being handled still counts, or lost, and with it all
        that it had in flight.
        """
        if window not in self.windows:
            self.answered()  # it was closing, and is lost now
            return
        self.windows.remove(window)
        self._lowered.pop(window, None)
        if window.in_flight_count:
            self._left_behind.append(window)
        self._share()

    def change_max_in_flight(self, count: int) -> None:
        """Changes max_in_flight; 0 pauses: what is in flight is dealt with, and no more comes."""
        self._wanted = count
        self._max_changed()

    def limit(self, count: int | None) -> None:
        """Sets a limit below max_in_flight, because more would wait here for too long; None lifts it."""
        if count != self._limit:
            self._limit = count
            self._log.debug("handlers keep up with %d in flight", self.max_in_flight)
            self._max_changed()

    def _max_changed(self) -> None:
        if self.max_in_flight == 0:
            for window in self.windows:
                self._set(window, 0)
        self._share()

    def answered(self) -> None:
        """Is told that a message is no longer in flight: if something is owed, there may be room for it."""
        if self.is_owing and not self._is_share_due:
            self._is_share_due = True
            self._loop.call_soon(self._share_again)

    def close(self) -> None:
        """Closes. Messages may be answered later still: that moves nothing any more."""
        self._is_closed = True
        self.is_owing = False
        self._tick.cancel()
        for timer in (self._wait, self._forgetting):
            if timer is not None:
                timer.cancel()
        self.windows.clear()

    # -- sharing -----------------------------------------------------------------------------------------

    def _share_again(self) -> None:
        self._is_share_due = False
        if not self._is_closed:
            self._share()

    def _share(self) -> None:
        """Gives every connection its part: first those that have too much, so that there is
        something for the others.
        """
        self.is_owing = False
        if self.level:
            if not self.is_waiting and not any(window.rdy for window in self.windows):
                self._test()  # the one that was asked has gone, or was paused
            return
        if not self.windows:
            return
        share = min(max(self.max_in_flight // len(self.windows), 1), self.max_in_flight)
        for window in self.windows:
            if window.rdy > share:
                self._set(window, share)
        excess = sum(window.rdy for window in self.windows) - self.max_in_flight
        for window in self.windows:
            if window.rdy and excess > 0:
                excess -= window.rdy
                self._set(window, 0)
        self._raise_to(share)

    def _raise_to(self, share: int) -> None:
        """Raises connections; those that wait longest come first, and who comes later takes nothing of what they are
        still owed.
        """
        left = self._left()
        unasked = self.max_in_flight - sum(window.rdy for window in self.windows)
        for window in sorted(self.windows, key=_turn):
            wanted = min(share, window.rdy_max, window.rdy + unasked)
            if window.rdy >= wanted:
                continue
            held = self._may_hold(window)
            count = max(window.rdy, min(wanted, held + left))
            if count == wanted or not window.rdy or count - window.rdy > wanted // RAISE_STEPS:
                left -= max(0, count - held)
                unasked -= count - window.rdy
                self._set(window, count)
            if count < wanted:
                self.is_owing = True
                break

    def _left(self) -> int:
        """Returns how many more messages may be in flight; less than 0 while there are, or may be, too many."""
        self._left_behind = [window for window in self._left_behind if window.in_flight_count]
        held = sum(map(self._may_hold, self.windows)) + sum(window.in_flight_count for window in self._left_behind)
        return self.max_in_flight - held

    def _may_hold(self, window: Window) -> int:
        """Returns what a connection has in flight, or may have soon."""
        count, _ = self._lowered.get(window, (0, 0.0))
        return max(window.rdy, window.in_flight_count, count)

    def _set(self, window: Window, count: int) -> None:
        count = min(count, window.rdy_max)
        if count < window.rdy:
            self._lower(window)
        if window.rdy != count:
            window.set_rdy(count)

    def _lower(self, window: Window) -> None:
        lowered_s = _lowered_s(window)
        self._lowered[window] = (self._may_hold(window), self._loop.time() + lowered_s)
        if self._forgetting is None:
            self._forgetting = self._loop.call_later(lowered_s, self._forget_lowered)

    def _forget_lowered(self) -> None:
        """Forgets what was on its way: by now it has come, and counts by itself."""
        now_s = self._loop.time() + CLOCK_S
        self._lowered = {window: entry for window, entry in self._lowered.items() if entry[1] > now_s}
        self._forgetting = None
        if self._lowered:
            next_s = min(until_s for _, until_s in self._lowered.values())
            self._forgetting = self._loop.call_at(next_s, self._forget_lowered)
        if self.is_owing:
            self._share()

    def _redistribute_regularly(self, interval_s: float) -> None:
        self._tick = self._loop.call_later(interval_s, self._redistribute_regularly, interval_s)
        is_scarce = len(self.windows) > (1 if self.level else self.max_in_flight)
        if is_scarce and not self.is_waiting and self.max_in_flight:
            self._redistribute()

    def _redistribute(self) -> None:
        """Lets a connection that brings nothing or has had its time make room for another, with too little for all.

        Those that wait longest come first, so that every connection has its turn; chance alone could pass one over. A
        turn is long enough for a message to come, however short the interval is.
        """
        now_s = self._loop.time()
        idle_s, enough_s = self._config.low_rdy_idle_timeout.seconds, self._config.low_rdy_timeout.seconds
        for window in self.windows:
            turn_s = now_s - window.rdy_at_s
            is_idle = now_s - window.last_message_at_s > idle_s and turn_s > _lowered_s(window)
            if window.rdy and (is_idle or turn_s > enough_s):
                self._set(window, 0)
        self._share()

    # -- backoff -----------------------------------------------------------------------------------------

    def succeeded(self) -> None:
        self._signal(self._backoff.succeeded)

    def failed(self) -> None:
        self._signal(self._backoff.failed)

    def went_on(self) -> None:
        """Is told that a message was given back without being a failure: in backoff it was a test that says nothing."""
        self._signal(lambda: None)

    def _signal(self, move: Callable[[], None]) -> None:
        """Is told the outcome of a message. Those that were on their way when backoff began say nothing new."""
        if self.is_waiting or self._is_closed:
            return
        was_backing_off = self.level > 0
        move()
        if self.level:
            self._hold_back()
        elif was_backing_off:
            self._log.debug("leaving backoff: max_in_flight is %d again", self.max_in_flight)
            self._share()

    def _hold_back(self) -> None:
        seconds = self._backoff.duration_s
        self._log.debug(
            "backing off for %.3f s (level %d): RDY 0 on %d connections", seconds, self.level, len(self.windows)
        )
        for window in self.windows:
            self._set(window, 0)
        self._wait = self._loop.call_later(seconds, self._test)

    def _test(self) -> None:
        """Asks for one message from one connection: its outcome decides how to go on."""
        self._wait = None
        if not self.windows or not self.max_in_flight:
            return  # `_share` tests when there is someone to ask again
        if self._left() > 0:
            self._set(min(self.windows, key=_turn), 1)
        else:
            self.is_owing = True


def _lowered_s(window: Window) -> float:
    """Returns how long a connection may still bring something after its RDY was lowered."""
    return min(max(LOWERED_S_MIN, LOWERED_ROUND_TRIPS * window.round_trip_s), LOWERED_S_MAX)


def _turn(window: Window) -> tuple[float, float]:
    """Orders by who waits longest; chance decides among equals."""
    return window.rdy_at_s, random.random()
