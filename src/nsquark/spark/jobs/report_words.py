"""Writes sizes, times, durations and rates as text, for a report's table and its page."""

from datetime import UTC, datetime

SECOND_US = 1_000_000
HOURS_MAX = 48
"""From this many hours on, a duration is told in days."""


def size_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def time_text(us: int) -> str:
    return datetime.fromtimestamp(us / SECOND_US, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def duration_text(us: float | None) -> str:
    if us is None:
        return "-"
    if us < 1000:
        return f"{us:.0f} us"
    if us < SECOND_US:
        return f"{us / 1000:.1f} ms"
    seconds = us / SECOND_US
    if seconds < 120:
        return f"{seconds:,.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:,.1f} min"
    hours = seconds / 3600
    return f"{hours:,.1f} h" if hours < HOURS_MAX else f"{hours / 24:,.1f} days"


def rate_text(rate: float | None) -> str:
    """Writes a rate in messages per second."""
    if rate is None:
        return "-"
    return f"{rate:.2g}" if 0 < rate < 1 else f"{rate:,.1f}"
