"""Writes an archive as a Delta table with delta-rs: Spark's tasks write files, and one commit adds them to the table.

The commit carries transactions of Delta's, one for each topic on an nsqd: how far the table has its log. So the table
itself says what of a batch is new to it, whatever the number of the batch, which after a backup of the checkpoint was
put back stands for other messages.
"""

import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.transaction import AddAction
from pyspark.sql import DataFrame, Row

from nsquark.base.clock import wall_ms
from nsquark.base.errors import UserError
from nsquark.spark.jobs.checkpoints import offset_before, offset_of
from nsquark.spark.source.offsets import Key, Offset, Range, ranges

WRITTEN = "path string, bytes bigint, messages bigint, partition string"
"""Each row describes a file that a task wrote; `path` is relative to the table, and `partition` has values as JSON."""
IDENTITY = ("topic", "nsqd", "seq", "timestamp")
"""These columns name a message for ever."""
TASK_PARTITIONS_MAX = 100_000
"""One task may write this many partitions, which are topics times hours. pyarrow's own limit is lower: it is for
mistakes in what to partition by.
"""


class DeltaWriter:
    """Writes each batch of a stream as one commit, for `foreachBatch`. Files of an attempt without a commit are in no
    reader's way: a table has only the files that its log names.
    """

    def __init__(self, output: str, partitions: Sequence[str], checkpoint: str) -> None:
        self._output = output
        self._partitions = list(partitions)
        self._checkpoint = checkpoint
        self._is_checked = False

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        # Delta describes columns as Spark does.
        schema = Schema.from_json(batch.schema.json())
        DeltaTable.create(self._output, schema=schema, partition_by=self._partitions, mode="ignore")
        table = DeltaTable(self._output)
        start = offset_before(batch.sparkSession, self._checkpoint, batch_id)
        if not self._is_checked:
            self._check_not_older(table, start)
            self._is_checked = True
        read = ranges(start, offset_of(batch.sparkSession, self._checkpoint, batch_id))
        reached = {key: _reached(table, key) for key in read}
        # A table may have messages of a log without a position: those that another program wrote.
        if any(not reached[key] or part.low < reached[key] for key, part in read.items()):
            batch = self._missing(batch, table, read)
        written = batch.mapInArrow(_files_writer(self._output, self._partitions), WRITTEN).collect()
        if written or any(part.high > reached[key] for key, part in read.items()):
            # Of two runs at the same time only one can commit: both have these transactions.
            positions = [Transaction(_application(key), max(part.high, reached[key])) for key, part in read.items()]
            table.create_write_transaction(
                [_added(file) for file in written],
                "append",
                schema,
                self._partitions,
                commit_properties=CommitProperties(app_transactions=positions),
            )

    def _check_not_older(self, table: DeltaTable, start: Offset) -> None:
        """Raises if the checkpoint takes messages for written that the table does not have."""
        for key, span in start.spans.items():
            reached = _reached(table, key) if span.start < span.next else span.next
            if reached < span.next:
                raise UserError(
                    f"{self._output} is older than its checkpoint {self._checkpoint}, or another: it has topic "
                    f"{key.topic} of nsqd {key.nsqd_id} up to {reached}, and those up to {span.next} count as written. "
                    "Put back the table that belongs to it, or use a new checkpoint and channel: that adds what the "
                    "nsqd still has, and nothing twice"
                )

    def _missing(self, batch: DataFrame, table: DeltaTable, read: Mapping[Key, Range]) -> DataFrame:
        """Returns the rows that the table does not have. The time is compared too: after a backup of an nsqd was put
        back, other messages may come under numbers that the table has.
        """
        topics = {f"topic={key.topic}" for key in read}
        files = [file for file in table.file_uris() if not topics.isdisjoint(file.split("/"))]
        if not files:
            return batch
        stored = batch.sparkSession.read.schema(batch.schema).option("basePath", self._output).parquet(*files)
        low, high = min(part.low for part in read.values()), max(part.high for part in read.values())
        stored = stored.where(stored.seq.between(low, high)).select(*IDENTITY)
        return batch.join(stored, list(IDENTITY), "left_anti").select(*batch.columns)


def _application(key: Key) -> str:
    return f"nsquark-archive-{key}"


def _reached(table: DeltaTable, key: Key) -> int:
    """Returns the number up to which the table has the log of a topic on an nsqd, 0 if it has nothing of it."""
    return table.transaction_version(_application(key)) or 0


def _added(file: Row) -> AddAction:
    return AddAction(
        path=file.path,
        size=file.bytes,
        partition_values=json.loads(file.partition),
        modification_time=wall_ms(),
        data_change=True,
        stats=json.dumps({"numRecords": file.messages}),
    )


def _files_writer(
    output: str, partitions: Sequence[str]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Returns the work of a task: it writes rows as files in the table's directory, under names of their own."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        first = next(batches, None)
        if first is None:
            return
        files: list[dict[str, Any]] = []

        def add_file(file: Any) -> None:
            path = os.path.relpath(file.path, output)
            values = dict(part.split("=", 1) for part in path.split("/")[:-1])
            row = {"path": path, "bytes": file.size, "messages": file.metadata.num_rows}
            files.append({**row, "partition": json.dumps(values)})

        fields = pa.schema([first.schema.field(name) for name in partitions])
        pyarrow.dataset.write_dataset(
            pa.RecordBatchReader.from_batches(first.schema, _chained(first, batches)),
            output,
            format="parquet",
            partitioning=pyarrow.dataset.partitioning(fields, flavor="hive"),
            basename_template=f"part-{uuid.uuid4()}-{{i}}.parquet",
            existing_data_behavior="overwrite_or_ignore",
            max_partitions=TASK_PARTITIONS_MAX,
            file_visitor=add_file,
        )
        yield pa.RecordBatch.from_pylist(files)

    return write


def _chained(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def files_of_table(directory: str) -> list[str]:
    """Returns the Parquet files that a table has now, as its log tells: so Spark reads it without Delta's package."""
    return DeltaTable(directory).file_uris()
