"""Counts a topic by its bodies on a cluster: `cluster_script.py <master> <nsqd> <topic> <file>`.

Writes the number of rows and of distinct bodies to the file; makes `<file>.running` when the first task has rows.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

ROWS_BETWEEN_PAUSES = 2000
PAUSE_S = 0.05


def main(master: str, nsqd: str, topic: str, result: str) -> None:
    running = f"{result}.running"

    def slowly(batches: Iterator[Any]) -> Iterator[Any]:
        """Hands rows on with pauses, so that there is a middle to kill a worker in."""
        for batch in batches:
            Path(running).touch()
            for low in range(0, batch.num_rows, ROWS_BETWEEN_PAUSES):
                time.sleep(PAUSE_S)
                yield batch.slice(low, ROWS_BETWEEN_PAUSES)

    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.executor.memory", "512m")
    spark = builder.config("spark.executor.cores", "1").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    frame = spark.read.format("nsq").options(nsqd=nsqd, topic=topic, minPartitions=4).schema("body binary").load()
    [row] = frame.mapInArrow(slowly, "body binary").selectExpr("count(*)", "count(distinct body)").collect()
    Path(result).write_text(f"{row[0]} {row[1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
