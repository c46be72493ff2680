"""What a range of a log holds, and where to split it, from the index in memory alone.

Counts are exact. Bytes are exact where the sparse index has an entry and interpolated in between.
"""

from bisect import bisect_right
from dataclasses import dataclass, field

from nsquark.kernel.extents import Extents
from nsquark.log.segment import Segment
from nsquark.log.segments import Segments


@dataclass(slots=True)
class Part:
    """The messages in `low <= seq < high`."""

    low: int
    high: int
    count: int
    size: int


@dataclass(slots=True)
class Plan(Part):
    parts: list[Part] = field(default_factory=list)


class ByteScale:
    """The files of a log laid end to end: which byte a message is at, and which message a byte belongs to."""

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
        """The first message of the batch with an index entry that is nearest below this byte."""
        return self._step(position)[0].low

    def message_at(self, position: int) -> int:
        """The message at this byte, about."""
        step, offset = self._step(position)
        return step.seq_at(offset)

    def _step(self, position: int) -> tuple["_Step", int]:
        index = bisect_right(self._starts, position) - 1
        segment, offset = self._segments[index], position - self._starts[index]
        _, offsets = segment.index
        return _Step(segment, bisect_right(offsets, offset) - 1), offset


class _Step:
    """From one entry of a segment's index to the next."""

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


def plan(segments: Segments, low: int, high: int, *, messages_max: int = 0, bytes_max: int = 0, parts: int = 1) -> Plan:
    """The range from `low`, up to `high` or where a limit (0: none) cuts it, in at most `parts` parts."""
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
    split = _split(scale, extents, low, high, min(parts, count))
    return Plan(low, high, count, sum(part.size for part in split), split)


def _cut(scale: ByteScale, extents: Extents, low: int, position: int) -> int:
    """Where to end at about this byte, but behind a message from `low` on: between batches, if it can be."""
    one_more = extents.nth(extents.ordinal(low) + 1)
    cut = scale.batch_at(position)
    return cut if cut >= one_more else max(scale.message_at(position), one_more)


def _split(scale: ByteScale, extents: Extents, low: int, high: int, parts: int) -> list[Part]:
    start, end = scale.at(low), scale.at(high)
    split: list[Part] = []
    for number in range(1, parts + 1):
        position = start + (end - start) * number // parts
        cut = high if number == parts else min(_cut(scale, extents, low, position), high)
        count = extents.between(low, cut)
        if count:
            split.append(Part(low, cut, count, scale.at(cut) - scale.at(low)))
            low = cut
    return split
