"""Checks `nsquark compact-archive`: few files, and each message once for every reader, wherever it is killed."""

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness import Nsqd

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

import pyarrow.parquet

from nsquark.base.errors import UserError
from nsquark.spark.jobs import archive, compact
from nsquark.spark.jobs.layout import CHECKPOINT, COMPACTION, SPARK_LOG
from nsquark.spark.jobs.sink_log import ListFile, live_files, live_lists, may_be_listing
from spark.compact_killed import STEPS
from spark.source_rig import STARTS_MAX, WORKER_WAS_LATE, address, bodies, publish, run_to_end
from spark.test_jobs import arguments

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.ours

SCRIPT = Path(__file__).with_name("compact_killed.py")
TOPIC = "compacted"
BATCH = 20
FIRST = 12 * BATCH
"""The archive has so many messages at first: nine batches and a whole list of ten, then two more."""
TARGET_BYTES = 1 << 27
ROUNDS_MAX = 5


def start(spark: "SparkSession", nsqd: Nsqd, output: Path) -> "StreamingQuery":
    options = {"nsqd": address(nsqd), "topic": TOPIC, "maxMessagesPerTrigger": str(BATCH), "minPartitions": "2"}
    return archive.start(spark, options, str(output), str(output / CHECKPOINT), None)


@pytest.fixture(scope="module")
def built(spark: "SparkSession", nsqd: Nsqd, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes an archive of many small files."""
    output = tmp_path_factory.mktemp("archive") / "lake"
    publish(nsqd, TOPIC, bodies(0, FIRST))
    run_to_end(lambda: start(spark, nsqd, output))
    assert [file.path.name for file in live_lists(output)] == ["9.compact", "10", "11"]
    return output


def copied(built: Path, to: Path) -> Path:
    """Makes a copy that is an archive of its own, although the list has whole paths."""
    shutil.copytree(built, to)
    for path in (to / SPARK_LOG).iterdir():
        if path.name.startswith("."):
            path.unlink()
        else:
            path.write_text(path.read_text().replace(str(built), str(to)))
    return to


def read_by_spark(spark: "SparkSession", directory: Path) -> Counter[bytes]:
    return Counter(bytes(row.body) for row in spark.read.parquet(str(directory)).select("body").collect())


def read_files(paths: Iterator[Path] | set[Path]) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    for path in paths:
        found.update(pyarrow.parquet.ParquetFile(path).read(["body"])["body"].to_pylist())
    return found


def read_without_list(directory: Path) -> Counter[bytes]:
    """Reads an archive as readers do that know nothing of Spark."""
    return read_files(path for path in directory.rglob("*.parquet") if not path.name.startswith((".", "_")))


def compaction(directory: Path) -> compact.Compaction:
    return compact.Compaction(directory, TARGET_BYTES, None)


def test_few_files_and_the_same_messages(
    spark: "SparkSession", built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = copied(built, tmp_path / "lake")
    before = len(live_files(lake))
    hours = len({path.parent for path in live_files(lake)})
    assert before >= 12 * 2
    assert compact.run(arguments(compact, str(lake))) == 0
    assert f"{before} files of {FIRST} messages became " in capsys.readouterr().out
    assert len(live_files(lake)) <= 3 * hours, "one for each file of the list, in each hour"
    assert read_by_spark(spark, lake) == Counter(bodies(0, FIRST)) == read_without_list(lake)
    assert compact.run(arguments(compact, str(lake))) == 0
    assert capsys.readouterr().out.startswith("0 files of 0 messages became 0: ")
    columns = {(row.topic, row.nsqd is None, row.id is None) for row in spark.read.parquet(str(lake)).collect()}
    assert columns == {(TOPIC, False, False)}


class Killed(BaseException):
    """Stands for a kill: nothing in the job may catch it."""


def test_killed_at_any_step_a_reader_sees_each_message_once(
    spark: "SparkSession", built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Counter(bodies(0, FIRST))
    left = [0]

    def stepping(real: Any) -> Any:
        def step(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                raise Killed
            return real(*args, **options)

        return step

    killed = 0
    while True:
        lake = copied(built, tmp_path / str(killed))
        with monkeypatch.context() as patched:
            for name in STEPS:
                patched.setattr(os, name, stepping(getattr(os, name)))
            left[0] = killed + 1
            try:
                compaction(lake).run()
                break
            except Killed:
                pass
        assert read_files(live_files(lake)) == expected, f"killed at step {killed}"
        if killed % 12 == 0:
            assert read_by_spark(spark, lake) == expected, f"killed at step {killed}"
        compaction(lake).run()
        assert read_files(live_files(lake)) == expected == read_without_list(lake), f"after step {killed}"
        assert not [path for path in lake.rglob(".*") if path.suffix == ".tmp" and "compact" in path.name]
        shutil.rmtree(lake)
        killed += 1
    assert killed > 40


def test_a_real_kill(spark: "SparkSession", built: Path, tmp_path: Path) -> None:
    lake = copied(built, tmp_path / "lake")
    for step in (4, 9, 14, 30):
        process = subprocess.run([sys.executable, SCRIPT, lake, str(step)], check=False)
        assert process.returncode == -signal.SIGKILL
        assert read_by_spark(spark, lake) == Counter(bodies(0, FIRST)), f"killed at step {step}"
    assert compaction(lake).run().left == 0
    assert read_by_spark(spark, lake) == Counter(bodies(0, FIRST)) == read_without_list(lake)


def test_beside_a_running_archive_job(spark: "SparkSession", nsqd: Nsqd, built: Path) -> None:
    """This test is the last of its module: the archive itself goes on, over its next whole list."""
    compaction(built).run()
    batches = FIRST // BATCH
    seen = FIRST
    merged = 0
    # One round is enough, unless this process gets so little time that it finds nothing to merge while the job runs.
    for _ in range(ROUNDS_MAX):
        publish(nsqd, TOPIC, bodies(batches * BATCH, (batches + 14) * BATCH))
        batches += 14
        for _ in range(STARTS_MAX):
            query = start(spark, nsqd, built)
            while query.isActive:
                merged += compaction(built).run().merged
                found = read_by_spark(spark, built)
                assert set(found.values()) == {1}
                assert seen <= found.total()
                seen = found.total()
            if WORKER_WAS_LATE not in str(query.exception()):
                break
        query.awaitTermination()
        if merged:
            break
    assert merged
    assert compaction(built).run().left == 0
    everything = Counter(bodies(0, batches * BATCH))
    assert read_by_spark(spark, built) == everything == read_without_list(built)
    numbers = [file.path.name for file in live_lists(built)]
    whole = batches // 10 * 10 - 1
    assert numbers[0] == f"{whole}.compact" and len(numbers) == batches - whole, numbers


def test_files_wait_while_a_job_may_be_listing_them(tmp_path: Path) -> None:
    log, checkpoint = tmp_path / SPARK_LOG, tmp_path / CHECKPOINT
    for directory in (log, checkpoint / "offsets", checkpoint / "commits"):
        directory.mkdir(parents=True)

    def have(*names: str) -> None:
        for name in names:
            (log / name).touch()

    def begun(batch: int) -> None:
        (checkpoint / "offsets" / str(batch)).touch()

    have("9.compact", "10")
    begun(11)
    assert not may_be_listing(tmp_path, None), "the eleventh batch lists nothing"
    have(*map(str, range(11, 19)))
    assert not may_be_listing(tmp_path, None), "the twentieth has not begun"
    begun(19)
    assert may_be_listing(tmp_path, None)
    assert may_be_listing(tmp_path, tmp_path / "elsewhere"), "nobody knows what it does"
    have("19.compact")
    assert not may_be_listing(tmp_path, None)


def test_a_list_that_spark_has_removed_meanwhile_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ListFile(tmp_path / "9.compact", 9, is_whole=True).write([])
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_of_a_list_goes_although_spark_has_removed_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(_fd: int) -> None:
        raise Killed

    log = tmp_path / SPARK_LOG
    log.mkdir()
    (log / "10").write_text("v1")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", kill)
        with pytest.raises(Killed):
            ListFile(log / "10", 10, is_whole=False).write([])
    (log / "10").unlink()
    assert [path.name for path in log.iterdir()] == [".10.nsquark.tmp"]
    compaction(tmp_path).run()
    assert not list(log.iterdir())


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no archive"):
        compact.run(arguments(compact, str(tmp_path)))
    with pytest.raises(UserError, match="--target-mib is below 1"):
        compact.run(arguments(compact, str(tmp_path), "--target-mib", "0"))


@pytest.mark.parametrize("damage", [b'[{"merged":"\xff"}]', b"[{", b"[" * 100_000])
def test_a_damaged_journal_is_named(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / SPARK_LOG).mkdir()
    journal = tmp_path / COMPACTION / compact.JOURNAL
    journal.parent.mkdir()
    journal.write_bytes(damage)
    with pytest.raises(UserError, match=r"journal\.json is damaged .*: remove it"):
        compact.Compaction(tmp_path, TARGET_BYTES, None).run()
