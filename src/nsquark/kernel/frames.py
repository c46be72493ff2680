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
    from cython.cimports.nsquark.kernel.bytes import copy, i32, i64
else:
    from nsquark.kernel.bytes import copy, i32, i64

FRAME_SIZE_MAX_BYTES = 64 << 20
"""Far above any sane --max-msg-size: a larger size means that the peer does not speak this protocol."""

FIN_COMMAND_BYTES = 21

# Declared, not annotated: an annotated global stays a Python object in the compiled form.
_PREFIX_BYTES = cython.declare(cython.longlong, record.TIMESTAMP_AT)
_MESSAGE_HEADER_BYTES = cython.declare(cython.longlong, MESSAGE_HEADER_BYTES)
_ID_AT = cython.declare(cython.longlong, record.ID_AT)
_ID_BYTES = cython.declare(cython.longlong, record.ID_BYTES)
_FIN_BYTES = cython.declare(cython.longlong, FIN_COMMAND_BYTES)
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
    if size > size_max:
        raise FrameError(f"frame size {size} is above the limit of {size_max} bytes")
    if kind == _MESSAGE_TYPE and size < 4 + _MESSAGE_HEADER_BYTES:
        raise FrameError(f"message frame of size {size} is too short for its header of {MESSAGE_HEADER_BYTES} bytes")
    return 0


@cython.cclass
class FrameScanner:
    """Splits what one socket read brought; the caller keeps the bytes that were not consumed.

    `wanted_bytes` is, after a scan, the length of the frame of which only a part is there, or 0 when not even
    its prefix is: a caller grows its buffer only for a frame that does not fit.
    """

    size_max: cython.longlong
    wanted_bytes = cython.declare(cython.longlong, visibility="readonly")

    def __init__(self, size_max: cython.longlong = FRAME_SIZE_MAX_BYTES) -> None:
        self.size_max = size_max
        self.wanted_bytes = 0

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
        self.wanted_bytes = 0
        while end - pos >= _PREFIX_BYTES:
            size = i32(data, pos)
            kind = i32(data, pos + 4)
            _check_frame(size, kind, self.size_max)
            after = pos + 4 + size
            if after > end:
                self.wanted_bytes = 4 + size
                break
            pos += _PREFIX_BYTES
            if kind == _MESSAGE_TYPE:
                body = pos + _MESSAGE_HEADER_BYTES
                messages.append(
                    (
                        i64(data, pos),
                        (data[pos + 8] << 8) | data[pos + 9],
                        _copied(data, body - _ID_BYTES, body),
                        _copied(data, body, after),
                    )
                )
            else:
                others.append((kind, _copied(data, pos, after)))
            pos = after
        return pos - start, messages, others


def finish_all(
    data: cython.const[cython.uchar][::1],
    start: cython.longlong,
    end: cython.longlong,
    out: cython.uchar[::1],
) -> tuple[int, int, int, list[tuple[int, bytes]]]:
    """Writes `FIN <id>` for each complete message into `out`, and no Python object per message.

    Gives (bytes consumed, messages, bytes written to `out`, other frames as (type, data)). It stops before a
    message whose FIN does not fit `out`: send what is there and call again from where it stopped.
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
