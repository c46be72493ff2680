"""Reads JSON that others wrote; whatever is wrong with it is a ValueError."""

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec

T = TypeVar("T")

INTEGER_MIN, INTEGER_MAX = -(1 << 63), (1 << 63) - 1
INTEGER_CHARS_MAX = len(str(INTEGER_MIN))
_SURROGATE = re.compile("[\ud800-\udfff]")

Int64 = Annotated[int, msgspec.Meta(ge=INTEGER_MIN, le=INTEGER_MAX)]
"""Is a whole number as Go reads it. A plain int may have thousands of digits, and then it cannot become a float."""


def decode_json(data: bytes, kind: type[T]) -> T:
    """Reads the document as `kind`; ValueError says what is wrong, such as that it is nested too deeply to be read."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def read_fields_as_go(body: bytes) -> tuple[tuple[str, Any], ...]:
    """Reads an object as Go's reader does, with its fields in order; one that is repeated is there several times, since
    each of its values has to be right.
    """
    document = _read_as_go(body, tuple)
    if document is None:
        return ()
    if not isinstance(document, tuple):
        raise ValueError("not an object")
    return document


def decode_json_as_go(body: bytes, kind: type[T]) -> T:
    """Reads the document as `kind`, whose fields have names in lower case, as Go's reader does."""
    try:
        return msgspec.convert(_read_as_go(body, dict), kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def _read_as_go(body: bytes, object_of: Callable[[list[tuple[str, Any]]], object]) -> Any:
    """Reads a document in which names have any letter case, a null is like an absent field, and broken text is
    repaired. A reader that is stricter than this would lock out programs that NSQ's daemons understand.
    """

    def read(pairs: list[tuple[str, Any]]) -> object:
        return object_of([(name.casefold(), _repaired(value)) for name, value in pairs if value is not None])

    text = body.decode("utf-8", "surrogateescape")
    try:
        return json.loads(text, object_pairs_hook=read, parse_int=_integer, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def _repaired(value: Any) -> Any:
    return without_surrogates(value) if isinstance(value, str) else value


def without_surrogates(text: str) -> str:
    """Puts U+FFFD for what no UTF-8 can write, as Go does."""
    return _SURROGATE.sub("\ufffd", text)


def _integer(text: str) -> int | float:
    """Reads a whole number of 64 bits. A larger one is made a float, since it fits no field that is a whole number."""
    number = int(text) if len(text) <= INTEGER_CHARS_MAX else float("inf")
    return number if INTEGER_MIN <= number <= INTEGER_MAX else float("inf")


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")
