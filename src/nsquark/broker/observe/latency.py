"""Measures how long messages take from publish to FIN: quantiles over a sliding window, in bounded memory.

A value is counted in the bucket of its logarithm, so that every quantile is within 1 % of a value that was really
measured. Sketches are merged by adding their buckets: nothing is lost by looking at several channels at once.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from math import ceil, log
from typing import Final

RELATIVE_ERROR: Final = 0.01
_GROWTH: Final = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
"""Is the upper end of a bucket divided by its lower one."""
_BUCKETS_PER_UNIT_OF_LOG: Final = 1 / log(_GROWTH)
BUCKETS_MAX: Final = ceil(log(2**63) * _BUCKETS_PER_UNIT_OF_LOG) + 1
"""A sketch has no more buckets than these, 2,185, whatever 64-bit values it is given."""
HALF_WINDOW_S_MIN: Final = 0.001


class Sketch:
    """Counts whole numbers by bucket: bucket i counts those above _GROWTH ** (i - 1) and up to _GROWTH ** i."""

    __slots__ = ("_buckets", "count")

    def __init__(self) -> None:
        self.count = 0
        self._buckets: Counter[int] = Counter()

    def __len__(self) -> int:
        """Tells how many buckets are in use."""
        return len(self._buckets)

    def add_since(self, times: list[int], now: int) -> None:
        """Adds `now - time` for each of the times, which rise; less than 1, as after a clock was set back, is 1.

        What is finished together was mostly published within a short time and shares few buckets: to look for where
        the next one starts is many times cheaper than to find the bucket of each value.
        """
        at = 0
        while at < len(times):
            value = now - times[at]
            bucket = ceil(log(value) * _BUCKETS_PER_UNIT_OF_LOG) if value > 1 else 0
            # The next bucket's values are at most the lower end of this one.
            end = bisect_left(times, now - int(_GROWTH ** (bucket - 1)), at + 1) if bucket else len(times)
            self._buckets[bucket] += end - at
            at = end
        self.count += len(times)

    def merge(self, other: "Sketch") -> None:
        self._buckets.update(other._buckets)
        self.count += other.count

    def quantiles(self, wanted: Iterable[float]) -> list[int]:
        """Returns for each quantile the value that this part of all values does not exceed, or 0 if there are none."""
        ordered = sorted(self._buckets.items())
        return [self._at_rank(ordered, quantile * (self.count - 1)) for quantile in wanted]

    def _at_rank(self, ordered: list[tuple[int, int]], rank: float) -> int:
        below = 0
        for bucket, times in ordered:
            below += times
            if below > rank:
                return round(2 * _GROWTH**bucket / (_GROWTH + 1))
        return 0


class LatencyWindow:
    """Keeps the latencies of one channel, in two halves of the window: the older goes when the newer is full.

    `total_count` and `total_ns` are of all messages finished since the start.
    """

    def __init__(self, window_s: float, now_s: float) -> None:
        self.total_count = 0
        self.total_ns = 0
        self._half_s = max(window_s / 2, HALF_WINDOW_S_MIN)
        self._newer, self._older = Sketch(), Sketch()
        self._moved_s = now_s

    def finished(self, publish_times_ns: list[int], now_ns: int, now_s: float) -> None:
        """Is told that messages published at these times are finished."""
        self._move_on(now_s)
        publish_times_ns.sort()
        self._newer.add_since(publish_times_ns, now_ns)
        past = bisect_left(publish_times_ns, now_ns)
        self.total_ns += now_ns * past - sum(publish_times_ns[:past])
        self.total_count += len(publish_times_ns)

    def add_to(self, sketch: Sketch, now_s: float) -> None:
        """Merges what is in the window now into another sketch."""
        self._move_on(now_s)
        sketch.merge(self._newer)
        sketch.merge(self._older)

    def _move_on(self, now_s: float) -> None:
        halves = int((now_s - self._moved_s) / self._half_s)
        if halves < 1:
            return
        self._older = self._newer if halves == 1 else Sketch()
        self._newer = Sketch()
        self._moved_s += halves * self._half_s
