# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Is the end of a log: messages are appended here, and a turn's worth of them is written at once.

    Tail.append ── Chunk             during the turn
    Tail.write ── BatchFile.append   at its end: one write for all of it
    Commit.settle                    then everyone who waits for it is told

The C types are in tail.pxd.
"""

from time import monotonic

import cython

from nsquark.wire.batch_format import HEADER_BYTES as _HEADER_BYTES
from nsquark.wire.record import RECORD_OVERHEAD_BYTES, SIZE_BYTES

if cython.compiled:
    from cython.cimports.nsquark.kernel.batch import BatchFile
    from cython.cimports.nsquark.kernel.bytes import u32
    from cython.cimports.nsquark.kernel.commits import Commit, CommitQueue
    from cython.cimports.nsquark.kernel.extents import Extents
    from cython.cimports.nsquark.kernel.records import Chunk
else:
    from nsquark.kernel.batch import BatchFile
    from nsquark.kernel.bytes import u32
    from nsquark.kernel.commits import Commit, CommitQueue
    from nsquark.kernel.extents import Extents
    from nsquark.kernel.records import Chunk

HEADER_BYTES = cython.declare(cython.longlong, _HEADER_BYTES)
RECORD_OVERHEAD = cython.declare(cython.longlong, RECORD_OVERHEAD_BYTES)
SLOW_WRITE_S = 0.005
_SLOW_WRITE_S = cython.declare(cython.double, SLOW_WRITE_S)


class Tail:
    """Appends to the end of a log, and commits what was appended.

    * `chunk` gets what is appended, `commits` will write it. While the tail `is_closed`, nothing is to be appended.
    * `extents` are the messages that are committed; `on_committed` is told of those of each commit.
    * `log` gives `chunk` room for a message (`extend`), writes the commits that are not simple (`write_next`), and is
      told of writes that failed (`write_failed`) or took long (`was_slow`). A commit is simple if the tail
      `writes_inline` and it fits one batch: nearly all are.
    * `files` are the log's segments, or None where it has none; `on_dirty` is told when a commit is opened.
    """

    def __init__(self, log: object, files: object, extents: Extents, on_dirty: object):
        self.commits = CommitQueue()
        self.extents = extents
        self.chunk = None
        self.writes_inline = False
        self.is_closed = False
        self.on_committed = None
        self._log = log
        self._files = files
        self._on_dirty = on_dirty

    def append(
        self, source: object, pos: cython.longlong, size: cython.longlong, timestamp_ns: cython.longlong
    ) -> object:
        """Appends one message; it is published once the commit that is returned is settled without an error."""
        commit: Commit = self.begin(timestamp_ns)
        if self.chunk is None or not self.chunk.append(source, pos, size, timestamp_ns):
            self._log.extend(size)
            self.chunk.append(source, pos, size, timestamp_ns)
        self.commits.added(size + RECORD_OVERHEAD, timestamp_ns)
        return commit

    def append_sized(
        self,
        source: object,
        pos: cython.longlong,
        end: cython.longlong,
        count: cython.longlong,
        timestamp_ns: cython.longlong,
    ) -> object:
        """Appends `count` messages, each behind its size, as in MPUB; they were measured before."""
        commit: Commit = self.begin(timestamp_ns)
        start: cython.longlong = pos
        left: cython.longlong = count
        while left:
            if self.chunk is not None:
                left -= self.chunk.append_sized(source, pos, left, timestamp_ns)
                pos = self.chunk.resume
            if left:
                self._log.extend(u32(source, pos))
        self.commits.added(end - start + count * (RECORD_OVERHEAD - SIZE_BYTES), timestamp_ns)
        return commit

    def begin(self, timestamp_ns: cython.longlong, first: cython.longlong = -1) -> object:
        """Returns the open commit; one that is opened here begins with record `first` of the chunk, or the next."""
        if self.commits.open is not None:
            return self.commits.open
        commit: Commit = self.commits.begin(timestamp_ns)
        if self.chunk is not None:
            commit.slices.append((self.chunk, self.chunk.count if first < 0 else first))
        self._on_dirty(self)
        return commit

    def write(self) -> None:
        """Writes what was appended since the last time; called at the end of each turn in which there was something."""
        commit: Commit = self.commits.open
        if self.commits.writing is not None:
            return  # when that write is done, the next begins
        if (
            commit is not None
            and self.writes_inline
            and commit.bytes_added
            and not commit.flags
            and not self.commits.waiting
            and len(commit.slices) == 1
        ):
            self.commits.start_next()
            self._write_inline(commit)  # nearly always
        else:
            self._log.write_next()

    def _write_inline(self, commit: Commit) -> cython.void:
        """Writes a commit of one batch, here and now."""
        chunk: Chunk = commit.slices[0][0]
        start: cython.longlong = commit.slices[0][1]
        size: cython.longlong = commit.bytes_added
        file: BatchFile
        try:
            file = self._files.for_append(chunk.first_seq + start, HEADER_BYTES + size)
            started_s: cython.double = monotonic()
            messages: cython.longlong = file.append(file.fd, chunk, start, size, commit.time_min_ns, commit.time_max_ns)
        except OSError as error:
            self._log.write_failed(error)
            return
        if monotonic() - started_s > _SLOW_WRITE_S:
            self._log.was_slow(started_s)
        self.extents.add(chunk.first_seq + start, messages)
        self.committed(commit, messages, 1)

    def committed(self, commit: Commit, messages: cython.longlong, batches: cython.longlong) -> cython.void:
        """Ends a write after which the messages are in `extents`: they are visible, and their publishers are told."""
        size: cython.longlong = commit.bytes_added
        self.commits.written()
        if self._files is not None:
            self._files.written(messages, size + HEADER_BYTES * batches)
        self.on_committed(messages, size - RECORD_OVERHEAD * messages)
        commit.settle()
