"""Batches as found in files: what their headers say, and the damage between them. Their layout is the kernel's."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest, xxh32_intdigest

from nsquark.kernel import batch as kernel
from nsquark.kernel.batch import HEADER_BYTES, MAGIC, NO_TOKEN, VERSION

__all__ = ["HEADER_BYTES", "MAGIC", "NO_TOKEN"]

MORE_FOLLOWS = 1
"""Flag: this batch and the next belong together; a log never ends between them."""
DEFERRED = 2
"""Flag: messages whose delay ended; the token is the number of this append (log/deferred.py)."""
APPEND_ONCE = 4
"""Flag: the token is a publisher's idempotency token."""

Bytes = bytes | bytearray | memoryview


HEADER_BYTES_EVER = 512
"""No version has a longer header."""


class UnknownVersion(Exception):
    """A file was written by a later version of this program; the text says what to do."""


class Batch(NamedTuple):
    """A batch as found in a file: where it starts, and what its header says."""

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
    """Bytes of a file that are no intact batch."""

    offset: int
    end: int
    reason: str


def encode_header(batch: Batch, payload: Bytes) -> bytes:
    return kernel.encode_header(
        payload, batch.first_seq, batch.messages, batch.time_min_ns, batch.time_max_ns, batch.flags, batch.token
    )


def read_header(data: Bytes, pos: int, offset: int) -> tuple[Batch, int] | None:
    """The batch whose header lies at `data[pos]` (file offset `offset`) and its payload's check, if it is one."""
    magic, version, flags, header_bytes, check = kernel.HEAD.unpack_from(data, pos)
    if magic != MAGIC or version != VERSION or header_bytes != HEADER_BYTES:
        return None
    tail = data[pos + kernel.HEAD.size : pos + HEADER_BYTES]
    if xxh32_intdigest(tail, flags) != check:
        return None
    messages, size, _, first_seq, time_min_ns, time_max_ns, payload_check, token = kernel.TAIL.unpack(tail)
    return Batch(offset, first_seq, messages, size, time_min_ns, time_max_ns, flags, token), payload_check


def require_known_version(head: Bytes, path: Path) -> None:
    """Tells a file of a later version from a damaged one, by the header it begins with.

    Magic, version, size and check of a header stay where they are in every version. A version that differs from ours
    in one bit is taken for a flipped bit: versions are chosen so that none does.
    """
    if len(head) < HEADER_BYTES:
        return
    magic, version, flags, header_bytes, check = kernel.HEAD.unpack_from(head, 0)
    is_header = magic == MAGIC and xxh32_intdigest(head[kernel.HEAD.size : header_bytes], flags) == check
    if is_header and (version ^ VERSION).bit_count() > 1:
        raise UnknownVersion(
            f"{path} has batches of version {version}, this nsqd knows version {VERSION}: start the nsqd that wrote it,"
            " or a later one; nothing was changed"
        )


def scan(data: memoryview, offset: int) -> Iterator[Batch | Damage]:
    """The batches in `data`, a piece of a file from `offset` on, and the damage between them.

    Ends before a batch that is not wholly in `data`. What is cut off or damaged at the very end is reported as damage
    only if a batch follows it: the caller knows whether more of the file is to come.
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
    """Where the next intact header is; -1 if there is none."""
    raw = bytes(data[pos:])
    at = raw.find(MAGIC)
    while at >= 0 and at + HEADER_BYTES <= len(raw):
        if read_header(raw, at, 0) is not None:
            return pos + at
        at = raw.find(MAGIC, at + 1)
    return -1
