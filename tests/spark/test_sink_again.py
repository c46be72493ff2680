"""Checks that once means once: a batch that the sink has written and Spark has not noted is run again, the topic having
grown.
"""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from broker.logs import read_all
from harness import Nsqd
from spark.source_rig import QUERY_TIMEOUT_S, address, bodies, publish, reader, stream_reader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.ours


def copy(spark: "SparkSession", daemon: Nsqd, topic: str, checkpoint: Path) -> None:
    """Copies all that is in the topic now to another, once."""
    stream = stream_reader(spark, daemon, topic, startingOffsets="earliest", minPartitions=8).load()
    writer = stream.select("body").writeStream.format("nsq").option("checkpointLocation", str(checkpoint))
    options: dict[str, Any] = {"nsqd": address(daemon), "topic": f"{topic}_copy", "idempotent": "true"}
    query = writer.options(**options).trigger(availableNow=True).start()
    assert query.awaitTermination(QUERY_TIMEOUT_S), query.status


def forget_last_commit(checkpoint: Path) -> None:
    """Leaves the checkpoint as if the driver had died between the sink and Spark's own log."""
    numbers = [int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdecimal()]
    last = checkpoint / "commits" / str(max(numbers))
    last.unlink()
    (checkpoint / "commits" / f".{last.name}.crc").unlink(missing_ok=True)


def test_a_batch_that_is_run_again_after_the_topic_has_grown_is_written_once(
    spark: "SparkSession", nsqd: Nsqd, topic: str, tmp_path: Path
) -> None:
    everything: list[bytes] = []

    def grow(count: int) -> None:
        for number, low in enumerate(range(len(everything), len(everything) + count, 10)):
            messages = [body + b"x" * (number % 50) * 4 for body in bodies(low, low + 10)]
            publish(nsqd, topic, messages)
            everything.extend(messages)

    grow(950)
    copy(spark, nsqd, topic, tmp_path)
    for _ in range(3):
        forget_last_commit(tmp_path)
        grow(1000)
        copy(spark, nsqd, topic, tmp_path)
    copied = Counter(record.body for record in read_all(nsqd, f"{topic}_copy"))
    assert sum(copied.values()) == len(everything) == 3950
    assert copied == Counter(everything)


def test_a_batch_write_with_a_token_is_written_once_although_the_topic_has_grown(
    spark: "SparkSession", nsqd: Nsqd, topic: str
) -> None:
    for low in range(0, 950, 10):
        publish(nsqd, topic, bodies(low, low + 10))
    found = nsqd.get("/log/info", topic=topic).json()
    ending = json.dumps({f"{topic}@{found['nsqd_id']}": found["next"]})
    for _ in range(3):
        rows = reader(spark, nsqd, topic, endingOffsets=ending, minPartitions=8).load().select("body")
        options: dict[str, Any] = {
            "nsqd": address(nsqd),
            "topic": f"{topic}_copy",
            "idempotent": "true",
            "token": topic,
        }
        rows.write.format("nsq").mode("append").options(**options).save()
        for low in range(1000, 1500, 7):
            publish(nsqd, topic, bodies(low, low + 7))
    assert sorted(record.body for record in read_all(nsqd, f"{topic}_copy")) == bodies(0, 950)
