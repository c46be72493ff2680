"""Reads a log by range, as raw batches of its files, and finds where a time begins or ends in it.

Nothing here reads in the event loop's thread: a `RangeReader` and a `TimeSearch` find out there, from the index in
memory, which parts of which files they need, and read them in a thread.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from nsquark.log.segment import Segment
from nsquark.log.segments import Segments
from nsquark.wire.batch_format import HEADER_BYTES, RANGE_PIECE, RANGE_REFUSED, StoredBatch, find_header, read_header
from nsquark.wire.record import BODY_AT, record_bytes, timestamp_of

HEADER_WALK_BYTES = 64 << 10
"""This much is read at a time to step from header to header."""
FILES_OPEN_MAX = 16
"""A range reader opens this many files at first, so that they can be removed meanwhile, and the others as it goes."""

GROUP_RANGES_MAX = 32
GROUP_FILES_MAX = 64


class _Span(NamedTuple):
    """Names the bytes of one file between which the batches of a range lie, as exactly as the index knows."""

    path: Path
    start: int
    end_from: int
    end: int


class RangeReader:
    """Reads the committed batches that overlap `low <= seq < high`, as they lie in the files.

    It is made in the event loop's thread; `read` and `close` run in threads and exclude each other.
    """

    def __init__(self, segments: Segments, low: int, high: int) -> None:
        self._low = low
        self._high = high
        self._spans = deque(_spans(segments, low, high))
        self._fds: deque[int] = deque()
        self._fd = -1
        self._pos = 0
        self._end = 0
        self._closed = False
        self._lock = threading.Lock()

    @property
    def files(self) -> int:
        """Tells how many files are open, beside the one that is read."""
        return len(self._fds)

    def open(self) -> None:
        """Opens the files. They exist now, and stay readable from here on even if they are removed."""
        for span in list(self._spans)[:FILES_OPEN_MAX]:
            self._fds.append(_open(span.path))

    def read(self, size: int) -> bytes:
        """Returns the next bytes; fewer than `size` only at the end of a file, none at the end of the range."""
        with self._lock:
            while self._pos >= self._end and self._next_file():
                pass
            if self._pos >= self._end or self._closed:
                return b""
            piece = os.pread(self._fd, min(size, self._end - self._pos), self._pos)
            if not piece:
                raise OSError(5, f"the log ends at {self._pos}, before {self._end}")
            self._pos += len(piece)
            return piece

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._spans.clear()
            self._leave_file()
            while self._fds:
                os.close(self._fds.popleft())

    def _next_file(self) -> bool:
        self._leave_file()
        if not self._spans:
            return False
        span = self._spans.popleft()
        self._fd = self._fds.popleft() if self._fds else _open(span.path)
        self._pos = next(
            (batch.offset for batch in headers(self._fd, span.start, span.end) if batch.next_seq > self._low), span.end
        )
        self._end = span.end
        if span.end_from < span.end:
            self._end = next(
                (batch.offset for batch in headers(self._fd, span.end_from, span.end) if batch.first_seq >= self._high),
                span.end,
            )
        return True

    def _leave_file(self) -> None:
        self._pos = self._end = 0
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Readable(Protocol):
    """Reads a range, as it is or in another form."""

    @property
    def files(self) -> int: ...
    def open(self) -> None: ...
    def read(self, size: int) -> bytes: ...
    def close(self) -> None: ...


class RangeGroup:
    """Reads small ranges of many logs one behind the other, in pieces, each behind the number of its range and its
    size.

    For a range that cannot be read it is given bytes instead, the document that says why; `refuse` makes one for a
    range whose first read fails. A range that fails later breaks all off. `read` runs in threads.
    """

    def __init__(self, refuse: Callable[[int, OSError], bytes]) -> None:
        self._refuse = refuse
        self._ranges: deque[tuple[int, Readable | bytes]] = deque()
        self._begun = -1
        """This is the number of the last range of which there were bytes."""

    def add(self, number: int, what: Readable | bytes) -> None:
        self._ranges.append((number, what))

    @property
    def is_full(self) -> bool:
        """Tells whether the group should be read before more ranges are added, since each has its files open."""
        files = sum(what.files for _, what in self._ranges if not isinstance(what, bytes))
        return len(self._ranges) >= GROUP_RANGES_MAX or files >= GROUP_FILES_MAX

    def read(self, size: int) -> bytes:
        """Returns the next bytes, about `size` of them, or none at the end."""
        found = bytearray()
        while self._ranges and len(found) < size:
            number, what = self._ranges[0]
            if isinstance(what, bytes):
                found += RANGE_PIECE.pack(number | RANGE_REFUSED, len(what)) + what
                self._ranges.popleft()
                continue
            try:
                piece = what.read(size)
            except OSError as error:
                if self._begun == number:
                    raise
                what.close()
                self._ranges[0] = (number, self._refuse(number, error))
                continue
            if piece:
                found += RANGE_PIECE.pack(number, len(piece)) + piece
                self._begun = number
            else:
                what.close()
                self._ranges.popleft()
        return bytes(found)

    def close(self) -> None:
        for _, what in self._ranges:
            if not isinstance(what, bytes):
                what.close()


def _spans(segments: Segments, low: int, high: int) -> Iterator[_Span]:
    for segment in _whole(segments):
        if segment.extents.head <= low:
            continue
        if segment.extents.first >= high:
            return
        if segment.extents.head <= high:
            yield _Span(segment.path, segment.offset_of(low), segment.size, segment.size)
        else:
            yield _Span(segment.path, segment.offset_of(low), segment.offset_of(high), segment.offset_beyond(high))


def _whole(segments: Segments) -> Iterator[Segment]:
    """Yields the segments that have messages."""
    return (segment for segment in segments if segment.size and segment.extents.count)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _open_unless_removed(segments: Segments, segment: Segment) -> int | None:
    """Opens a file of the log, or returns None if it was removed meanwhile; one that is gone otherwise is an error."""
    try:
        return _open(segment.path)
    except FileNotFoundError:
        if segment.extents.head > segments.removed.to:
            raise
        return None


def headers(fd: int, start: int, end: int) -> Iterator[StoredBatch]:
    """Yields the batches of a file between two offsets, by their headers alone; what is no batch is stepped over."""
    window, window_at = memoryview(b""), start
    while start + HEADER_BYTES <= end:
        if not window_at <= start <= window_at + len(window) - HEADER_BYTES:
            window, window_at = memoryview(os.pread(fd, min(HEADER_WALK_BYTES, end - start), start)), start
            if len(window) < HEADER_BYTES:
                return
        found = read_header(window, start - window_at, start)
        if found is not None:
            yield found[0]
            start = found[0].end
            continue
        after = find_header(window, start - window_at + 1)
        start = window_at + after if after >= 0 else max(start, window_at + len(window) - HEADER_BYTES) + 1


class TimeEnd:
    """Finds where messages end that were published before `time_ns`: from there on all are of this time or later.

    It is exact to the batch. The order of the log is not strictly that of time, so the file in which they end is walked
    through by the headers of its batches. It is made in the event loop's thread; `find` runs in a thread.
    """

    def __init__(self, segments: Segments, time_ns: int) -> None:
        self._time_ns = time_ns
        self._segments = segments
        older = [segment for segment in _whole(segments) if segment.time_min_ns < time_ns]
        self._last = older[-1] if older else None
        self._seq = segments.extents.first
        if self._last is not None:
            self._seq = self._last.extents.head if self._last.time_max_ns < time_ns else self._last.seq_at_time(time_ns)
            self._start, self._size = self._last.offset_of(self._seq), self._last.size

    def find(self) -> int:
        """Returns the sequence number after the last message that was published before the time."""
        if self._last is None or self._last.time_max_ns < self._time_ns:
            return self._seq
        fd = _open_unless_removed(self._segments, self._last)
        if fd is None:  # and so is all before it
            return self._seq
        try:
            older = (
                batch.next_seq for batch in headers(fd, self._start, self._size) if batch.time_min_ns < self._time_ns
            )
            return max(older, default=self._seq)
        finally:
            os.close(fd)


class TimeSearch:
    """Finds where the first message of a log lies that was published at `time_ns` or later.

    It is made in the event loop's thread; `find` runs in a thread.
    """

    def __init__(self, segments: Segments, time_ns: int) -> None:
        self._time_ns = time_ns
        self._segments = segments
        self._places = [
            (segment, segment.offset_of(segment.seq_at_time(time_ns)), segment.size)
            for segment in _whole(segments)
            if segment.time_max_ns >= time_ns
        ]

    def find(self) -> int | None:
        """Returns the sequence number of the first message at the time or later, or None if all are older."""
        for segment, start, end in self._places:
            fd = _open_unless_removed(self._segments, segment)
            if fd is None:  # the first of what is left is wanted
                continue
            try:
                seq = self._find_in(fd, start, end)
            finally:
                os.close(fd)
            if seq is not None:
                return seq
        return None

    def _find_in(self, fd: int, start: int, end: int) -> int | None:
        for batch in headers(fd, start, end):
            if batch.time_min_ns >= self._time_ns:
                return batch.first_seq
            if batch.time_max_ns >= self._time_ns:
                index = self._first_record(os.pread(fd, batch.payload_bytes, batch.offset + HEADER_BYTES))
                if index is not None:
                    return batch.first_seq + index
        return None

    def _first_record(self, payload: bytes) -> int | None:
        """Returns the index of the first message at the time or later in a batch, or None: the header's times are those
        of the whole commit, so the batch may have only older ones.
        """
        pos, index = 0, 0
        while pos + BODY_AT <= len(payload):
            if timestamp_of(payload, pos) >= self._time_ns:
                return index
            pos += record_bytes(payload, pos)
            index += 1
        return None
