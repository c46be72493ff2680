"""With `idempotent=true`, tasks and batches that Spark runs again lose nothing and double nothing."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness import Nsqd, eventually

pytest.importorskip("pyspark")

from . import flaky_driver
from .sink_rig import differences, http_address, log_bodies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.ours, pytest.mark.timeout(400)]

DRIVER_TIMEOUT_S = 240
FILES, LINES = 3, 500


def make_files(directory: Path) -> list[bytes]:
    """Makes files, each a batch of the stream; Spark takes them in the order of their times."""
    (directory / "in").mkdir()
    for number in range(FILES):
        path = directory / "in" / f"{number}.txt"
        path.write_text("".join(f"{number}-{line}\n" for line in range(LINES)))
        os.utime(path, (1_000_000 + number, 1_000_000 + number))
    return [f"{number}-{line}".encode() for number in range(FILES) for line in range(LINES)]


def test_retried_tasks_and_a_killed_driver(
    spark: "SparkSession", make_nsqd: Callable[..., Nsqd], tmp_path: Path
) -> None:
    nsqd = make_nsqd()
    lines = make_files(tmp_path)
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        command = [sys.executable, flaky_driver.__file__, http_address(nsqd), str(tmp_path)]
        driver = subprocess.Popen(command, stderr=stderr, start_new_session=True)
    try:
        is_over = lambda: (tmp_path / "appended").exists() or driver.poll() is not None  # noqa: E731
        eventually(is_over, DRIVER_TIMEOUT_S)
        assert driver.poll() is None, errors.read_text()
        # Half of the batch's tasks failed after writing, one before: all were run again, with other orders of rows.
        assert differences([nsqd], "batch", [b"%d" % number for number in range(flaky_driver.ROWS)]) == (0, 0)
        # Batch 1 of the stream is in nsqd, and Spark does not know it.
        assert len(log_bodies(nsqd, "stream")) == 2 * LINES
        assert not (tmp_path / "checkpoint" / "commits" / "1").exists()
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    resume(spark, nsqd, tmp_path)
    assert (tmp_path / "checkpoint" / "commits" / "2").exists()
    assert differences([nsqd], "stream", lines) == (0, 0)


def resume(spark: "SparkSession", nsqd: Nsqd, directory: Path) -> None:
    """Goes on with the same query from its checkpoint, in another driver, with the sink as it is."""
    files = spark.readStream.option("maxFilesPerTrigger", 1).text(str(directory / "in"))
    stream = files.withColumnRenamed("value", "body").repartition(flaky_driver.PARTITIONS, "body")
    writer = stream.writeStream.format("nsq").option("checkpointLocation", str(directory / "checkpoint"))
    writer = writer.options(nsqd=http_address(nsqd), topic="stream", idempotent="true")
    assert writer.trigger(availableNow=True).start().awaitTermination(DRIVER_TIMEOUT_S)
