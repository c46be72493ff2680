# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Turns the records of a log into columns in Arrow's layout, without a Python object per message.

A column of numbers is an array of int64, a column of bodies is their bytes and the int32 offsets between them: these
are the buffers that pyarrow wraps without copying.
"""

import cython

from nsquark.wire import record
from nsquark.wire.frames import FrameType

if cython.compiled:
    from cython.cimports.nsquark.kernel.bytes import copy, i64, put, room, u32
else:
    from nsquark.kernel.bytes import copy, i64, put, room, u32

# Declared, not annotated: an annotated global stays a Python object in the compiled form.
_SIZE_BYTES = cython.declare(cython.longlong, record.SIZE_BYTES)
_TYPE_AT = cython.declare(cython.longlong, record.TYPE_AT)
_TIMESTAMP_AT = cython.declare(cython.longlong, record.TIMESTAMP_AT)
_ID_AT = cython.declare(cython.longlong, record.ID_AT)
_ID_BYTES = cython.declare(cython.longlong, record.ID_BYTES)
_BODY_AT = cython.declare(cython.longlong, record.BODY_AT)
_MESSAGE_TYPE = cython.declare(cython.longlong, FrameType.MESSAGE)
_NS_PER_US = cython.declare(cython.longlong, 1000)


class RecordError(ValueError):
    """Says that a payload whose checksum is right does not consist of records: another version wrote it."""


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _microseconds(data: cython.const[cython.uchar][::1], pos: cython.longlong) -> cython.longlong:
    """Reads nanoseconds as microseconds, rounded down; division rounds towards zero when compiled, down when
    interpreted.
    """
    ns: cython.longlong = i64(data, pos)
    return ns // _NS_PER_US if ns >= 0 else -((_NS_PER_US - 1 - ns) // _NS_PER_US)


def without_bodies(data: cython.const[cython.uchar][::1], start: cython.longlong, end: cython.longlong) -> bytearray:
    """Copies the records in data[start:end], each up to where its body begins."""
    pos: cython.longlong = start
    at: cython.longlong = 0
    count: cython.longlong = 0
    if start < 0 or end < start or end > len(data):
        raise ValueError(f"valid range {start}..{end} does not lie in a buffer of {len(data)} bytes")
    while pos < end:
        if end - pos < _BODY_AT or u32(data, pos) < _BODY_AT - _SIZE_BYTES or u32(data, pos) > end - pos - _SIZE_BYTES:
            raise RecordError(f"record {count} is no record of a message")
        pos += _SIZE_BYTES + u32(data, pos)
        count += 1
    heads: bytearray = room(count * _BODY_AT)
    view: cython.uchar[::1] = memoryview(heads)
    pos = start
    while pos < end:
        copy(view, at, data, pos, _BODY_AT)
        put(view, at, _BODY_AT - _SIZE_BYTES, 4)
        pos += _SIZE_BYTES + u32(data, pos)
        at += _BODY_AT
    return heads


@cython.cclass
class ColumnBuilder:
    """Collects the messages of a range, until an Arrow batch of `rows_max` rows or `body_bytes_max` bytes of bodies is
    full.

    A body larger than that gets an Arrow batch of its own. Buffers that were handed over are never written again. `low`
    and `high` may be set anew: for a reader that starts again after a lost connection, to leave out what it already
    has, and for one that goes on with another range.
    """

    rows = cython.declare(cython.longlong, visibility="readonly")
    rows_max: cython.longlong
    body_bytes_max: cython.longlong
    body_bytes: cython.longlong
    with_bodies: cython.bint
    low = cython.declare(cython.longlong, visibility="public")
    high = cython.declare(cython.longlong, visibility="public")
    _seqs_buffer: object
    _times_buffer: object
    _ids_buffer: object
    _offsets_buffer: object
    _bodies_buffer: object
    _seqs: cython.longlong[::1]
    _times: cython.longlong[::1]
    _ids: cython.uchar[::1]
    _offsets: cython.int[::1]
    _bodies: cython.uchar[::1]

    def __init__(
        self,
        low: cython.longlong,
        high: cython.longlong,
        rows_max: cython.longlong,
        body_bytes_max: cython.longlong,
        with_bodies: cython.bint = True,
    ) -> None:
        if rows_max < 1 or body_bytes_max < 1:
            raise ValueError("a batch has room for at least one row and one byte")
        self.low = low
        self.high = high
        self.rows_max = rows_max
        self.body_bytes_max = body_bytes_max
        self.with_bodies = with_bodies
        self._renew()

    @cython.cfunc
    def _renew(self) -> object:
        self.rows = 0
        self.body_bytes = 0
        self._seqs_buffer = room(self.rows_max * 8)
        self._times_buffer = room(self.rows_max * 8)
        self._ids_buffer = room(self.rows_max * 16)
        self._offsets_buffer = room((self.rows_max + 1) * 4)
        self._seqs = memoryview(self._seqs_buffer).cast("q")
        self._times = memoryview(self._times_buffer).cast("q")
        self._ids = memoryview(self._ids_buffer)
        self._offsets = memoryview(self._offsets_buffer).cast("i")
        self._offsets[0] = 0
        self._room_for_bodies(self.body_bytes_max if self.with_bodies else 1)
        return None

    @cython.cfunc
    def _room_for_bodies(self, size: cython.longlong) -> object:
        self._bodies_buffer = room(size)
        self._bodies = memoryview(self._bodies_buffer)
        return None

    def append(
        self,
        data: cython.const[cython.uchar][::1],
        start: cython.longlong,
        end: cython.longlong,
        seq: cython.longlong,
    ) -> tuple[int, int]:
        """Adds the records in data[start:end], the first of which is message `seq`, as far as there is room.

        Returns the position and the sequence number it stopped at; position `end` means that all were added. Messages
        outside of the range are left out.
        """
        pos: cython.longlong = start
        after: cython.longlong
        size: cython.longlong
        if start < 0 or end < start or end > len(data):
            raise ValueError(f"valid range {start}..{end} does not lie in a buffer of {len(data)} bytes")
        while pos < end:
            if end - pos < _BODY_AT:
                raise RecordError(f"{end - pos} bytes are left over after message {seq - 1}")
            after = pos + _SIZE_BYTES + u32(data, pos)
            if after < pos + _BODY_AT or after > end or u32(data, pos + _TYPE_AT) != _MESSAGE_TYPE:
                raise RecordError(f"message {seq} is no record of a message")
            if self.low <= seq < self.high:
                size = after - pos - _BODY_AT if self.with_bodies else 0
                if not self._has_room(size):
                    break
                self._put(data, pos, size, seq)
            pos = after
            seq += 1
        return pos, seq

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _has_room(self, size: cython.longlong) -> cython.bint:
        if self.rows == 0:
            return True
        return self.rows < self.rows_max and self.body_bytes + size <= self.body_bytes_max

    @cython.cfunc
    @cython.inline
    def _put(
        self,
        data: cython.const[cython.uchar][::1],
        pos: cython.longlong,
        size: cython.longlong,
        seq: cython.longlong,
    ) -> object:
        row: cython.longlong = self.rows
        id_at: cython.longlong = row * _ID_BYTES
        body_at: cython.longlong = self.body_bytes
        if size > len(self._bodies):
            self._room_for_bodies(size)
        self._seqs[row] = seq
        self._times[row] = _microseconds(data, pos + _TIMESTAMP_AT)
        copy(self._ids, id_at, data, pos + _ID_AT, _ID_BYTES)
        copy(self._bodies, body_at, data, pos + _BODY_AT, size)
        self.rows = row + 1
        self.body_bytes = body_at + size
        self._offsets[row + 1] = cython.cast(cython.int, self.body_bytes)
        return None

    def hand_over(self) -> tuple[int, bytearray, bytearray, bytearray, bytearray, bytearray]:
        """Returns (rows, sequence numbers, times in us, ids of 16 bytes, offsets, bodies) of what was collected."""
        taken = (
            self.rows,
            self._seqs_buffer,
            self._times_buffer,
            self._ids_buffer,
            self._offsets_buffer,
            self._bodies_buffer,
        )
        self._renew()
        return taken
