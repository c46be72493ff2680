"""A channel's journal: attempts and due times of requeued messages, and what was parked when the floor passed it."""

import os
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh32_intdigest

from nsquark.kernel.ledger import JOURNAL_RECORD
from nsquark.log.files import FILE_MODE, write_all, write_atomically

_MAGIC = b"NQJ1"
_PIECE_HEAD_BYTES = 12
COMPACT_BYTES_MIN = 1 << 20
"""A journal smaller than this is not worth rewriting."""
REWRITE_SHARE = 4
"""It is rewritten when it is so many times as long as needed; a message that is parked is noted twice at least."""


class Journal:
    """An append-only file of pieces (magic, bytes, checksum, records); rewritten when most of it is out of date."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._fd = -1

    def load(self) -> bytearray:
        """All records in order, up to the first piece that is not intact: that one is cut off."""
        records = bytearray()
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return records
        with file:
            while (piece := _read_piece(file)) is not None:
                records += piece
                self.size += _PIECE_HEAD_BYTES + len(piece)
        if self.path.stat().st_size > self.size:
            os.truncate(self.path, self.size)
        return records

    def append(self, records: bytes | bytearray) -> None:
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        piece = _piece(records)
        write_all(self._fd, piece, self.size)
        self.size += len(piece)

    def wants_rewrite(self, live_records: int) -> bool:
        """Whether most of it is out of date, given how many messages it has to remember."""
        return self.size > COMPACT_BYTES_MIN and self.size > REWRITE_SHARE * live_records * JOURNAL_RECORD.size

    def rewrite(self, records: bytes) -> None:
        """Replaces everything by `records`, durably: parked messages rely on it."""
        self.close()
        if not records:
            self.path.unlink(missing_ok=True)
            self.size = 0
            return
        piece = _piece(records)
        write_atomically(self.path, piece)
        self.size = len(piece)

    def sync(self) -> None:
        if self._fd >= 0:
            os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def delete(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)


def _read_piece(file: BinaryIO) -> bytes | None:
    head = file.read(_PIECE_HEAD_BYTES)
    if len(head) < _PIECE_HEAD_BYTES or head[:4] != _MAGIC:
        return None
    size = int.from_bytes(head[4:8], "little")
    piece = file.read(size)
    if len(piece) < size or size % JOURNAL_RECORD.size or xxh32_intdigest(piece) != int.from_bytes(head[8:], "little"):
        return None
    return piece


def _piece(records: bytes | bytearray) -> bytes:
    return _MAGIC + len(records).to_bytes(4, "little") + xxh32_intdigest(records).to_bytes(4, "little") + records
