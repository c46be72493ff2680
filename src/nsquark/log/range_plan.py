"""Finds out what is in a range of a log, and where to split it, from the index in memory alone.

Counts are exact. Bytes are exact where the sparse index has an entry and interpolated in between, so they change a
little while the log grows. Where a range is split must not: a writer that is started again recognises what it has
written by the part it came from. So parts are cut by the ordinal of their messages, and how many there are follows from
the count and from `settled_bytes`, which depend on the range alone.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

from nsquark.kernel.extents import Extents
from nsquark.log.segment import Segment
from nsquark.log.segments import Segments

PARTS_MAX = 4096


@dataclass(slots=True)
class Part:
    """Names the messages in `low <= seq < high`."""

    low: int
    high: int
    count: int
    size: int


@dataclass(slots=True)
class Plan(Part):
    parts: list[Part] = field(default_factory=list)
    settled_bytes: int = 0
    """Is what the function of this name returns, or 0 if `part_bytes` was not given."""


class ByteScale:
    """Lays the files of a log end to end: it knows which byte a message is at, and which message a byte belongs to."""

    def __init__(self, segments: Segments) -> None:
        self._segments = [segment for segment in segments if segment.extents.count]
        self._bases = [segment.base_seq for segment in self._segments]
        self._starts: list[int] = []
        total = 0
        for segment in self._segments:
            self._starts.append(total)
            total += segment.size

    def at(self, seq: int) -> int:
        index = bisect_right(self._bases, seq) - 1
        if index < 0:
            return 0
        segment = self._segments[index]
        seqs, _ = segment.index
        step = _Step(segment, bisect_right(seqs, seq) - 1)
        return self._starts[index] + step.offset_of(seq)

    def batch_at(self, position: int) -> int:
        """Finds the first message of the batch with an index entry that is nearest below this byte."""
        return self._step(position)[0].low

    def message_at(self, position: int) -> int:
        """Finds about which message lies at this byte."""
        step, offset = self._step(position)
        return step.seq_at(offset)

    def _step(self, position: int) -> tuple["_Step", int]:
        index = bisect_right(self._starts, position) - 1
        segment, offset = self._segments[index], position - self._starts[index]
        _, offsets = segment.index
        return _Step(segment, bisect_right(offsets, offset) - 1), offset


class _Step:
    """Covers a segment from one entry of its index to the next."""

    def __init__(self, segment: Segment, entry: int) -> None:
        seqs, offsets = segment.index
        entry = max(entry, 0)
        is_last = entry + 1 >= len(seqs)
        self.low, self.start = seqs[entry], offsets[entry]
        self._high = segment.extents.head if is_last else seqs[entry + 1]
        self._size = (segment.size if is_last else offsets[entry + 1]) - self.start
        self._extents = segment.extents
        self._count = segment.extents.between(self.low, self._high)

    def offset_of(self, seq: int) -> int:
        return self.start + self._size * self._extents.between(self.low, min(seq, self._high)) // max(self._count, 1)

    def seq_at(self, offset: int) -> int:
        nth = self._count * (offset - self.start) // max(self._size, 1)
        return self._extents.nth(self._extents.ordinal(self.low) + nth)


def plan(
    segments: Segments,
    low: int,
    high: int,
    *,
    messages_max: int = 0,
    bytes_max: int = 0,
    parts: int = 1,
    part_bytes: int = 0,
) -> Plan:
    """Plans the range from `low`, up to `high` or where a limit (0: none) cuts it, in `parts` parts.

    There are more parts where each would exceed `part_bytes`, if that is given, and fewer if there are fewer messages.
    """
    extents = segments.extents
    high = max(low, min(high, extents.head))
    if messages_max:
        high = min(high, max(low, extents.nth(extents.ordinal(low) + messages_max)))
    count = extents.between(low, high)
    if not count:
        return Plan(low, high, 0, 0)
    scale = ByteScale(segments)
    if bytes_max and scale.at(high) - scale.at(low) > bytes_max:
        high = _cut(scale, extents, low, scale.at(low) + bytes_max)
        count = extents.between(low, high)
    settled = settled_bytes(segments, low, high) if part_bytes else 0
    if settled:
        parts = min(max(parts, -(-settled // part_bytes)), PARTS_MAX)
    split = _split(scale, extents, low, high, min(parts, count))
    return Plan(low, high, count, sum(part.size for part in split), split, settled)


def settled_bytes(segments: Segments, low: int, high: int) -> int:
    """Returns the bytes of a range in the files, up to a step of the index less: the same however the log goes on.

    It counts from the entry at or below the range's first message to that of its last. Both were there when the range
    was, later entries lie beyond it, and an index that is made again has the same entries.
    """
    extents = segments.extents
    first, last = extents.at_or_after(low), extents.nth(extents.ordinal(high) - 1)
    total = 0
    for segment in segments:
        if segment.extents.count and segment.extents.head > first and segment.extents.first <= last:
            seqs, offsets = segment.index
            end = segment.size if segment.extents.head <= last else offsets[bisect_right(seqs, last) - 1]
            total += end - offsets[max(bisect_right(seqs, first) - 1, 0)]
    return total


def _cut(scale: ByteScale, extents: Extents, low: int, position: int) -> int:
    """Finds where a range from `low` on can end at about this byte: behind a message, between batches if possible."""
    one_more = extents.nth(extents.ordinal(low) + 1)
    cut = scale.batch_at(position)
    return cut if cut >= one_more else max(scale.message_at(position), one_more)


def _split(scale: ByteScale, extents: Extents, low: int, high: int, parts: int) -> list[Part]:
    first, count = extents.ordinal(low), extents.between(low, high)
    cuts = [low, *(extents.nth(first + count * number // parts) for number in range(1, parts)), high]
    return [
        Part(start, end, extents.between(start, end), scale.at(end) - scale.at(start)) for start, end in pairwise(cuts)
    ]
