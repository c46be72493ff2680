"""Reads the rows that Spark hands to the sink: checks their columns and values, and groups them by topic."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from nsquark.kernel.mpub import hash_rows, pack
from nsquark.wire.commands import MpubBody
from nsquark.wire.names import is_valid_name

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

BODY, TOPIC, DEFER_MS = "body", "topic", "defer_ms"
SOURCE_COLUMNS = frozenset({"nsqd", "seq", "id", "timestamp"})
"""The source has these columns beside topic and body. The sink drops them, so that what was read can be written."""

_TYPES = {
    BODY: ("string", "binary"),
    TOPIC: ("string",),
    DEFER_MS: ("tinyint", "smallint", "int", "bigint"),
}


class BadRow(ValueError):
    """Says that no nsqd would take a row; the text says which, and what to do."""


def check_schema(schema: StructType, topic: str | None, *, idempotent: bool) -> None:
    """Checks the columns; raises ValueError for one that is missing, not known or of the wrong type."""
    found = {field.name.lower(): field.dataType.simpleString() for field in schema.fields}
    if BODY not in found:
        raise ValueError("the nsq sink writes the column body: make it, for example by to_json(struct(*)) AS body")
    for name, kind in found.items():
        # A string with a collation is still a string.
        if name in _TYPES and kind.partition(" ")[0] not in _TYPES[name]:
            raise ValueError(f"column {name} has type {kind}: cast it to {' or '.join(_TYPES[name])}")
        if name not in _TYPES and name not in SOURCE_COLUMNS:
            raise ValueError(f"the nsq sink has no column {name}: select only {', '.join(_TYPES)}")
    if topic is None and TOPIC not in found:
        raise ValueError("no topic to write to: give the option topic, or a column topic")
    if idempotent and DEFER_MS in found:
        raise ValueError("idempotent=true cannot defer messages: drop the column defer_ms, or idempotent")


@dataclass(frozen=True, slots=True)
class Bodies:
    """Holds messages for one topic, as a binary column without nulls."""

    topic: str
    column: pa.Array

    def __len__(self) -> int:
        return len(self.column)

    def buffers(self) -> tuple[memoryview, memoryview]:
        """Returns the data of the column, and the offsets in it of just these rows."""
        _, offsets, data = self.column.buffers()
        first = self.column.offset
        rows = memoryview(offsets).cast("B").cast("i")[first : first + len(self.column) + 1]
        return memoryview(data if data is not None else b"").cast("B"), rows

    def mpub_bodies(self, bytes_max: int, count_max: int) -> Iterator[MpubBody]:
        """Yields all messages as MPUB bodies within both limits; a message above `bytes_max` is alone in its own."""
        data, offsets = self.buffers()
        row, rows = 0, len(self)
        while row < rows:
            body, after = pack(data, offsets, row, rows, bytes_max, count_max)
            yield MpubBody(body, after - row)
            row = after

    def hashes(self) -> tuple[pa.Array, int]:
        """Returns a 64-bit hash of each message, and their sum, which is the same for any order of the messages."""
        data, offsets = self.buffers()
        out = array("Q", bytes(8 * len(self)))
        total = hash_rows(data, offsets, 0, len(self), memoryview(out))
        return pa.Array.from_buffers(pa.uint64(), len(self), [None, pa.py_buffer(out)]), total

    def reordered(self, indices: pa.Array) -> Bodies:
        return Bodies(self.topic, self.column.take(indices))


@dataclass(frozen=True, slots=True)
class Deferred:
    """Holds one message that nsqd is to keep back for a while."""

    topic: str
    body: bytes
    delay_ms: int


class RowReader:
    """Reads the record batches of one partition; `row` counts the rows that were read."""

    def __init__(self, partition: int, topic: str | None, message_bytes_max: int) -> None:
        self.row = 0
        self.partition = partition
        self._topic = topic
        self._message_bytes_max = message_bytes_max
        self._known_topics: set[str] = set()

    def read(self, batch: pa.RecordBatch) -> tuple[list[Bodies], list[Deferred]]:
        columns = {name.lower(): batch.column(index) for index, name in enumerate(batch.schema.names)}
        # The cast makes one type of string, binary and their large forms; the bytes of a string are not copied.
        body = columns[BODY].cast(pa.binary())
        self._check_bodies(body)
        topics = None if self._topic is not None else columns[TOPIC].cast(pa.string())
        if topics is not None:
            self._check_topics(topics)
        delays = self._delays(columns[DEFER_MS]) if DEFER_MS in columns else None
        deferred: list[Deferred] = []
        if delays is not None:
            is_deferred = pc.greater(delays, 0)
            deferred = self._deferred(body, topics, delays, is_deferred)
            at_once = pc.invert(is_deferred)
            body = body.filter(at_once)
            topics = topics.filter(at_once) if topics is not None else None
        self.row += batch.num_rows
        return list(self._by_topic(body, topics)), deferred

    def _by_topic(self, body: pa.Array, topics: pa.Array | None) -> Iterator[Bodies]:
        if not len(body):
            return
        if topics is None:
            assert self._topic is not None
            yield Bodies(self._topic, body)
            return
        # Sorting keeps the order of rows within a topic, and costs the same for one topic and for a thousand.
        order = pc.sort_indices(topics)
        body, topics = body.take(order), topics.take(order)
        runs = pc.run_end_encode(topics)
        start = 0
        for topic, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
            yield Bodies(topic, body.slice(start, end - start))
            start = end

    def _deferred(
        self, body: pa.Array, topics: pa.Array | None, delays: pa.Array, is_deferred: pa.Array
    ) -> list[Deferred]:
        bodies, waits = body.filter(is_deferred).to_pylist(), delays.filter(is_deferred).to_pylist()
        names = topics.filter(is_deferred).to_pylist() if topics is not None else [self._topic] * len(bodies)
        return [Deferred(*row) for row in zip(names, bodies, waits, strict=True)]

    def _delays(self, column: pa.Array) -> pa.Array:
        """Reads the delays of rows; null means no delay."""
        delays = pc.fill_null(column.cast(pa.int64()), 0)
        self._refuse(pc.less(delays, 0), "its defer_ms is negative: give milliseconds from now, or null")
        return delays

    def _check_bodies(self, body: pa.Array) -> None:
        if body.null_count:
            self._refuse(body.is_null(), "its body is null: filter such rows out with where('body IS NOT NULL')")
        sizes = pc.binary_length(body)
        extremes = pc.min_max(sizes).as_py()
        if len(body) and extremes["min"] == 0:
            self._refuse(pc.equal(sizes, 0), "its body is empty, and NSQ has no empty messages: filter such rows out")
        if len(body) and extremes["max"] > self._message_bytes_max:
            too_big = pc.greater(sizes, self._message_bytes_max)
            size = sizes[_first(too_big)].as_py()
            self._refuse(
                too_big,
                f"its body has {size} bytes, more than {self._message_bytes_max}: make it smaller, or raise both "
                "--max-msg-size of nsqd and the option maxMessageBytes",
            )

    def _check_topics(self, topics: pa.Array) -> None:
        if topics.null_count:
            self._refuse(topics.is_null(), "its topic is null: fill it in, or give the option topic for all rows")
        for name in pc.unique(topics).to_pylist():
            if name in self._known_topics:
                continue
            if not is_valid_name(name):
                reason = f"{name!r} is not a topic: use 1 to 64 of the characters a-z A-Z 0-9 . _ -"
                self._refuse(pc.equal(topics, name), reason)
            self._known_topics.add(name)

    def _refuse(self, is_bad: pa.Array, reason: str) -> None:
        """Raises BadRow for the first bad row, if there is one."""
        index = _first(is_bad)
        if index >= 0:
            raise BadRow(f"row {self.row + index} of partition {self.partition} cannot be written: {reason}")


def _first(is_bad: pa.Array) -> int:
    index: Any = pc.index(is_bad, True).as_py()
    return int(index)
