"""Checks `spark.readStream.format("nsq")` in real queries."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness import Nsqd, eventually
from spark.source_rig import (
    QUERY_TIMEOUT_S,
    Stream,
    addresses,
    bodies,
    info,
    nsqd_id,
    on_fixed_port,
    publish,
    rows_by_batch,
    stream_reader,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.ours


def test_runs_of_available_now_go_on_where_the_last_ended(
    spark: "SparkSession", nsqd: Nsqd, topic: str, tmp_path: Path
) -> None:
    stream = Stream(spark, tmp_path)
    options = {"startingOffsets": "earliest", "channel": "archive", "maxMessagesPerTrigger": 400}
    publish(nsqd, topic, bodies(0, 1000))
    query = stream.run(stream_reader(spark, nsqd, topic, **options))
    assert rows_by_batch(query) == [400, 400, 200]
    assert stream.bodies() == bodies(0, 1000)
    assert nsqd.channel(topic, "archive")["depth"] == 0, "committed also after the last batch"
    publish(nsqd, topic, bodies(1000, 1100))
    assert nsqd.channel(topic, "archive")["depth"] == 100
    query = stream.run(stream_reader(spark, nsqd, topic, **options))
    assert rows_by_batch(query) == [100]
    assert stream.bodies() == bodies(0, 1100)


def test_a_running_query_sees_what_comes(
    spark: "SparkSession", make_nsqd: Callable[..., Nsqd], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two nsqds one is killed and started again, and a third appears: all is read, and the listener says how far."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from nsquark.spark.listener import NsqListener

    registry = prometheus_client.CollectorRegistry()
    listener = NsqListener(registry)
    spark.streams.addListener(listener)
    caplog.set_level(logging.INFO, "nsquark.spark")
    first, second, third = (on_fixed_port(make_nsqd(data_path=tmp_path / name)) for name in ("one", "two", "three"))
    third.kill()
    stream = Stream(spark, tmp_path)
    publish(first, "t", bodies(0, 100))
    where = addresses(first, second, third)
    query = stream.start(stream_reader(spark, where, "t", startingOffsets="earliest", channel="live"))
    try:
        stream.await_bodies(query, bodies(0, 100))
        publish(second, "t", bodies(100, 200))
        query.processAllAvailable()
        assert stream.bodies() == bodies(0, 200)
        publish(second, "t", bodies(200, 300))
        second.restart(crash=True)
        publish(first, "t", bodies(300, 400))
        third.start()
        publish(third, "t", bodies(400, 500))
        stream.await_bodies(query, bodies(0, 500))
        eventually(
            lambda: [daemon.channel("t", "live")["depth"] for daemon in (first, second, third)] == [0, 0, 0],
            QUERY_TIMEOUT_S,
        )
        labels = {"query": str(query.id), "topic": "t", "nsqd": nsqd_id(third)}
        eventually(
            lambda: registry.get_sample_value("nsquark_spark_next_seq", labels) == info(third, "t")["next"],
            QUERY_TIMEOUT_S,
        )
        assert registry.get_sample_value("nsquark_spark_behind_messages", labels) == 0
        # The batch with the last rows of the third nsqd need not be the last one, and listeners are told later.
        eventually(
            lambda: registry.get_sample_value("nsquark_spark_input_rows_total", {"query": str(query.id)}) == 500,
            QUERY_TIMEOUT_S,
        )
        assert "0 behind" in caplog.text
    finally:
        query.stop()
        spark.streams.removeListener(listener)


def test_an_error_of_the_source_ends_the_query_with_its_sentence(
    spark: "SparkSession", nsqd: Nsqd, topic: str, tmp_path: Path
) -> None:
    publish(nsqd, topic, bodies(0, 5))
    Stream(spark, tmp_path / "one").run(stream_reader(spark, nsqd, topic, channel="mine"))
    with pytest.raises(Exception, match=r"belongs to query .* and this is query"):
        Stream(spark, tmp_path / "two").run(stream_reader(spark, nsqd, topic, channel="mine"))
