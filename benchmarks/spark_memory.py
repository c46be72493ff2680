"""Is a source and a sink for Spark that are only memory: what they take is what Spark itself takes for any in
Python.

Functions make the classes, because pyspark is only there if Spark is.
"""

import functools
import time
from collections.abc import Iterator
from typing import Any

BODY_BYTES = 200
ROWS_PER_BATCH = 8192
PARTITION_MESSAGES = 145_000
"""A partition of a topic has about as many: 2 million messages of this size are split into 14."""
TOPIC = "bench"
COLUMNS = "topic string, nsqd string, seq bigint, id string, timestamp timestamp, body binary"


def body(number: int) -> bytes:
    event = b'{"id":%d,"user":"u%d","amount":%d,"pad":"' % (number, number % 100, number % 1000)
    return event.ljust(BODY_BYTES - 2, b"x") + b'"}'


@functools.cache
def made_batch() -> Any:
    """Makes a batch once for each of Spark's workers: making rows is not what is measured."""
    import pyarrow as pa

    rows = ROWS_PER_BATCH
    columns = [
        pa.array([TOPIC] * rows, pa.string()),
        pa.array(["d0aa3256-ae2c-4018-8bb5-f07743d0d5b2"] * rows, pa.string()),
        pa.array(range(rows), pa.int64()),
        pa.array([f"{number:016x}" for number in range(rows)], pa.string()),
        pa.array(range(rows), pa.int64()).cast(pa.timestamp("us", "UTC")),
        pa.array([body(number) for number in range(rows)], pa.binary()),
    ]
    return pa.record_batch(columns, names=[column.split()[0] for column in COLUMNS.split(", ")])


def memory_source() -> type:
    """Gives the columns of format("nsq") in Arrow batches of the same size.

    Options: `messages`, cut as those of a topic are; a stream takes `rate` instead, messages a second.
    """
    from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

    def batches(left: int) -> Iterator[Any]:
        while left > 0:
            yield made_batch().slice(0, left)
            left -= ROWS_PER_BATCH

    def cut(messages: int) -> list[InputPartition]:
        parts = max(-(-messages // PARTITION_MESSAGES), 1)
        return [InputPartition(messages // parts + (number < messages % parts)) for number in range(parts)]

    class MemoryReader(DataSourceReader):
        def __init__(self, messages: int):
            self._messages = messages

        def partitions(self) -> list[InputPartition]:
            return cut(self._messages)

        def read(self, partition: InputPartition) -> Iterator[Any]:
            return batches(partition.value)

    class MemoryStreamReader(DataSourceStreamReader):
        def __init__(self, messages: int, rate: int):
            self._messages = messages
            self._rate = rate
            self._began = time.monotonic()

        def initialOffset(self) -> dict[str, int]:
            return {"next": 0}

        def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:
            if self._rate:
                return {"next": int((time.monotonic() - self._began) * self._rate)}
            return {"next": self._messages}

        def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
            return cut(end["next"] - start["next"])

        def read(self, partition: InputPartition) -> Iterator[Any]:
            return batches(partition.value)

    class MemorySource(DataSource):
        @classmethod
        def name(cls) -> str:
            return "memory_arrow"

        def schema(self) -> str:
            return COLUMNS

        def reader(self, schema: Any) -> DataSourceReader:
            return MemoryReader(int(self.options["messages"]))

        def streamReader(self, schema: Any) -> DataSourceStreamReader:
            return MemoryStreamReader(int(self.options.get("messages", 0)), int(self.options.get("rate", 0)))

    return MemorySource


def dropping_sink() -> type:
    """Takes Arrow batches and drops them: no sink in Python can be faster."""
    from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

    class DroppingWriter(DataSourceArrowWriter):
        def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
            for _ in iterator:
                pass
            return WriterCommitMessage()

    class DroppingSink(DataSource):
        @classmethod
        def name(cls) -> str:
            return "dropping_arrow"

        def writer(self, schema: Any, overwrite: bool) -> DroppingWriter:
            return DroppingWriter()

    return DroppingSink
