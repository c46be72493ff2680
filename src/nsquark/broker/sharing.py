"""Decides who gets how much: a channel's messages are shared among the consumers that are ready for some."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nsquark.base.clock import now_ms
from nsquark.broker.topology import Closeness, TopologyCounts

if TYPE_CHECKING:
    from nsquark.broker.feed import Feed
    from nsquark.broker.tcp.session import Session

REFILL_DELAY_S = 0.005
"""A consumer with most of its RDY in flight is refilled in larger portions, at most this much later."""


class Sharing:
    """Divides what a `Feed` has among sessions; a session is ready while its RDY and its socket allow more.

    * A burst reaches all sessions that are ready: each gets an equal part, and another one is the first each time.
    * With a topology the nearest are served first, and the others get what is left.
    * `wake` asks for another delivery in the next turn, `call_later` is the event loop's.
    """

    def __init__(
        self,
        feed: Feed,
        topology: TopologyCounts | None,
        wake: Callable[[], None],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._feed = feed
        self._topology = topology
        self._wake = wake
        self._call_later = call_later
        self._rotation = 0
        self._refill_due = False
        self._refill_timer = False

    def deliver(self, sessions: list[Session]) -> None:
        """Sends what is available to those of the sessions that are ready."""
        feed = self._feed
        eager, self._refill_due = self._refill_due, False
        if not feed.may_have_more():
            return
        ready = [session for session in sessions if session.is_ready]
        if not eager and self._topology is None:  # waiting for a nearby consumer would send to a distant one
            for session in ready:
                if session.is_nearly_full:
                    ready = self._without_nearly_full(ready)
                    break
        if not ready:
            return
        now = now_ms()
        if self._topology is not None:
            self._share_by_closeness(self._topology, ready, now)
        elif len(ready) == 1:
            feed.fill(ready[0], ready[0].free, now)
        else:
            self._share(ready, feed.depth, now)
        if feed.may_have_more() and not feed.is_loading:
            for session in ready:
                if session.is_ready:
                    self._wake()
                    break

    def _share(self, ready: list[Session], available: int, now: int) -> None:
        share = -(-available // len(ready))
        self._rotation = (self._rotation + 1) % len(ready)
        for session in ready[self._rotation :] + ready[: self._rotation]:
            self._feed.fill(session, min(session.free, share), now)
            if not self._feed.may_have_more():  # thousands may be ready for a few messages
                break

    def _share_by_closeness(self, topology: TopologyCounts, ready: list[Session], now: int) -> None:
        """Serves consumers in this nsqd's zone first, then those in its region; the others get what is left."""
        ledger = self._feed.ledger
        for closeness in Closeness:
            group = [session for session in ready if topology.closeness(session.settings) is closeness]
            sent = -1
            while group and sent != 0 and (available := self._feed.depth) > 0:
                in_flight = ledger.in_flight
                self._share(group, available, now)
                sent = ledger.in_flight - in_flight
                topology.sent[closeness] += sent
                group = [session for session in group if session.is_ready]

    def _without_nearly_full(self, ready: list[Session]) -> list[Session]:
        """Leaves out sessions that would get a small portion now and a larger one in a few milliseconds."""
        chosen = [session for session in ready if not session.is_nearly_full]
        if not self._refill_timer:
            self._refill_timer = True
            self._call_later(REFILL_DELAY_S, self._refill)
        return chosen

    def _refill(self) -> None:
        self._refill_timer = False
        self._refill_due = True
        self._wake()
