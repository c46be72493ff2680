"""Reads many small ranges in one task: by one request for all, with rows of many topics in one Arrow batch.

This is the fast path for ranges that come as planned. A range that comes otherwise, or not at all because the
connection broke, is read again by itself with `RangeRowReader`, which knows what to do and what to say.
"""

import http.client
from collections.abc import Iterator

import msgspec
import pyarrow as pa

from nsquark.base.logs import library_log
from nsquark.kernel.columns import ColumnBuilder
from nsquark.spark.endpoint import NsqdError
from nsquark.spark.nsqd_http import ITEMS_MAX, RangeNsqd
from nsquark.spark.options import SourceOptions
from nsquark.spark.source.plan import PACK_RANGES_MAX, PackedPartition, Partition, RangePartition
from nsquark.spark.source.range_rows import (
    BODY_BYTES_MAX,
    ROWS_MAX,
    STALL_TIMEOUT_S,
    ArrowColumns,
    RangeRowReader,
)
from nsquark.wire.batch_format import HEADER_BYTES, RANGE_PIECE, RANGE_REFUSED, StoredBatch, scan

log = library_log("nsquark.spark")

RANGE_BYTES_MAX = 64 << 20
"""Each range is held in memory as a whole. After one that is larger than this, the rest are read one by one."""
READ_BYTES = 256 << 10

assert PACK_RANGES_MAX <= ITEMS_MAX


def read_partition(options: SourceOptions, schema: pa.Schema, partition: Partition) -> Iterator[pa.RecordBatch]:
    if isinstance(partition, PackedPartition):
        return PackedReader(options, schema, partition).batches()
    return RangeRowReader(options, schema, partition).batches()


class PackedReader:
    """Reads the ranges of one packed partition."""

    def __init__(self, options: SourceOptions, schema: pa.Schema, partition: PackedPartition):
        self._options = options
        self._schema = schema
        self._partition = partition
        with_bodies = self._with_bodies = not {"body", "headers"}.isdisjoint(schema.names)
        self._columns = ArrowColumns(schema, partition.ranges[0].key, options.headers and with_bodies)
        self._builder = ColumnBuilder(0, 0, ROWS_MAX, BODY_BYTES_MAX, with_bodies)
        self._topics: list[str] = []

    def batches(self) -> Iterator[pa.RecordBatch]:
        unread = dict(enumerate(self._partition.ranges))
        try:
            for number, data in self._received():
                part = unread.get(number)
                batches = _whole_batches(part, data) if part is not None else None
                if part is not None and batches is not None:
                    del unread[number]
                    yield from self._rows_of(part, data, batches)
        except (NsqdError, OSError, http.client.HTTPException) as error:
            log.warning("nsqd %s: %s; trying again", self._partition.ranges[0].key.nsqd_id, error)
        if self._builder.rows:
            yield self._full_batch()
        for part in unread.values():
            yield from RangeRowReader(self._options, self._schema, part).batches()

    def _received(self) -> Iterator[tuple[int, bytearray]]:
        """Yields the number and the bytes of each range; one that nsqd refuses has no bytes."""
        ranges = self._partition.ranges
        nsqd = RangeNsqd(self._partition.address, self._options.access, ranges[0].key.nsqd_id, STALL_TIMEOUT_S)
        asked = [{"topic": part.key.topic, "from": part.low, "to": part.high, "id": part.topic_id} for part in ranges]
        try:
            response = nsqd.stream("/log/read", msgspec.json.encode({"ranges": asked, "bodies": self._with_bodies}))
            current, data = 0, bytearray()
            while True:
                nsqd.deadline.set(STALL_TIMEOUT_S)
                head = _read_exactly(response, RANGE_PIECE.size)
                number, size = RANGE_PIECE.unpack(head) if head else (len(ranges), 0)
                if number != current:
                    yield current, data
                    current, data = number, bytearray()
                if not head:
                    return
                if size > RANGE_BYTES_MAX or len(data) + size > RANGE_BYTES_MAX:
                    raise NsqdError(f"a range of more than {RANGE_BYTES_MAX >> 20} MiB among small ones")
                data += _read_exactly(response, size)
                if number & RANGE_REFUSED:
                    current, data = number ^ RANGE_REFUSED, bytearray()
        finally:
            nsqd.close()

    def _rows_of(self, part: RangePartition, data: bytearray, batches: list[StoredBatch]) -> Iterator[pa.RecordBatch]:
        self._builder.low, self._builder.high = part.low, part.high
        for batch in batches:
            pos, seq = batch.offset + HEADER_BYTES, batch.first_seq
            while True:
                before = self._builder.rows
                pos, seq = self._builder.append(data, pos, batch.end, seq)
                self._topics += [part.key.topic] * (self._builder.rows - before)
                if pos == batch.end:
                    break
                yield self._full_batch()

    def _full_batch(self) -> pa.RecordBatch:
        topics, self._topics = self._topics, []
        return self._columns.batch(self._builder.hand_over(), topics)


def _whole_batches(part: RangePartition, data: bytearray) -> list[StoredBatch] | None:
    """Returns the batches of a range if they are intact and have the messages that the plan promised, else None."""
    found: list[StoredBatch] = []
    count, end, seq = 0, 0, part.low
    for batch in scan(memoryview(data), 0):
        if not isinstance(batch, StoredBatch) or batch.first_seq >= part.high or batch.next_seq <= seq:
            return None
        count += min(batch.next_seq, part.high) - max(batch.first_seq, part.low)
        end, seq = batch.end, batch.next_seq
        found.append(batch)
    return found if count == part.count and end == len(data) else None


def _read_exactly(response: http.client.HTTPResponse, size: int) -> bytes:
    """Reads `size` bytes, or none at the end of the answer; raises if it ends in between."""
    data = response.read(size)
    if data and len(data) < size:
        raise http.client.IncompleteRead(data, size - len(data))
    return data
