# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Packs records (`wire/record.py`) one after another as a consumer gets them, so that delivering is sending a slice.

The C types are in records.pxd.
"""

import ctypes

import cython

from nsquark.wire import record
from nsquark.wire.frames import FrameType

if cython.compiled:
    from cython.cimports.nsquark.kernel.bytes import copy, i32, i64, put, u32
else:
    from nsquark.kernel.bytes import copy, i32, i64, put, u32

TYPE_AT = cython.declare(cython.longlong, record.TYPE_AT)
TIMESTAMP_AT = cython.declare(cython.longlong, record.TIMESTAMP_AT)
ATTEMPTS_AT = cython.declare(cython.longlong, record.ATTEMPTS_AT)
ID_AT = cython.declare(cython.longlong, record.ID_AT)
BODY_AT = cython.declare(cython.longlong, record.BODY_AT)
MESSAGE_TYPE = cython.declare(cython.longlong, FrameType.MESSAGE)

POOLED_BYTES = cython.declare(cython.longlong, 1 << 20)
SPARE_MAX = 4

# `measure_mpub` returns these where it has no position.
MPUB_INCOMPLETE = -1
MPUB_BAD_SIZE = -2
MPUB_TOO_BIG = -3


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _put_hex(data: cython.uchar[::1], pos: cython.longlong, value: cython.longlong) -> cython.void:
    shift: cython.int = 60
    digit: cython.int
    while shift >= 0:
        digit = cython.cast(cython.int, (value >> shift) & 15)
        data[pos] = cython.cast(cython.uchar, digit + 48 if digit < 10 else digit + 87)
        pos += 1
        shift -= 4


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _increment_hex(data: cython.uchar[::1], pos: cython.longlong) -> cython.void:
    """Adds one to the hexadecimal number whose last digit is at `pos`."""
    while data[pos] == 102:  # f
        data[pos] = 48
        pos -= 1
    data[pos] = 97 if data[pos] == 57 else data[pos] + 1


def measure_mpub(
    data: cython.const[cython.uchar][::1],
    pos: cython.longlong,
    end: cython.longlong,
    count: cython.longlong,
    size_max: cython.longlong,
) -> tuple:
    """Walks `count` sized messages from `pos`; returns (position after them or MPUB_*, index, size, start) of its end.

    A caller that gets more bytes later goes on at `start` with `count - index` messages.
    """
    index: cython.longlong = 0
    size: cython.longlong = 0
    while index < count:
        if pos + 4 > end:
            return MPUB_INCOMPLETE, index, -1, pos
        size = i32(data, pos)
        if size <= 0:
            return MPUB_BAD_SIZE, index, size, pos
        if size > size_max:
            return MPUB_TOO_BIG, index, size, pos
        if pos + 4 + size > end:
            return MPUB_INCOMPLETE, index, size, pos
        pos += 4 + size
        index += 1
    return pos, index, size, pos


_spare: list = []
"""Has the memory of full-grown chunks that are gone, for those to come.

Fresh memory from the system costs more than filling it: it comes page by page, and zeroed.
"""


class _Loan(ctypes.c_ubyte * (1 << 20)):
    """Lends memory: when the last view of it is gone, it is spare again."""

    def __del__(self):
        if len(_spare) < SPARE_MAX:
            _spare.append(self.memory)


@cython.cfunc
def _memory(size: cython.longlong) -> object:
    if size != POOLED_BYTES:
        return memoryview(bytearray(size))
    try:
        memory = _spare.pop()
    except IndexError:
        memory = bytearray(size)
    loan = _Loan.from_buffer(memory)
    loan.memory = memory
    return memoryview(loan).cast("B")


class Chunk:
    """Has records of consecutive sequence numbers in one piece of memory that never moves.

    Record i has sequence number `first_seq + i` and lies at `offsets[i] .. offsets[i + 1]`; `used` is where the
    next one goes. Bytes below `used` change only by `truncate`, which is for records nobody was shown yet.
    """

    def __init__(
        self,
        node_id: cython.longlong,
        first_seq: cython.longlong,
        size: cython.longlong,
        count_max: cython.longlong,
    ):
        self.first_seq = first_seq
        self.count = 0
        self.used = 0
        self.resume = 0
        self.view = _memory(size)
        self._id_bits = node_id << record.SEQ_BITS
        self._timestamp_ns = -1
        self._count_max = count_max
        self._size = size
        self._data = self.view
        self._offsets = memoryview(bytearray(4 * (count_max + 1))).cast("I")

    def append(
        self,
        source: cython.const[cython.uchar][::1],
        pos: cython.longlong,
        size: cython.longlong,
        timestamp_ns: cython.longlong,
    ) -> cython.bint:
        """Appends one message with its body at `source[pos:pos + size]`; returns False when there is no room for it."""
        if self.count >= self._count_max or self.used + BODY_AT + size > self._size:
            return False
        self._write(source, pos, size, timestamp_ns)
        return True

    def append_sized(
        self,
        source: cython.const[cython.uchar][::1],
        pos: cython.longlong,
        count: cython.longlong,
        timestamp_ns: cython.longlong,
    ) -> cython.longlong:
        """Appends up to `count` messages, each behind its size as in MPUB; returns how many fit. `resume` is where the
        rest starts.
        """
        done: cython.longlong = 0
        size: cython.longlong
        while done < count and self.count < self._count_max:
            size = u32(source, pos)
            if self.used + BODY_AT + size > self._size:
                break
            self._write(source, pos + 4, size, timestamp_ns)
            pos += 4 + size
            done += 1
        self.resume = pos
        return done

    def append_pubs(
        self,
        source: cython.const[cython.uchar][::1],
        pos: cython.longlong,
        end: cython.longlong,
        line: bytes,
        size_max: cython.longlong,
        timestamp_ns: cython.longlong,
    ) -> cython.longlong:
        """Appends the whole PUB commands at `pos` whose line is `line`; returns how many fit. `resume` is their end."""
        done: cython.longlong = 0
        size: cython.longlong
        at: cython.longlong
        index: cython.longlong
        line_bytes: cython.longlong = len(line)
        while pos + line_bytes + 4 < end and self.count < self._count_max:
            index = 0
            while index < line_bytes and source[pos + index] == cython.cast(cython.uchar, line[index]):
                index += 1
            if index < line_bytes:
                break
            at = pos + line_bytes
            size = u32(source, at)
            if size == 0 or size > size_max or at + 4 + size > end or self.used + BODY_AT + size > self._size:
                break
            self._write(source, at + 4, size, timestamp_ns)
            pos = at + 4 + size
            done += 1
        self.resume = pos
        return done

    def _write(
        self,
        source: cython.const[cython.uchar][::1],
        pos: cython.longlong,
        size: cython.longlong,
        timestamp_ns: cython.longlong,
    ) -> cython.void:
        at: cython.longlong = self.used
        if self._timestamp_ns >= 0:
            # All but the size, the time and the last digits of the id is as in the record before.
            copy(self._data, at, self._data, self._offsets[self.count - 1], BODY_AT)
            put(self._data, at, BODY_AT - 4 + size, 4)
            if timestamp_ns != self._timestamp_ns:
                put(self._data, at + TIMESTAMP_AT, timestamp_ns, 8)
            _increment_hex(self._data, at + BODY_AT - 1)
        else:
            put(self._data, at, BODY_AT - 4 + size, 4)
            put(self._data, at + TYPE_AT, MESSAGE_TYPE, 4)
            put(self._data, at + TIMESTAMP_AT, timestamp_ns, 8)
            put(self._data, at + ATTEMPTS_AT, 1, 2)
            _put_hex(self._data, at + ID_AT, self._id_bits | (self.first_seq + self.count))
        self._timestamp_ns = timestamp_ns
        copy(self._data, at + BODY_AT, source, pos, size)
        self._offsets[self.count] = cython.cast(cython.uint, at)
        self.count += 1
        self.used = at + BODY_AT + size
        self._offsets[self.count] = cython.cast(cython.uint, self.used)

    def load(
        self,
        source: cython.const[cython.uchar][::1],
        pos: cython.longlong,
        size: cython.longlong,
        count: cython.longlong,
    ) -> cython.bint:
        """Adds `count` records as they lie in the log; returns False if they do not fit, or are not so many records."""
        if self.count + count > self._count_max or self.used + size > self._size:
            return False
        at: cython.longlong = self.used
        index: cython.longlong = self.count
        end: cython.longlong = at + size
        stop: cython.longlong = index + count
        self._timestamp_ns = -1
        copy(self._data, at, source, pos, size)
        while index < stop:
            if at + BODY_AT > end:
                return False
            self._offsets[index] = cython.cast(cython.uint, at)
            at += 4 + u32(self._data, at)
            index += 1
        if at != end:
            return False
        self._offsets[index] = cython.cast(cython.uint, at)
        self.count = index
        self.used = end
        return True

    def truncate(self, count: cython.longlong) -> None:
        """Forgets all records from the `count`-th on."""
        if count < self.count:
            self._timestamp_ns = -1
            self.count = count
            self.used = self._offsets[count] if count > 0 else 0

    def offset(self, index: cython.longlong) -> cython.longlong:
        """Tells where record `index` starts; for `index == count`, where the last one ends."""
        if index < 0 or index > self.count:
            raise IndexError(index)
        return self._offsets[index] if self.count > 0 else 0

    def fit(self, index: cython.longlong, count_max: cython.longlong, bytes_max: cython.longlong) -> cython.longlong:
        """Tells how many records from `index` on fit both limits, but at least one if there is one."""
        stop: cython.longlong = index + count_max
        if stop > self.count:
            stop = self.count
        if stop <= index:
            return 0
        limit: cython.longlong = self._offsets[index] + bytes_max
        if self._offsets[stop] <= limit:
            return stop - index
        low: cython.longlong = index + 1
        while low < stop:
            middle: cython.longlong = (low + stop + 1) >> 1
            if self._offsets[middle] <= limit:
                low = middle
            else:
                stop = middle - 1
        return low - index

    def timestamp(self, index: cython.longlong) -> cython.longlong:
        """Tells when record `index` was published, in nanoseconds."""
        return i64(self._data, self._offsets[index] + TIMESTAMP_AT)
