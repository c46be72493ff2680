"""Who may send how much: max_in_flight shared over the connections as RDY counts, and held back after failures.

RDY is a window: nsqd keeps that many messages in flight until it is told otherwise, so a count is sent when it changes
and never again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Protocol

from nsquark.cli.logs import library_log
from nsquark.client.backoff import Backoff
from nsquark.client.config import Config

log = library_log("nsquark.client")


class Window(Protocol):
    """A connection as seen from here. `set_rdy` sends the count and keeps it in `rdy`, its time in `rdy_at_s`."""

    rdy: int
    rdy_max: int
    rdy_at_s: float
    last_message_at_s: float

    def set_rdy(self, count: int) -> None: ...


class Flow:
    """Invariants:

    * The RDY counts of all connections together are at most max_in_flight; in backoff at most 1; while it waits, 0.
    * Outside of backoff no connection has less than its share while some of max_in_flight is left over.
    * In backoff, unless it waits or is paused, one of the connections has the RDY count of 1.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._backoff = Backoff(config)
        self._loop = asyncio.get_running_loop()
        self._wait: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.max_in_flight = config.max_in_flight
        self.windows: list[Window] = []
        interval_s = config.rdy_redistribute_interval.seconds
        self._tick = self._loop.call_later(interval_s, self._redistribute_regularly, interval_s)

    @property
    def level(self) -> int:
        """Of backoff; 0 is normal work."""
        return self._backoff.level

    @property
    def is_waiting(self) -> bool:
        """In backoff, with nothing asked for yet."""
        return self._wait is not None

    def join(self, window: Window) -> None:
        self.windows.append(window)
        self._share()

    def leave(self, window: Window) -> None:
        """It is closing or lost."""
        if window not in self.windows:
            return
        self.windows.remove(window)
        self._share()

    def change_max_in_flight(self, count: int) -> None:
        """0 pauses: what is in flight is dealt with, and no more comes."""
        self.max_in_flight = count
        if count == 0:
            for window in self.windows:
                self._set(window, 0)
        self._share()

    def close(self) -> None:
        """Messages may be answered later still: that moves nothing any more."""
        self._is_closed = True
        self._tick.cancel()
        if self._wait is not None:
            self._wait.cancel()
        self.windows.clear()

    # -- sharing -----------------------------------------------------------------------------------------

    def _share(self) -> None:
        """Every connection its part: first those that have too much, so that there is something for the others."""
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
        for window in self.windows:
            if window.rdy and self._left() < 0:
                self._set(window, 0)
        for window in self.windows:
            if window.rdy < share and (left := self._left()) > 0:
                self._set(window, min(share, window.rdy + left))

    def _left(self) -> int:
        return self.max_in_flight - sum(window.rdy for window in self.windows)

    def _set(self, window: Window, count: int) -> None:
        count = min(count, window.rdy_max)
        if window.rdy != count:
            window.set_rdy(count)

    def _redistribute_regularly(self, interval_s: float) -> None:
        self._tick = self._loop.call_later(interval_s, self._redistribute_regularly, interval_s)
        is_scarce = len(self.windows) > (1 if self.level else self.max_in_flight)
        if is_scarce and not self.is_waiting and self.max_in_flight:
            self._redistribute()

    def _redistribute(self) -> None:
        """With too little for all, a connection that brings nothing or has had its time makes room for another.

        Those that wait longest come first, so that every connection has its turn; chance alone could pass one over.
        """
        now_s = self._loop.time()
        idle_s, turn_s = self._config.low_rdy_idle_timeout.seconds, self._config.low_rdy_timeout.seconds
        others = [window for window in self.windows if window.rdy == 0]
        relieved = []
        for window in self.windows:
            if window.rdy and (now_s - window.last_message_at_s > idle_s or now_s - window.rdy_at_s > turn_s):
                self._set(window, 0)
                relieved.append(window)
        random.shuffle(others)
        random.shuffle(relieved)
        others.sort(key=lambda window: window.rdy_at_s)
        left = 1 - sum(window.rdy for window in self.windows) if self.level else self._left()
        for window in (others + relieved)[: max(left, 0)]:
            self._set(window, 1)

    # -- backoff -----------------------------------------------------------------------------------------

    def succeeded(self) -> None:
        self._signal(self._backoff.succeeded)

    def failed(self) -> None:
        self._signal(self._backoff.failed)

    def went_on(self) -> None:
        """A message was given back without being a failure: in backoff it was a test that says nothing."""
        self._signal(lambda: None)

    def _signal(self, move: Callable[[], None]) -> None:
        """The outcome of a message. Those that were on their way when backoff began say nothing new."""
        if self.is_waiting or self._is_closed:
            return
        was_backing_off = self.level > 0
        move()
        if self.level:
            self._hold_back()
        elif was_backing_off:
            log.info("leaving backoff: max_in_flight is %d again", self.max_in_flight)
            self._share()

    def _hold_back(self) -> None:
        seconds = self._backoff.duration_s
        log.warning(
            "backing off for %.3f s (level %d): RDY 0 on %d connections", seconds, self.level, len(self.windows)
        )
        for window in self.windows:
            self._set(window, 0)
        self._wait = self._loop.call_later(seconds, self._test)

    def _test(self) -> None:
        """One message from one connection: its outcome decides how to go on."""
        self._wait = None
        if self.windows and self.max_in_flight:  # else `_share` tests when there is someone to ask again
            self._set(random.choice(self.windows), 1)
