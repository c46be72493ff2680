"""The clocks that need no file: monotonic for deadlines, wall for people."""

import time


def now_ms() -> int:
    """Milliseconds of the monotonic clock, for deadlines."""
    return time.monotonic_ns() // 1_000_000


def wall_ms() -> int:
    """Milliseconds since 1970, as far as this machine knows."""
    return time.time_ns() // 1_000_000
