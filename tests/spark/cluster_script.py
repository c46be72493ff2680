"""Counts a topic by its bodies on a cluster: `cluster_script.py <master> <nsqd> <topic> <file>`.

Writes the number of rows and of distinct bodies to the file; makes `<file>.running` when the first task has rows, and
waits in the middle of each until there is `<file>.go`.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

ROWS_BEFORE_PAUSE = 2000
PAUSE_S = 0.05
WAIT_S = 400.0


def main(master: str, nsqd: str, topic: str, result: str) -> None:
    running, go_on = f"{result}.running", f"{result}.go"

    def in_two_parts(batches: Iterator[Any]) -> Iterator[Any]:
        """Stops between rows, so that there is a middle to kill a worker in, however late who kills it comes."""
        for batch in batches:
            yield batch.slice(0, ROWS_BEFORE_PAUSE)
            Path(running).touch()
            deadline = time.monotonic() + WAIT_S
            while not Path(go_on).exists() and time.monotonic() < deadline:
                time.sleep(PAUSE_S)
            yield batch.slice(ROWS_BEFORE_PAUSE)

    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.executor.memory", "512m")
    spark = builder.config("spark.executor.cores", "1").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    frame = spark.read.format("nsq").options(nsqd=nsqd, topic=topic, minPartitions=4).schema("body binary").load()
    [row] = frame.mapInArrow(in_two_parts, "body binary").selectExpr("count(*)", "count(distinct body)").collect()
    Path(result).write_text(f"{row[0]} {row[1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
