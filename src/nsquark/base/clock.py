"""Reads the clocks that need no file: the monotonic one for deadlines, the wall clock for people."""

import time


def now_ms() -> int:
    """Returns milliseconds of the monotonic clock, for deadlines."""
    return time.monotonic_ns() // 1_000_000


def wall_ms() -> int:
    """Returns milliseconds since 1970, as far as this machine knows."""
    return time.time_ns() // 1_000_000
