"""Reads percent escapes and query strings, as strictly as Go does."""

import re
from collections.abc import Mapping

_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})|%")


class EscapeError(ValueError):
    """Says that a `%` is not followed by two hexadecimal digits."""


def unescape(data: bytes) -> str:
    """Undoes percent escapes. Bytes that are no UTF-8 become U+FFFD, which no valid name contains."""
    if b"%" in data:
        data = _ESCAPE.sub(_unescaped, data)
    return data.decode("utf-8", "replace")


def parse_query(data: bytes) -> tuple[Mapping[str, str], bool]:
    """Returns the first value of each key, and whether the whole query could be read."""
    values: dict[str, str] = {}
    ok = True
    for piece in data.split(b"&"):
        if not piece:
            continue
        if b";" in piece:
            ok = False
            continue
        name, _, value = piece.replace(b"+", b" ").partition(b"=")
        try:
            values.setdefault(unescape(name), unescape(value))
        except EscapeError:
            ok = False
    return values, ok


def _unescaped(match: re.Match[bytes]) -> bytes:
    digits: bytes | None = match[1]
    if digits is None:
        raise EscapeError
    return bytes((int(digits, 16),))
