"""Finds the part of a log in which rows can pass a filter, by asking Arrow, which does this for its own files.

Arrow is told that a file has only rows with, say, `seq < 1000`, and asked whether the filter needs that file. The bound
is where the answer changes, and a binary search finds it. So every filter that Arrow understands narrows what is read,
however it is written, and one that it does not understand narrows nothing.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow.fs import LocalFileSystem

INT64_MAX: Final = (1 << 63) - 1


class LogBounds(NamedTuple):
    """Holds the bounds outside of which no row passes a filter, as `low <= value < high`: for sequence numbers, and for
    microseconds since 1970.
    """

    seq_low: int
    seq_high: int
    time_low_us: int
    time_high_us: int


class RowFilter:
    """Tells which rows of `schema` can pass a filter, and which columns the filter needs."""

    def __init__(self, expression: pc.Expression, schema: pa.Schema):
        self._expression = expression
        self._schema = schema

    def bounds(self, topic: str, nsqd_id: str) -> LogBounds | None:
        """Returns the bounds for the rows of one topic on one nsqd, or None if none of these rows can pass."""
        base = (pc.field("topic") == topic) & (pc.field("nsqd") == nsqd_id)
        if not self._may_pass(base):
            return None

        def below(name: str, limit: Callable[[int], pa.Scalar]) -> int:
            return _first_true(lambda value: self._may_pass(base & (pc.field(name) < limit(value + 1))))

        def from_on(name: str, limit: Callable[[int], pa.Scalar]) -> int:
            return _first_true(lambda value: not self._may_pass(base & (pc.field(name) >= limit(value))))

        return LogBounds(
            below("seq", _seq), from_on("seq", _seq), below("timestamp", _time), from_on("timestamp", _time)
        )

    def needs(self, column: str) -> bool:
        """Tells whether the filter looks at a column."""
        without = self._schema.remove(self._schema.get_field_index(column))
        try:
            ds.dataset(without.empty_table()).count_rows(filter=self._expression)
        except pa.ArrowInvalid:
            return True
        return False

    def _may_pass(self, guarantee: pc.Expression) -> bool:
        """Tells whether a row for which `guarantee` is true may pass the filter. The file "-" is never opened."""
        files = ds.FileSystemDataset.from_paths(
            ["-"], schema=self._schema, format=ds.IpcFileFormat(), filesystem=LocalFileSystem(), partitions=[guarantee]
        )
        return next(files.get_fragments(filter=self._expression), None) is not None


def _first_true(test: Callable[[int], bool]) -> int:
    """Returns the least number from 0 on for which `test` is true, or INT64_MAX; once true, `test` has to stay true."""
    low, high = 0, INT64_MAX
    if test(low):
        return low
    if not test(high - 1):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if test(middle) else (middle, high)
    return high


def _seq(value: int) -> pa.Scalar:
    return pa.scalar(value, pa.int64())


def _time(value: int) -> pa.Scalar:
    return pa.scalar(value, pa.timestamp("us", "UTC"))
