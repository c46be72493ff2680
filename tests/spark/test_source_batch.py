"""Checks `spark.read.format("nsq")`: what a batch reads."""

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness import Nsqd
from harness.upgrades import make_certificate
from spark.source_rig import addresses, bodies, info, nsqd_id, publish, read_bodies, reader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.ours


def test_columns_are_those_of_the_message(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    before = datetime.now(UTC)
    publish(nsqd, topic, [b"first", b"\xff\x00 not text", "größer".encode()])
    rows = reader(spark, nsqd, topic).load().orderBy("seq").collect()
    there = info(nsqd, topic)
    assert [row.seq for row in rows] == list(range(there["first"], there["next"]))
    assert [bytes(row.body) for row in rows] == [b"first", b"\xff\x00 not text", "größer".encode()]
    assert {(row.topic, row.nsqd) for row in rows} == {(topic, nsqd_id(nsqd))}
    assert all(int(row.id, 16) & (2**53 - 1) == row.seq for row in rows)
    times = reader(spark, nsqd, topic).load().selectExpr("unix_micros(timestamp) as us").collect()
    assert all(before.timestamp() * 1e6 - 1 <= row.us <= time.time() * 1e6 for row in times)


def test_a_schema_prunes_and_orders(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, bodies(0, 3))
    frame = reader(spark, nsqd, topic).schema("body binary, seq bigint").load()
    assert frame.columns == ["body", "seq"]
    assert read_bodies(frame) == bodies(0, 3)
    assert reader(spark, nsqd, topic).schema("id string").load().distinct().count() == 3


def test_many_topics_on_many_nsqds_between_two_positions(
    spark: "SparkSession", make_nsqd: Callable[..., Nsqd], tmp_path: Path
) -> None:
    one, two = (make_nsqd(data_path=tmp_path / name) for name in ("one", "two"))
    for daemon, low in ((one, 0), (two, 1000)):
        publish(daemon, "a_1", bodies(low, low + 100))
        publish(daemon, "a_2", bodies(low + 100, low + 200))
        publish(daemon, "b", bodies(low + 200, low + 300))
    where = addresses(one, two)
    everything = reader(spark, where, topicPattern="a_.", minPartitions=6).load()
    assert everything.rdd.getNumPartitions() >= 6
    assert read_bodies(everything) == bodies(0, 200) + bodies(1000, 1200)
    start = {f"a_1@{nsqd_id(one)}": info(one, "a_1")["first"] + 90, f"a_1@{nsqd_id(two)}": "latest"}
    end = {f"a_1@{nsqd_id(one)}": info(one, "a_1")["first"] + 95}
    some = reader(spark, where, "a_1", startingOffsets=json.dumps(start), endingOffsets=json.dumps(end)).load()
    assert read_bodies(some) == bodies(90, 95)


def test_between_two_times(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    moments = []
    for low in range(0, 30, 10):
        time.sleep(0.002)  # the next millisecond
        moments.append(time.time_ns() // 1_000_000 + 1)
        time.sleep(0.002)
        publish(nsqd, topic, bodies(low, low + 10))
    iso = datetime.fromtimestamp(moments[2] / 1000, UTC).isoformat(timespec="milliseconds")
    frame = reader(spark, nsqd, topic, startingTimestamp=moments[1], endingTimestamp=iso).load()
    assert read_bodies(frame) == bodies(10, 20)


def test_an_empty_topic_has_no_rows(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    nsqd.post("/topic/create", topic=topic)
    assert reader(spark, nsqd, topic).load().count() == 0


def test_large_and_empty_looking_messages(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    """Some messages are larger than an Arrow batch is meant to be, among small ones."""
    publish(nsqd, topic, [b"a", bytes(1_000_000), b"b", *[b"x" * 1000] * 3000])
    publish(nsqd, topic, [bytes(1_000_000)] * 4)
    lengths = reader(spark, nsqd, topic).load().selectExpr("length(body) as n").collect()
    assert sorted(row.n for row in lengths) == sorted([1, 1_000_000, 1, *[1000] * 3000, *[1_000_000] * 4])


def test_tls(spark: "SparkSession", make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    daemon = make_nsqd(f"--tls-cert={certificate}", f"--tls-key={key}", "--tls-required=tcp-https")
    publish(daemon, "t", bodies(0, 3))
    secure = "https://{}:{}".format(*daemon.https)
    assert read_bodies(reader(spark, secure, "t", tlsRootCaFile=certificate).load()) == bodies(0, 3)
    assert read_bodies(reader(spark, secure, "t", tlsInsecureSkipVerify="true").load()) == bodies(0, 3)
    with pytest.raises(Exception, match="write tlsRootCaFile"):
        reader(spark, secure, "t").load().collect()
    with pytest.raises(Exception, match="must be PEM files"):
        reader(spark, secure, "t", tlsRootCaFile="/nowhere.pem").load().collect()
