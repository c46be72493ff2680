"""Formats figures for people; static/format.js follows the same rules for the figures that the browser draws itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

UNKNOWN: Final = "\u2013"
"""Stands for a figure that is not known, such as a rate after the first poll."""

_UNITS: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNT_WHOLE_MAX: Final = 9_999_999

_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86400
_LONG_UNITS: Final = ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min"))


def count(value: float | None) -> str:
    """Writes a count exactly, with separators, since people compare counts between pages."""
    return UNKNOWN if value is None else f"{round(value):,}"


def big(value: float | None) -> str:
    """Writes a figure for large type: exactly if that fits, else compactly."""
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
    """Rounds a figure to about three digits, which is as much as people read.

    Python and JavaScript round differently, so both do it by this arithmetic, which gives the same in both.
    """
    scale = 1 if abs(value) >= 100 else 10 if abs(value) >= 10 else 100
    rounded = math.floor(value * scale + 0.5) / scale
    return str(int(rounded) if rounded.is_integer() else rounded)


def size(value: float | None) -> str:
    """Writes a number of bytes in the unit that fits it."""
    if value is None:
        return UNKNOWN
    step = 0
    while value >= 1024 and step < len(_BYTE_UNITS) - 1:
        value /= 1024
        step += 1
    return f"{_trim(value)} {_BYTE_UNITS[step]}"


def latency(ns: float | None) -> str:
    return UNKNOWN if ns is None else seconds(ns / 1e9)


def seconds(value: float) -> str:
    """Writes a measured time in one unit, so that it fits beside the axis of a chart."""
    if value == 0:
        return "0"
    if value < 1e-3:
        return f"{_trim(value * 1e6)} µs"
    if value < 1:
        return f"{_trim(value * 1e3)} ms"
    for unit, name in _LONG_UNITS:
        if value >= 2 * unit:
            return f"{_trim(value / unit)} {name}"
    return f"{_trim(value)} s"


def duration(seconds: float) -> str:
    """Writes how long something has lasted, in whole units."""
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


def plural(number: int | None, one: str, many: str = "") -> str:
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


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
