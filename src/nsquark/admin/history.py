"""Keeps the last hour of the drawn figures in memory, in ring buffers that are all written at the same moments.

Its size is bounded by the number of series. A subject (the cluster, a node, a topic, a channel) has a few series; while
there is room it keeps every subject, and then only the busiest and those that somebody looks at.
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from nsquark.admin.snapshot import ClusterChannel, ClusterTopic, Node, Percentile, Snapshot
from nsquark.base.durations import NS_PER_S

SPAN_S: Final = 3600.0
STEP_S_MIN: Final = 2.0
"""Moments that are closer together are not recorded; at this pace the rings hold an hour."""
POINTS_MAX: Final = int(SPAN_S / STEP_S_MIN)
SERIES_MAX: Final = 6000
"""There are at most this many series of 4 bytes a point, which take 43 MB when all are in use."""
WATCHED_S: Final = 60.0
"""A subject keeps its place for this long after somebody looked at it."""
RERANK_INTERVAL_S: Final = 30.0
REPLACED_MAX: Final = 200
"""At most this many subjects change places at once, so that a cluster whose load moves does not rebuild all rings in
one turn.
"""
SERIES_PER_SUBJECT_MAX: Final = 16

Key = tuple[str, ...]
"""Names a subject and one of its figures: ("cluster", "in"), ("channel", "orders", "archive", "depth")."""
Values = dict[str, float | None]


class Track:
    """Holds the rings of one subject, by the name of the figure."""

    __slots__ = ("rings", "seen_at", "watched_at")

    def __init__(self, at: float) -> None:
        self.rings: dict[str, array[float]] = {}
        self.seen_at = at
        self.watched_at = 0.0


class History:
    """Keeps the figures of snapshots; `add` is called after each poll. All tracks together never have more than
    `series_max` rings.
    """

    def __init__(self, series_max: int = SERIES_MAX, points_max: int = POINTS_MAX) -> None:
        self._series_max = series_max
        self._points_max = points_max
        self._times = array("d", [0.0]) * points_max
        self._recorded = 0
        self._tracks: dict[Key, Track] = {}
        self._series = 0
        self._ranked_at = 0.0
        self._latest: Snapshot | None = None

    @property
    def series_count(self) -> int:
        return self._series

    def add(self, snapshot: Snapshot) -> None:
        self._latest = snapshot
        if self._recorded and 0 <= snapshot.at - self._last_time < STEP_S_MIN * 0.9:
            return
        self._make_room(snapshot)
        slot = self._recorded % self._points_max
        self._times[slot] = snapshot.at
        for subject, track in self._tracks.items():
            values = _values(snapshot, subject)
            for ring in track.rings.values():
                ring[slot] = math.nan
            if values is not None:
                track.seen_at = snapshot.at
                self._write(track, values, slot)
        self._recorded += 1

    def watch(self, keys: Iterable[Key]) -> None:
        """Keeps these series, since somebody looks at them, and does not give them up for the next `WATCHED_S`."""
        snapshot = self._latest
        if snapshot is None:
            return
        subjects = {key[:-1] for key in keys}
        for subject in subjects & self._tracks.keys():
            self._tracks[subject].watched_at = snapshot.at
        missing = [each for each in sorted(subjects - self._tracks.keys()) if _values(snapshot, each) is not None]
        if missing:
            self._track_watched(missing, snapshot)
            for subject in missing:
                if (track := self._tracks.get(subject)) is not None:
                    track.watched_at = snapshot.at

    def points(self, key: Key, since: float = 0.0) -> tuple[list[float], list[float | None]]:
        """Returns the times in unix seconds and the values of moments after `since`, oldest first. A value is None
        where there was none.
        """
        ring = self._ring(key)
        first = self._first_after(max(since, self._last_time - SPAN_S))
        if ring is None or first == self._recorded:
            return [], []
        slots = [number % self._points_max for number in range(first, self._recorded)]
        return [self._times[slot] for slot in slots], [_known(ring[slot]) for slot in slots]

    def _ring(self, key: Key) -> array[float] | None:
        track = self._tracks.get(key[:-1])
        return track.rings.get(key[-1]) if track is not None else None

    @property
    def _last_time(self) -> float:
        return self._times[(self._recorded - 1) % self._points_max] if self._recorded else 0.0

    def _first_after(self, since: float) -> int:
        """Returns the number of the first moment after `since` that is kept, or of the next one to come if there is
        none.

        If the clock was set back, the times are not in order; then it finds one of the places where they pass `since`.
        """
        numbers = range(max(0, self._recorded - self._points_max), self._recorded)
        return numbers.start + bisect_right(numbers, since, key=lambda number: self._times[number % self._points_max])

    def _write(self, track: Track, values: Mapping[str, float | None], slot: int) -> None:
        for name, value in values.items():
            ring = track.rings.get(name)
            if ring is None:
                if self._series >= self._series_max or len(track.rings) >= SERIES_PER_SUBJECT_MAX:
                    continue
                ring = track.rings[name] = array("f", [math.nan]) * self._points_max
                self._series += 1
            ring[slot] = math.nan if value is None else value

    # -- which subjects are kept -------------------------------------------------------------------------

    def _make_room(self, snapshot: Snapshot) -> None:
        """Takes new subjects in while there is room; every `RERANK_INTERVAL_S` the busiest replace the idlest."""
        for subject in _subjects(snapshot):
            if subject not in self._tracks and not self._track(subject, snapshot):
                break
        if 0 <= snapshot.at - self._ranked_at < RERANK_INTERVAL_S:
            return
        self._ranked_at = snapshot.at
        for subject in [each for each, track in self._tracks.items() if snapshot.at - track.seen_at > SPAN_S]:
            self._drop(subject)
        self._replace_idle(snapshot)

    def _replace_idle(self, snapshot: Snapshot) -> None:
        outside = (each for each in _subjects(snapshot) if each not in self._tracks)
        busiest = heapq.nlargest(REPLACED_MAX, ((_business(snapshot, each), each) for each in outside))
        idlest = heapq.nsmallest(
            REPLACED_MAX, ((_business(snapshot, each), each) for each in self._replaceable(snapshot))
        )
        for (rate, subject), (idle_rate, idle) in zip(busiest, idlest, strict=False):
            # It must be twice as busy, or two that are alike would change places for ever.
            if rate <= 2 * idle_rate:
                break
            self._drop(idle)
            self._track(subject, snapshot)

    def _replaceable(self, snapshot: Snapshot) -> list[Key]:
        return [each for each, track in self._tracks.items() if snapshot.at - track.watched_at > WATCHED_S]

    def _track_watched(self, subjects: list[Key], snapshot: Snapshot) -> None:
        """Takes in subjects that are looked at, in place of the idlest of those that nobody looks at."""
        idle = self._replaceable(snapshot)
        idle.sort(key=lambda each: _business(snapshot, each), reverse=True)
        for subject in subjects:
            while not self._track(subject, snapshot):
                if not idle:
                    return
                self._drop(idle.pop())

    def _track(self, subject: Key, snapshot: Snapshot) -> bool:
        """Takes a subject in, and returns False if there is no room. One that the snapshot does not have needs none."""
        names = list(_values(snapshot, subject) or ())[:SERIES_PER_SUBJECT_MAX]
        if not names:
            return True
        if self._series + len(names) > self._series_max:
            return False
        track = self._tracks[subject] = Track(snapshot.at)
        track.rings = {name: array("f", [math.nan]) * self._points_max for name in names}
        self._series += len(names)
        return True

    def _drop(self, subject: Key) -> None:
        self._series -= len(self._tracks.pop(subject).rings)


# -- what is recorded of a snapshot ----------------------------------------------------------------------


def _subjects(snapshot: Snapshot) -> Iterator[Key]:
    yield ("cluster",)
    for address in snapshot.nodes:
        yield ("node", address)
    for topic in snapshot.topics:
        yield ("topic", topic)
    for topic, found in snapshot.topics.items():
        for channel in found.channels:
            yield ("channel", topic, channel)


def _values(snapshot: Snapshot, subject: Key) -> Values | None:
    """Returns the figures of a subject, or None if the snapshot does not have it."""
    match subject:
        case ("cluster",):
            return _cluster_values(snapshot)
        case ("node", address):
            node = snapshot.nodes.get(address)
            return _node_values(node) if node is not None and node.answered else None
        case ("topic", name):
            topic = snapshot.topics.get(name)
            return _topic_values(topic) if topic is not None else None
        case ("channel", name, channel_name):
            channel = snapshot.channel(name, channel_name)
            return _channel_values(channel) if channel is not None else None
    return None


def _cluster_values(snapshot: Snapshot) -> Values:
    totals = snapshot.totals
    return {
        "in": totals.rate_in,
        "out": totals.rate_out,
        "depth": totals.depth,
        "in_flight": totals.in_flight,
        "requeued": totals.rate_requeued,
        "timed_out": totals.rate_timed_out,
    }


def _node_values(node: Node) -> Values:
    return {"in": node.rate_in, "out": node.rate_out, "depth": node.depth, "in_flight": node.in_flight}


def _topic_values(topic: ClusterTopic) -> Values:
    return {
        "in": topic.rate_in,
        "out": topic.rate_out,
        "depth": topic.total_depth,
        "in_flight": topic.in_flight,
        **_latency_values(topic.latency),
    }


def _channel_values(channel: ClusterChannel) -> Values:
    return {
        "out": channel.rate_out,
        "depth": channel.depth,
        "in_flight": channel.in_flight,
        "deferred": channel.deferred,
        "requeued": channel.rate_requeued,
        "timed_out": channel.rate_timed_out,
        **_latency_values(channel.latency),
    }


def _latency_values(percentiles: tuple[Percentile, ...]) -> Values:
    """Returns latencies in seconds."""
    return {
        percentile.name: percentile.value / NS_PER_S if percentile.value is not None else None
        for percentile in percentiles
    }


def _business(snapshot: Snapshot, subject: Key) -> float:
    """Returns how busy a subject is, in messages per second; the cluster and its nodes come before every topic."""
    match subject:
        case ("cluster",) | ("node", _):
            return math.inf
        case ("topic", name):
            topic = snapshot.topics.get(name)
            return 1 + (topic.rate_in or 0.0) + (topic.rate_out or 0.0) if topic is not None else 0.0
        case ("channel", name, channel_name):
            channel = snapshot.channel(name, channel_name)
            return (channel.rate_out or 0.0) + (channel.rate_requeued or 0.0) if channel is not None else 0.0
    return 0.0


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
