"""This is `df.write.format("nsq")` and `df.writeStream.format("nsq")`: it writes rows as messages.

A task goes over its rows once: they are checked (`rows`), and either published as they come (`publisher`: at least
once) or collected and appended under a token (`append`: once, with `idempotent=true`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from nsquark.spark.options import OptionError
from nsquark.spark.sink.options import SinkOptions
from nsquark.spark.sink.rows import RowReader, check_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

REQUEST_MESSAGES_MAX = 20_000
"""An MPUB has at most this many messages, so that many small ones do not hold up nsqd's other publishers."""
QUERY_ID_PROPERTY = "sql.streaming.queryId"
BATCH_ID_PROPERTY = "streaming.sql.batchId"


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """Says that an nsqd has all messages of a task, and how many there are."""

    messages: int


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
    if overwrite:
        raise OptionError("a topic cannot be overwritten: write .mode('append')")
    parsed = _checked(options, schema)
    return NsqBatchWriter(parsed)


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
    if overwrite:
        raise OptionError("output mode complete would publish all results again in each batch: use append")
    parsed = _checked(options, schema)
    if parsed.token is not None:
        raise OptionError("token is for batch writes: a stream has its own, leave the option out")
    return NsqStreamWriter(parsed)


def _checked(options: Mapping[str, str], schema: StructType) -> SinkOptions:
    parsed = SinkOptions.parse(options)
    check_schema(schema, parsed.topic, idempotent=parsed.idempotent)
    return parsed


class NsqBatchWriter(DataSourceArrowWriter):
    """Writes a batch. It is pickled to the tasks, so it has nothing but its options."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return write_partition(self._options, iterator)


class NsqStreamWriter(DataSourceStreamArrowWriter):
    """Writes each micro-batch of a stream. When all tasks are done, nothing is left to do."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return write_partition(self._options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        pass

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        pass


def write_partition(options: SinkOptions, batches: Iterator[pa.RecordBatch]) -> Written:
    context = TaskContext.get()
    assert context is not None
    reader = RowReader(context.partitionId(), options.topic, options.message_bytes_max)
    if options.idempotent:
        return _append(options, attempt_name(options, context), reader, batches)
    return _publish(options, reader, batches)


def attempt_name(options: SinkOptions, context: TaskContext) -> str:
    """Returns a name that all attempts at this partition of this write have in common, and nothing else has."""
    query, batch = context.getLocalProperty(QUERY_ID_PROPERTY), context.getLocalProperty(BATCH_ID_PROPERTY)
    if options.token is None and (query is None or batch is None):
        raise OptionError(
            "idempotent=true needs a name for a batch write: give the option token, the same whenever this write is "
            "repeated and another one for other data"
        )
    return "/".join([options.token or "", query or "", batch or "", str(context.partitionId())])


def _append(options: SinkOptions, name: str, reader: RowReader, batches: Iterator[pa.RecordBatch]) -> Written:
    from nsquark.spark.sink.append import Appenders, Collected

    collected = Collected(reader.partition)
    for batch in batches:
        for bodies in reader.read(batch)[0]:
            collected.add(bodies)
    with Appenders(options) as appenders:
        for bodies in collected.topics():
            appenders.append(name, bodies)
    return Written(reader.row)


def _publish(options: SinkOptions, reader: RowReader, batches: Iterator[pa.RecordBatch]) -> Written:
    from nsquark.spark.sink.publisher import Publisher

    with Publisher(options) as publisher:
        for batch in batches:
            first = reader.row
            groups, deferred = reader.read(batch)
            rows = f"among rows {first} to {reader.row - 1} of partition {reader.partition}"
            for bodies in groups:
                for messages in bodies.mpub_bodies(options.request_bytes_max, REQUEST_MESSAGES_MAX):
                    publisher.publish(bodies.topic, messages, rows)
            publisher.defer(deferred, rows)
        publisher.flush()
    return Written(reader.row)
