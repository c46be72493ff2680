"""Checks `nsquark archive --format delta`: each message is once in the table, also for readers that know nothing of
Spark.
"""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness import Nsqd

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")
pytest.importorskip("deltalake", reason="it is not installed: pip install 'nsquark[delta]'")

import deltalake

from nsquark.base.errors import UserError
from nsquark.spark.jobs import archive, replay
from nsquark.spark.jobs.layout import CHECKPOINT
from nsquark.spark.jobs.session import read_messages
from spark.source_rig import address, bodies, publish
from spark.test_jobs import arguments
from spark.test_sink_again import forget_last_commit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.ours


def table_bodies(directory: Path) -> Counter[bytes]:
    return Counter(deltalake.DeltaTable(str(directory)).to_pyarrow_table(columns=["body"])["body"].to_pylist())


def update(spark: "SparkSession", nsqd: Nsqd, topics: str, output: Path) -> None:
    options = {"nsqd": address(nsqd), "topic": topics, "channel": "archive", "maxMessagesPerTrigger": "300"}
    checkpoint = str(output / CHECKPOINT)
    archive.start(spark, options, str(output), checkpoint, None, "delta").awaitTermination()


def test_a_delta_archive_has_each_message_once_after_a_batch_was_run_again(
    spark: "SparkSession", nsqd: Nsqd, topic: str, tmp_path: Path
) -> None:
    publish(nsqd, topic, bodies(0, 500))
    publish(nsqd, f"{topic}.other", [b"\x00\xff"])
    update(spark, nsqd, f"{topic},{topic}.other", tmp_path)
    forget_last_commit(tmp_path / CHECKPOINT)
    publish(nsqd, topic, bodies(500, 800))
    update(spark, nsqd, f"{topic},{topic}.other", tmp_path)
    assert table_bodies(tmp_path) == Counter([*bodies(0, 800), b"\x00\xff"])
    table = deltalake.DeltaTable(str(tmp_path)).to_pyarrow_table()
    assert set(table.column_names) == {"topic", "nsqd", "seq", "id", "timestamp", "body", "date", "hour"}
    for row in table.to_pylist():
        assert (str(row["date"]), row["hour"]) == (f"{row['timestamp']:%Y-%m-%d}", f"{row['timestamp']:%H}")

    words = ["--archive", str(tmp_path), "--topic", topic, "--to-topic", "unused"]
    read = read_messages(spark, arguments(replay, *words)).select("body").collect()
    assert Counter(bytes(row.body) for row in read) == Counter(bodies(0, 800)), "the other jobs read the table too"


def test_an_archive_keeps_its_format(tmp_path: Path) -> None:
    (tmp_path / "_spark_metadata").mkdir()
    with pytest.raises(UserError, match="is an archive in the format parquet"):
        archive.check_format(str(tmp_path), "delta")
    with pytest.raises(UserError, match="write its path"):
        archive.check_format("s3a://bucket/archive", "delta")
