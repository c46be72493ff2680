# cython: language_level=3, boundscheck=False, initializedcheck=False
"""Knows which sequence numbers of a topic exist, and how many lie between two of them.

Sequence numbers are handed out in leases, so they have gaps; depth is counted here, never by subtraction.
"""

from bisect import bisect_right

import cython


class Extents:
    """Has the ranges of existing sequence numbers, in order, each with the ordinal of its first message; none is empty.

    The ordinal counts the messages the log ever had; removing old ones does not change it. `head` is the sequence
    number after the last message the log ever had, 0 if it never had one.
    """

    def __init__(self) -> None:
        self.head = 0
        self._starts = []
        self._ends = []
        self._ordinals = []
        self._total = 0

    @property
    def first(self) -> int:
        """Returns the lowest existing sequence number, or the head if there is none."""
        return self._starts[0] if self._starts else self.head

    @property
    def count(self) -> int:
        """Returns how many messages exist."""
        return self._total - (self._ordinals[0] if self._ordinals else self._total)

    def add(self, first: cython.longlong, count: cython.longlong) -> cython.void:
        """Adds messages that were appended, always at the head or above."""
        end: cython.longlong = first + count
        if self._ends and self._ends[-1] == first:
            self._ends[-1] = end
        else:
            self._starts.append(first)
            self._ends.append(end)
            self._ordinals.append(self._total)
        self._total += count
        self.head = end

    def resume(self, head: int) -> None:
        """Goes on at `head`, which the log once reached although all that was there is removed."""
        if head > self.head:
            self.head = head

    def ordinal(self, seq: cython.longlong) -> cython.longlong:
        """Returns how many messages the log ever had below `seq`."""
        index: cython.Py_ssize_t = bisect_right(self._starts, seq) - 1
        if index < 0:
            return self._ordinals[0] if self._ordinals else self._total
        return self._ordinals[index] + min(seq, self._ends[index]) - self._starts[index]

    def nth(self, ordinal: int) -> int:
        """Returns the sequence number of the message with this ordinal, or the head if there is none."""
        index = bisect_right(self._ordinals, ordinal) - 1
        if index < 0:
            return self.first
        seq = self._starts[index] + ordinal - self._ordinals[index]
        return seq if seq < self._ends[index] else self.head

    def between(self, low: cython.longlong, high: cython.longlong) -> cython.longlong:
        """Returns how many existing messages are in `low <= seq < high`."""
        return max(cython.cast(cython.longlong, 0), self.ordinal(high) - self.ordinal(low))

    def at_or_after(self, seq: int) -> int:
        """Returns the lowest existing sequence number not below `seq`; if there is none, the head or `seq` itself."""
        index = bisect_right(self._starts, seq) - 1
        if index >= 0 and seq < self._ends[index]:
            return seq
        index += 1
        return self._starts[index] if index < len(self._starts) else max(seq, self.head)

    def remove_below(self, seq: int) -> None:
        """Removes the messages below `seq`."""
        while self._starts and self._ends[0] <= seq:
            del self._starts[0], self._ends[0], self._ordinals[0]
        if self._starts and self._starts[0] < seq:
            self._ordinals[0] += seq - self._starts[0]
            self._starts[0] = seq

    def remove(self, low: int, high: int) -> int:
        """Removes the messages in `low <= seq < high`, which are lost; returns how many there were. It is rare, so it
        may be slow.
        """
        pieces = list(zip(self._starts, self._ends, strict=True))
        head, base, lost = self.head, self._ordinals[0] if self._ordinals else self._total, 0
        self._starts, self._ends, self._ordinals, self._total = [], [], [], base
        for start, end in pieces:
            lost += max(0, min(end, high) - max(start, low))
            for piece_start, piece_end in ((start, min(end, low)), (max(start, high), end)):
                if piece_start < piece_end:
                    self.add(piece_start, piece_end - piece_start)
        self.head = head
        return lost

    def ranges(self) -> list[tuple[int, int]]:
        """Returns all ranges, as (first, count)."""
        return [(start, end - start) for start, end in zip(self._starts, self._ends, strict=True)]
