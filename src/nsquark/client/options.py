"""Defines kinds of options: which values a user may give for one, and what is kept of them.

Every kind reads values in two ways. `typed` is for Python code, where a wrong type is a mistake worth an error at once;
`loose` is for command lines and config files and has go-nsq's rules, by which strings are parsed and an integer for a
duration is in milliseconds.
"""

from __future__ import annotations

import math
import os
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable

from nsquark.base.addresses import split_address
from nsquark.base.durations import NS_PER_MS, NS_PER_US, Duration
from nsquark.base.kinds import parse_boolean
from nsquark.client.errors import ConfigError

DISABLED: Final = Duration(-1)
"""Is the value of a duration that is switched off."""

US_PER_S: Final = 1_000_000
S_PER_DAY: Final = 86_400

T = TypeVar("T")
Number = TypeVar("Number", int, float, Duration)


@runtime_checkable
class BackoffStrategy(Protocol):
    """Says how long a consumer waits at each level of backoff."""

    def calculate(self, attempt: int) -> float:
        """Returns the seconds to wait at this level, which starts at 1."""


class OptionKind(ABC, Generic[T]):
    """Says what an option may be; a ValueError of a reader says why a value is not that."""

    @abstractmethod
    def typed(self, value: Any) -> T:
        """Reads a value as the constructor takes it."""

    def loose(self, value: Any) -> T:
        """Reads a value as a command line gives it."""
        return self.typed(value)

    def shown(self, value: Any) -> str:
        """Shows `value` as an error may repeat it."""
        return str(value)

    def check(self, name: str, value: T) -> None:
        """Raises ConfigError for a value of the right type and the wrong size."""


class _Ranged(OptionKind[Number]):
    def __init__(self, least: Number | None, most: Number | None) -> None:
        self._least: Number | None = least
        self._most: Number | None = most

    def check(self, name: str, value: Number) -> None:
        if self._least is not None and value < self._least:
            raise ConfigError(f"invalid {name} ! {value} < {self._least}{self._range()}")
        if self._most is not None and value > self._most:
            raise ConfigError(f"invalid {name} ! {value} > {self._most}{self._range()}")

    def _range(self) -> str:
        if self._most is None or self._least is None:
            return ""
        return f" (allowed: {self._least} to {self._most})"


class Span(_Ranged[Duration]):
    """Accepts a duration. Python code gives its unit: whoever means 60 seconds must not get 60 milliseconds."""

    def typed(self, value: Any) -> Duration:
        if isinstance(value, Duration):
            return value
        if isinstance(value, str):
            return Duration.parse(value)
        if isinstance(value, timedelta):
            return duration_of(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise ValueError(f"a plain number has no unit: write '{value}s' or timedelta(seconds={value})")
        raise ValueError("expected a duration such as '60s' or timedelta(seconds=60)")

    def loose(self, value: Any) -> Duration:
        if isinstance(value, int) and not isinstance(value, bool | Duration):
            return Duration(value * NS_PER_MS)
        return self.typed(value)


class SpanOrOff(Span):
    """Accepts a duration that -1 switches off, in whichever unit."""

    _OFF: Final = frozenset((-1, -NS_PER_MS))

    def __init__(self) -> None:
        super().__init__(Duration(0), None)

    def typed(self, value: Any) -> Duration:
        if value in (-1, "-1"):
            return DISABLED
        span = super().typed(value)
        return DISABLED if span in self._OFF else span

    def loose(self, value: Any) -> Duration:
        span = super().loose(value)
        return DISABLED if span in self._OFF else span

    def check(self, name: str, value: Duration) -> None:
        if value < 0 and value != DISABLED:
            raise ConfigError(f"invalid {name} ! {value} < 0s (-1 disables it)")


class Whole(_Ranged[int]):
    def typed(self, value: Any) -> int:
        if isinstance(value, int) and not isinstance(value, bool | Duration):
            return int(value)
        raise ValueError(f"expected a whole number, an int and not {kind_of(value)}")

    def loose(self, value: Any) -> int:
        if not isinstance(value, str):
            return self.typed(value)
        digits = value[1:] if value[:1] in ("-", "+") else value
        if not (digits.isascii() and digits.isdecimal()):
            raise ValueError("expected a whole number")
        return int(value)


class Fraction(_Ranged[float]):
    def typed(self, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool | Duration):
            raise ValueError(f"expected a number, a float and not {kind_of(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ValueError("expected a finite number")
        return number

    def loose(self, value: Any) -> float:
        try:
            return self.typed(float(value) if isinstance(value, str) else value)
        except ValueError:
            raise ValueError("expected a number") from None


class YesNo(OptionKind[bool]):
    def typed(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        raise ValueError(f"expected True or False, a bool and not {kind_of(value)}")

    def loose(self, value: Any) -> bool:
        if isinstance(value, int):
            return value != 0
        try:
            return parse_boolean(Text().typed(value))
        except ValueError:
            raise ValueError("expected true or false") from None


class Text(OptionKind[str]):
    def typed(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        raise ValueError(f"expected a string, a str and not {kind_of(value)}")

    def loose(self, value: Any) -> str:
        """Reads a text; a number is taken as it is written: config files know client_id = 7."""
        if isinstance(value, bool):
            return "true" if value else "false"
        return str(value) if isinstance(value, int | float) else self.typed(value)


class Secret(Text):
    def shown(self, value: Any) -> str:
        return "..."


class FilePath(OptionKind[str]):
    def typed(self, value: Any) -> str:
        if isinstance(value, str | os.PathLike):
            path = os.fspath(value)
            if isinstance(path, str):
                return path
        raise ValueError("expected a path")


class Address(Text):
    """Accepts `host:port`, or nothing."""

    def typed(self, value: Any) -> str:
        text = super().typed(value)
        if text:
            split_address(text)
        return text


class Word(OptionKind[str]):
    def __init__(self, *words: str) -> None:
        self._words = words

    def typed(self, value: Any) -> str:
        if isinstance(value, str) and value in self._words:
            return value
        raise ValueError(f"expected one of {', '.join(self._words)}")


class Strategy(OptionKind["str | BackoffStrategy"]):
    _word: Final = Word("exponential", "full_jitter")

    def typed(self, value: Any) -> str | BackoffStrategy:
        if isinstance(value, BackoffStrategy) and not isinstance(value, type):
            return value
        try:
            return self._word.typed(value)
        except ValueError as error:
            raise ValueError(f"{error}, or an object with calculate(attempt) that returns seconds") from None


class Tls(OptionKind["ssl.SSLContext | None"]):
    def typed(self, value: Any) -> ssl.SSLContext | None:
        if value is None or isinstance(value, ssl.SSLContext):
            return value
        raise ValueError("expected an ssl.SSLContext")


def duration_of(span: timedelta) -> Duration:
    """Makes a duration of a timedelta, exactly, unlike the way through float seconds."""
    return Duration(((span.days * S_PER_DAY + span.seconds) * US_PER_S + span.microseconds) * NS_PER_US)


def kind_of(value: object) -> str:
    """Names the class of a value: "2" and the 2 of numpy look like the number that they are not."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def read(name: str, value: Any, reader: Callable[[Any], T], kind: OptionKind[T]) -> T:
    """Reads `value` of option `name` as its kind keeps it."""
    try:
        checked = reader(value)
    except ValueError as error:
        raise ConfigError(f"failed to coerce option {name} ({kind.shown(value)}) - {error}") from None
    kind.check(name, checked)
    return checked
