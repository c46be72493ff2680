"""Checks that filters choose what is read at all, and columns what travels: with Spark's push-down on, and as ever with
it off.
"""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from harness import Nsqd, eventually
from spark.sink_rig import log_bodies
from spark.source_rig import address, bodies, nsqd_id, publish, reader

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

import pyarrow as pa
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual, Not

from nsquark.spark.options import SourceOptions
from nsquark.spark.source.batch import plan_batch
from nsquark.spark.source.packed_rows import read_partition
from nsquark.spark.source.pushdown import Bounds
from nsquark.spark.source.range_rows import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.ours

SETTING = "spark.sql.python.filterPushdown.enabled"


def moment_us(time_ns: int) -> datetime:
    return datetime.fromtimestamp(time_ns // 1000 / 1e6, UTC)


def planned(nsqd: Nsqd, filters: list[Filter], **options: Any) -> int:
    """Returns how many messages a batch with these filters reads."""
    parsed = SourceOptions.parse({"nsqd": address(nsqd), **options})
    return sum(part.count for part in plan_batch(parsed, Bounds().narrowed(filters).cut))


def three_days(nsqd: Nsqd, topic: str) -> list[datetime]:
    """Publishes three times a thousand messages; returns the times around them."""
    between = []
    for day in range(3):
        between.append(moment_us(time.time_ns()))
        time.sleep(0.002)
        for low in range(0, 1000, 100):
            publish(nsqd, topic, bodies(1000 * day + low, 1000 * day + low + 100))
        time.sleep(0.002)
    return [*between, moment_us(time.time_ns())]


def test_filters_on_time_read_a_day_of_a_month(nsqd: Nsqd, topic: str) -> None:
    days = three_days(nsqd, topic)
    cases: list[tuple[list[Filter], int]] = [
        ([GreaterThanOrEqual(("timestamp",), days[1]), LessThan(("timestamp",), days[2])], 1000),
        ([GreaterThan(("timestamp",), days[2])], 1000),
        ([LessThanOrEqual(("timestamp",), days[1])], 1000),
        ([LessThan(("timestamp",), days[0])], 0),
        ([GreaterThan(("timestamp",), days[3])], 0),
        ([GreaterThanOrEqual(("timestamp",), days[0]), LessThan(("timestamp",), days[3])], 3000),
        ([Not(LessThan(("timestamp",), days[1]))], 3000),
    ]
    for filters, count in cases:
        assert planned(nsqd, filters, topic=topic) == count, filters


def test_older_times_behind_newer_ones_are_not_left_out(nsqd: Nsqd, topic: str) -> None:
    # Whoever stands still for longer than the early one is deferred publishes the other too late, and tries again.
    for topic in [f"{topic}_{number}" for number in range(20)]:
        with nsqd.connect() as wire:
            before = moment_us(time.time_ns() + 1000)
            wire.DPUB(topic, 1000, b"early, but late in the log")
            wire.expect_ok()
            time.sleep(0.01)
            after_early = moment_us(time.time_ns())
            time.sleep(0.01)
            wire.publish(topic, b"first in the log")
        eventually(lambda topic=topic: len(log_bodies(nsqd, topic)) == 2)
        if log_bodies(nsqd, topic)[0] == b"first in the log":
            break
    assert log_bodies(nsqd, topic) == [b"first in the log", b"early, but late in the log"]
    assert planned(nsqd, [LessThan(("timestamp",), after_early)], topic=topic) == 2, "up to the one that came late"
    assert planned(nsqd, [LessThan(("timestamp",), before)], topic=topic) <= 2


def test_filters_on_seq_topic_and_nsqd(nsqd: Nsqd, topic: str) -> None:
    for number in range(5):
        publish(nsqd, f"{topic}_{number}", bodies(0, 100))
    pattern = {"topicPattern": f"{topic}_.*"}
    assert planned(nsqd, [], **pattern) == 500
    assert planned(nsqd, [EqualTo(("topic",), f"{topic}_3")], **pattern) == 100
    assert planned(nsqd, [In(("topic",), (f"{topic}_3", f"{topic}_4", "x"))], **pattern) == 200
    assert planned(nsqd, [EqualTo(("nsqd",), "another")], **pattern) == 0
    assert planned(nsqd, [EqualTo(("nsqd",), nsqd_id(nsqd))], **pattern) == 500
    first = nsqd.get("/log/info", topic=f"{topic}_0").json()["first"]
    only = {"topic": f"{topic}_0"}
    assert planned(nsqd, [GreaterThan(("seq",), first + 9), LessThanOrEqual(("seq",), first + 29)], **only) == 20
    assert planned(nsqd, [EqualTo(("seq",), first)], **only) == 1


def test_bodies_that_nobody_asked_for_do_not_travel(nsqd: Nsqd, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsquark.spark.endpoint import _TimedReader

    received = [0]
    readinto = _TimedReader.readinto

    def counted(self: Any, buffer: Any, /) -> int | None:
        size = readinto(self, buffer)
        received[0] += size or 0
        return size

    monkeypatch.setattr(_TimedReader, "readinto", counted)
    names = [f"{topic}_{number}" for number in range(3)]
    for name in names:
        publish(nsqd, name, [body + bytes(10_000) for body in bodies(0, 100)])
    rows: dict[tuple[str, ...], list[Any]] = {}
    for topics in (names[0], ",".join(names)):
        options = SourceOptions.parse({"nsqd": address(nsqd), "topic": topics})
        for columns in (("seq", "id", "timestamp"), ("seq", "id", "timestamp", "body")):
            schema = pa.schema([arrow_schema(options).field(name) for name in columns])
            parts = plan_batch(options)
            received[0] = 0
            found = [
                row for part in parts for batch in read_partition(options, schema, part) for row in batch.to_pylist()
            ]
            rows[topics, *columns] = [{name: row[name] for name in columns[:3]} for row in found]
            each = received[0] / len(found)
            assert each < 60 if "body" not in columns else each > 10_000, (topics, columns, each)
        whole, without = (rows[topics, *names] for names in (columns, columns[:3]))
        assert whole == without and len(whole) == 100 * (topics.count(",") + 1)


@pytest.fixture(params=["true", "false"])
def pushdown(spark: "SparkSession", request: pytest.FixtureRequest) -> Iterator[bool]:
    before = spark.conf.get(SETTING)
    spark.conf.set(SETTING, request.param)
    yield request.param == "true"
    spark.conf.set(SETTING, str(before))


def scanned(frame: "DataFrame") -> int:
    """Returns how many rows the source gave, after an action."""
    leaf = frame._jdf.queryExecution().executedPlan().collectLeaves().head()
    return int(leaf.metrics().apply("numOutputRows").value())


def test_spark_reads_what_the_filter_chooses(spark: "SparkSession", nsqd: Nsqd, topic: str, pushdown: bool) -> None:
    days = three_days(nsqd, topic)
    frame = reader(spark, nsqd, topic, pushFilters="true").load()
    chosen = frame.where((frame.timestamp >= days[1]) & (frame.timestamp < days[2]))
    assert sorted(bytes(row.body) for row in chosen.collect()) == bodies(1000, 2000)
    assert scanned(chosen) == (1000 if pushdown else 3000)
    nothing = frame.where("topic = 'another'")
    assert nothing.collect() == [] and scanned(nothing) == (0 if pushdown else 3000)
    assert reader(spark, nsqd, topic).load().count() == 3000
    assert reader(spark, nsqd, topic).load().where("seq % 2 = 0 AND body IS NOT NULL").count() == 1500


def test_without_the_option_a_frame_can_be_used_twice_whatever_the_setting(
    spark: "SparkSession", nsqd: Nsqd, topic: str, pushdown: bool
) -> None:
    for number in range(2):
        publish(nsqd, f"{topic}_{number}", bodies(0, 10 + 10 * number))
    frame = reader(spark, nsqd, topicPattern=f"{topic}_.").load()
    sides = [frame.where(f"topic = '{topic}_{number}'") for number in range(2)]
    assert sides[0].union(sides[1]).count() == 30
    assert sides[0].crossJoin(sides[1]).count() == 200
    assert frame.count() == 30
