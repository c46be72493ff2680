"""Decides for nsq_to_nsq which JSON messages go on, and with which fields; it writes JSON as NSQ's tool does."""

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, NoReturn

from nsquark.wire.documents import without_surrogates

WHOLE_MAX: Final = 2.0**63
"""Larger floats are not written as whole numbers."""
PLAIN_MIN, PLAIN_MAX = 1e-6, 1e21
"""A float between these is written without an exponent."""
_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ESCAPED: Final = re.compile('["\\\\<>&\u2028\u2029\x00-\x1f]')


class NotJson(ValueError):
    """Says that a body is no JSON object."""


class FieldMissing(Exception):
    """Says that there is no field to compare with the required value."""


class JsonFilter:
    """Applies the flags `--require-json-field`, `--require-json-value` and `--whitelist-json-field`."""

    def __init__(self, field: str, value: str, whitelist: Sequence[str]) -> None:
        self._field = field
        self._value = value
        self._whitelist = list(whitelist)
        self._number: float | None = None
        with contextlib.suppress(ValueError):
            self._number = float(value)

    @property
    def is_used(self) -> bool:
        return bool(self._field or self._whitelist)

    def apply(self, body: bytes) -> bytes | None:
        """Returns the body to be sent on, or None if the message is not wanted."""
        document = read_object(body)
        if self._field and not self._is_wanted(document):
            return None
        if not self._whitelist:
            return body
        return write_object({name: document[name] for name in self._whitelist if name in document})

    def _is_wanted(self, document: Mapping[str, Any]) -> bool:
        if self._field not in document:
            if self._value:
                raise FieldMissing("missing field to check required value")
            return False
        if not self._value:
            return True
        found = document[self._field]
        if isinstance(found, str):
            return found == self._value
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        return is_number and self._number is not None and float(found) == self._number


def read_object(body: bytes) -> dict[str, Any]:
    """Reads an object. Whole numbers stay exact, where NSQ's tool makes floats of them and spoils large ids."""
    text = body.decode("utf-8", "replace")
    try:
        document = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from None
    if document is None:  # Go reads null as an object without fields
        return {}
    if not isinstance(document, dict):
        raise NotJson("not an object")
    return document


def write_object(document: Mapping[str, Any]) -> bytes:
    return _written({name: _as_whole(value) for name, value in document.items()}).encode()


def _whole(digits: str) -> int:
    _finite(digits)
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        _refuse(digits)
    return number


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _as_whole(value: Any) -> Any:
    """Turns a float without a fraction into a whole number, as NSQ's tool does at the top of an object."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < WHOLE_MAX
    return int(value) if is_whole else value


def _written(value: Any) -> str:
    """Writes JSON as Go does: keys in order, no spaces, and nothing that a web page could take for markup."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_text(key)}:{_written(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float):
        return _float(value)
    return json.dumps(value)  # null, true, false or a whole number


def _text(value: str) -> str:
    escaped = _ESCAPED.sub(lambda found: _ESCAPES.get(found[0]) or f"\\u{ord(found[0]):04x}", without_surrogates(value))
    return f'"{escaped}"'


def _float(value: float) -> str:
    if value == 0 or PLAIN_MIN <= abs(value) < PLAIN_MAX:
        return f"{Decimal(repr(value)):f}".removesuffix(".0")
    digits, _, exponent = repr(value).partition("e")
    return f"{digits}e{int(exponent):+d}"
