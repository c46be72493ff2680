# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The end of a log: where messages are appended, and how a turn's worth of them is written.

    Tail.append ── Chunk             during the turn
    Tail.write ── BatchFile.append   at its end: one write for all of it
    Commit.settle                    then everyone who waits for it is told

The C types are in tail.pxd.
"""

from collections import deque
from time import monotonic

import cython

from nsquark.wire.batch_format import HEADER_BYTES as _HEADER_BYTES
from nsquark.wire.record import RECORD_OVERHEAD_BYTES

if cython.compiled:
    from cython.cimports.nsquark.kernel.batch import BatchFile
    from cython.cimports.nsquark.kernel.extents import Extents
    from cython.cimports.nsquark.kernel.records import Chunk
else:
    from nsquark.kernel.batch import BatchFile
    from nsquark.kernel.extents import Extents
    from nsquark.kernel.records import Chunk

HEADER_BYTES = cython.declare(cython.longlong, _HEADER_BYTES)
UNCOMMITTED_BYTES_MAX = cython.declare(cython.longlong, 8 << 20)
RECORD_OVERHEAD = cython.declare(cython.longlong, RECORD_OVERHEAD_BYTES)
SLOW_WRITE_S = 0.005
_SLOW_WRITE_S = cython.declare(cython.double, SLOW_WRITE_S)
NO_TOKEN = bytes(16)


class Commit:
    """The records of one write: open while messages are being added, then settled once, with an error or without.

    `slices` are parts of chunks, each from a record's index on.
    """

    def __init__(self, timestamp_ns: cython.longlong = 0):
        self.waiters = []
        self.is_settled = False
        self.error = None
        self.slices = []
        self.time_min_ns = timestamp_ns
        self.time_max_ns = timestamp_ns
        self.bytes_added = 0
        self.flags = 0
        self.token = NO_TOKEN

    def settle(self, error: object = None) -> None:
        self.is_settled = True
        self.error = error
        for waiter in self.waiters:
            waiter.committed(self)


class Tail:
    """The end of a log: `chunk` takes what is appended, `open` is the commit that will write it.

    `writing` is the commit that is being written, `waiting` are those closed meanwhile. While it `is_closed` nothing is
    to be appended. A subclass has

    * `extend(body_bytes)`, which gives `chunk` room for a message;
    * `segments`, whose `for_append(first_seq, size)` tells the file to append to, or None;
    * `write_next()`, which writes any commit, also in a thread; this only those that are to be `writes_inline`;
    * `failed(commit, error)` and `was_slow(started_s)`.
    """

    def __init__(self, on_dirty: object):
        """`on_dirty` is told when a commit is opened."""
        self.chunk = None
        self.open = None
        self.writing = None
        self.waiting = deque()
        self.writes_inline = False
        self.uncommitted_bytes = 0
        self.is_closed = False
        self.segments = None
        self.extents = Extents()
        self.head = 0
        self.on_committed = None
        self._on_dirty = on_dirty

    @property
    def is_congested(self) -> cython.bint:
        """Publishers are to be paused until the disk has caught up."""
        return self.uncommitted_bytes > UNCOMMITTED_BYTES_MAX

    def append(
        self, source: object, pos: cython.longlong, size: cython.longlong, timestamp_ns: cython.longlong
    ) -> object:
        """One message; it is published once the commit that is returned is settled without an error."""
        commit: Commit = self.begin(timestamp_ns)
        if self.chunk is None or not self.chunk.append(source, pos, size, timestamp_ns):
            self.extend(size)
            self.chunk.append(source, pos, size, timestamp_ns)
        self.added(commit, size + RECORD_OVERHEAD, timestamp_ns)
        return commit

    def append_sized(
        self,
        source: object,
        pos: cython.longlong,
        end: cython.longlong,
        count: cython.longlong,
        timestamp_ns: cython.longlong,
    ) -> object:
        """`count` messages, each behind its size, as in MPUB; they were measured before."""
        commit: Commit = self.begin(timestamp_ns)
        start: cython.longlong = pos
        left: cython.longlong = count
        while left:
            if self.chunk is not None:
                left -= self.chunk.append_sized(source, pos, left, timestamp_ns)
                pos = self.chunk.resume
            if left:
                self.extend(int.from_bytes(source[pos : pos + 4], "big"))
        self.added(commit, end - start + count * (RECORD_OVERHEAD - 4), timestamp_ns)
        return commit

    def begin(self, timestamp_ns: cython.longlong, first: cython.longlong = -1) -> object:
        """The commit that is open; if it has to be opened, from record `first` of the chunk on, or the next."""
        if self.open is not None:
            return self.open
        commit = Commit(timestamp_ns)
        if self.chunk is not None:
            commit.slices.append((self.chunk, self.chunk.count if first < 0 else first))
        self.open = commit
        self._on_dirty(self)
        return commit

    def added(self, commit: Commit, size: cython.longlong, timestamp_ns: cython.longlong) -> cython.void:
        commit.bytes_added += size
        self.uncommitted_bytes += size
        if timestamp_ns > commit.time_max_ns:
            commit.time_max_ns = timestamp_ns
        elif timestamp_ns < commit.time_min_ns:
            commit.time_min_ns = timestamp_ns

    def write(self) -> None:
        """Writes what was appended since the last time; called at the end of each turn in which there was something."""
        commit: Commit = self.open
        if self.writing is not None:
            return  # when it is done, the next is written
        if (
            commit is not None
            and self.writes_inline
            and commit.bytes_added
            and not commit.flags
            and not self.waiting
            and len(commit.slices) == 1
        ):
            self._write_inline(commit)  # nearly always
        else:
            self.write_next()

    def _write_inline(self, commit: Commit) -> cython.void:
        """A commit of one batch, here and now."""
        chunk: Chunk = commit.slices[0][0]
        start: cython.longlong = commit.slices[0][1]
        size: cython.longlong = commit.bytes_added
        file: BatchFile
        self.open = None
        self.writing = commit
        try:
            file = self.segments.for_append(chunk.first_seq + start, HEADER_BYTES + size)
            started_s: cython.double = monotonic()
            messages: cython.longlong = file.append(file.fd, chunk, start, size, commit.time_min_ns, commit.time_max_ns)
        except OSError as error:
            self.failed(commit, error)
            return
        if monotonic() - started_s > _SLOW_WRITE_S:
            self.was_slow(started_s)
        self.extents.add(chunk.first_seq + start, messages)
        self.committed(commit, messages, 1)

    def committed(self, commit: Commit, messages: cython.longlong, batches: cython.longlong) -> cython.void:
        """All is written and noted: the messages are visible, and their publishers are told."""
        size: cython.longlong = commit.bytes_added
        self.head = self.extents.head
        self.writing = None
        self.uncommitted_bytes -= size
        if self.segments is not None:
            self.segments.written(messages, size + HEADER_BYTES * batches)
        self.on_committed(messages, size - RECORD_OVERHEAD * messages)
        commit.settle()
