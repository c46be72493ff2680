"""Checks jobs whose checkpoint or output was put back from a backup: nothing is lost, and what cannot go on says so."""

import shutil
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from broker.logs import read_all
from harness import Nsqd
from spark.source_rig import QUERY_TIMEOUT_S, address, bodies, on_fixed_port, publish, read_bodies

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")
pytest.importorskip("deltalake", reason="it is not installed: pip install 'nsquark[delta]'")

from pyspark.errors import StreamingQueryException
from pyspark.sql import Row

from nsquark.base.errors import UserError
from nsquark.spark.jobs import archive, replay
from nsquark.spark.jobs.layout import CHECKPOINT
from nsquark.spark.jobs.replay_state import ReplayState
from nsquark.spark.jobs.session import reason_of
from nsquark.spark.sink.options import SinkOptions
from spark.jobs_driver import start_rollup
from spark.test_job_delta import table_bodies
from spark.test_job_kills import orders
from spark.test_sink_again import forget_last_commit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.ours, pytest.mark.timeout(600)]


class Archive:
    """Is an archive job with its checkpoint beside its output, so that either can be put back without the other."""

    def __init__(self, spark: "SparkSession", nsqd: Nsqd, topic: str, directory: Path, format_name: str) -> None:
        self._spark = spark
        self._nsqd = nsqd
        self._topic = topic
        self._format = format_name
        self.output = directory / "archive"
        self.checkpoint = directory / CHECKPOINT
        self._published = 0

    def publish(self, count: int) -> None:
        publish(self._nsqd, self._topic, bodies(self._published, self._published + count))
        self._published += count

    def update(self, batch_messages: int = 100, **more: Any) -> None:
        options = {"nsqd": address(self._nsqd), "topic": self._topic, "maxMessagesPerTrigger": str(batch_messages)}
        where = str(self.output), str(self.checkpoint)
        query = archive.start(self._spark, {**options, **more}, *where, None, self._format)
        assert query.awaitTermination(QUERY_TIMEOUT_S), query.status

    def bodies(self) -> list[bytes]:
        if self._format == "delta":
            return sorted(table_bodies(self.output).elements())
        return read_bodies(self._spark.read.parquet(str(self.output)))


def back_up(directory: Path) -> Path:
    backup = directory.with_name(f"{directory.name}.backup")
    shutil.copytree(directory, backup)
    return backup


def put_back(directory: Path) -> None:
    shutil.rmtree(directory)
    shutil.copytree(directory.with_name(f"{directory.name}.backup"), directory)


@pytest.fixture
def delta(spark: "SparkSession", nsqd: Nsqd, topic: str, tmp_path: Path) -> Archive:
    return Archive(spark, nsqd, topic, tmp_path, "delta")


@pytest.mark.parametrize("batch_messages", [70, *(pytest.param(size, marks=pytest.mark.long) for size in (100, 250))])
def test_a_delta_archive_whose_checkpoint_is_older_has_each_message_once(delta: Archive, batch_messages: int) -> None:
    delta.publish(150)
    delta.update()
    back_up(delta.checkpoint)
    delta.publish(300)
    delta.update()
    put_back(delta.checkpoint)
    delta.publish(200)
    delta.update(batch_messages)
    assert delta.bodies() == bodies(0, 650)


def test_a_delta_archive_with_a_new_checkpoint_has_each_message_once(delta: Archive) -> None:
    delta.publish(150)
    delta.update()
    shutil.rmtree(delta.checkpoint)
    delta.publish(100)
    delta.update()
    assert delta.bodies() == bodies(0, 250)


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_delta_archive_that_is_older_than_its_checkpoint_is_refused(delta: Archive, is_empty: bool) -> None:
    delta.publish(150)
    delta.update()
    back_up(delta.output)
    delta.publish(100)
    delta.update()
    put_back(delta.output)
    if is_empty:
        shutil.rmtree(delta.output)
    delta.publish(100)
    with pytest.raises(StreamingQueryException) as failed:
        delta.update()
    assert "is older than its checkpoint" in reason_of(failed.value)
    shutil.rmtree(delta.checkpoint)
    delta.update()
    assert delta.bodies() == bodies(0, 350), "a new checkpoint adds what is missing"


def test_a_delta_archive_has_messages_that_come_under_numbers_it_had(
    spark: "SparkSession", make_nsqd: Callable[..., Nsqd], topic: str, tmp_path: Path
) -> None:
    nsqd = on_fixed_port(make_nsqd())
    delta = Archive(spark, nsqd, topic, tmp_path, "delta")
    delta.publish(100)
    nsqd.stop()
    back_up(nsqd.data_path)
    nsqd.start()
    delta.publish(50)
    delta.update()
    nsqd.stop()
    put_back(nsqd.data_path)
    nsqd.start()
    delta.publish(70)
    delta.update(failOnDataLoss="false")
    assert delta.bodies() == bodies(0, 220)


@pytest.fixture
def parquet(spark: "SparkSession", nsqd: Nsqd, topic: str, tmp_path: Path) -> Archive:
    return Archive(spark, nsqd, topic, tmp_path, "parquet")


@pytest.mark.parametrize("is_new", [False, True])
def test_a_parquet_archive_whose_checkpoint_is_older_is_refused(parquet: Archive, is_new: bool) -> None:
    parquet.publish(150)
    parquet.update()
    parquet.update()
    back_up(parquet.checkpoint)
    parquet.publish(100)
    parquet.update()
    current = parquet.checkpoint.rename(parquet.checkpoint.with_name("current"))
    if not is_new:
        shutil.copytree(parquet.checkpoint.with_name(f"{CHECKPOINT}.backup"), parquet.checkpoint)
    parquet.publish(100)
    with pytest.raises(UserError, match=r"is older than .*archive"):
        parquet.update()
    shutil.rmtree(parquet.checkpoint, ignore_errors=True)
    current.rename(parquet.checkpoint)
    parquet.update()
    assert parquet.bodies() == bodies(0, 350)


def test_a_parquet_archive_that_is_older_than_its_checkpoint_is_refused(parquet: Archive) -> None:
    parquet.publish(150)
    parquet.update()
    back_up(parquet.output)
    parquet.publish(100)
    parquet.update()
    put_back(parquet.output)
    with pytest.raises(UserError, match="archive is older than its checkpoint"):
        parquet.update()


def test_a_parquet_archive_goes_on_after_batches_without_messages_and_a_kill(parquet: Archive) -> None:
    parquet.publish(150)
    for _ in range(12):  # beyond the first whole list of Spark's sink
        parquet.update(channel="archive")
        parquet.publish(10)
    forget_last_commit(parquet.checkpoint)
    parquet.update(channel="archive")
    assert parquet.bodies() == bodies(0, 270)


def test_a_rollup_whose_checkpoint_is_older_is_refused(
    spark: "SparkSession", nsqd: Nsqd, topic: str, tmp_path: Path
) -> None:
    publish(nsqd, topic, orders()[:600])
    start_rollup(spark, address(nsqd), topic, tmp_path).awaitTermination()
    checkpoint = tmp_path / "rollup" / CHECKPOINT
    back_up(checkpoint)
    publish(nsqd, topic, orders()[600:])
    start_rollup(spark, address(nsqd), topic, tmp_path).awaitTermination()
    put_back(checkpoint)
    with pytest.raises(UserError, match="is older than"):
        start_rollup(spark, address(nsqd), topic, tmp_path)


@pytest.mark.parametrize("piece", [10, 7, 40])
def test_a_replay_whose_state_is_older_leaves_nothing_out(nsqd: Nsqd, topic: str, tmp_path: Path, piece: int) -> None:
    options = SinkOptions.parse({"nsqd": address(nsqd), "topic": topic, "idempotent": "true"})
    rows = [Row(at_us=number, nsqd="n", topic="t", seq=number, body=b"%d" % number) for number in range(100)]
    directory = tmp_path / "replay"

    def go_on(low: int, high: int, step: int) -> None:
        with (
            ReplayState.opened(directory, {}, None, datetime(2026, 1, 31, tzinfo=UTC)) as state,
            replay._Appending(options, state) as writer,
        ):
            for first in range(low, high, step):
                writer.write(rows[first : min(first + step, high)])

    go_on(0, 20, 10)
    back_up(directory)
    go_on(20, 60, 10)
    put_back(directory)
    go_on(20, 100, piece)
    published = Counter(int(record.body) for record in read_all(nsqd, topic))
    assert set(published) == set(range(100)), "none is left out"
    if piece == 10:
        assert published.total() == 100, "pieces that are cut as before are not published again"
