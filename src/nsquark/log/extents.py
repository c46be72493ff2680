"""Which sequence numbers of a topic exist, and how many lie between two of them.

Sequence numbers are handed out in leases, so they have gaps; depth is counted here, never by subtraction.
"""

from bisect import bisect_right


class Extents:
    """Ranges of existing sequence numbers, in order, each with the ordinal of its first message.

    The ordinal counts the messages the log ever had; removing old ones does not change it.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._ordinals: list[int] = []
        self._total = 0

    @property
    def head(self) -> int:
        """The sequence number after the last message; 0 for a log that never had one."""
        return self._ends[-1] if self._ends else 0

    @property
    def first(self) -> int:
        """The lowest existing sequence number; the head if there is none."""
        return self._starts[0] if self._starts else 0

    @property
    def count(self) -> int:
        """How many messages exist."""
        return self._total - (self._ordinals[0] if self._ordinals else self._total)

    def add(self, first: int, count: int) -> None:
        """Messages were appended; always above the head."""
        if self._ends and self._ends[-1] == first:
            self._ends[-1] += count
        else:
            self._starts.append(first)
            self._ends.append(first + count)
            self._ordinals.append(self._total)
        self._total += count

    def ordinal(self, seq: int) -> int:
        """How many messages the log ever had below `seq`."""
        index = bisect_right(self._starts, seq) - 1
        if index < 0:
            return self._ordinals[0] if self._ordinals else self._total
        return self._ordinals[index] + min(seq, self._ends[index]) - self._starts[index]

    def nth(self, ordinal: int) -> int:
        """The sequence number of the message with this ordinal; the head if there is none."""
        index = bisect_right(self._ordinals, ordinal) - 1
        if index < 0:
            return self.first
        return min(self._starts[index] + ordinal - self._ordinals[index], self._ends[index])

    def between(self, low: int, high: int) -> int:
        """How many existing messages are in `low <= seq < high`."""
        return max(0, self.ordinal(high) - self.ordinal(low))

    def at_or_after(self, seq: int) -> int:
        """The lowest existing sequence number not below `seq`; the head if there is none."""
        index = bisect_right(self._starts, seq) - 1
        if index >= 0 and seq < self._ends[index]:
            return seq
        index += 1
        return self._starts[index] if index < len(self._starts) else max(seq, self.head)

    def remove_below(self, seq: int) -> None:
        """The messages below `seq` are gone."""
        while self._starts and self._ends[0] <= seq and len(self._starts) > 1:
            del self._starts[0], self._ends[0], self._ordinals[0]
        if self._starts and self._starts[0] < seq:
            cut = min(seq, self._ends[0])
            self._ordinals[0] += cut - self._starts[0]
            self._starts[0] = cut

    def remove(self, low: int, high: int) -> int:
        """The messages in `low <= seq < high` are lost; how many there were. Rare, so it may be slow."""
        pieces = [(start, end) for start, end in zip(self._starts, self._ends, strict=True)]
        lost = 0
        base = self._ordinals[0] if self._ordinals else self._total
        self._starts, self._ends, self._ordinals = [], [], []
        self._total = base
        for start, end in pieces:
            lost += max(0, min(end, high) - max(start, low))
            for piece_start, piece_end in ((start, min(end, low)), (max(start, high), end)):
                if piece_start < piece_end:
                    self.add(piece_start, piece_end - piece_start)
        return lost

    def ranges(self) -> list[tuple[int, int]]:
        """All ranges, as (first, count)."""
        return [(start, end - start) for start, end in zip(self._starts, self._ends, strict=True)]
