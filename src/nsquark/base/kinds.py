"""Defines the kinds of option values: how each is read from the command line, and from a TOML file.

NSQ reads the two differently (a bare number is no duration on the command line, but milliseconds in a file), so a kind
has both readers. Each raises ValueError with a reason for a person to read.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, NoReturn, TypeVar

from nsquark.base.durations import DURATION_NS_MAX, NS_PER_MS, Duration
from nsquark.base.logs import Level
from nsquark.base.printable import escaped

T = TypeVar("T")

INTEGER_MAX: Final = 2**63 - 1
INTEGER_TEXT_LENGTH_MAX: Final = 80
PARSE_ERROR: Final = "parse error"

_OLD_OCTAL = re.compile(r"([+-]?)0(_?[0-7][0-7_]*)", re.ASCII)
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
_TRUE: Final = frozenset(("1", "t", "T", "true", "TRUE", "True"))
_FALSE: Final = frozenset(("0", "f", "F", "false", "FALSE", "False"))


class FatalValueError(ValueError):
    """Refuses a value for which NSQ ends the program with status 1, where other bad flags give 2."""


def show_quoted(value: object) -> str:
    return f'"{"".join(map(escaped, str(value)))}"' if value else ""


def show_nonzero(value: object) -> str:
    return str(value) if value else ""


def show_list(value: object) -> str:
    return ",".join(str(item) for item in value) if isinstance(value, list) else ""


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """Says how values of one kind are read and shown."""

    word: str
    """Stands after the flag in the usage text; booleans have none."""
    from_flag: Callable[[str], T]
    from_config: Callable[[object], T]
    show_default: Callable[[object], str] = show_nonzero
    boolean: bool = False
    """A boolean flag stands alone: the argument after it is not its value."""
    repeated: bool = False
    """The values of all uses of a list flag are joined, and then put in order by `arrange`."""
    arrange: Callable[[list[object]], list[object]] = list


def not_in_a_file(value: object) -> NoReturn:
    """Is the `from_config` of a program that has no config file."""
    raise ValueError("this program has no config file")


def _string_of(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise ValueError("expected a string")


def parse_integer(text: str) -> int:
    """Reads an integer as Go does: decimal, 0x, 0o, 0b, or octal by a leading zero, with `_` between digits."""
    if len(text) > INTEGER_TEXT_LENGTH_MAX or not text.isascii() or text != text.strip():
        raise ValueError(PARSE_ERROR)
    octal = _OLD_OCTAL.fullmatch(text)
    try:
        number = int(f"{octal[1]}0o{octal[2]}" if octal else text, 0)
    except ValueError:
        raise ValueError(PARSE_ERROR) from None
    return _in_range(number)


def _in_range(number: int) -> int:
    if not -INTEGER_MAX - 1 <= number <= INTEGER_MAX:
        raise ValueError("value out of range")
    return number


def _integer_of(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return _in_range(value)
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,20}", value, re.ASCII):
        return _in_range(int(value))
    raise ValueError("expected an integer")


def parse_boolean(text: object) -> bool:
    """Reads one of the words that Go accepts for true and false."""
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(PARSE_ERROR)


def _boolean_of(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return parse_boolean(value)
    if isinstance(value, int):
        # NSQ reads 0 as true. A file that works there must mean the same here.
        return value == 0
    raise ValueError("expected true or false")


def _parse_duration(text: str) -> Duration:
    try:
        return Duration.parse(text)
    except ValueError as error:
        raise ValueError(f"{PARSE_ERROR}: {error}") from None


def _duration_of(value: object) -> Duration:
    if isinstance(value, str):
        return Duration.parse(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > DURATION_NS_MAX // NS_PER_MS:
            raise ValueError("value out of range")
        return Duration(value * NS_PER_MS)
    raise ValueError('expected a duration such as "5s", or an integer in milliseconds')


def _strings_of(value: object) -> list[str]:
    if isinstance(value, str):
        return [piece for piece in value.split(",") if piece]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return list(value)
    raise ValueError("expected an array of strings, or one string with commas")


def parse_float(text: str) -> float:
    if _FLOAT.fullmatch(text) is None or not math.isfinite(number := float(text)):
        raise ValueError(f"Could not parse: {text}")
    return number


def _parse_one_float(text: str) -> float:
    try:
        return parse_float(text)
    except ValueError:
        raise ValueError(PARSE_ERROR) from None


def _float_of(value: object) -> float:
    if type(value) in (float, int):
        return float(value)  # type: ignore[arg-type]
    raise ValueError("expected a number")


def _parse_floats(text: str) -> list[float]:
    try:
        return [parse_float(piece.strip()) for piece in text.split(",")]
    except ValueError as error:
        raise FatalValueError(str(error)) from None


def _floats_of(value: object) -> list[float]:
    """Reads numbers in the file's order, as NSQ does; only those of the command line are sorted."""
    if isinstance(value, str):
        return _parse_floats(value)
    if isinstance(value, list) and all(type(item) in (float, int) for item in value):
        return [float(item) for item in value]
    raise ValueError("expected an array of floats, or one string with commas")


def _arrange_floats(values: list[object]) -> list[object]:
    return [*sorted((value for value in values if isinstance(value, float)), reverse=True)]


STRING: Final = Kind("string", str, _string_of, show_quoted)
INTEGER: Final = Kind("int", parse_integer, _integer_of)
BOOLEAN: Final = Kind("", parse_boolean, _boolean_of, lambda value: "true" if value else "", boolean=True)
DURATION: Final = Kind("duration", _parse_duration, _duration_of)
STRINGS: Final[Kind[list[str]]] = Kind("value", lambda text: [text], _strings_of, show_list, repeated=True)
FLOAT: Final = Kind("float", _parse_one_float, _float_of, lambda value: f"{value:g}" if value else "")
FLOATS: Final[Kind[list[float]]] = Kind(
    "value", _parse_floats, _floats_of, show_list, repeated=True, arrange=_arrange_floats
)


def word_kind(parse: Callable[[str], T], show: Callable[[object], str], *, boolean: bool = False) -> Kind[T]:
    """Makes the kind of a value that is one word; in a config file it may be `true`, `false` or a number too."""

    def from_config(value: object) -> T:
        return parse(str(value).lower() if isinstance(value, bool) else str(value))

    return Kind("value", parse, from_config, show, boolean=boolean)


LOG_LEVEL: Final = word_kind(Level.parse, lambda value: value.word if isinstance(value, Level) else "")
