"""The broker's clocks: monotonic for deadlines, wall for what is stored."""

import time


def now_ms() -> int:
    """Milliseconds of the monotonic clock, for deadlines."""
    return time.monotonic_ns() // 1_000_000


def wall_ms() -> int:
    """Milliseconds since 1970, for what outlives this process."""
    return time.time_ns() // 1_000_000


def wall_offset_ms() -> int:
    """What to add to a deadline to get its time of day."""
    return wall_ms() - now_ms()
