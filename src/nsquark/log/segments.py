"""The files of one log: which one to write, reading them back, syncing, and removing what nobody needs."""

import contextlib
import os
import time
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nsquark.kernel.arena import Chunk
from nsquark.kernel.extents import Extents
from nsquark.log.batches import HEADER_BYTES, Batch, Damage, scan
from nsquark.log.files import DIRECTORY_MODE, sync_directory, write_all, write_atomically
from nsquark.log.removed import Removed
from nsquark.log.segment import SEGMENT_SUFFIX, Segment, scan_file
from nsquark.log.shared import LogShared

READ_BYTES = 256 << 10
"""How much of a file one cold read brings in, unless a single batch is larger."""
READ_RETRY_S = 1.0
SYNC_INTERVAL_MIN_S = 0.2
"""At a high rate a log is synced by time instead of by count: back to back, syncs cost a third of the throughput."""
REMOVED_SUFFIX = ".removed"


class RecordPlace(NamedTuple):
    """A batch that reaches beyond `seq` starts in the file at `offset` or later."""

    seq: int
    path: Path
    offset: int
    end: int


class DiskLimitReached(OSError):
    """Publishing would exceed --max-disk-bytes."""


class Segments:
    """Segments in order of sequence number; only the last is written to.

    `extents` tells all messages that exist in them. Bytes on disk are counted in `shared.disk_bytes`.
    """

    def __init__(self, shared: LogShared, directory: Path) -> None:
        self.shared = shared
        self.directory = directory
        self.extents = Extents()
        self.removed = Removed(directory / "removed")
        self.before_remove: Callable[[Segment], None] = lambda segment: None
        self._segments: list[Segment] = []
        self._bases: list[int] = []
        self._unsynced_messages = 0
        self._syncing = False
        self._sync_not_before_s = 0.0
        self._abandoned = False
        self.is_writing = False
        """A thread writes to the last segment."""
        self._rescue_later: Segment | None = None
        self._synced_size = 0
        self._directory_synced = False
        directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        self._open_existing()

    def _open_existing(self) -> None:
        for leftover in self.directory.glob(f"*{REMOVED_SUFFIX}"):
            leftover.unlink()
        bases = sorted(int(path.stem) for path in self.directory.glob(f"*{SEGMENT_SUFFIX}") if path.stem.isdigit())
        for base in bases:
            segment = Segment(self.directory, base)
            for damage in segment.open_existing(last=base == bases[-1]):
                self.shared.report(
                    f"LOG({segment.path}): bytes {damage.offset} to {damage.end} set aside: {damage.reason}"
                )
            self._segments.append(segment)
            self._bases.append(base)
            self.shared.disk_bytes += segment.size
            for first, count in segment.extents.ranges():
                self.extents.add(first, count)
            if base != bases[-1] and not segment.sealed:
                self._seal(segment)  # a crash came before its index was stored
        self._synced_size = self._segments[-1].size if self._segments else 0
        self.removed.load(bases[0] if bases else 0)

    @property
    def total_bytes(self) -> int:
        return sum(segment.size for segment in self._segments)

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._segments)

    @property
    def oldest_ns(self) -> int:
        """When the oldest message was published."""
        return self._segments[0].time_min_ns if self._segments else 0

    @property
    def last_deferred_append(self) -> int:
        return max((segment.deferred_append for segment in self._segments), default=0)

    @property
    def tokens(self) -> list[bytes]:
        return [token for segment in self._segments for token in segment.tokens]

    # -- writing -----------------------------------------------------------------------------------------

    def for_append(self, first_seq: int, size: int) -> Segment:
        """The segment the next `size` bytes go to; a new one if they do not fit."""
        shared = self.shared
        limit = shared.settings.disk_bytes_max
        if limit and shared.disk_bytes + size > limit and not shared.make_room(size):
            raise DiskLimitReached(f"--max-disk-bytes={limit} is reached")
        segment = self._segments[-1] if self._segments else None
        if segment is not None and not segment.sealed:
            if not segment.size or segment.size + size <= shared.settings.max_bytes_per_file:
                return segment
            self._seal(segment)
        if segment is not None and segment.size == 0:  # its first write failed: nothing of it is worth keeping
            self._segments.pop()
            self._bases.pop()
            segment.delete()
        segment = Segment(self.directory, first_seq)
        segment.create()
        self._segments.append(segment)
        self._bases.append(first_seq)
        self._synced_size = 0
        self._directory_synced = False
        if self.shared.settings.sync_every == 1:
            sync_directory(self.directory)
        return segment

    def written(self, messages: int, size: int) -> None:
        """A write succeeded: the disk is well; sync if enough came together."""
        shared = self.shared
        shared.disk_bytes += size
        shared.disk_error = None
        self._unsynced_messages += messages
        if self.is_writing:
            self._write_ended()
        every = shared.settings.sync_every
        if self._unsynced_messages >= every > 1 and time.monotonic() >= self._sync_not_before_s:
            self.sync()

    def _write_ended(self) -> None:
        self.is_writing = False
        if self._rescue_later is not None:
            self._try_rescue(self._rescue_later)

    def write_failed(self, error: Exception) -> None:
        self._write_ended()
        self.shared.disk_error = error
        segment = self._segments[-1] if self._segments else None
        if segment is not None and not segment.sealed and os.stat(segment.path).st_size != segment.size:
            # The file could not be cut back: the index says where its good end is.
            segment.sealed = True
            with contextlib.suppress(OSError):
                write_atomically(segment.index_path, segment.index_content())

    def _seal(self, segment: Segment) -> None:
        segment.sealed = True
        content = segment.index_content()
        self.shared.run(lambda: segment.sync(content), lambda error: self._sealed(segment, error))

    def _sealed(self, segment: Segment, error: Exception | None) -> None:
        if error is not None:
            self._sync_failed(segment, error)

    def sync(self) -> None:
        """Makes all that is written durable, in a thread; one at a time."""
        if self._syncing or self._unsynced_messages == 0 or not self._segments:
            return
        segment, directory = self._segments[-1], self.directory
        size = segment.size
        content = segment.index_content() if segment.wants_checkpoint else None
        directory_synced = self._directory_synced
        started = time.monotonic()
        self._sync_not_before_s = started + SYNC_INTERVAL_MIN_S
        self._syncing = True
        self._unsynced_messages = 0

        def work() -> None:
            segment.sync(content)
            if not directory_synced:
                sync_directory(directory)

        def done(error: Exception | None) -> None:
            self._syncing = False
            if self._abandoned:
                self._close_files()
                return
            self.shared.sync_seconds.observe(time.monotonic() - started)
            if error is not None:
                self._sync_failed(segment, error)
            elif self._segments and segment is self._segments[-1]:
                self._synced_size = size
                self._directory_synced = True

        self.shared.run(work, done)

    def _sync_failed(self, segment: Segment, error: Exception) -> None:
        """Pages whose sync failed are not trusted again: what follows the last good sync is written to a new file."""
        self.shared.disk_error = error
        self.shared.report(f"LOG({segment.path}): sync failed: {error}")
        if not self._segments or segment is not self._segments[-1] or segment.sealed:
            return
        if self.is_writing:  # its batches are not noted yet
            self._rescue_later = segment
            return
        self._try_rescue(segment)

    def _try_rescue(self, segment: Segment) -> None:
        self._rescue_later = None
        try:
            self._rescue(segment)
        except OSError as rescue_error:
            self.shared.disk_error = rescue_error
            self.shared.report(f"LOG({segment.path}): could not be written anew: {rescue_error}")

    def _rescue(self, segment: Segment) -> None:
        batches = [item for item in scan_file(segment.fd, self._synced_size, segment.size) if isinstance(item, Batch)]
        if not batches:
            return
        fresh = Segment(self.directory, batches[0].first_seq)
        if fresh.path == segment.path:  # nothing of it was ever synced
            os.replace(segment.path, segment.path.with_suffix(".unsynced.bad"))
        fresh.create()
        for batch in batches:
            raw = os.pread(segment.fd, batch.end - batch.offset, batch.offset)
            write_all(fresh.fd, raw, fresh.size)
            fresh.note(batch._replace(offset=fresh.size))
        os.fdatasync(fresh.fd)
        sync_directory(self.directory)
        if fresh.path == segment.path:
            segment.close()
            self._segments[-1] = fresh
        else:
            segment.cut(self._synced_size, batches[0].first_seq)
            segment.sealed = True
            os.ftruncate(segment.fd, segment.size)
            write_atomically(segment.index_path, segment.index_content())
            self._segments.append(fresh)
            self._bases.append(fresh.base_seq)
        self._synced_size = fresh.size
        self._directory_synced = True
        self.shared.report(f"LOG({fresh.path}): {len(batches)} batches written anew after a failed sync")

    # -- reading -----------------------------------------------------------------------------------------

    def segment_of(self, seq: int) -> Segment | None:
        index = bisect_right(self._bases, seq) - 1
        return self._segments[max(index, 0)] if self._segments else None

    def read(self, seq: int, stop: int, then: Callable[[list[Chunk]], None]) -> list[Chunk] | None:
        """The records from `seq` on and below `stop`, as many as one read brings; None: `then` gets them later."""
        segment = self.segment_of(seq)
        assert segment is not None
        offset = segment.offset_of(seq)
        size = min(READ_BYTES, segment.size - offset)
        buffer = bytearray(size)
        try:
            if os.preadv(segment.fd, [buffer], offset, os.RWF_NOWAIT) == size:
                chunks = self._decode(segment, memoryview(buffer), offset, seq, stop)
                if chunks:
                    return chunks
        except (BlockingIOError, OSError):
            pass
        self._read_in_thread(segment, offset, seq, stop, then)
        return None

    def _read_in_thread(
        self, segment: Segment, offset: int, seq: int, stop: int, then: Callable[[list[Chunk]], None]
    ) -> None:
        pieces: list[memoryview] = []
        fd = os.dup(segment.fd)  # the segment may be removed meanwhile
        end = segment.size

        def work() -> None:
            try:
                pieces.append(_read_batch(fd, offset, end, seq))
            finally:
                os.close(fd)

        def done(error: Exception | None) -> None:
            if error is not None:
                self.shared.disk_error = error
                self.shared.report(f"LOG({segment.path}): reading at {offset} failed: {error}; trying again")
                self.shared.later(READ_RETRY_S, lambda: self._read_in_thread(segment, offset, seq, stop, then))
                return
            chunks = self._decode(segment, pieces[0], offset, seq, stop)
            if not chunks:
                self._lost(segment, seq, min(stop, segment.extents.head))
            then(chunks)

        self.shared.run(work, done)

    def _decode(self, segment: Segment, piece: memoryview, offset: int, seq: int, stop: int) -> list[Chunk]:
        """The batches of a piece of a file that reach beyond `seq`, in chunks without their headers."""
        groups: list[list[Batch]] = []
        known_to = max(seq, segment.base_seq)
        damaged = False
        for item in scan(piece, offset):
            if isinstance(item, Damage):
                damaged = True
                continue
            if damaged and item.first_seq > known_to:
                self._lost(segment, known_to, item.first_seq)
            damaged = False
            if item.next_seq <= seq:
                continue
            if item.first_seq >= stop:
                break
            known_to = item.next_seq
            if groups and groups[-1][-1].next_seq == item.first_seq:
                groups[-1].append(item)
            else:
                groups.append([item])
        return [self._chunk(group, piece, offset) for group in groups]

    def _chunk(self, batches: list[Batch], piece: memoryview, offset: int) -> Chunk:
        size = sum(batch.payload_bytes for batch in batches)
        count = sum(batch.messages for batch in batches)
        chunk = Chunk(self.shared.node_id, batches[0].first_seq, size, count)
        for batch in batches:
            start = batch.offset - offset + HEADER_BYTES
            if not chunk.load(piece, start, batch.payload_bytes, batch.messages):
                raise ValueError(f"batch at {batch.offset} does not hold {batch.messages} records")
        return chunk

    def _lost(self, segment: Segment, low: int, high: int) -> None:
        """Messages that cannot be read any more are taken out of the count, so that channels go on behind them."""
        count = self.extents.remove(low, high)
        if count:
            self.shared.report(f"LOG({segment.path}): {count} messages from {low} on are damaged and left out")

    def places(self, seqs: list[int]) -> list[RecordPlace]:
        """Where single records of this log are to be found, for `read_records` in a thread."""
        places: list[RecordPlace] = []
        for seq in seqs:
            segment = self.segment_of(seq)
            if segment is not None:
                places.append(RecordPlace(seq, segment.path, segment.offset_of(seq), segment.size))
        return places

    def last_base_at_or_below(self, seq: int) -> int:
        """The lowest message of the segment that holds `seq`; everything below could be removed."""
        index = bisect_right(self._bases, seq) - 1
        return self._bases[index] if index >= 0 else 0

    # -- removing ----------------------------------------------------------------------------------------

    def remove_below(self, needed_seq: int, now_ns: int) -> int:
        """Deletes sealed segments that nobody needs and retention does not hold; the lowest message left."""
        settings = self.shared.settings
        held_bytes = self.total_bytes
        while len(self._segments) > 1:
            segment = self._segments[0]
            if self._bases[1] > needed_seq or not segment.sealed:
                break
            if settings.retention_ns and now_ns - segment.time_max_ns < settings.retention_ns:
                break
            if settings.retention_bytes and held_bytes - segment.size < settings.retention_bytes:
                break
            held_bytes -= segment.size
            self.remove_first()
        return self._bases[0] if self._bases else needed_seq

    def remove_first(self) -> int:
        """Deletes the lowest segment, needed or not; the lowest message left."""
        self.before_remove(self._segments[0])
        segment = self._segments.pop(0)
        self._bases.pop(0)
        self.shared.disk_bytes -= segment.size
        left = self._bases[0] if self._bases else segment.extents.head
        self.extents.remove_below(left)
        self.removed.note(segment.extents.head, left)
        segment.close()
        doomed = segment.path.with_suffix(REMOVED_SUFFIX)
        os.replace(segment.path, doomed)
        segment.index_path.unlink(missing_ok=True)
        self.shared.run(lambda: doomed.unlink(missing_ok=True), lambda error: None)
        return left

    # -- the end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Syncs the last segment and stores its index, so that the next start reads no data."""
        self.shared.drain()
        if self._segments and not self._segments[-1].sealed:
            segment = self._segments[-1]
            segment.sync(segment.index_content())
        self._close_files()

    def abandon(self) -> None:
        """The files are being deleted."""
        self.shared.disk_bytes -= self.total_bytes
        self._abandoned = True
        if not self._syncing:
            self._close_files()

    def _close_files(self) -> None:
        for segment in self._segments:
            segment.close()
        self._segments, self._bases = [], []


def _read_batch(fd: int, offset: int, end: int, seq: int) -> memoryview:
    """A piece of a file that holds, if there is one, a whole batch reaching beyond `seq`."""
    size = READ_BYTES
    while True:
        buffer = bytearray(min(size, end - offset))
        piece = memoryview(buffer)[: os.preadv(fd, [buffer], offset)]
        if offset + size >= end:
            return piece
        if any(isinstance(item, Batch) and item.next_seq > seq for item in scan(piece, offset)):
            return piece
        size *= 2


def read_records(places: list[RecordPlace]) -> dict[int, bytes]:
    """The records at these places, less those that are damaged."""
    found: dict[int, bytes] = {}
    for seq, path, offset, end in places:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            piece = _read_batch(fd, offset, end, seq)
        finally:
            os.close(fd)
        for batch in scan(piece, offset):
            if isinstance(batch, Batch) and batch.first_seq <= seq < batch.next_seq:
                chunk = Chunk(0, batch.first_seq, batch.payload_bytes, batch.messages)
                chunk.load(piece, batch.offset - offset + HEADER_BYTES, batch.payload_bytes, batch.messages)
                index = seq - batch.first_seq
                found[seq] = bytes(chunk.view[chunk.offset(index) : chunk.offset(index + 1)])
    return found
