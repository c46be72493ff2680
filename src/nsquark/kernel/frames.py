# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Cuts what a socket read brought to a client into frames, in one call.

    i32 size | i32 frame type | data                     size counts the type and the data
    data of a message: i64 timestamp ns | u16 attempts | 16 bytes id | body

`FrameScanner` makes one tuple per message, for real clients. `finish_all` makes none: a load generator only
answers each message with FIN, and must not be slower than the broker it measures.
"""

import cython

from nsquark.wire import record
from nsquark.wire.frames import MESSAGE_HEADER_BYTES, FrameType

if cython.compiled:
    from cython.cimports.cpython.bytes import PyBytes_AS_STRING, PyBytes_FromStringAndSize
    from cython.cimports.libc.string import memcpy
    from cython.cimports.nsquark.kernel.bytes import copy, i32, i64
else:
    from nsquark.kernel.bytes import copy, i32, i64

FRAME_SIZE_MAX_BYTES = 64 << 20
"""This is far above any sane --max-msg-size: a larger size means that the peer does not speak this protocol."""

LARGE_FRAME_BYTES = 64 << 10
"""The scanner puts a message with a larger frame together as it comes; no other frame may be larger."""

FIN_COMMAND_BYTES = 21

# Declared, not annotated: an annotated global stays a Python object in the compiled form.
_PREFIX_BYTES = cython.declare(cython.longlong, record.TIMESTAMP_AT)
_MESSAGE_HEADER_BYTES = cython.declare(cython.longlong, MESSAGE_HEADER_BYTES)
_ID_AT = cython.declare(cython.longlong, record.ID_AT)
_ID_BYTES = cython.declare(cython.longlong, record.ID_BYTES)
_FIN_BYTES = cython.declare(cython.longlong, FIN_COMMAND_BYTES)
_LARGE_BYTES = cython.declare(cython.longlong, LARGE_FRAME_BYTES)
_MESSAGE_TYPE = cython.declare(cython.longlong, FrameType.MESSAGE)


class FrameError(ValueError):
    """Says that what arrived is not a frame of NSQ's protocol; where the next one would start is unknown."""


@cython.cfunc
@cython.inline
def _copied(data: cython.const[cython.uchar][::1], pos: cython.longlong, end: cython.longlong) -> bytes:
    if cython.compiled:
        # A slice of the typed view would build a view object for each field.
        return b"" if pos == end else cython.address(data[pos])[: end - pos]
    else:
        return bytes(data[pos:end])


@cython.cfunc
@cython.exceptval(-1)
def _check_range(start: cython.longlong, end: cython.longlong, length: cython.longlong) -> cython.int:
    """Refuses a wrong range, which must never reach the loops: they index unchecked."""
    if start < 0 or end < start or end > length:
        raise ValueError(f"valid range {start}..{end} does not lie in a buffer of {length} bytes")
    return 0


@cython.cfunc
@cython.inline
@cython.exceptval(-1)
def _check_frame(size: cython.longlong, kind: cython.longlong, size_max: cython.longlong) -> cython.int:
    if size < 4:
        raise FrameError(f"frame size {size} is below 4: the peer does not speak NSQ's protocol V2")
    if kind != _MESSAGE_TYPE and size_max > _LARGE_BYTES:
        size_max = _LARGE_BYTES
    if size > size_max:
        raise FrameError(f"frame size {size} is above the limit of {size_max} bytes")
    if kind == _MESSAGE_TYPE and size < 4 + _MESSAGE_HEADER_BYTES:
        raise FrameError(f"message frame of size {size} is too short for its header of {MESSAGE_HEADER_BYTES} bytes")
    return 0


@cython.cfunc
@cython.inline
def _message(data: cython.const[cython.uchar][::1], body: cython.longlong, content: bytes) -> tuple:
    """Makes the tuple of a message from the header before its body."""
    header: cython.longlong = body - _MESSAGE_HEADER_BYTES
    return (
        i64(data, header),
        (data[header + 8] << 8) | data[header + 9],
        _copied(data, body - _ID_BYTES, body),
        content,
    )


@cython.cclass
class _LargeMessage:
    """Gathers a message that many reads bring. Each of them is copied to its place in the body, so that nothing is left
    to do at the end: copying a body of 64 MiB at once would block the event loop for too long.
    """

    fields: tuple
    body: bytes
    size: cython.longlong
    filled: cython.longlong

    def __init__(self, fields: tuple, size: cython.longlong) -> None:
        self.fields = fields
        self.size = size
        self.filled = 0
        if cython.compiled:
            self.body = PyBytes_FromStringAndSize(cython.NULL, size)
        else:
            self.body = bytearray(size)

    @cython.cfunc
    def fill(
        self, data: cython.const[cython.uchar][::1], pos: cython.longlong, end: cython.longlong
    ) -> cython.longlong:
        """Copies what belongs to the body; returns where the rest begins."""
        count: cython.longlong = min(end - pos, self.size - self.filled)
        if count > 0:
            if cython.compiled:
                memcpy(PyBytes_AS_STRING(self.body) + self.filled, cython.address(data[pos]), count)
            else:
                self.body[self.filled : self.filled + count] = data[pos : pos + count]
            self.filled += count
        return pos + count


@cython.cclass
class FrameScanner:
    """Splits what one socket read brought; the caller keeps the bytes that were not consumed, at most
    LARGE_FRAME_BYTES. A message that is larger is consumed as it comes, and returned when all of it is here.
    """

    size_max: cython.longlong
    large: _LargeMessage

    def __init__(self, size_max: cython.longlong = FRAME_SIZE_MAX_BYTES) -> None:
        self.size_max = size_max
        self.large = None

    def scan(
        self, data: cython.const[cython.uchar][::1], start: cython.longlong, end: cython.longlong
    ) -> tuple[int, list[tuple[int, int, bytes, bytes]], list[tuple[int, bytes]]]:
        """Returns (bytes consumed, messages as (timestamp ns, attempts, id, body), other frames as (type, data))."""
        messages: list = []
        others: list = []
        pos: cython.longlong = start
        size: cython.longlong
        kind: cython.longlong
        body: cython.longlong
        after: cython.longlong
        _check_range(start, end, len(data))
        if self.large is not None:
            pos = self.large.fill(data, pos, end)
            if self.large.filled == self.large.size:
                messages.append((*self.large.fields, bytes(self.large.body)))
                self.large = None
        while end - pos >= _PREFIX_BYTES:
            size = i32(data, pos)
            kind = i32(data, pos + 4)
            _check_frame(size, kind, self.size_max)
            after = pos + 4 + size
            body = pos + _PREFIX_BYTES + _MESSAGE_HEADER_BYTES
            if after > end:
                if kind == _MESSAGE_TYPE and size > _LARGE_BYTES and body <= end:
                    self.large = _LargeMessage(_message(data, body, b"")[:3], after - body)
                    pos = self.large.fill(data, body, end)
                break
            if kind == _MESSAGE_TYPE:
                messages.append(_message(data, body, _copied(data, body, after)))
            else:
                others.append((kind, _copied(data, pos + _PREFIX_BYTES, after)))
            pos = after
        return pos - start, messages, others


def finish_all(
    data: cython.const[cython.uchar][::1],
    start: cython.longlong,
    end: cython.longlong,
    out: cython.uchar[::1],
) -> tuple[int, int, int, list[tuple[int, bytes]]]:
    """Writes `FIN <id>` for each complete message into `out`, without a Python object per message.

    Returns (bytes consumed, messages, bytes written to `out`, other frames as (type, data)). It stops before a message
    whose FIN does not fit `out`: send what is there and call again from where it stopped.
    """
    others: list = []
    pos: cython.longlong = start
    written: cython.longlong = 0
    messages: cython.longlong = 0
    room: cython.longlong = len(out)
    size: cython.longlong
    kind: cython.longlong
    after: cython.longlong
    size_max: cython.longlong = FRAME_SIZE_MAX_BYTES
    _check_range(start, end, len(data))
    while end - pos >= _PREFIX_BYTES:
        size = i32(data, pos)
        kind = i32(data, pos + 4)
        _check_frame(size, kind, size_max)
        after = pos + 4 + size
        if after > end:
            break
        if kind == _MESSAGE_TYPE:
            if written + _FIN_BYTES > room:
                break
            _put_fin(out, written, data, pos + _ID_AT)
            written += _FIN_BYTES
            messages += 1
        else:
            others.append((kind, _copied(data, pos + _PREFIX_BYTES, after)))
        pos = after
    return pos - start, messages, written, others


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _put_fin(
    out: cython.uchar[::1],
    at: cython.longlong,
    data: cython.const[cython.uchar][::1],
    id_at: cython.longlong,
) -> cython.void:
    out[at] = 70  # F
    out[at + 1] = 73  # I
    out[at + 2] = 78  # N
    out[at + 3] = 32  # space
    copy(out, at + 4, data, id_at, _ID_BYTES)
    out[at + 20] = 10  # LF
