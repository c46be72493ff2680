# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Lays messages out as MPUB wants them, from lines of text or an Arrow column, with no Python object per message.

Arrow: data, and i32 offsets: row i lies at offsets[i] .. offsets[i + 1]
MPUB:  i32 count, then i32 size and bytes of each message, big endian
"""

import sys

import cython

from nsquark.wire import record

if cython.compiled:
    from cython.cimports.libc.string import memcpy
    from cython.cimports.nsquark.kernel.bytes import copy, put, room
else:
    from nsquark.kernel.bytes import copy, put, room

_COUNT_BYTES = cython.declare(cython.longlong, 4)
_SIZE_BYTES = cython.declare(cython.longlong, record.SIZE_BYTES)
_WORD_BYTES = cython.declare(cython.longlong, 8)
_MASK = cython.declare(cython.ulonglong, (1 << 64) - 1)
_ODD_1 = cython.declare(cython.ulonglong, 0x9E3779B97F4A7C15)
_ODD_2 = cython.declare(cython.ulonglong, 0xD6E8FEB86659FD93)


@cython.cfunc
@cython.exceptval(-1)
def _check_rows(
    size: cython.longlong, offsets: cython.const[cython.int][::1], first: cython.longlong, last: cython.longlong
) -> cython.int:
    """Refuses wrong rows or offsets, which must never reach the loops: they index unchecked."""
    row: cython.longlong = first
    if first < 0 or last < first or last >= len(offsets):
        raise ValueError(f"rows {first} to {last} are not in a column of {len(offsets) - 1} rows")
    while row < last:
        if offsets[row + 1] < offsets[row]:
            raise ValueError(f"row {row} ends before it begins")
        row += 1
    if offsets[first] < 0 or offsets[last] > size:
        raise ValueError(f"the offsets reach beyond {size} bytes of data")
    return 0


def pack(
    data: cython.const[cython.uchar][::1],
    offsets: cython.const[cython.int][::1],
    first: cython.longlong,
    last: cython.longlong,
    bytes_max: cython.longlong,
    count_max: cython.longlong,
) -> tuple[bytearray, int]:
    """Makes an MPUB body of rows from `first` on; returns the row after them too.

    It packs as many rows before `last` as both limits allow, but always one: the caller knows what to do with a message
    that alone is too big.
    """
    size: cython.longlong = _COUNT_BYTES
    end: cython.longlong = first
    _check_rows(len(data), offsets, first, last)
    while end < last and end - first < count_max:
        size += _SIZE_BYTES + offsets[end + 1] - offsets[end]
        if size > bytes_max and end > first:
            size -= _SIZE_BYTES + offsets[end + 1] - offsets[end]
            break
        end += 1
    body = room(size)
    _fill(body, data, offsets, first, end)
    return body, end


def pack_bodies(bodies: list) -> bytearray:
    """Makes an MPUB body of these messages, each `bytes`; an empty one is a ValueError, since nsqd refuses it."""
    size: cython.longlong = _COUNT_BYTES
    length: cython.longlong
    pos: cython.longlong = _COUNT_BYTES
    body: bytes
    out: cython.uchar[::1]
    for body in bodies:
        length = len(body)
        if length == 0:
            raise ValueError("a message body must not be empty: nsqd refuses it")
        size += _SIZE_BYTES + length
    packed = room(size)
    out = packed
    put(out, 0, len(bodies), 4)
    for body in bodies:
        length = len(body)
        put(out, pos, length, 4)
        pos += _SIZE_BYTES
        if cython.compiled:
            memcpy(cython.address(out[pos]), cython.cast(cython.p_char, body), length)
        else:
            out[pos : pos + length] = body
        pos += length
    return packed


@cython.cfunc
@cython.exceptval(check=False)
def _fill(
    out: cython.uchar[::1],
    data: cython.const[cython.uchar][::1],
    offsets: cython.const[cython.int][::1],
    first: cython.longlong,
    last: cython.longlong,
) -> cython.void:
    pos: cython.longlong = _COUNT_BYTES
    row: cython.longlong = first
    start: cython.longlong
    size: cython.longlong
    put(out, 0, last - first, 4)
    while row < last:
        start = offsets[row]
        size = offsets[row + 1] - start
        put(out, pos, size, 4)
        pos += _SIZE_BYTES
        copy(out, pos, data, start, size)
        pos += size
        row += 1


def hash_rows(
    data: cython.const[cython.uchar][::1],
    offsets: cython.const[cython.int][::1],
    first: cython.longlong,
    last: cython.longlong,
    out: cython.ulonglong[::1],
) -> int:
    """Writes a 64-bit hash of each row's bytes to `out`; returns their sum modulo 2^64, whatever their order."""
    total: cython.ulonglong = 0
    value: cython.ulonglong
    row: cython.longlong = first
    _check_rows(len(data), offsets, first, last)
    if len(out) < last - first:
        raise ValueError(f"{last - first} hashes do not fit into {len(out)}")
    while row < last:
        value = _hash(data, offsets[row], offsets[row + 1])
        out[row - first] = value
        total = (total + value) & _MASK
        row += 1
    return total


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _hash(data: cython.const[cython.uchar][::1], pos: cython.longlong, end: cython.longlong) -> cython.ulonglong:
    value: cython.ulonglong = ((end - pos + 1) * _ODD_1) & _MASK
    while pos < end:
        value = _mixed(value ^ _word(data, pos, min(_WORD_BYTES, end - pos)))
        pos += _WORD_BYTES
    return _mixed(value)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _mixed(value: cython.ulonglong) -> cython.ulonglong:
    """Mixes the bits of a value one to one: different values stay different."""
    value = ((value ^ (value >> 32)) * _ODD_2) & _MASK
    value = ((value ^ (value >> 29)) * _ODD_1) & _MASK
    return value ^ (value >> 32)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _word(data: cython.const[cython.uchar][::1], pos: cython.longlong, size: cython.longlong) -> cython.ulonglong:
    word: cython.ulonglong = 0
    if cython.compiled:
        memcpy(cython.address(word), cython.address(data[pos]), size)
        return word
    else:
        return int.from_bytes(data[pos : pos + size], sys.byteorder)


_NEWLINE = cython.declare(cython.uchar, 10)


def measure_lines(data: cython.const[cython.uchar][::1], size_max: cython.longlong) -> cython.longlong:
    """Returns how many lines are not empty, or -1 if one is longer than `size_max`."""
    count: cython.longlong = 0
    start: cython.longlong = 0
    end: cython.longlong = len(data)
    at: cython.longlong = 0
    while at <= end:
        if at == end or data[at] == _NEWLINE:
            if at - start > size_max:
                return -1
            if at > start:
                count += 1
            start = at + 1
        at += 1
    return count


def size_lines(
    data: cython.const[cython.uchar][::1], pos: cython.longlong, count_max: cython.longlong
) -> tuple[bytearray, int, int]:
    """Puts its size before each of the next lines that are not empty, as in MPUB; returns that, how many they are, and
    where the rest starts.
    """
    end: cython.longlong = len(data)
    first: cython.longlong = pos
    start: cython.longlong = pos
    at: cython.longlong = pos
    count: cython.longlong = 0
    size: cython.longlong = 0
    while at <= end and count < count_max:
        if at == end or data[at] == _NEWLINE:
            if at > start:
                count += 1
                size += _SIZE_BYTES + at - start
            start = at + 1
        at += 1
    rest: cython.longlong = start if start < end else end
    sized: bytearray = room(size)
    out: cython.uchar[::1] = sized
    used: cython.longlong = 0
    start = at = first
    while used < size:
        if at == end or data[at] == _NEWLINE:
            if at > start:
                put(out, used, at - start, 4)
                used += _SIZE_BYTES
                copy(out, used, data, start, at - start)
                used += at - start
            start = at + 1
        at += 1
    return sized, count, rest
