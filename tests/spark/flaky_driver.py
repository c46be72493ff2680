"""Is a Spark driver whose tasks fail after they have written, and which hangs before Spark knows that a batch is done.

    python flaky_driver.py <HTTP address of nsqd> <directory>

It runs as a process of its own: `local[2]` never retries a task, `local[2,3]` does, and a session has one master.
First a batch write to topic "batch", then a stream of the files in <directory>/in to topic "stream". When batch 1 of
that is in nsqd, and not yet in Spark's log of commits, it makes <directory>/appended and waits to be killed.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, WriterCommitMessage

from nsquark.spark.sink.options import SinkOptions
from nsquark.spark.sink.writer import NsqBatchWriter, NsqStreamWriter

ROWS = 5000
PARTITIONS = 4
PART_BYTES = 2048
"""Is so small that each partition is staged in many parts."""
WAIT_S = 300.0


class FailsAfterwards(NsqBatchWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        written = super().write(iterator)
        context = TaskContext.get()
        if context is not None and context.attemptNumber() == 0 and context.partitionId() % 2 == 0:
            raise RuntimeError("this attempt has written, and fails")
        return written


class HangsBeforeCommit(NsqStreamWriter):
    def __init__(self, options: SinkOptions, appended: str) -> None:
        super().__init__(options)
        self._appended = appended

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        if batchId == 1:
            Path(self._appended).touch()
            time.sleep(WAIT_S)


class Flaky(DataSource):
    """Is the sink of format nsq, with these failures."""

    @classmethod
    def name(cls) -> str:
        return "flaky"

    def _sink_options(self) -> SinkOptions:
        ours = {name: value for name, value in self.options.items() if name not in ("checkpointlocation", "appended")}
        return SinkOptions.parse(ours)

    def writer(self, schema: Any, overwrite: bool) -> NsqBatchWriter:
        return FailsAfterwards(self._sink_options())

    def streamWriter(self, schema: Any, overwrite: bool) -> NsqStreamWriter:
        return HangsBeforeCommit(self._sink_options(), self.options["appended"])


def other_order(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Gives rows in another order in each attempt, as a shuffle may bring them, and fails once before half of them
    came.
    """
    context = TaskContext.get()
    assert context is not None
    table = pa.Table.from_batches(list(batches))
    step = 1 + context.attemptNumber() * 2
    order = [row for start in range(step) for row in range(start, len(table), step)]
    for number, batch in enumerate(table.take(order).to_batches(max_chunksize=100)):
        if number == 5 and context.attemptNumber() == 0 and context.partitionId() == 1:
            raise RuntimeError("this attempt fails before it has written")
        yield batch


def shuffled(df: DataFrame) -> DataFrame:
    return df.repartition(PARTITIONS, "body").mapInArrow(other_order, "body string")


def main(nsqd: str, directory: Path) -> None:
    spark = SparkSession.builder.master("local[2,3]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    spark.dataSource.register(Flaky)
    options = {"nsqd": nsqd, "idempotent": "true", "maxRequestBytes": str(PART_BYTES)}
    rows = shuffled(spark.range(ROWS).selectExpr("cast(id as string) AS body"))
    rows.write.format("flaky").mode("append").options(topic="batch", token="x", **options).save()
    files = spark.readStream.option("maxFilesPerTrigger", 1).text(str(directory / "in"))
    stream = files.withColumnRenamed("value", "body").repartition(PARTITIONS, "body")
    writer = stream.writeStream.format("flaky").option("checkpointLocation", str(directory / "checkpoint"))
    writer = writer.options(topic="stream", appended=str(directory / "appended"), **options)
    writer.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
