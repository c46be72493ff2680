"""Checks that times in options and filters are taken to the microsecond, as the column `timestamp` has them."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from broker.logs import read_all
from harness import Nsqd
from spark.source_rig import address, bodies

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

from pyspark.sql.datasource import Filter, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual

from nsquark.spark.options import SourceOptions
from nsquark.spark.source.batch import plan_batch
from nsquark.spark.source.pushdown import Bounds

pytestmark = pytest.mark.ours

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FAR = datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)


def planned(nsqd: Nsqd, topic: str, *filters: Filter, **options: Any) -> int:
    """Returns how many messages a batch with these filters and options reads."""
    parsed = SourceOptions.parse({"nsqd": address(nsqd), "topic": topic, **options})
    return sum(part.count for part in plan_batch(parsed, Bounds().narrowed(filters).cut))


def publish_one_by_one(nsqd: Nsqd, topic: str, count: int) -> list[datetime]:
    """Publishes messages, several within a millisecond; returns their times as the column `timestamp` has them."""
    with nsqd.connect() as wire:
        for body in bodies(0, count):
            wire.publish(topic, body)
    return [EPOCH + timedelta(microseconds=record.timestamp_ns // 1000) for record in read_all(nsqd, topic)]


def test_rows_at_the_border_of_a_time_are_read_once(nsqd: Nsqd, topic: str) -> None:
    times = publish_one_by_one(nsqd, topic, 60)
    for moment in times[::7]:
        before = sum(time < moment for time in times)
        text = moment.isoformat()
        assert planned(nsqd, topic, endingTimestamp=text) == before, text
        assert planned(nsqd, topic, startingTimestamp=text) == len(times) - before, text
        assert planned(nsqd, topic, LessThan(("timestamp",), moment)) == before, text
        assert planned(nsqd, topic, GreaterThanOrEqual(("timestamp",), moment)) == len(times) - before, text


def test_times_that_nsqd_cannot_count_are_before_or_after_all_messages(nsqd: Nsqd, topic: str) -> None:
    count = len(publish_one_by_one(nsqd, topic, 5))
    assert planned(nsqd, topic, LessThanOrEqual(("timestamp",), FAR)) == count
    assert planned(nsqd, topic, GreaterThan(("timestamp",), FAR)) == 0
    assert planned(nsqd, topic, endingTimestamp=FAR.isoformat()) == count
    assert planned(nsqd, topic, endingTimestamp="9999999999999999") == count
    assert planned(nsqd, topic, startingTimestamp=FAR.isoformat()) == 0
