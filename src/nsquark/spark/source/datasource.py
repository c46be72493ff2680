"""This is `format("nsq")`: it answers what Spark asks for, and shows which module does the work.

A batch read is planned by `batch.plan_batch` from what the nsqds have now; a stream by `stream.NsqStreamReader`, batch
after batch. Both are then read by tasks, anywhere in the cluster, through `packed_rows.read_partition`. Writing is in
`sink`.

Spark 4.2 and 4.3 call `NsqDataSource` as follows. At `load()` without a schema they call `__init__` and `schema()`;
with a schema given by the user, they call `__init__` when the query starts. For a write, they call `__init__` and
`writer()` or `streamWriter()`; a streaming write makes another instance, which is never asked for anything. So
`__init__` cannot always know what it is for.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.types import StructType

from nsquark.base.logs import library_log
from nsquark.spark.options import NAMES, TABLES, OptionError, SourceOptions, check_names
from nsquark.spark.sink.options import OPTION_NAMES as SINK_NAMES

if TYPE_CHECKING:
    import pyarrow as pa

log = library_log("nsquark.spark")

SPARKS_OWN_NAMES = ("checkpointLocation", "queryName")
"""Spark hands these options of its own on to the sink of a stream."""
PROVIDER = "provider"
"""Spark adds this option for CREATE TABLE."""


class NsqDataSource(DataSource):
    """Answers Spark's calls. Options that are wrong for any use, or surely meant for reading, are refused at once.
    Other errors wait until Spark asks to read: the same options may be right for a write.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        self.options = options
        if PROVIDER in options:
            raise OptionError(f"format nsq makes no tables. {TABLES}")
        check_names(options, [*NAMES, *SINK_NAMES, *SPARKS_OWN_NAMES])
        self._source: SourceOptions | None = None
        self._error: OptionError | None = None
        try:
            self._source = _source_options(options)
        except OptionError as error:
            reading = {name.lower() for name in NAMES} - {name.lower() for name in SINK_NAMES}
            if not reading.isdisjoint(options):
                raise
            self._error = error

    @classmethod
    def name(cls) -> str:
        return "nsq"

    def schema(self) -> StructType:
        from nsquark.spark.source.schema import spark_schema

        return spark_schema(self._reading())

    def reader(self, schema: StructType) -> DataSourceReader:
        from nsquark.spark.source.pushdown import is_pushdown_worker

        options = self._reading()
        pushes_filters = options.pushes_filters and is_pushdown_worker()
        return (FilteringReader if pushes_filters else NsqReader)(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from nsquark.spark.source.stream import NsqStreamReader

        try:
            return NsqStreamReader(self._reading(), schema)
        except OptionError as error:
            # If it were raised here, Spark would report an UnboundLocalError of its own instead.
            return RefusingStreamReader(error)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from nsquark.spark.sink.writer import batch_writer

        return batch_writer(self._writing(), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        from nsquark.spark.sink.writer import stream_writer

        return stream_writer(self._writing(), schema, overwrite)

    def _reading(self) -> SourceOptions:
        if self._error is not None:
            raise self._error
        assert self._source is not None
        return self._source

    def _writing(self) -> Mapping[str, str]:
        own = {name.lower() for name in SPARKS_OWN_NAMES}
        return {name: value for name, value in self.options.items() if name.lower() not in own}


def _source_options(options: Mapping[str, str]) -> SourceOptions:
    writing = {name.lower(): name for name in SINK_NAMES if name not in NAMES}
    for name in options:
        if name.lower() in writing:
            raise OptionError(f"{writing[name.lower()]} is for writing: leave it out of a read")
    return SourceOptions.parse(options)


FILTERS_PUSHED = (
    "filters choose what is read. Spark remembers that for the DataFrame of this load(): load() again for a query, or "
    "a side of a union or join, that filters otherwise or not at all; or leave pushFilters out"
)


class NsqReader(DataSourceReader):
    """Reads a batch: what lies between two positions of each log when the query is planned."""

    def __init__(self, options: SourceOptions, schema: StructType):
        from nsquark.spark.source.pushdown import Bounds
        from nsquark.spark.source.schema import check_schema

        options.check_batch()
        check_schema(schema, options)
        self._options = options
        self._schema = schema
        self._bounds = Bounds()

    def partitions(self) -> list[InputPartition]:
        from nsquark.spark.source.batch import plan_batch

        return [InputPartition(part) for part in plan_batch(self._options, self._bounds.cut)]

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        from nsquark.spark.source.packed_rows import read_partition
        from nsquark.spark.source.schema import as_arrow

        # If there are no partitions, Spark makes one of its own, whose value is None.
        if partition.value is None:
            return iter(())
        return read_partition(self._options, as_arrow(self._schema), partition.value)


class FilteringReader(NsqReader):
    """Reads less where filters allow it. Spark still filters the rows: the bounds are only as exact as nsqd's index."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        whole, self._bounds = self._bounds, self._bounds.narrowed(filters)
        if self._bounds != whole:
            log.warning(FILTERS_PUSHED)
        return filters


class RefusingStreamReader(DataSourceStreamReader):
    """Raises the error in the options when Spark first asks for something."""

    def __init__(self, error: OptionError):
        self._error = error

    def initialOffset(self) -> dict[str, Any]:
        raise self._error

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        raise self._error

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        raise self._error
