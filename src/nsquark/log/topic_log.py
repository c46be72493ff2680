"""Keeps a topic's log: appending, committing, and the chunks in memory.

The path of a message: `append` puts its record into the tail chunk and opens a commit; at the end of the event loop's
turn `write` puts all that was appended into the file with one system call; then the commit is settled, publishers get
their OK, and the records are below `head`, where channels find them by `chunk_at`.
"""

import os
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from nsquark.kernel.commits import Commit
from nsquark.kernel.extents import Extents
from nsquark.kernel.records import Chunk
from nsquark.kernel.tail import SLOW_WRITE_S, Tail
from nsquark.log.cache import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, ChunkCache, chunk_records
from nsquark.log.segment import Segment
from nsquark.log.segments import Segments
from nsquark.log.sequences import LEASE_SEQS_MAX, LEASE_SEQS_MIN
from nsquark.log.services import LogShared
from nsquark.log.writer import BatchWriter
from nsquark.wire.batch_format import DEFERRED, HEADER_BYTES, MORE_FOLLOWS, StoredBatch
from nsquark.wire.record import RECORD_OVERHEAD_BYTES, Bytes

SLOW_WRITES_TO_MOVE = 3
SLOW_WINDOW_S = 1.0
"""SLOW_WRITES_TO_MOVE slow writes within this time move a log's writing to a thread."""
THREADED_WRITES_MAX = 200
"""After this many writes in a thread, writing in the event loop's thread is tried again."""


class LogDiscarded(Exception):
    """Says that the log is being deleted."""

    def __str__(self) -> str:
        return "exiting"


class ThreadedAppend(Protocol):
    """Makes and writes records in a thread, with sequence numbers of their own."""

    first_seq: int
    bytes_max: int
    """The file grows by this many bytes at most."""

    def write(self, fd: int, offset: int) -> list[StoredBatch]:
        """Writes everything at `offset` and makes it durable, or leaves the file as it was and raises."""


class ThreadedCommit(Commit):
    """Is a commit of too many records for one turn: it has no slices, a thread writes its records."""

    def __init__(self, timestamp_ns: int, threaded: ThreadedAppend) -> None:
        super().__init__(timestamp_ns)
        self.threaded = threaded


class TopicLog:
    """Owns an append-only sequence of messages; its `tail` appends them, and writes most of them.

    * Messages below `head` are committed: in the file (or, without a directory, in memory) and visible.
    * Chunks in `_chunks` are in order and do not overlap; the last is the tail's while the tail has one.
    * `_commits` has the commits on their way to the file, in order; this class writes those that the tail does not.
    """

    def __init__(
        self,
        shared: LogShared,
        directory: Path | None,
        on_dirty: Callable[[Tail], None],
        opened: list[Segment] | None = None,
    ) -> None:
        self.shared = shared
        self.segments = Segments(shared, directory, opened) if directory is not None else None
        self.extents = self.segments.extents if self.segments is not None else Extents()
        self.tail = Tail(self, self.segments, self.extents, on_dirty)
        self.tail.on_committed = lambda messages, body_bytes: None
        self._commits = self.tail.commits
        self._schedule = on_dirty
        self._cache: ChunkCache = shared.cache
        self._lease = (0, 0)
        self._lease_seqs = LEASE_SEQS_MIN
        self._chunk_bytes = CHUNK_BYTES_MIN
        self._chunks: list[Chunk] = []
        self._firsts: list[int] = []
        self._threaded_writes = 0
        self._slow_writes: deque[float] = deque(maxlen=SLOW_WRITES_TO_MOVE)
        self._is_discarded = False
        if self.segments is not None:
            self.choose_way()

    @property
    def head(self) -> int:
        """Returns the sequence number after the last message that is committed."""
        return self.extents.head

    @property
    def is_congested(self) -> bool:
        """Tells whether publishers are to be paused until the disk has caught up."""
        return self._commits.is_congested()

    # -- appending ---------------------------------------------------------------------------------------

    def append(self, source: Bytes, pos: int, size: int, timestamp_ns: int) -> Commit:
        """Appends one message; it is published once the commit that is returned is settled without an error."""
        return self.tail.append(source, pos, size, timestamp_ns)

    def append_sized(self, source: Bytes, pos: int, end: int, count: int, timestamp_ns: int) -> Commit:
        """Appends `count` messages, each behind its size, as in MPUB; they were measured before."""
        return self.tail.append_sized(source, pos, end, count, timestamp_ns)

    def append_apart(self, messages: list[tuple[int, bytes]], flags: int, token: bytes) -> tuple[Commit, list[int]]:
        """Appends messages with their own times in a commit of their own, all or nothing; tells their sequence numbers.

        What was open is written before; it raises BlockingIOError if that takes a while.
        """
        self.write()
        if not self._commits.is_empty:
            raise BlockingIOError("the log is busy; try again after its commit")
        commit = self.tail.begin(messages[0][0])
        seqs: list[int] = []
        for timestamp_ns, body in messages:
            self.append(bytearray(body), 0, len(body), timestamp_ns)
            seqs.append(self.next_seq() - 1)
        commit.flags = flags
        commit.token = token
        return commit, seqs

    def append_threaded(self, threaded: ThreadedAppend, timestamp_ns: int) -> Commit:
        """Makes a commit that is written in a thread; its sequence numbers were leased in this turn."""
        assert self.segments is not None
        commit = ThreadedCommit(timestamp_ns, threaded)
        self._commits.put_apart(commit)
        self.tail.chunk, self._lease = None, (0, 0)  # what comes now gets higher numbers
        self._schedule(self.tail)  # not at once: OKs of what was open tell that channels have noted what came before
        return commit

    def next_seq(self) -> int:
        """Tells the number the next message gets if the tail has room for it."""
        chunk = self.tail.chunk
        return chunk.first_seq + chunk.count if chunk is not None else self.head

    def extend(self, body_bytes: int) -> None:
        """Gives the tail a chunk with room for a message of `body_bytes` and, if the topic is busy, many more."""
        after = self.next_seq()
        low, high = self._lease
        if not low <= after < high:
            try:
                after, high = self._lease = self.shared.sequences.lease(self._lease_seqs)
            except OSError as error:
                self.shared.disk.failed(error, 1)
                raise
            self._lease_seqs = min(self._lease_seqs * 2, LEASE_SEQS_MAX)
        size = max(self._chunk_bytes, body_bytes + RECORD_OVERHEAD_BYTES)
        self._chunk_bytes = min(self._chunk_bytes * 2, CHUNK_BYTES_MAX)
        chunk = Chunk(self.shared.node_id, after, size, min(chunk_records(size), high - after))
        self.tail.chunk = chunk
        self._chunks.append(chunk)
        self._firsts.append(chunk.first_seq)
        assert self._commits.open is not None
        self._commits.open.slices.append((chunk, 0))
        if self.segments is not None:
            self._cache.add(chunk, self)

    # -- committing --------------------------------------------------------------------------------------

    def write(self) -> None:
        """Writes what was appended, unless a write is under way: then it is written after that."""
        self.tail.write()

    def write_next(self) -> None:
        """Writes the next commit in order, of whatever kind."""
        commit = self._commits.start_next()
        if commit is None:
            return
        if isinstance(commit, ThreadedCommit):
            self._write_threaded(commit, commit.threaded)
            return
        batches = _batches(commit)
        if self.segments is None or not batches:  # it is empty if there was no sequence number to be had
            self._written(commit, [batch for batch, _ in batches])
            return
        try:
            size = commit.bytes_added + HEADER_BYTES * len(batches)
            limited = not commit.flags & DEFERRED
            segment = self.segments.for_append(batches[0][0].first_seq, size, limited=limited)
            if not self.tail.writes_inline:
                self._write_in_thread(commit, segment, batches)
                return
            started = time.monotonic()
            written = _append(segment, batches)
        except OSError as error:
            self.write_failed(error)
            return
        if time.monotonic() - started > SLOW_WRITE_S:
            self.was_slow(started)
        self._written(commit, written, segment)
        if self._commits.waiting:
            self.write()

    def choose_way(self) -> None:
        """Lets the tail write here and now, unless each write is to be synced before its publishers get their OK."""
        self.tail.writes_inline = self.shared.settings.sync_every != 1 and not self.shared.syncer.is_behind
        self._threaded_writes = 0

    def was_slow(self, when_s: float) -> None:
        """Counts a slow write: one is a hiccup, several in a short time are a slow disk."""
        self._slow_writes.append(when_s)
        oldest_s = self._slow_writes[0]
        if len(self._slow_writes) == SLOW_WRITES_TO_MOVE and when_s - oldest_s < SLOW_WINDOW_S:
            self.tail.writes_inline = False
            self._slow_writes.clear()

    def _write_in_thread(self, commit: Commit, segment: Segment, batches: list[tuple[StoredBatch, memoryview]]) -> None:
        assert self.segments is not None
        self.segments.begin_write(segment)
        strict = self.shared.settings.sync_every == 1 or self.shared.syncer.is_behind
        started = time.monotonic()
        written: list[StoredBatch] = []

        def done(error: Exception | None) -> None:
            if strict:
                self.shared.sync_seconds.observe(time.monotonic() - started)
            self._thread_wrote(commit, segment, written, error)

        self.shared.run(lambda: written.extend(_append(segment, batches, strict=strict)), done)

    def _write_threaded(self, commit: Commit, threaded: ThreadedAppend) -> None:
        assert self.segments is not None
        try:
            segment = self.segments.for_append(threaded.first_seq, threaded.bytes_max)
            fd = os.dup(segment.fd)  # the topic may be deleted meanwhile
        except OSError as error:
            self.write_failed(error)
            return
        self.segments.begin_write(segment)
        offset = segment.size
        batches: list[StoredBatch] = []

        def work() -> None:
            try:
                segment.file.directory.sync()
                batches.extend(threaded.write(fd, offset))
            finally:
                os.close(fd)

        def done(error: Exception | None) -> None:
            self._commits.grew(sum(batch.payload_bytes for batch in batches))
            self._thread_wrote(commit, segment, batches, error)

        self.shared.run(work, done)

    def _thread_wrote(
        self, commit: Commit, segment: Segment, batches: list[StoredBatch], error: Exception | None
    ) -> None:
        if self._is_discarded:
            assert self.segments is not None
            self.segments.abandon()
            for failed in self._commits.fail():
                failed.settle(LogDiscarded())
            return
        if error is not None:
            self.write_failed(error)
            return
        self._threaded_writes += 1
        if self._threaded_writes >= THREADED_WRITES_MAX:
            self.choose_way()
        self._written(commit, batches, segment)
        self.write()

    def _written(self, commit: Commit, batches: list[StoredBatch], segment: Segment | None = None) -> None:
        for batch in batches:
            if segment is not None:
                segment.add(batch)
            self.extents.add(batch.first_seq, batch.messages)
        self.tail.committed(commit, sum(batch.messages for batch in batches), len(batches))

    def write_failed(self, error: Exception) -> None:
        """Drops what was not written, and what was appended behind it meanwhile; their publishers fail."""
        failed = self._commits.fail()
        slices = [piece for commit in failed for piece in commit.slices]
        if self.segments is not None:
            self.segments.write_failed(error, sum(chunk.count - start for chunk, start in slices))
        for chunk, start in reversed(slices):
            chunk.truncate(start)
            if chunk.count == 0:
                self._drop(chunk)
        self.tail.chunk = self._chunks[-1] if self._chunks and self._is_end(self._chunks[-1]) else None
        for commit in failed:
            commit.settle(error)

    def _is_end(self, chunk: Chunk) -> bool:
        return chunk.first_seq + chunk.count == self.head

    # -- reading -----------------------------------------------------------------------------------------

    def chunk_at(self, seq: int) -> Chunk | None:
        """Returns the chunk in memory that has a message below the head, or None if it has to be loaded."""
        index = bisect_right(self._firsts, seq) - 1
        if index >= 0:
            chunk = self._chunks[index]
            if seq < chunk.first_seq + chunk.count:
                self._cache.touch(chunk)
                return chunk
        return None

    def load(self, seq: int, then: Callable[[], None]) -> Chunk | None:
        """Brings a message's surroundings into memory: at once if the system has them, else `then` is called later."""
        assert self.segments is not None, "messages of a log in memory are always there"
        following = bisect_right(self._firsts, seq)
        stop = self._firsts[following] if following < len(self._firsts) else self.head
        chunks = self.segments.read(seq, stop, lambda chunks: self._loaded(chunks, then))
        if chunks is None:
            return None
        self._insert(chunks)
        chunk = self.chunk_at(seq)
        if chunk is None:  # it proved to be damaged: the caller goes on behind it
            self.shared.post(then)
        return chunk

    def _loaded(self, chunks: list[Chunk], then: Callable[[], None]) -> None:
        self._insert(chunks)
        then()

    def _insert(self, chunks: list[Chunk]) -> None:
        for chunk in reversed(chunks):  # the first is wanted most, and the cache lets go of what came earliest
            index = bisect_right(self._firsts, chunk.first_seq)
            overlaps_before = index > 0 and self._firsts[index - 1] + self._chunks[index - 1].count > chunk.first_seq
            overlaps_after = index < len(self._firsts) and self._firsts[index] < chunk.first_seq + chunk.count
            if not overlaps_before and not overlaps_after:
                self._chunks.insert(index, chunk)
                self._firsts.insert(index, chunk.first_seq)
                self._cache.add(chunk, self)

    @property
    def resident_from(self) -> int:
        """Returns the lowest message of the part that is in memory up to the head."""
        low = self.head
        for chunk in reversed(self._chunks):
            end = min(chunk.first_seq + chunk.count, self.head)
            if self.extents.between(end, low):
                break
            low = min(low, chunk.first_seq)
        return low

    def evict(self, chunk: Chunk) -> bool:
        """Lets go of a chunk when the cache asks for it. What is not written yet must stay."""
        if self._commits.uses(chunk):
            return False
        self._remove(chunk)
        return True

    def _drop(self, chunk: Chunk) -> None:
        self._remove(chunk)
        self._cache.remove(chunk)

    def _remove(self, chunk: Chunk) -> None:
        index = bisect_right(self._firsts, chunk.first_seq) - 1
        if index >= 0 and self._chunks[index] is chunk:
            del self._chunks[index], self._firsts[index]
        if chunk is self.tail.chunk:
            self.tail.chunk = None
            self._chunk_bytes = CHUNK_BYTES_MIN

    def record(self, seq: int) -> bytearray | None:
        """Copies a record, if it is in memory."""
        chunk = self.chunk_at(seq)
        if chunk is None:
            return None
        index = seq - chunk.first_seq
        return bytearray(chunk.view[chunk.offset(index) : chunk.offset(index + 1)])

    @property
    def chunk_count(self) -> int:
        """Tells how many chunks are in memory."""
        return len(self._chunks)

    def forget_below(self, seq: int) -> None:
        """Lets go of memory below `seq`, which nobody needs; from a log without a file these messages are gone."""
        last = self.tail.chunk
        while self._chunks and self._chunks[0] is not last and self._firsts[0] + self._chunks[0].count <= seq:
            self._drop(self._chunks[0])
        if self.segments is None:
            self.extents.remove_below(seq)

    # -- the end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Writes and syncs everything; to be called after all publishers are gone."""
        while not self._commits.is_empty:
            self.write()
            self.shared.drain()
        if self.segments is not None:
            self.segments.close()
        self._let_go()

    def discard(self) -> None:
        """Forgets everything; the files are the caller's to delete. What is still being written fails."""
        self._is_discarded = True
        for commit in self._commits.abandon():
            commit.settle(LogDiscarded())
        if self.segments is not None and self._commits.writing is None:
            self.segments.abandon()
        self._let_go()

    def _let_go(self) -> None:
        for chunk in list(self._chunks):
            self._drop(chunk)


def _batches(commit: Commit) -> list[tuple[StoredBatch, memoryview]]:
    """Makes a batch and its payload of each slice, since a batch has consecutive sequence numbers; their places in the
    file are still open.
    """
    slices = [(chunk, start) for chunk, start in commit.slices if chunk.count > start]
    batches: list[tuple[StoredBatch, memoryview]] = []
    for chunk, start in slices:
        flags = commit.flags
        if flags and len(batches) < len(slices) - 1:
            flags |= MORE_FOLLOWS
        payload = chunk.view[chunk.offset(start) : chunk.used]
        first_seq, count = chunk.first_seq + start, chunk.count - start
        times = commit.time_min_ns, commit.time_max_ns
        batches.append((StoredBatch(0, first_seq, count, len(payload), *times, flags, commit.token), payload))
    return batches


def _append(
    segment: Segment, batches: list[tuple[StoredBatch, memoryview]], *, strict: bool = False
) -> list[StoredBatch]:
    """Writes batches behind the segment's end, or leaves the file as it was and raises."""
    with BatchWriter(segment.fd, segment.size) as writer:
        for batch, payload in batches:
            writer.add(batch, payload)
        writer.flush()
        if strict:
            segment.file.sync()
    return writer.batches
