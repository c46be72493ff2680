"""Knows a segment: one file of batches, and beside it an index file.

The index file has what reading needs (extents, a sparse index by sequence and by time) up to a size of the data file
that is known to be on disk. It is written when the segment is sealed, at a clean stop, and every CHECKPOINT_BYTES in
between, always after the data was synced. A start therefore reads only what follows it.
"""

import contextlib
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from xxhash import xxh3_64_intdigest

from nsquark.kernel.batch import BatchFile
from nsquark.log.deferred_appends import Appends
from nsquark.log.durable import DurableFile
from nsquark.log.files import read_readable, write_atomically
from nsquark.log.syncer import Syncer
from nsquark.wire.batch_format import (
    APPEND_ONCE,
    DEFERRED,
    HEADER_BYTES_EVER,
    MORE_FOLLOWS,
    Damage,
    StoredBatch,
    require_known_version,
    scan,
)

CHECKPOINT_BYTES = 16 << 20
"""The index of a segment is written each time this much was added, so that a start scans no more."""
SCAN_BYTES = 4 << 20
_INDEX_MAGIC = b"NQIX\x01"
SEGMENT_SUFFIX = ".log"
INDEX_SUFFIX = ".idx"


class _Index(msgspec.Struct, array_like=True):
    """Is the content of an index file."""

    size: int
    sealed: bool
    ranges: list[tuple[int, int]]
    time_min_ns: int
    time_max_ns: int
    seqs: bytes
    offsets: bytes
    times: bytes
    deferred_append: int
    tokens: list[bytes]
    deferred_later: list[int] = []


class Segment(BatchFile):
    """Knows a file of batches in order of sequence number; all below `size` are intact unless reported otherwise."""

    sealed: bool
    deferred: Appends
    tokens: list[bytes]

    def __init__(
        self, syncer: Syncer, directory: Path, base_seq: int, checkpoint_bytes: int = CHECKPOINT_BYTES
    ) -> None:
        self.base_seq = base_seq
        self.path = directory / f"{base_seq:020d}{SEGMENT_SUFFIX}"
        self.forget()
        self._checkpoint_every_bytes = checkpoint_bytes
        self._checkpoint_bytes = 0
        self._is_partly_unreadable = False
        self.file = DurableFile(syncer, self.path)
        self.file.content_bytes = lambda: self.size
        self.file.after_sync = self._index_to_store

    @property
    def index_path(self) -> Path:
        return self.path.with_suffix(INDEX_SUFFIX)

    @property
    def fd(self) -> int:
        if self.file.fd < 0:
            self.file.open(os.O_RDONLY if self.sealed else os.O_RDWR)
        return self.file.fd

    def create(self) -> None:
        self.file.open(os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def close(self) -> None:
        self.file.close()

    def delete(self) -> None:
        """Deletes both files, the index first: data without it is scanned, an index without data would be an error."""
        self.file.abandon()
        self.index_path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    # -- writing -----------------------------------------------------------------------------------------

    def add(self, batch: StoredBatch) -> None:
        """Adds a batch that was written at the end to what is known of the file."""
        self.grown(
            batch.offset, batch.first_seq, batch.messages, batch.payload_bytes, batch.time_min_ns, batch.time_max_ns
        )
        if batch.flags & DEFERRED:
            self.deferred.add_token(batch.token)
        elif batch.flags & APPEND_ONCE and not batch.flags & MORE_FOLLOWS:
            self.tokens.append(batch.token)  # only the last batch makes the append complete

    @property
    def wants_checkpoint(self) -> bool:
        return self.size - self._checkpoint_bytes >= self._checkpoint_every_bytes

    def index_content(self) -> bytes:
        """Encodes the index of all that is written now; to be stored only after the data was synced."""
        self._checkpoint_bytes = self.size
        content = msgspec.msgpack.encode(
            _Index(
                size=self.size,
                sealed=self.sealed,
                ranges=self.extents.ranges(),
                time_min_ns=self.time_min_ns,
                time_max_ns=self.time_max_ns,
                seqs=self.seqs.tobytes(),
                offsets=self.offsets.tobytes(),
                times=self.times.tobytes(),
                deferred_append=self.deferred.durable,
                tokens=self.tokens,
                deferred_later=sorted(self.deferred.later),
            )
        )
        return _INDEX_MAGIC + xxh3_64_intdigest(content).to_bytes(8, "little") + content

    def _index_to_store(self) -> Callable[[], None] | None:
        """Returns what follows a sync that begins now: storing the index, where there is a reason for it."""
        if self._is_partly_unreadable or not (self.sealed or self.wants_checkpoint):
            return None  # what cannot be read today may be readable tomorrow
        content = self.index_content()
        return lambda: self.store_index(content)

    def store_index(self, content: bytes) -> None:
        """Writes the index file, in a thread: it reads nothing that changes.

        It is not synced: a lost index only costs a scan, and syncing it stalls the writes of the data.
        """
        write_atomically(self.index_path, content, sync=False)

    # -- opening -----------------------------------------------------------------------------------------

    def open_existing(self, *, last: bool) -> list[Damage]:
        """Reads the index and whatever lies behind it; returns what is damaged, after setting it aside.

        A segment may end in what a crash or a failed write left behind, half a batch or half of batches that belong
        together: that is not served, and is cut off the last segment. Behind the end of a sealed one nothing counts. A
        segment of which a part cannot be read is never written to again.
        """
        self._load_index()
        file_bytes = os.stat(self.path).st_size
        if self.size > file_bytes:  # the file is shorter than it was: trust only what can be read
            self.forget()
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            require_known_version(read_readable(fd, HEADER_BYTES_EVER, 0, self.path)[0], self.path)
            damages, unreadable = self._read_on(fd, self.size if self.sealed else file_bytes)
            if self.size < file_bytes:
                damages = [damage for damage in damages if damage.offset < self.size]
                damages.append(Damage(self.size, file_bytes, "cannot be read" if unreadable else "torn end"))
            for damage in damages:
                self._set_aside(fd, damage)
            if unreadable:
                self.sealed = self._is_partly_unreadable = True
            elif last and self.size < file_bytes:
                os.ftruncate(fd, self.size)
        finally:
            os.close(fd)
        self._checkpoint_bytes = self.size
        return damages

    def _read_on(self, fd: int, end: int) -> tuple[list[Damage], bool]:
        """Adds whole batches up to `end` to what is known, of those that belong together all or none; returns the
        damage, and whether a part is unreadable.
        """
        damages: list[Damage] = []
        run: list[StoredBatch] = []
        unreadable: list[int] = []
        for item in scan_file(fd, self.path, self.size, end, unreadable):
            if isinstance(item, Damage):
                damages.append(item)
            elif item.first_seq < (run[-1].next_seq if run else self.extents.head):
                damages.append(Damage(item.offset, item.end, "sequence numbers that go back"))
            else:
                run.append(item)
                if not item.flags & MORE_FOLLOWS:
                    for batch in run:
                        self.add(batch)
                    run.clear()
        return damages, bool(unreadable)

    def _set_aside(self, fd: int, damage: Damage) -> None:
        path = self.path.with_suffix(f".{damage.offset}.bad")
        with contextlib.suppress(OSError):  # the copy is only for people to look at
            size = min(damage.end - damage.offset, SCAN_BYTES)
            path.write_bytes(read_readable(fd, size, damage.offset, self.path)[0])

    def forget(self) -> None:
        super().forget()
        self.sealed = False
        self.deferred = Appends()
        self.tokens = []

    def _load_index(self) -> None:
        try:
            raw = self.index_path.read_bytes()
        except OSError:
            return  # there is none, or it cannot be read
        head = len(_INDEX_MAGIC) + 8
        content = raw[head:]
        if not raw.startswith(_INDEX_MAGIC) or xxh3_64_intdigest(content) != int.from_bytes(
            raw[head - 8 : head], "little"
        ):
            return  # the data is scanned instead
        try:
            index = msgspec.msgpack.decode(content, type=_Index)
        except msgspec.MsgspecError:
            return  # another version of this program wrote it
        self.size = index.size
        self.sealed = index.sealed
        for first, count in index.ranges:
            self.extents.add(first, count)
        self.time_min_ns, self.time_max_ns = index.time_min_ns, index.time_max_ns
        self.seqs.frombytes(index.seqs)
        self.offsets.frombytes(index.offsets)
        self.times.frombytes(index.times)
        self.reindex()
        self.deferred = Appends(index.deferred_append, index.deferred_later)
        self.tokens = index.tokens

    # -- finding -----------------------------------------------------------------------------------------

    @property
    def index(self) -> tuple["array[int]", "array[int]"]:
        """Returns the sparse index by sequence number: the first of some batches, and their offsets."""
        return self.seqs, self.offsets

    def offset_beyond(self, seq: int) -> int:
        """Finds where a batch starts that has nothing below `seq`, or where the file ends."""
        index = bisect_left(self.seqs, seq)
        return self.offsets[index] if index < len(self.offsets) else self.size

    def offset_of(self, seq: int) -> int:
        """Finds where the batch with `seq` starts, or one before it."""
        index = bisect_right(self.seqs, seq) - 1
        return self.offsets[index] if index >= 0 else 0

    def seq_at_time(self, time_ns: int) -> int:
        """Finds a sequence number below which every message of this segment was published before `time_ns`."""
        index = bisect_right(self.times, time_ns - 1) - 1
        return self.seqs[index] if index >= 0 else self.base_seq


def scan_file(
    fd: int, path: Path, start: int, end: int, unreadable: list[int] | None = None
) -> Iterator[StoredBatch | Damage]:
    """Yields the batches and damages of a file between two offsets; stops before what is not a whole batch at the end.

    Where the disk fails to read, `unreadable` gets the offset of the piece.
    """
    want = SCAN_BYTES
    while start < end:
        raw, missing = read_readable(fd, min(want, end - start), start, path)
        if missing and unreadable is not None:
            unreadable.append(start)
        piece = memoryview(raw)
        done = start
        for item in scan(piece, start):
            yield item
            done = item.end
        if done == start:
            if not piece or start + len(piece) >= end:
                return
            want *= 2  # a batch larger than the piece
            continue
        start, want = done, SCAN_BYTES
