"""Checks the option `headers`: envelopes are opened where they are asked for, and only there."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from client.pool_rig import address_of
from harness import Nsqd
from nsquark import sync
from nsquark.client.envelope import unwrap
from spark.source_rig import Stream, reader, stream_reader

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

from pyspark.errors import PySparkException

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.ours

SENT = {b"one": {"tenant": "acme", "ä": "ö"}, b"two": {}, b"plain": {}}


@pytest.fixture
def messages(nsqd: Nsqd, topic: str) -> str:
    with sync.Producer(address_of(nsqd), envelope=True) as producer, sync.Producer(address_of(nsqd)) as plain:
        producer.publish(topic, b"one", headers=SENT[b"one"])
        producer.publish(topic, b"two")
        plain.publish(topic, b"plain")
    return topic


def test_headers_and_bodies_of_a_batch(spark: "SparkSession", nsqd: Nsqd, messages: str) -> None:
    frame = reader(spark, nsqd, messages, headers="true").load()
    assert frame.columns == ["topic", "nsqd", "seq", "id", "timestamp", "body", "headers"]
    assert {bytes(row.body): row.headers for row in frame.collect()} == SENT
    for schema in ("headers map<string,string>", "seq bigint, body binary", "seq bigint"):
        rows = reader(spark, nsqd, messages, headers="true").schema(schema).load().collect()
        assert len(rows) == 3
        if "body" in schema:
            assert {bytes(row.body) for row in rows} == SENT.keys()
        if "headers" in schema:
            assert sorted(len(row.headers) for row in rows) == [0, 0, 2]


def test_without_the_option_bodies_are_as_they_came(spark: "SparkSession", nsqd: Nsqd, messages: str) -> None:
    frame = reader(spark, nsqd, messages).load()
    assert "headers" not in frame.columns
    raw = [bytes(row.body) for row in frame.collect()]
    assert sum(unwrap(body).key is not None for body in raw) == 2
    with pytest.raises(PySparkException, match="headers=true"):
        reader(spark, nsqd, messages).schema("headers map<string,string>").load().collect()


def test_headers_of_a_stream(spark: "SparkSession", nsqd: Nsqd, messages: str, tmp_path: Path) -> None:
    stream = Stream(spark, tmp_path)
    stream.run(stream_reader(spark, nsqd, messages, headers="true", startingOffsets="earliest"))
    rows = spark.read.parquet(str(stream.output)).collect()
    assert {bytes(row.body): row.headers for row in rows} == SENT
