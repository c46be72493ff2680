"""Knows the files of one log: which one to write, reading them back, syncing, and removing what nobody needs."""

import errno
import os
import time
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nsquark.kernel.extents import Extents
from nsquark.kernel.records import Chunk
from nsquark.log.deferred_appends import Appends
from nsquark.log.durable import SyncFailed
from nsquark.log.files import DIRECTORY_MODE, read_readable
from nsquark.log.recovery import REMOVED_SUFFIX, open_segments
from nsquark.log.removal_mark import Removed
from nsquark.log.segment import Segment
from nsquark.log.services import READ_TRIES, LogShared
from nsquark.wire.batch_format import HEADER_BYTES, Damage, StoredBatch, scan

READ_BYTES = 256 << 10
"""One cold read brings in this much of a file, unless a single batch is larger."""
SYNC_INTERVAL_MIN_S = 0.2
"""At a high rate a log is synced by time instead of by count: back to back, syncs cost a third of the throughput."""


class RecordPlace(NamedTuple):
    """Says that a batch which reaches beyond `seq` starts in the file at `offset` or later."""

    seq: int
    path: Path
    offset: int
    end: int


class Segments:
    """Owns the segments of a log in order of sequence number; only the last is written to.

    `extents` tells all messages that exist in them. Bytes on disk are counted in `shared.disk_bytes`.
    """

    def __init__(self, shared: LogShared, directory: Path, opened: list[Segment] | None = None) -> None:
        self.shared = shared
        self.directory = directory
        self.extents = Extents()
        self.removed = Removed(directory / "removed", shared.report)
        self.before_remove: Callable[[Segment], None] = lambda segment: None
        self._segments: list[Segment] = []
        self._bases: list[int] = []
        self._unsynced_messages = 0
        self._sync_not_before_s = 0.0
        self._refused_by: Exception | None = None
        """Says why nothing may be appended: a segment could neither be synced nor written anew."""
        if not directory.exists():
            directory.mkdir(mode=DIRECTORY_MODE, parents=True)
            shared.syncer.directory(directory.parent).changed()
        try:
            self._use(open_segments(shared, directory, shared.report) if opened is None else opened)
        except BaseException:
            self.abandon()
            raise

    def _use(self, opened: list[Segment]) -> None:
        self._segments = opened
        self._bases = [segment.base_seq for segment in self._segments]
        for segment in self._segments:
            self._watch(segment)
            self.shared.disk_bytes += segment.size
            for first, count in segment.extents.ranges():
                self.extents.add(first, count)
            if segment is not self._segments[-1] and not segment.sealed:
                self._seal(segment)  # a crash came before its index was stored
        if self._segments:
            # A process that was killed may have written what was never synced.
            self._segments[-1].file.changed()
        self.removed.load(self._bases[0] if self._bases else 0)
        self.extents.resume(self.removed.to)

    def _watch(self, segment: Segment) -> None:
        segment.file.on_sync_failed = lambda: self._sync_failed(segment)
        segment.file.on_mended = lambda: self._mended(segment)

    @property
    def total_bytes(self) -> int:
        return sum(segment.size for segment in self._segments)

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._segments)

    @property
    def oldest_ns(self) -> int:
        """Tells when the oldest message was published."""
        return self._segments[0].time_min_ns if self._segments else 0

    @property
    def deferred_appends(self) -> Appends:
        """Returns the appends of deferred messages whose batches are here."""
        appends = Appends()
        for segment in self._segments:
            appends.add_all(segment.deferred)
        return appends

    @property
    def tokens(self) -> list[bytes]:
        return [token for segment in self._segments for token in segment.tokens]

    # -- writing -----------------------------------------------------------------------------------------

    def for_append(self, first_seq: int, size: int, *, limited: bool = True) -> Segment:
        """Returns the segment that the next `size` bytes go to; a new one if they do not fit.

        An empty segment is left from a write that failed. It is used if its name is not above `first_seq`: after a
        failure numbers may go on below those that failed, and files must be in the order of their names. What is not
        `limited` only moves: it is on disk already, and goes from there when the log has it.
        """
        shared = self.shared
        if limited and shared.settings.disk_bytes_max:
            shared.require_room(size)
        if self._refused_by is not None:
            raise OSError(errno.EIO, f"the log could not be synced: {self._refused_by}")
        segment = self._segments[-1] if self._segments else None
        if segment is not None and not segment.sealed:
            if not segment.size and segment.base_seq <= first_seq:
                return segment
            if segment.size and segment.size + size <= shared.settings.max_bytes_per_file:
                return segment
            if segment.size:
                self._seal(segment)
        if segment is not None and segment.size == 0:
            if segment.file.is_in_use:
                raise OSError(errno.EIO, f"{segment.path.name} could not be synced and is being written anew")
            self._segments.pop()
            self._bases.pop()
            segment.delete()
        segment = Segment(shared.syncer, self.directory, first_seq, shared.settings.checkpoint_bytes)
        segment.create()
        self._watch(segment)
        self._segments.append(segment)
        self._bases.append(first_seq)
        return segment

    def begin_write(self, segment: Segment) -> None:
        """Is told that a thread is about to write to the last segment; `written` or `write_failed` ends it."""
        segment.file.is_written_in_thread = True

    def written(self, messages: int, size: int) -> None:
        """Is told that a write succeeded: the disk is well, and the log is synced if enough came together."""
        if not messages:
            return  # there was no sequence number to be had
        shared = self.shared
        shared.disk_bytes += size
        if shared.disk.error is not None:
            shared.disk.worked()
        file = self._segments[-1].file
        every = shared.settings.sync_every
        if not file.is_changed and every != 1:
            file.changed()
        if file.is_written_in_thread:
            self._write_ended()
        self._unsynced_messages += messages
        if self._unsynced_messages >= every > 1 and time.monotonic() >= self._sync_not_before_s:
            self.sync()

    def _write_ended(self) -> None:
        segment = self._segments[-1]
        segment.file.is_written_in_thread = False
        if segment.file.sync_error is not None:
            segment.sealed = True
            segment.file.write_anew()

    def write_failed(self, error: Exception, refused: int) -> None:
        """Is told that the last write failed, and `refused` messages with it; the file is as it was before."""
        self.shared.disk.failed(error, refused)
        if not self._segments:
            return
        segment = self._segments[-1]
        segment.file.is_written_in_thread = False
        if isinstance(error, SyncFailed):  # pages of earlier messages may be meant
            segment.file.failed(error)
        elif segment.file.sync_error is not None:
            self._write_ended()
        fd = segment.file.fd
        if not segment.sealed and fd >= 0 and os.fstat(fd).st_size != segment.size:
            # The file could not be cut back: it is not written to again, and what follows its end does not count.
            self._seal(segment)

    def sync(self) -> None:
        """Makes all that is written durable, in a thread."""
        self._unsynced_messages = 0
        self._sync_not_before_s = time.monotonic() + SYNC_INTERVAL_MIN_S
        if self._segments and self._segments[-1].file.is_changed:
            self._segments[-1].file.hurry()

    def when_synced(self, callback: Callable[[], None]) -> None:
        """Calls back once all that is written to the log by now is durable."""
        unsynced = [segment.file for segment in self._segments if not segment.file.is_durable]
        left = len(unsynced)

        def one_less() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                callback()

        if not unsynced:
            callback()
        for file in unsynced:
            file.when_synced(one_less)

    def _seal(self, segment: Segment) -> None:
        """Ends the writing to a segment; its index follows its next sync."""
        segment.sealed = True
        segment.file.hurry()

    def _sync_failed(self, segment: Segment) -> None:
        """Is told that a sync of a segment failed, or writing it anew did. What is published meanwhile goes to another
        file; after a second failure nothing is accepted, or a bad disk would fill with small files that are not safe
        either.
        """
        if not segment.file.is_written_in_thread:
            segment.sealed = True
        if segment.file.attempts:
            self._refused_by = segment.file.sync_error

    def _mended(self, mended: Segment) -> None:
        """Is told that a segment is safe again; it gets its index."""
        if mended in self._segments:
            content = mended.index_content()
            self.shared.run(lambda: mended.store_index(content), lambda error: None)
        self._accept_again()

    def _accept_again(self) -> None:
        """Lets messages be appended if no segment that is left waits to be written anew."""
        if all(segment.file.sync_error is None for segment in self._segments):
            self._refused_by = None

    # -- reading -----------------------------------------------------------------------------------------

    def segment_of(self, seq: int) -> Segment | None:
        index = bisect_right(self._bases, seq) - 1
        return self._segments[max(index, 0)] if self._segments else None

    def read(self, seq: int, stop: int, then: Callable[[list[Chunk]], None]) -> list[Chunk] | None:
        """Returns the records from `seq` on and below `stop`, as many as one read brings; if None, `then` gets them."""
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
        self, segment: Segment, offset: int, seq: int, stop: int, then: Callable[[list[Chunk]], None], tries: int = 1
    ) -> None:
        end = segment.size
        # What cannot be read by the last try is left out, so that what follows need not wait for it.
        way = _read_whole if tries < READ_TRIES else read_readable

        def read(fd: int) -> memoryview:
            return _read_batch(fd, segment.path, offset, end, seq, way)

        def done(piece: memoryview) -> None:
            chunks = self._decode(segment, piece, offset, seq, stop)
            if not chunks:
                self._lost(segment, seq, min(stop, segment.extents.head))
            then(chunks)

        def again() -> None:
            self._read_in_thread(segment, offset, seq, stop, then, min(tries + 1, READ_TRIES))

        self.shared.read(segment.fd, f"LOG({segment.path}): reading at {offset}", read, done, again)

    def _decode(self, segment: Segment, piece: memoryview, offset: int, seq: int, stop: int) -> list[Chunk]:
        """Cuts the batches of a piece of a file that reach beyond `seq` into chunks without their headers."""
        groups: list[list[StoredBatch]] = []
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

    def _chunk(self, batches: list[StoredBatch], piece: memoryview, offset: int) -> Chunk:
        size = sum(batch.payload_bytes for batch in batches)
        count = sum(batch.messages for batch in batches)
        chunk = Chunk(self.shared.node_id, batches[0].first_seq, size, count)
        for batch in batches:
            start = batch.offset - offset + HEADER_BYTES
            if not chunk.load(piece, start, batch.payload_bytes, batch.messages):
                raise ValueError(f"batch at {batch.offset} does not hold {batch.messages} records")
        return chunk

    def _lost(self, segment: Segment, low: int, high: int) -> None:
        """Removes messages that cannot be read any more from `extents`, so that channels go on behind them."""
        count = self.extents.remove(low, high)
        if count:
            self.shared.report(f"LOG({segment.path}): {count} messages from {low} on are damaged and left out")

    def places(self, seqs: list[int]) -> list[RecordPlace]:
        """Finds the places of single records of this log, for `read_records` in a thread."""
        places: list[RecordPlace] = []
        for seq in seqs:
            segment = self.segment_of(seq)
            if segment is not None:
                places.append(RecordPlace(seq, segment.path, segment.offset_of(seq), segment.size))
        return places

    def last_base_at_or_below(self, seq: int) -> int:
        """Finds the lowest message of the segment that has `seq`; everything below could be removed."""
        index = bisect_right(self._bases, seq) - 1
        return self._bases[index] if index >= 0 else 0

    # -- removing ----------------------------------------------------------------------------------------

    def remove_below(self, needed_seq: int, now_ns: int, *, newest_too: bool = False, keep_none: bool = False) -> int:
        """Deletes segments that nobody needs and retention does not keep; returns the lowest message left.

        The newest one stays unless its removal is asked for or `is_newest_out_of_time`; with `keep_none` retention
        keeps nothing.
        """
        settings = self.shared.settings
        left_bytes = self.total_bytes
        newest_too = newest_too or self.is_newest_out_of_time(now_ns)
        while self._segments:
            segment = self._segments[0]
            is_newest = len(self._segments) == 1
            end = segment.extents.head if is_newest else self._bases[1]
            if end > needed_seq:
                if is_newest and newest_too and needed_seq > segment.base_seq and not segment.sealed:
                    self._seal(segment)  # so that it can go once the rest of it is finished
                break
            if not (self._may_drop_newest(newest_too) if is_newest else segment.sealed):
                break
            is_young = settings.retention_ns and now_ns - segment.time_max_ns < settings.retention_ns
            is_needed_for_size = settings.retention_bytes and left_bytes - segment.size < settings.retention_bytes
            if (is_young or is_needed_for_size) and not keep_none:
                break
            left_bytes -= segment.size
            self.remove_first()
        return self._bases[0] if self._bases else max(needed_seq, self.extents.head)

    def is_newest_out_of_time(self, now_ns: int) -> bool:
        """Tells whether all messages are older than --retention-time, which is also a maximum for what is finished."""
        retention_ns = self.shared.settings.retention_ns
        return bool(self._segments and retention_ns and now_ns - self._segments[-1].time_max_ns >= retention_ns)

    def _may_drop_newest(self, wanted: bool) -> bool:
        newest = self._segments[-1]
        return wanted and bool(newest.size) and not newest.file.is_written_in_thread and newest.file.sync_error is None

    def drop_oldest(self) -> bool:
        """Deletes the lowest segment, read or not, to make room; returns False if there is none that can go."""
        if not self._segments or (len(self._segments) == 1 and not self._may_drop_newest(True)):
            return False
        self.remove_first()
        return True

    def remove_first(self) -> int:
        """Deletes the lowest segment, needed or not; returns the lowest message left."""
        self.before_remove(self._segments[0])
        segment = self._segments.pop(0)
        self._bases.pop(0)
        self.shared.disk_bytes -= segment.size
        left = self._bases[0] if self._bases else segment.extents.head
        self.extents.remove_below(left)
        self.removed.store(segment.extents.head, left)
        waiting = segment.file.abandon()
        doomed = segment.path.with_suffix(REMOVED_SUFFIX)
        os.replace(segment.path, doomed)
        segment.index_path.unlink(missing_ok=True)
        self.shared.run(lambda: doomed.unlink(missing_ok=True), lambda error: None)
        self._accept_again()
        for callback in waiting:  # what is gone need not become durable
            callback()
        return left

    # -- the end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Syncs what is not durable yet and stores the last index, so that the next start reads no data."""
        self.shared.drain()
        for segment in self._segments:
            try:
                if not segment.file.is_durable:
                    segment.file.make_durable()
                if segment is self._segments[-1] or not segment.sealed:
                    segment.store_index(segment.index_content())
            except OSError as error:  # the next start finds what is written, as after a crash
                self.shared.report(f"LOG({segment.path}): not closed well: {error}")
            segment.close()
        self._segments, self._bases = [], []

    def abandon(self) -> None:
        """Lets go of files that are being deleted, or cannot be used after all."""
        self.shared.disk_bytes -= self.total_bytes
        for segment in self._segments:
            segment.file.abandon()
        self._segments, self._bases = [], []


Read = Callable[[int, int, int, Path], tuple[bytes, int]]


def _read_whole(fd: int, size: int, offset: int, path: Path) -> tuple[bytes, int]:
    return os.pread(fd, size, offset), 0


def _read_batch(fd: int, path: Path, offset: int, end: int, seq: int, read: Read = read_readable) -> memoryview:
    """Reads a piece of a file that has, if there is one, a whole batch reaching beyond `seq`."""
    size = READ_BYTES
    while True:
        piece = memoryview(read(fd, min(size, end - offset), offset, path)[0])
        if offset + size >= end:
            return piece
        if any(isinstance(item, StoredBatch) and item.next_seq > seq for item in scan(piece, offset)):
            return piece
        size *= 2


def read_records(places: list[RecordPlace]) -> dict[int, bytes]:
    """Reads the records at these places, except those that are damaged."""
    found: dict[int, bytes] = {}
    for seq, path, offset, end in places:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            piece = _read_batch(fd, path, offset, end, seq)
        finally:
            os.close(fd)
        for batch in scan(piece, offset):
            if isinstance(batch, StoredBatch) and batch.first_seq <= seq < batch.next_seq:
                chunk = Chunk(0, batch.first_seq, batch.payload_bytes, batch.messages)
                chunk.load(piece, batch.offset - offset + HEADER_BYTES, batch.payload_bytes, batch.messages)
                index = seq - batch.first_seq
                found[seq] = bytes(chunk.view[chunk.offset(index) : chunk.offset(index + 1)])
    return found
