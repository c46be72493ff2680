"""Checks the last hour: it is bounded by a count of series, of which the busiest and those that are looked at stay."""

import math
import time
from typing import Any

import pytest

from admin.snapshots import make_topic
from nsquark.admin.history import STEP_S_MIN, History, Key
from nsquark.admin.snapshot import ClusterTopic, ClusterTotals, Snapshot
from nsquark.admin.sparks import spark_values

CLUSTER_SERIES = 6
TOPIC_SERIES = 4


def topic(name: str, rate: float = 0.0, **more: Any) -> ClusterTopic:
    return make_topic(name=name, rate_in=rate, rate_bytes_in=0.0, rate_out=rate, **more)


def snapshot(at: float, *topics: ClusterTopic, rate: float | None = None) -> Snapshot:
    return Snapshot(at=at, topics={each.name: each for each in topics}, totals=ClusterTotals(rate_in=rate))


def record(history: History, count: int, *topics: ClusterTopic, start: float = 1000.0) -> float:
    at = start
    for number in range(count):
        at = start + number * STEP_S_MIN
        history.add(snapshot(at, *topics, rate=float(number)))
    return at


def test_points_are_what_was_recorded() -> None:
    history = History()
    record(history, 3)
    times, values = history.points(("cluster", "in"))
    assert times == [1000.0, 1002.0, 1004.0]
    assert values == [0.0, 1.0, 2.0]


def test_points_since_a_moment_are_those_after_it() -> None:
    history = History()
    record(history, 5)
    times, values = history.points(("cluster", "in"), since=1004.0)
    assert (times, values) == ([1006.0, 1008.0], [3.0, 4.0])
    assert history.points(("cluster", "in"), since=1008.0) == ([], [])


def test_what_is_not_known_is_none() -> None:
    history = History()
    history.add(snapshot(1000.0, rate=None))
    assert history.points(("cluster", "in")) == ([1000.0], [None])
    assert history.points(("topic", "missing", "in")) == ([], [])


def test_the_ring_forgets_the_oldest() -> None:
    history = History(points_max=4)
    record(history, 7)
    assert history.points(("cluster", "in"))[1] == [3.0, 4.0, 5.0, 6.0]


def test_moments_closer_than_a_step_are_not_recorded() -> None:
    history = History()
    for number in range(10):
        history.add(snapshot(1000.0 + number * STEP_S_MIN / 5))
    assert len(history.points(("cluster", "in"))[0]) == 2


def test_a_sparkline_keeps_the_peak() -> None:
    """It has 40 values for the 100 moments."""
    history = History()
    start = time.time() - 100 * STEP_S_MIN
    for number in range(100):
        history.add(snapshot(start + number * STEP_S_MIN, rate=99.0 if number == 50 else 1.0))
    values = [float(value) for value in spark_values(history, ("cluster", "in")).split(",") if value]
    assert sorted(set(values)) == [1.0, 99.0]
    assert len(values) < 40


def test_a_topic_that_is_gone_for_a_moment_has_a_gap() -> None:
    history = History()
    history.add(snapshot(1000.0, topic("t", depth=5)))
    history.add(snapshot(1002.0))
    history.add(snapshot(1004.0, topic("t", depth=7)))
    assert history.points(("topic", "t", "depth"))[1] == [5.0, None, 7.0]


def test_series_are_bounded() -> None:
    history = History(series_max=CLUSTER_SERIES + 3 * TOPIC_SERIES)
    record(history, 3, *(topic(f"t{number}") for number in range(50)))
    assert history.series_count <= CLUSTER_SERIES + 3 * TOPIC_SERIES
    kept = [number for number in range(50) if history.points(("topic", f"t{number}", "in"))[0]]
    assert kept == [0, 1, 2]


def test_the_busiest_stay() -> None:
    history = History(series_max=CLUSTER_SERIES + 2 * TOPIC_SERIES)
    idle = [topic("a"), topic("b")]
    at = record(history, 2, *idle)
    busy = topic("z", rate=100.0)
    record(history, 40, *idle, busy, start=at + STEP_S_MIN)
    assert history.points(("topic", "z", "in"))[0]
    assert history.series_count <= CLUSTER_SERIES + 2 * TOPIC_SERIES
    assert history.points(("cluster", "in"))[0]


def test_what_is_looked_at_is_kept_however_idle() -> None:
    history = History(series_max=CLUSTER_SERIES + 2 * TOPIC_SERIES)
    busy = [topic(f"busy{number}", rate=100.0) for number in range(5)]
    idle = topic("idle")
    at = record(history, 2, *busy, idle)
    key: Key = ("topic", "idle", "in")
    assert history.points(key) == ([], [])
    for number in range(40):
        history.watch([key])
        history.add(snapshot(at + (number + 1) * STEP_S_MIN, *busy, idle))
    assert [value for value in history.points(key)[1] if value is not None] == [0.0] * 40
    assert history.series_count <= CLUSTER_SERIES + 2 * TOPIC_SERIES


def test_all_watched_and_no_room_is_no_harm() -> None:
    history = History(series_max=CLUSTER_SERIES + TOPIC_SERIES)
    topics = [topic(f"t{number}") for number in range(5)]
    at = record(history, 1, *topics)
    history.watch([("cluster", "in"), *(("topic", f"t{number}", "in") for number in range(5))])
    history.add(snapshot(at + STEP_S_MIN, *topics))
    assert history.series_count <= CLUSTER_SERIES + TOPIC_SERIES


@pytest.mark.parametrize("step", [-3600.0, 7200.0])
def test_a_clock_that_jumps_is_survived(step: float) -> None:
    history = History()
    at = record(history, 5, start=1e6)
    record(history, 5, start=at + step)
    times, values = history.points(("cluster", "in"))
    assert len(times) == len(values)
    assert not any(value is not None and math.isnan(value) for value in values)
    assert values[-1] == 4.0
