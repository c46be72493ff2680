"""Counts how often values fell between given bounds, and adds them up."""

from bisect import bisect_left


class Histogram:
    """Counts values: `counts[i]` are those up to `bounds[i]`, and one more entry counts those above all bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum: float = 0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
