"""Is a driver with three jobs at work, killed in the worst moment of each: jobs_driver.py <nsqd> <topic> <directory>.

The rollup and the archive into Delta hang when their second batch with rows is written and Spark has not noted it; they
make `rollup.hangs` and `delta.hangs` in <directory> then. The replay is slow, and killed between two messages.
"""

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from nsquark.spark.jobs import archive, delta, replay, rollup
from nsquark.spark.jobs.layout import CHECKPOINT
from nsquark.spark.jobs.rollup_spec import RollupSpec, read_spec

WAIT_S = 600.0
HANGS_AFTER = 2
BATCH_MESSAGES = 200
SPEC = """
topics = ["{topic}"]
window = "10s"
watermark = "0s"
time = "at"
keys = ["user.country"]
sum = ["amount"]
min = ["amount"]
max = ["amount"]
avg = ["amount"]

[output]
parquet = "{directory}/rollup"
topic = "{topic}.rollup"
"""


def spec_of(topic: str, directory: Path) -> RollupSpec:
    path = directory / "rollup.toml"
    path.write_text(SPEC.format(topic=topic, directory=directory))
    return read_spec(path)


def start_rollup(spark: SparkSession, nsqd: str, topic: str, directory: Path) -> Any:
    spec = spec_of(topic, directory)
    options = {"nsqd": nsqd, "topic": topic, "channel": "rollup", "maxMessagesPerTrigger": str(BATCH_MESSAGES)}
    target = {"nsqd": nsqd, "topic": str(spec.topic), "idempotent": "true"}
    rollup.check_identity(spark, spec, spec.parquet)
    return rollup.start(spark, spec, options, spec.parquet, target, None)


def start_delta(spark: SparkSession, nsqd: str, topic: str, directory: Path) -> Any:
    options = {"nsqd": nsqd, "topic": topic, "channel": "delta", "maxMessagesPerTrigger": str(BATCH_MESSAGES)}
    table = str(directory / "table")
    return archive.start(spark, options, table, f"{table}/{CHECKPOINT}", None, "delta")


def replay_arguments(nsqd: str, topic: str, directory: Path, rate: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    replay.add_arguments(parser)
    words = ["--nsqd-http-address", nsqd, "--topic", topic, "--to-topic", f"{topic}.again", "--since", "1h"]
    return parser.parse_args([*words, "--rate", str(rate), "--checkpoint", str(directory / "replay")])


def hanging(writer: Any, mark: Path) -> Any:
    """Wraps the writer of a job so that it does not come back from its second batch that has rows."""
    written: list[int] = []

    def write(batch: DataFrame, batch_id: int) -> None:
        has_rows = not batch.isEmpty()
        writer(batch, batch_id)
        written.extend([batch_id] * has_rows)
        if len(written) == HANGS_AFTER:
            mark.touch()
            time.sleep(WAIT_S)

    return write


def main(nsqd: str, topic: str, directory: Path) -> None:
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.shuffle.partitions", "2").config("spark.driver.memory", "1g")
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    to_delta, to_rollup = delta.DeltaWriter, rollup.RollupWriter
    delta.DeltaWriter = lambda *args: hanging(to_delta(*args), directory / "delta.hangs")  # type: ignore
    rollup.RollupWriter = lambda *args: hanging(to_rollup(*args), directory / "rollup.hangs")  # type: ignore
    for start, mark in ((start_rollup, "rollup.hangs"), (start_delta, "delta.hangs")):
        query = start(spark, nsqd, topic, directory)
        while not (directory / mark).exists():
            if not query.isActive:
                # Spark gives a worker ten seconds to start, which a busy machine exceeds.
                print(query.exception(), file=sys.stderr)
                query = start(spark, nsqd, topic, directory)
            time.sleep(0.1)
    args = replay_arguments(nsqd, topic, directory, rate=5)
    threading.Thread(target=replay.run, args=[args], daemon=True).start()
    time.sleep(WAIT_S)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
