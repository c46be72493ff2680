"""Writes figures as people read them; static/format.js has the same rules for what the browser draws itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

UNKNOWN: Final = "\u2013"
"""A figure that is not known, as a rate at first sight."""

_UNITS: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNT_WHOLE_MAX: Final = 9_999_999

_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86400


def count(value: float | None) -> str:
    """Writes a count with separators, and exact: what people compare between pages."""
    return UNKNOWN if value is None else f"{round(value):,}"


def big(value: float | None) -> str:
    """Writes a figure for large type: exact as long as it fits."""
    if value is None or abs(value) <= _COUNT_WHOLE_MAX:
        return count(value)
    return compact(value)


def compact(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    for unit, letter in _UNITS:
        if abs(value) >= unit:
            return _trim(value / unit) + letter
    return _trim(value)


def _trim(value: float) -> str:
    """Cuts a figure to three digits at most, behind which nobody looks."""
    if abs(value) >= 100 or value == int(value):
        return str(round(value))
    text = f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".")


def size(value: float | None) -> str:
    """Writes a size in bytes."""
    if value is None:
        return UNKNOWN
    step = 0
    while value >= 1024 and step < len(_BYTE_UNITS) - 1:
        value /= 1024
        step += 1
    return f"{_trim(value)} {_BYTE_UNITS[step]}"


def latency(ns: float) -> str:
    seconds = ns / 1e9
    if ns == 0:
        return "0"
    if seconds < 1e-3:
        return f"{_trim(seconds * 1e6)} µs"
    if seconds < 1:
        return f"{_trim(seconds * 1e3)} ms"
    return duration(seconds) if seconds >= 2 * _MINUTE_S else f"{_trim(seconds)} s"


def duration(seconds: float) -> str:
    whole = max(0, int(seconds))
    if whole < _MINUTE_S:
        return f"{whole} s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S} min"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S} min"
    return f"{whole // _DAY_S} d {whole % _DAY_S // _HOUR_S} h"


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def plural(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


FILTERS: Final[dict[str, Callable[..., str]]] = {
    "count": count,
    "big": big,
    "compact": compact,
    "size": size,
    "latency": latency,
    "duration": duration,
    "percent": percent,
    "plural": plural,
}
