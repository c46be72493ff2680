"""Follows channels over time with smoothed rates, which tell that a depth grows or that a rate is above normal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import msgspec

from nsquark.admin.snapshot import ClusterChannel, Snapshot

TRENDS_MAX: Final = 20_000
STEP_S: Final = 10.0
FAST_S: Final = 20.0
"""A rate is smoothed over about this long."""
SLOW_S: Final = 900.0
"""A rate that has lasted for about this long is normal."""

Place = tuple[str, str]
"""This is a topic and a channel."""


class Trend(msgspec.Struct, gc=False):
    """Follows one channel. The channel grows if the least that waited in it was more in each step of time than in the
    step before; a burst that is worked off, or a consumer that takes batches, is no growth.
    """

    at: float
    node_count: int
    lowest: int
    """This is the least that waited in this step."""
    last_lowest: int
    step_began: float
    growing_since: float = 0.0
    """This is when the channel began to grow, or 0 while it does not."""
    growing_from: int = 0
    growth: float = 0.0
    """This is how many messages per second the channel grew by since `growing_since`."""
    requeued: float = 0.0
    """This is the smoothed rate of requeued messages per second."""
    usual_requeued: float | None = None
    timed_out: float = 0.0
    usual_timed_out: float | None = None

    @staticmethod
    def of(at: float, channel: ClusterChannel) -> Trend:
        return Trend(at, len(channel.nodes), channel.waiting, channel.waiting, at)

    def move(self, at: float, channel: ClusterChannel, fast: float, slow: float) -> None:
        """Adds a poll; `fast` and `slow` are the weights of its rates in the smoothed and in the usual rates."""
        self.at = at
        if channel.rate_requeued or self.requeued:
            self.requeued, self.usual_requeued = _moved(
                self.requeued, self.usual_requeued, channel.rate_requeued, fast, slow
            )
        if channel.rate_timed_out or self.timed_out:
            self.timed_out, self.usual_timed_out = _moved(
                self.timed_out, self.usual_timed_out, channel.rate_timed_out, fast, slow
            )
        self.lowest = min(self.lowest, channel.waiting)
        if at - self.step_began >= STEP_S:
            self._end_step(channel.waiting)

    def _end_step(self, waiting: int) -> None:
        if self.lowest > self.last_lowest:
            if not self.growing_since:
                self.growing_since, self.growing_from = self.step_began, self.last_lowest
            self.growth = (self.lowest - self.growing_from) / (self.at - self.growing_since)
        else:
            self.growing_since = self.growth = 0.0
        self.last_lowest, self.lowest, self.step_began = self.lowest, waiting, self.at


def _moved(now: float, usual: float | None, rate: float | None, fast: float, slow: float) -> tuple[float, float | None]:
    if rate is None:
        return now, usual
    now += fast * (rate - now)
    # The first rate is not taken as usual, so that what goes on from the beginning is reported too.
    return now, (0.0 if usual is None else usual + slow * (rate - usual))


class Trends:
    """Keeps the trends of all channels in which messages wait, or had been requeued or timed out; there is nothing to
    report of others.
    """

    def __init__(self) -> None:
        self._trends: dict[Place, Trend] = {}
        self._at = 0.0

    def get(self, topic: str, channel: str) -> Trend | None:
        return self._trends.get((topic, channel))

    def update(self, snapshot: Snapshot) -> None:
        seconds = snapshot.at - self._at
        self._at = snapshot.at
        if seconds <= 0:
            return
        fast, slow = 1 - math.exp(-seconds / FAST_S), 1 - math.exp(-seconds / SLOW_S)
        followed: dict[Place, Trend] = {}
        for channel in _worth(snapshot):
            if len(followed) >= TRENDS_MAX:
                break
            place = channel.topic, channel.name
            trend = self._trends.get(place)
            # With an nsqd more or less the sum is another one, which cannot be compared with the one before.
            if trend is None or trend.node_count != len(channel.nodes):
                trend = Trend.of(snapshot.at, channel)
            else:
                trend.move(snapshot.at, channel, fast, slow)
            followed[place] = trend
        self._trends = followed


def _worth(snapshot: Snapshot) -> Iterable[ClusterChannel]:
    for topic in snapshot.topics.values():
        for channel in topic.channels.values():
            if channel.waiting or channel.requeued or channel.timed_out:
                yield channel
