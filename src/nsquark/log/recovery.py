"""Opens what a start finds in a log's directory: segments in order, after clearing up what accidents left behind.

A segment is never deleted here, whatever is wrong with it: what cannot be used is set aside under another name.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nsquark.log.durable import ANEW_SUFFIX
from nsquark.log.files import FILE_MODE, names_like, sync_directory, write_all
from nsquark.log.segment import SEGMENT_SUFFIX, Segment, scan_file
from nsquark.log.services import LogShared
from nsquark.wire.batch_format import StoredBatch

REMOVED_SUFFIX = ".removed"
"""Ends the names of segments that nobody needs, until they are deleted."""
_SEGMENT_NAME = re.compile(rf"([0-9]{{20}}){re.escape(SEGMENT_SUFFIX)}")
"""Matches the names of segments; any other file is not ours, and is left alone."""
MERGED_SUFFIX = ".merged.bad"
"""Ends the names of segments whose messages were written to another one."""
LEFTOVERS = (f"*{REMOVED_SUFFIX}", f"*{ANEW_SUFFIX}", "*.tmp")
"""Lists patterns of what a crash may leave unfinished: copies and files that were about to be removed."""


Report = Callable[[str], object]


def open_segments(shared: LogShared, directory: Path, report: Report) -> list[Segment]:
    """Opens all segments, in order of sequence number and without overlap, or raises OSError.

    It may run in a thread, for a log that nothing else uses and whose directory the syncer knows.
    """
    for leftover in names_like(directory, *LEFTOVERS):
        leftover.unlink(missing_ok=True)
    segments = _open_all(shared, directory, report)
    # Each repair leaves one segment less, or one less with a wrong name, so this ends.
    while _repaired(shared, segments, report):
        for segment in segments:
            segment.close()
        segments = _open_all(shared, directory, report)
    return segments


def _repaired(shared: LogShared, segments: list[Segment], report: Report) -> bool:
    """Repairs the first thing that is out of order; returns False if there is none."""
    for segment in segments:
        if segment.extents.count and segment.extents.first < segment.base_seq:
            namesakes = [other for other in segments if other.base_seq == segment.extents.first]
            _rename(shared, segment, namesakes, report)
            return True
    overlapping = _first_overlap(segments)
    if overlapping is not None:
        _merge(segments[overlapping], segments[overlapping + 1], report)
    return overlapping is not None


def _rename(shared: LogShared, segment: Segment, namesakes: list[Segment], report: Report) -> None:
    """Gives a segment the name of its first message; joins it with the one that has that name already."""
    for other in namesakes:
        _merge(other, segment, report)
        return
    right = Segment(shared.syncer, segment.path.parent, segment.extents.first).path
    segment.index_path.unlink(missing_ok=True)
    sync_directory(right.parent)
    os.rename(segment.path, right)
    sync_directory(right.parent)
    report(f"LOG({segment.path}): holds messages below its name; it is {right.name} now")


def _open_all(shared: LogShared, directory: Path, report: Report) -> list[Segment]:
    names = (_SEGMENT_NAME.fullmatch(path.name) for path in names_like(directory, f"*{SEGMENT_SUFFIX}"))
    bases = sorted(int(name[1]) for name in names if name is not None)
    segments: list[Segment] = []
    for base in bases:
        segment = Segment(shared.syncer, directory, base, shared.settings.checkpoint_bytes)
        # An error is not caught: the file may be whole, and going on without it would pass its messages over for ever.
        for damage in segment.open_existing(last=base == bases[-1]):
            report(f"LOG({segment.path}): bytes {damage.offset} to {damage.end} set aside: {damage.reason}")
        segments.append(segment)
    return segments


def _first_overlap(segments: list[Segment]) -> int | None:
    for index in range(len(segments) - 1):
        first, second = segments[index], segments[index + 1]
        if first.extents.count and second.base_seq < first.extents.head:
            return index
    return None


class _Piece(NamedTuple):
    first_seq: int
    batch: StoredBatch
    fd: int


def _merge(low: Segment, high: Segment, report: Report) -> None:
    """Writes the batches of two overlapping segments, each once and in order, to a file that replaces the lower one.

    The copy is durable before it gets the name; the higher one keeps its content under another name. A crash in between
    leaves the overlap, to be found by the next start.
    """
    pieces = sorted(
        _Piece(item.first_seq, item, segment.fd)
        for segment in (low, high)
        for item in scan_file(segment.fd, segment.path, 0, segment.size)
        if isinstance(item, StoredBatch)
    )
    temporary = low.path.with_name(low.path.name + ANEW_SUFFIX)
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
    try:
        size, head = 0, 0
        for _, batch, source in pieces:
            if batch.first_seq < head:
                continue  # the same batch from the other file
            raw = os.pread(source, batch.end - batch.offset, batch.offset)
            write_all(fd, raw, size)
            size, head = size + len(raw), batch.next_seq
        os.fsync(fd)
        low.index_path.unlink(missing_ok=True)
        high.index_path.unlink(missing_ok=True)
        sync_directory(low.path.parent)
        os.replace(temporary, low.path)
        sync_directory(low.path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    os.replace(high.path, high.path.with_suffix(MERGED_SUFFIX))
    report(f"LOG({low.path}): overlapped {high.path.name}; the messages of both are in it now")
