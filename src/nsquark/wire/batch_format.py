"""Defines the format of a batch, which one write appends to a log, in files and as `/log/read` streams it.

    magic u32 | version u8 | flags u8 | header bytes u16 | header check u32 | count u32 | payload bytes u32 |
    unused u32 | first sequence u64 | earliest and latest publish time i64 | payload check u64 | token 16 bytes

The header has its own check, so that a damaged payload can be stepped over and told from a damaged header. The payload
is records of consecutive sequence numbers. The kernel writes headers (`kernel/batch.py`).
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest, xxh32_intdigest

from nsquark.wire.record import Bytes

MAGIC = b"NQB1"
VERSION = 1
HEAD = struct.Struct("<4sBBHI")
"""A header starts with magic, version, flags, header bytes and a check of what follows in it."""
TAIL = struct.Struct("<IIIQqqQ16s")
RANGE_PIECE = struct.Struct("<II")
"""Stands before each piece of an answer that has many ranges: the number of the range, and the bytes of the piece."""
RANGE_REFUSED = 1 << 31
"""Is added to the number of a range that cannot be read; a document follows that says why."""
HEADER_BYTES = HEAD.size + TAIL.size
HEADER_BYTES_EVER = 512
"""No version has a longer header than this."""
NO_TOKEN = bytes(16)

MORE_FOLLOWS = 1
"""This flag says that the batch and the next belong together; a log never ends between them."""
DEFERRED = 2
"""This flag marks messages whose delay ended; the token is the number of this append (log/deferred.py)."""
APPEND_ONCE = 4
"""This flag says that the token is a publisher's idempotency token."""


class UnknownVersion(Exception):
    """Says that a file was written by a later version of this program, and what to do."""


class StoredBatch(NamedTuple):
    """Describes a batch as it was found in a file: where it starts, and what its header says."""

    offset: int
    first_seq: int
    messages: int
    payload_bytes: int
    time_min_ns: int
    time_max_ns: int
    flags: int
    token: bytes

    @property
    def end(self) -> int:
        return self.offset + HEADER_BYTES + self.payload_bytes

    @property
    def next_seq(self) -> int:
        return self.first_seq + self.messages


class Damage(NamedTuple):
    """Names bytes of a file that are no intact batch."""

    offset: int
    end: int
    reason: str


def read_header(data: Bytes, pos: int, offset: int) -> tuple[StoredBatch, int] | None:
    """Returns the batch of the header at `data[pos]` (file offset `offset`) and its payload's check, or None."""
    magic, version, flags, header_bytes, check = HEAD.unpack_from(data, pos)
    if magic != MAGIC or version != VERSION or header_bytes != HEADER_BYTES:
        return None
    tail = data[pos + HEAD.size : pos + HEADER_BYTES]
    if xxh32_intdigest(tail, flags) != check:
        return None
    messages, size, _, first_seq, time_min_ns, time_max_ns, payload_check, token = TAIL.unpack(tail)
    return StoredBatch(offset, first_seq, messages, size, time_min_ns, time_max_ns, flags, token), payload_check


def require_known_version(head: Bytes, path: Path) -> None:
    """Raises UnknownVersion if a file begins with an intact header of another version; a damaged file passes.

    Magic, version, size and check of a header stay where they are in every version. A version that differs from ours in
    one bit counts as a flipped bit: versions are chosen so that none does.
    """
    if len(head) < HEADER_BYTES:
        return
    magic, version, flags, header_bytes, check = HEAD.unpack_from(head, 0)
    is_header = magic == MAGIC and xxh32_intdigest(head[HEAD.size : header_bytes], flags) == check
    if is_header and (version ^ VERSION).bit_count() > 1:
        raise UnknownVersion(
            f"{path} has batches of version {version}, this nsqd knows version {VERSION}: start the nsqd that wrote it,"
            " or a later one; nothing was changed"
        )


def scan(data: memoryview, offset: int) -> Iterator[StoredBatch | Damage]:
    """Yields the batches in `data`, a piece of a file from `offset` on, and the damage between them.

    It ends before a batch that is not wholly in `data`. What is cut off or damaged at the very end is reported as
    damage only if a batch follows it: the caller knows whether more of the file is to come.
    """
    pos, end = 0, len(data)
    while pos + HEADER_BYTES <= end:
        found = read_header(data, pos, offset + pos)
        if found is None:
            after = find_header(data, pos + 1)
            if after < 0:
                return
            yield Damage(offset + pos, offset + after, "no batch header")
            pos = after
            continue
        batch, payload_check = found
        after = pos + HEADER_BYTES + batch.payload_bytes
        if after > end:
            return
        if xxh3_64_intdigest(data[pos + HEADER_BYTES : after]) == payload_check:
            yield batch
        else:
            yield Damage(offset + pos, offset + after, f"checksum of {batch.messages} messages from {batch.first_seq}")
        pos = after


def find_header(data: memoryview, pos: int) -> int:
    """Returns where the next intact header is, or -1 if there is none."""
    raw = bytes(data[pos:])
    at = raw.find(MAGIC)
    while at >= 0 and at + HEADER_BYTES <= len(raw):
        if read_header(raw, at, 0) is not None:
            return pos + at
        at = raw.find(MAGIC, at + 1)
    return -1
