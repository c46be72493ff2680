"""Shows topics as an Arrow dataset, whose scans fetch only the columns and rows that they are asked for.

DuckDB and polars hand the columns and the filter of a query to `scanner`, as they do for files.
"""

import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from nsquark.base.durations import NS_PER_US
from nsquark.query.bounds import INT64_MAX, RowFilter
from nsquark.spark.nsqd_http import RangeNsqd
from nsquark.spark.options import SourceOptions
from nsquark.spark.source.batch import plan_batch
from nsquark.spark.source.packed_rows import read_partition
from nsquark.spark.source.plan import Partition, Ranges
from nsquark.spark.source.range_rows import arrow_schema

READERS_MAX: Final = 2
"""At most this many ranges are read at once."""
BATCHES_WAITING_MAX: Final = 16
"""At most this many batches of each range are read before the caller asks for them."""


class TopicDataset(ds.Dataset):  # type: ignore[misc]  # pyarrow has no types
    """Shows the messages that topics have when it is scanned. `body` is bytes, or text, with `raw` for the bytes.

    A scan reads ahead in threads of its own. An error there is raised where the rows are asked for, and kept in
    `failure` for callers like DuckDB's, which see it only wrapped in another error.
    """

    def __init__(self, options: SourceOptions, *, text: bool = False):
        self._options = options
        self._stored = arrow_schema(options)
        self._text = text
        self._given = _with_text(self._stored) if text else self._stored
        self.failure: Exception | None = None
        """The last scan ended with this error, if with one."""
        self.rows_read = 0
        """The last scan fetched this many messages from the nsqds."""

    @property
    def schema(self) -> pa.Schema:
        return self._given

    def scanner(
        self, columns: Sequence[str] | None = None, filter: pc.Expression | None = None, **_: Any
    ) -> ds.Scanner:
        """Returns a scanner of the rows that pass `filter`. Further arguments, which tune how Arrow reads files, are
        ignored.
        """
        self.failure = None
        names = self._given.names if columns is None else list(columns)
        wanted = None if filter is None else RowFilter(filter, self._given)
        if wanted is not None:
            names = list(dict.fromkeys([*names, *(name for name in self._given.names if wanted.needs(name))]))
        read = pa.schema([self._given.field(name) for name in self._given.names if name in names])
        stored = self._stored_columns(read)
        parts = plan_batch(self._options, lambda ranges, nsqds: _narrowed(wanted, ranges, nsqds))
        chosen = self._given if columns is None else pa.schema([self._given.field(name) for name in columns])
        return Scan(chosen, filter, self._batches(parts, stored, read))

    def _stored_columns(self, read: pa.Schema) -> pa.Schema:
        names = {"body" if name == "raw" else name for name in read.names}
        chosen = [field for field in self._stored if field.name in names]
        # A query that wants no column at all, like count(*), still has to count rows.
        return pa.schema(chosen or [self._stored.field("seq")])

    def _batches(self, parts: list[Partition], stored: pa.Schema, read: pa.Schema) -> Iterator[pa.RecordBatch]:
        self.rows_read = 0
        try:
            with contextlib.closing(read_batches(self._options, parts, stored)) as batches:
                for batch in batches:
                    self.rows_read += batch.num_rows
                    yield _text_columns(batch, read) if self._text else batch
        except Exception as error:
            self.failure = error
            raise


class Scan:
    """Does, once, what callers ask of a `ds.Scanner`. Arrow's own would fetch ahead in its threads, wanted or not."""

    def __init__(self, schema: pa.Schema, condition: pc.Expression | None, batches: Iterator[pa.RecordBatch]):
        self.projected_schema = schema
        self._condition = condition
        self._batches = batches

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.projected_schema, self._chosen())

    def to_table(self) -> pa.Table:
        return self.to_reader().read_all()

    def _chosen(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            passing = batch if self._condition is None else batch.filter(self._condition)
            yield passing.select(self.projected_schema.names)


def _with_text(stored: pa.Schema) -> pa.Schema:
    at = stored.get_field_index("body")
    return stored.set(at, pa.field("body", pa.string())).insert(at + 1, pa.field("raw", pa.binary()))


def _text_columns(batch: pa.RecordBatch, read: pa.Schema) -> pa.RecordBatch:
    columns = {name: batch.column(name) for name in batch.schema.names}
    if "raw" in read.names:
        columns["raw"] = columns["body"]
    if "body" in read.names:
        columns["body"] = _decoded(columns["body"])
    return pa.RecordBatch.from_arrays([columns[name] for name in read.names], schema=read)


def _decoded(bodies: pa.Array) -> pa.Array:
    """Decodes bodies; bytes that are not UTF-8 become U+FFFD. If all are UTF-8, as is usual, nothing is copied."""
    try:
        return bodies.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([body.decode("utf-8", "replace") for body in bodies.to_pylist()], pa.string())


def _narrowed(wanted: RowFilter | None, ranges: Ranges, nsqds: Mapping[str, RangeNsqd]) -> Ranges:
    """Finds the range of each log in which rows can pass the filter."""
    if wanted is None:
        return ranges
    found = {}
    for key, stored in ranges.items():
        bounds = wanted.bounds(key.topic, key.nsqd_id)
        if bounds is None:
            continue
        low, high = max(stored.low, bounds.seq_low), min(stored.high, bounds.seq_high)
        nsqd = nsqds[key.nsqd_id]
        if bounds.time_low_us:
            low = max(low, nsqd.first_at([key.topic], ts=bounds.time_low_us * NS_PER_US).get(key.topic, low))
        if bounds.time_high_us < INT64_MAX:
            at = nsqd.first_at([key.topic], ts=bounds.time_high_us * NS_PER_US, side="end")
            high = min(high, at.get(key.topic, high))
        if low < high:
            found[key] = stored._replace(low=low, high=high)
    return found


class _Ahead:
    """Reads a range in a thread of its own, so that rows are fetched while the caller uses those before them."""

    def __init__(self, options: SourceOptions, schema: pa.Schema, part: Partition):
        self._batches = read_partition(options, schema, part)
        self._read: queue.Queue[pa.RecordBatch | Exception | None] = queue.Queue(BATCHES_WAITING_MAX)
        self._stopped = False
        threading.Thread(target=self._run, daemon=True).start()

    def batches(self) -> Iterator[pa.RecordBatch]:
        while (found := self._read.get()) is not None:
            if isinstance(found, Exception):
                raise found
            yield found

    def stop(self) -> None:
        """Ends the thread after the batch at hand. One batch is dropped, since the thread may be waiting for room."""
        self._stopped = True
        with contextlib.suppress(queue.Empty):
            self._read.get_nowait()

    def _run(self) -> None:
        try:
            for batch in self._batches:
                self._read.put(batch)
                if self._stopped:
                    return
        except Exception as error:
            self._read.put(error)
        else:
            self._read.put(None)


def read_batches(
    options: SourceOptions, parts: list[Partition], schema: pa.Schema
) -> Generator[pa.RecordBatch, None, None]:
    """Yields the batches of all partitions, in the order of the partitions."""
    upcoming = (_Ahead(options, schema, part) for part in parts)
    started = deque(itertools.islice(upcoming, READERS_MAX))
    try:
        while started:
            yield from started[0].batches()
            started.popleft()
            started.extend(itertools.islice(upcoming, 1))
    finally:
        for ahead in started:
            ahead.stop()
