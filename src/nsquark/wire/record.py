"""Defines the layout of a record: a message in the log, and the frame of its first delivery, byte for byte.

    u32 size | u32 frame type = 2 | i64 timestamp ns | u16 attempts = 1 | 16 bytes id, ascii hex | body

The size counts everything behind itself. All numbers are big endian. The id is the node's bits and the sequence number,
in hex, so that `FIN id` finds its message by arithmetic.
"""

import struct
from typing import Final

HEAD: Final = struct.Struct(">IIqH16s")
"""Packs all of a record but its body: size, frame type, timestamp, attempts, id."""
SIZE_BYTES: Final = 4
"""Counts the bytes of a record's size field. MPUB puts such a field before each message."""
COUNT_BYTES: Final = 4
"""MPUB says in this many bytes, before its first message, how many messages it has."""
TYPE_AT: Final = 4
TIMESTAMP_AT: Final = 8
ATTEMPTS_AT: Final = 16
ID_AT: Final = 18
ID_BYTES: Final = 16
BODY_AT: Final = HEAD.size
RECORD_OVERHEAD_BYTES: Final = BODY_AT
"""A message costs this many bytes beside its body, as a frame on the wire and as a record in the log."""

SEQ_BITS: Final = 53
"""This many low bits of an id are the sequence number, the others are the node's."""
SEQ_MASK: Final = (1 << SEQ_BITS) - 1

Bytes = bytes | bytearray | memoryview
"""Records may be in any of these."""


def record_bytes(data: Bytes, pos: int) -> int:
    """Returns how many bytes the record at `pos` has, its size field included."""
    return SIZE_BYTES + int.from_bytes(data[pos : pos + SIZE_BYTES], "big")


def timestamp_of(data: Bytes, pos: int) -> int:
    """Returns when the message whose record is at `pos` was published, in ns since 1970."""
    return int.from_bytes(data[pos + TIMESTAMP_AT : pos + ATTEMPTS_AT], "big", signed=True)


def message_id(node_id: int, seq: int) -> bytes:
    """Makes the id of a message as it stands in its record."""
    return b"%016x" % (node_id << SEQ_BITS | seq)
