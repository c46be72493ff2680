"""Encodes and finds the records in a file of deferred messages.

A record is a head (checksum, kind, bytes of the body, due time, delay, publish time, number) and a body. A note's body
has the numbers of messages that left; its number is that of their append, or 0 if they were moved to another bucket.
The kinds of records are chosen so that the next record is found behind one that is damaged. In format 1 the kinds were
1 and 2, and there was no delay; such records are read.
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from nsquark.base.durations import NS_PER_MS
from nsquark.log.files import read_readable

BUCKET_MS = 60_000
READ_BYTES = 1 << 20
_HEAD = struct.Struct("<QIIqqqQ")
"""Packs the head of a record: checksum, kind, body bytes, due ms, delay ms, timestamp ns, number."""
_HEAD_1 = struct.Struct("<QIIqqQ")
"""Packs the head of a record in format 1, which has no delay."""
_KIND_AT = 8
MESSAGE = int.from_bytes(b"NQDM", "little")
LEFT = int.from_bytes(b"NQDL", "little")
_MESSAGE_1, _LEFT_1 = 1, 2
_KINDS = {kind: kind.to_bytes(4, "little") for kind in (MESSAGE, LEFT, _MESSAGE_1, _LEFT_1)}
_ANY_KIND = re.compile(b"|".join(_KINDS.values()))


class Record(NamedTuple):
    """Is an intact record, a message or a note, and where it is in the file."""

    offset: int
    end: int
    is_message: bool
    due_ms: int
    delay_ms: int
    timestamp_ns: int
    number: int
    body: bytes


class DamagedBytes(NamedTuple):
    """Names bytes that are no intact record, with an intact one behind them or not."""

    offset: int
    end: int


def encode(kind: int, due_ms: int, delay_ms: int, timestamp_ns: int, number: int, body: bytes) -> bytes:
    record = _HEAD.pack(0, kind, len(body), due_ms, delay_ms, timestamp_ns, number) + body
    return xxh3_64_intdigest(record[8:]).to_bytes(8, "little") + record[8:]


def scan(fd: int, path: Path, size: int, key: int, unreadable: list[int]) -> Iterator[Record | DamagedBytes]:
    """Yields the records of a file and the damage between and behind them, read piece by piece.

    `unreadable` gets how many bytes could not be read, which therefore are damaged.
    """
    data, base, pos, damaged_from = bytearray(), 0, 0, -1
    while base + pos < size:
        if pos >= READ_BYTES:
            del data[:pos]
            base, pos = base + pos, 0
        if wants_bytes(data, pos, size - base) > len(data):
            piece, missing = read_readable(fd, min(READ_BYTES, size - base - len(data)), base + len(data), path)
            data += piece
            if missing:
                unreadable.append(missing)
            size = size if piece else base + len(data)  # it got shorter meanwhile
            continue
        record = read_record(data, pos, base)
        if record is None or (damaged_from >= 0 and record.is_message and record.due_ms // BUCKET_MS != key):
            damaged_from = base + pos if damaged_from < 0 else damaged_from
            pos = _next_candidate(data, pos + 1)
            continue
        if damaged_from >= 0:
            yield DamagedBytes(damaged_from, record.offset)
            damaged_from = -1
        yield record
        pos = record.end - base
    if damaged_from >= 0:
        yield DamagedBytes(damaged_from, size)


def wants_bytes(data: bytearray, pos: int, size: int) -> int:
    """Returns how many bytes `data` has to have for the record at `pos`, in a file that has `size` of them."""
    if pos + _HEAD.size > len(data):
        return min(pos + _HEAD.size, size)
    kind, body_bytes = struct.unpack_from("<II", data, pos + _KIND_AT)
    end = pos + _HEAD.size + int(body_bytes)
    return end if kind in _KINDS and end <= size else 0


def read_record(data: bytearray, pos: int, base: int) -> Record | None:
    """Returns the record at `pos`, or None if it is not intact."""
    if pos + _HEAD_1.size > len(data):
        return None
    check, kind, body_bytes = struct.unpack_from("<QII", data, pos)
    head = _HEAD if kind in (MESSAGE, LEFT) else _HEAD_1
    end = pos + head.size + body_bytes
    if kind not in _KINDS or end > len(data) or xxh3_64_intdigest(data[pos + 8 : end]) != check:
        return None
    if head is _HEAD:
        *_, due_ms, delay_ms, timestamp_ns, number = head.unpack_from(data, pos)
    else:
        *_, due_ms, timestamp_ns, number = head.unpack_from(data, pos)
        delay_ms = max(0, due_ms - timestamp_ns // NS_PER_MS)
    body = bytes(data[pos + head.size : end])
    is_message = kind in (MESSAGE, _MESSAGE_1)
    return Record(base + pos, base + end, is_message, due_ms, delay_ms, timestamp_ns, number, body)


def _next_candidate(data: bytearray, start: int) -> int:
    """Finds where the next record may start: as far on as can be said from what was read."""
    found = _ANY_KIND.search(data, start + _KIND_AT)
    return found.start() - _KIND_AT if found is not None else max(start, len(data) - _KIND_AT - 3)
