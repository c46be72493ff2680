"""Writes the status lines of nsq_to_http and nsq_to_nsq, which say in NSQ's words how long the last requests took."""

import math
from collections.abc import Callable, Sequence
from typing import Final

ACCURATE_COUNT_MIN: Final = 100


class Timings:
    """Remembers the last `every` durations, and says a line whenever it begins to overwrite them, but never if `every`
    is 0.
    """

    def __init__(self, every: int, prefix: str, say: Callable[[str], None]) -> None:
        self._every = every
        self._prefix = prefix
        self._say = say
        self._seconds: list[float] = []
        self._place = 0
        if 0 < every < ACCURATE_COUNT_MIN:
            say(f"Warning: percentiles of fewer than {ACCURATE_COUNT_MIN} values are rough (status-every is {every})")

    def took(self, seconds: float, count: int = 1) -> None:
        """Records that `count` requests took this long each."""
        while self._every > 0 and count > 0:
            if self._place == self._every:
                # As in NSQ's tools, the line comes with the first value of the next round, which replaced the oldest.
                self._place = 1
                self._seconds[0] = seconds
                count -= 1
                self._say(self.line())
                continue
            some = min(count, self._every - self._place)
            self._seconds[self._place : self._place + some] = [seconds] * some
            self._place += some
            count -= some

    def line(self) -> str:
        ordered = sorted(self._seconds)
        average = sum(ordered) / len(ordered) if ordered else 0.0
        return (
            f"{self._prefix} finished {len(ordered)} - 99th: {_ms(percentile(99, ordered))}"
            f" - 95th: {_ms(percentile(95, ordered))} - avg: {_ms(average)}"
        )


def percentile(percent: float, ordered: Sequence[float]) -> float:
    """Returns the value at the index that NSQ's tools take for a percentile."""
    if not ordered:
        return 0.0
    return ordered[min(math.ceil(percent / 100 * len(ordered) + 0.5), len(ordered) - 1)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f}ms"
