"""Appends batches to a file, or leaves the file as it was.

The kernel does the same for the one batch of nearly every turn (`kernel/batch.py`); everything else that writes batches
uses this.
"""

import errno
import os
from types import TracebackType
from typing import Self

from nsquark.kernel import batch as kernel
from nsquark.wire.batch_format import HEADER_BYTES, StoredBatch
from nsquark.wire.record import Bytes

PIECES_PER_WRITE_MAX = 1024
"""The system accepts at most this many pieces in one vectored write."""


def encode_header(batch: StoredBatch, payload: Bytes) -> bytes:
    """Makes the header of a batch, which is written before its payload."""
    return kernel.encode_header(
        payload, batch.first_seq, batch.messages, batch.time_min_ns, batch.time_max_ns, batch.flags, batch.token
    )


def placed(batch: StoredBatch, offset: int) -> StoredBatch:
    """Gives a batch its place in a file."""
    return StoredBatch(offset, *batch[1:])


class BatchWriter:
    """Appends batches to a file from `offset` on, several with one system call.

    It is used in a `with` block, at whose end all of them are written. If anything raises inside, the file is cut back
    to `offset`: so what has to be durable is synced inside. `batches` are those that were added, with their places.
    """

    def __init__(self, fd: int, offset: int, *, unwritten_bytes_max: int = 0) -> None:
        """Begins behind the file's content; about `unwritten_bytes_max` bytes, if given, wait in memory at most."""
        self.batches: list[StoredBatch] = []
        self._fd = fd
        self._start = offset
        self._written_to = offset
        self._unwritten_bytes = 0
        self._unwritten_bytes_max = unwritten_bytes_max
        self._pieces: list[Bytes] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.flush()
        except OSError:
            os.ftruncate(self._fd, self._start)
            raise
        if error is not None:
            os.ftruncate(self._fd, self._start)

    def add(self, batch: StoredBatch, payload: Bytes) -> None:
        """Puts a batch behind those before; its payload must not change until it is written."""
        batch = placed(batch, self._written_to + self._unwritten_bytes)
        self._pieces += (encode_header(batch, payload), payload)
        self._unwritten_bytes += HEADER_BYTES + len(payload)
        self.batches.append(batch)
        is_much = 0 < self._unwritten_bytes_max <= self._unwritten_bytes
        if is_much or len(self._pieces) + 2 > PIECES_PER_WRITE_MAX:
            self.flush()

    def flush(self) -> None:
        """Writes what was added."""
        if not self._pieces:
            return
        written = os.pwritev(self._fd, self._pieces, self._written_to)
        if written != self._unwritten_bytes:
            raise OSError(errno.ENOSPC, "no space left on device: the write was cut short")
        self._written_to += written
        self._pieces, self._unwritten_bytes = [], 0
