"""Reads and writes durations as Go does: they are part of every NSQ command line and config file."""

import re
from decimal import Decimal
from typing import Final, Self

NS_PER_US: Final = 1_000
NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000
_UNIT_NS: Final = {
    "ns": 1,
    "us": NS_PER_US,
    "\u00b5s": NS_PER_US,  # micro sign
    "\u03bcs": NS_PER_US,  # Greek letter mu, which looks the same
    "ms": NS_PER_MS,
    "s": NS_PER_S,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
DURATION_NS_MAX: Final = 2**63 - 1
"""A Go duration is an int64: what does not fit there would be refused by every other NSQ program."""
DURATION_TEXT_LENGTH_MAX: Final = 256

_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([^0-9.]*)")


class Duration(int):
    """Is a span of time in whole nanoseconds. Arithmetic gives plain integers."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads Go's syntax (`1m30s`, `250ms`, `-1.5h`, `0`); anything else raises a ValueError that says why."""
        quoted = f'"{text[:DURATION_TEXT_LENGTH_MAX]}"'
        if len(text) > DURATION_TEXT_LENGTH_MAX:
            raise ValueError(f"duration {quoted} is too long")
        negative = text.startswith("-")
        rest = text[1:] if text[:1] in ("-", "+") else text
        if rest == "0":
            return cls(0)
        if not rest:
            raise ValueError(f"invalid duration {quoted}")
        total = 0
        position = 0
        while position < len(rest):
            part = _PART.match(rest, position)
            if part is None:
                raise ValueError(f"invalid duration {quoted}")
            number, unit = part.groups()
            if not unit:
                raise ValueError(f"missing unit in duration {quoted}")
            if unit not in _UNIT_NS:
                raise ValueError(f'unknown unit "{unit}" in duration {quoted}')
            total += int(Decimal(number) * _UNIT_NS[unit])
            position = part.end()
        if total > DURATION_NS_MAX:
            raise ValueError(f"duration {quoted} is out of range")
        return cls(-total if negative else total)

    @property
    def ms(self) -> int:
        """Returns whole milliseconds, rounded towards zero."""
        return int(self) // NS_PER_MS if self >= 0 else -(-int(self) // NS_PER_MS)

    @property
    def seconds(self) -> float:
        return int(self) / 1e9

    def __str__(self) -> str:
        if self < 0:
            return f"-{Duration(-self)}"
        ns = int(self)
        for unit, size in (("ns", NS_PER_US), ("\u00b5s", NS_PER_MS), ("ms", NS_PER_S)):
            if ns < size:
                return "0s" if ns == 0 else _decimal(ns, _UNIT_NS[unit]) + unit
        minutes, rest = divmod(ns, 60_000_000_000)
        text = _decimal(rest, NS_PER_S) + "s"
        if minutes >= 60:
            return f"{minutes // 60}h{minutes % 60}m{text}"
        return f"{minutes}m{text}" if minutes else text

    def __repr__(self) -> str:
        return f"Duration.parse({str(self)!r})"


def _decimal(ns: int, unit_ns: int) -> str:
    """Writes `ns` in the unit, with exactly the decimals it needs: a float would invent or lose some."""
    whole, fraction = divmod(ns, unit_ns)
    if not fraction:
        return str(whole)
    digits = len(str(unit_ns)) - 1
    return f"{whole}.{fraction:0{digits}d}".rstrip("0")
