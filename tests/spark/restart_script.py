"""Runs a query that archives a topic to Parquet, in a process of its own: `restart_script.py <nsqd> <directory>`."""

import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

OPTIONS: dict[str, Any] = {
    "topic": "t",
    "startingOffsets": "earliest",
    "channel": "archive",
    "maxMessagesPerTrigger": 100,
    "minPartitions": 2,
}


def main(nsqd: str, directory: Path) -> None:
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.ui.showConsoleProgress", "false").config("spark.driver.memory", "512m").getOrCreate()
    spark.sparkContext.setLogLevel("FATAL")
    reader = spark.readStream.format("nsq").options(nsqd=nsqd, **OPTIONS)
    writer = reader.load().writeStream.format("parquet").option("checkpointLocation", str(directory / "checkpoint"))
    writer.trigger(availableNow=True).start(str(directory / "output")).awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
