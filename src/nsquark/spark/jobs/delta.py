"""Writes an archive as a Delta table with delta-rs: Spark's tasks write files, and one commit adds them to the table.

The commit carries a transaction of Delta's: the id of the query and the number of the batch. A batch that Spark runs
again, since it died before it logged the first run, finds its number in the table and adds nothing.
"""

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.transaction import AddAction
from pyspark import TaskContext
from pyspark.sql import DataFrame, Row, SparkSession

from nsquark.spark.sink.writer import QUERY_ID_PROPERTY

WRITTEN = "query string, path string, bytes bigint, messages bigint, partition string"
"""Each row describes a file that a task wrote; `path` is relative to the table, and `partition` has values as JSON."""
TASK_PARTITIONS_MAX = 100_000
"""One task may write this many partitions, which are topics times hours. pyarrow's own limit is lower: it is for
mistakes in what to partition by.
"""


class DeltaWriter:
    """Writes each batch of a stream as one commit, for `foreachBatch`. Files of an attempt without a commit are in no
    reader's way: a table has only the files that its log names.
    """

    def __init__(self, output: str, partitions: Sequence[str]) -> None:
        self._output = output
        self._partitions = list(partitions)

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        written = batch.mapInArrow(_files_writer(self._output, self._partitions), WRITTEN).collect()
        if written:
            # Delta describes columns as Spark does.
            self._commit(Schema.from_json(batch.schema.json()), written, batch_id)

    def _commit(self, schema: Schema, written: list[Row], batch_id: int) -> None:
        DeltaTable.create(self._output, schema=schema, partition_by=self._partitions, mode="ignore")
        table = DeltaTable(self._output)
        application = f"nsquark-archive-{written[0].query}"
        done = table.transaction_version(application)
        if done is not None and done >= batch_id:
            for file in written:
                os.unlink(os.path.join(self._output, file.path))
            return
        table.create_write_transaction(
            [_added(file) for file in written],
            "append",
            schema,
            self._partitions,
            commit_properties=CommitProperties(app_transactions=[Transaction(application, batch_id)]),
        )


def _added(file: Row) -> AddAction:
    return AddAction(
        path=file.path,
        size=file.bytes,
        partition_values=json.loads(file.partition),
        modification_time=time.time_ns() // 1_000_000,
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
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty(QUERY_ID_PROPERTY)
        files: list[dict[str, Any]] = []

        def add_file(file: Any) -> None:
            path = os.path.relpath(file.path, output)
            values = dict(part.split("=", 1) for part in path.split("/")[:-1])
            row = {"query": query, "path": path, "bytes": file.size, "messages": file.metadata.num_rows}
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


def read_delta(spark: SparkSession, directory: str) -> DataFrame:
    """Reads the table as it is now, without Delta's package for Spark: its log tells which Parquet files it has."""
    table = DeltaTable(directory)
    return spark.read.option("basePath", directory).parquet(*table.file_uris())
