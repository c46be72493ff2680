# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Makes the records of a channel's journal: each has 32 bytes and its own check, so that a damaged one costs no other.

The ledger knows what they mean; the C types are in journal.pxd.
"""

from struct import Struct

import cython

if cython.compiled:
    from cython.cimports.nsquark.kernel.bytes import little_u64
else:
    from nsquark.kernel.bytes import little_u64

JOURNAL_REQUEUED = 1  # counts while the message is not below the floor
JOURNAL_PARKED = 2  # counts until a JOURNAL_FINISHED
JOURNAL_FINISHED = 3  # `span` messages from the sequence number on are finished
JOURNAL_RECORD = Struct("<IHHQqQ")
"""Packs check, kind, attempts, sequence number, due time (steady clock, ms), span: a count, or the ms until then."""
RECORD_BYTES = cython.declare(cython.int, 32)
_RECORD_1 = Struct("<BxHIQq")  # kind, attempts, count, sequence number, due time
_FINISHED = cython.declare(cython.int, JOURNAL_FINISHED)

# These are odd numbers with well-mixed bits; multiplication by one of them loses nothing.
_MIX = cython.declare(cython.ulonglong, 0x9E3779B97F4A7C15)
_LAST_MIX = cython.declare(cython.ulonglong, 0xC2B2AE3D27D4EB4F)
_BITS = cython.declare(cython.ulonglong, 0xFFFFFFFFFFFFFFFF)  # C drops higher bits by itself


@cython.ccall
def record(
    kind: cython.int,
    attempts: cython.int,
    seq: cython.longlong,
    due_ms: cython.longlong,
    span: cython.longlong,
) -> bytes:
    """Makes a record as it is in the file."""
    check: cython.ulonglong = _check(kind | (attempts << 16), seq, due_ms, span)
    return JOURNAL_RECORD.pack(check, kind, attempts, seq, due_ms, span)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _check(
    first: cython.ulonglong, second: cython.ulonglong, third: cython.ulonglong, fourth: cython.ulonglong
) -> cython.ulonglong:
    mixed: cython.ulonglong = ((first ^ _LAST_MIX) * _MIX) & _BITS
    mixed = ((mixed ^ (mixed >> 29) ^ (second & _BITS)) * _MIX) & _BITS
    mixed = ((mixed ^ (mixed >> 29) ^ (third & _BITS)) * _MIX) & _BITS
    mixed = ((mixed ^ (mixed >> 29) ^ (fourth & _BITS)) * _MIX) & _BITS
    return (((mixed ^ (mixed >> 32)) * _LAST_MIX) & _BITS) >> 32


def keep_intact(records: bytearray) -> int:
    """Removes damaged records in place; returns how many there were, counting a part of one at the end."""
    size = len(records)
    intact = _compact(memoryview(records), size)
    del records[intact:]
    return -(-(size - intact) // JOURNAL_RECORD.size)


@cython.cfunc
@cython.exceptval(check=False)
def _compact(data: cython.uchar[::1], size: cython.longlong) -> cython.longlong:
    """Moves the intact records to the front; returns how many bytes they have."""
    pos: cython.longlong = 0
    intact: cython.longlong = 0
    head: cython.ulonglong
    index: cython.int
    while pos + RECORD_BYTES <= size:
        head = little_u64(data, pos)
        if head & 0xFFFFFFFF == _check(
            head >> 32, little_u64(data, pos + 8), little_u64(data, pos + 16), little_u64(data, pos + 24)
        ):
            if intact != pos:
                for index in range(RECORD_BYTES):
                    data[intact + index] = data[pos + index]
            intact += RECORD_BYTES
        pos += RECORD_BYTES
    return intact


def from_format_1(old: bytes, delay_max_ms: int) -> bytearray:
    """Converts records of format 1: they have 24 bytes, no check, and no time until they are due."""
    records = bytearray()
    for kind, attempts, count, seq, due_ms in _RECORD_1.iter_unpack(old):
        records += record(kind, attempts, seq, due_ms, count if kind == _FINISHED else delay_max_ms if due_ms else 0)
    return records
