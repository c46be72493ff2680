"""Checks that a query reads exactly once, whose driver is killed again and again, in the middle of a batch, on one
checkpoint.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness import Nsqd, eventually
from harness.holding import hold_group
from spark.restart_script import OPTIONS
from spark.source_rig import Stream, address, bodies, publish, stream_reader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A JVM for each kill; test_job_kills.py has one, at the worst moment, in every run.
pytestmark = [pytest.mark.ours, pytest.mark.long, pytest.mark.timeout(1800)]

KILLS = 10
MESSAGES_PER_ROUND = 4000
"""Is more than a driver reads before it is killed, so that it never comes to the end."""
SCRIPT = Path(__file__).with_name("restart_script.py")
DRIVER_TIMEOUT_S = 300


def batches(checkpoint: Path, kind: str) -> int:
    """Counts batches: those that were begun for the kind `offsets`, those that ended for `commits`."""
    return len([path for path in (checkpoint / kind).glob("*") if path.name.isdigit()])


def kill_in_the_middle(
    driver: "subprocess.Popen[bytes]", checkpoint: Path, errors: Path, moment: random.Random
) -> None:
    """Kills it in its second batch or a later one, which it has begun and not yet committed."""
    wanted = batches(checkpoint, "commits") + 1 + moment.randrange(2)

    def is_in_a_batch() -> bool:
        done = batches(checkpoint, "commits")
        return done >= wanted and batches(checkpoint, "offsets") > done

    while True:
        eventually(lambda: driver.poll() is not None or is_in_a_batch(), DRIVER_TIMEOUT_S, 0.001)
        assert driver.poll() is None, f"the driver ended by itself, with {driver.returncode}: {errors.read_text()}"
        time.sleep(moment.random() * 0.3)
        # It is stopped for the look at it: however late this process is, the batch is not over before the kill.
        hold_group(driver.pid)
        if is_in_a_batch():
            break
        os.killpg(driver.pid, signal.SIGCONT)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    assert batches(checkpoint, "offsets") > batches(checkpoint, "commits")


def test_kills_of_the_driver_lose_and_double_nothing(
    spark: "SparkSession", make_nsqd: Callable[..., Nsqd], tmp_path: Path
) -> None:
    nsqd = make_nsqd()
    moment = random.Random(7)
    errors = tmp_path / "errors"
    stream = Stream(spark, tmp_path)
    for number in range(KILLS):
        publish(nsqd, "t", bodies(number * MESSAGES_PER_ROUND, (number + 1) * MESSAGES_PER_ROUND))
        # A session of its own, so that the kill reaches the JVM and its workers too.
        with errors.open("wb") as stderr:
            command = [sys.executable, str(SCRIPT), address(nsqd), str(tmp_path)]
            driver = subprocess.Popen(command, stderr=stderr, start_new_session=True)
        try:
            kill_in_the_middle(driver, stream.checkpoint, errors, moment)
        finally:
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()
    stream.run(stream_reader(spark, nsqd, **{**OPTIONS, "maxMessagesPerTrigger": KILLS * MESSAGES_PER_ROUND}))
    assert stream.bodies() == bodies(0, KILLS * MESSAGES_PER_ROUND)
    assert nsqd.channel("t", "archive")["depth"] == 0
