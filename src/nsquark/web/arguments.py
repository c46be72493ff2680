"""Reads the arguments in a request's query, and refuses requests, for both daemons."""

from __future__ import annotations

from typing import Final

from nsquark.web.messages import JSON_TYPE, NSQ_HEADER, Headers, Request, Response, encode_json
from nsquark.wire.names import is_valid_name

INT64_MAX: Final = 2**63 - 1
INT64_DIGITS: Final = len(str(INT64_MAX))
CHALLENGE: Final = ("WWW-Authenticate", "Bearer")


class Refusal(Exception):
    """Answers the request with an error: a code for programs, and fields or a text that say what to do."""

    def __init__(self, status: int, code: str, **fields: object) -> None:
        super().__init__(code)
        self.status = status
        self.code = code
        self.fields = fields

    def response(self) -> Response:
        """Returns the answer, in NSQ's form."""
        headers: Headers = (NSQ_HEADER, CHALLENGE) if self.status == 401 else (NSQ_HEADER,)
        return Response(self.status, encode_json({"message": self.code, **self.fields}), JSON_TYPE, headers)


class Arguments:
    """Reads the query of one request. Each getter refuses the request if its argument is missing or invalid."""

    def __init__(self, request: Request) -> None:
        if not request.query_ok:
            raise Refusal(400, "INVALID_REQUEST")
        self._query = request.query

    def __contains__(self, name: str) -> bool:
        return name in self._query

    def get(self, name: str) -> str:
        """Returns an argument as it is. One that is given but empty counts as given, as for NSQ."""
        value = self._query.get(name)
        if value is None:
            raise Refusal(400, f"MISSING_ARG_{name.upper()}")
        return value

    def name(self, name: str, code: str = "") -> str:
        """Returns a topic's or a channel's name; a bad one is refused with `code`, or with the usual code."""
        value = self.get(name)
        if not is_valid_name(value):
            raise Refusal(400, code or f"INVALID_ARG_{name.upper()}")
        return value

    def text(self, name: str, chars_max: int) -> str:
        value = self.get(name)
        if not 1 <= len(value) <= chars_max:
            raise invalid(name, f"1 to {chars_max} characters")
        return value

    def one_of(self, name: str, words: tuple[str, ...]) -> str:
        """Returns an argument that is one of `words`; the first is the default."""
        value = self._query.get(name, words[0])
        if value not in words:
            raise invalid(name, " or ".join(words))
        return value

    def number(self, name: str, low: int, high: int, default: int | None = None) -> int:
        if default is not None and name not in self:
            return default
        number = decimal(self.get(name))
        if number is None or not low <= number <= high:
            raise invalid(name, f"a number from {low} to {high}")
        return number

    def seconds(self, name: str, most: float) -> float:
        """Returns a time of at most `most` seconds; 0 is the default."""
        try:
            seconds = float(self._query.get(name, "0"))
        except ValueError:
            seconds = -1.0
        if not seconds >= 0:  # NaN is refused too
            raise invalid(name, "seconds, 0 or more")
        return min(seconds, most)


def invalid(name: str, wanted: str) -> Refusal:
    return Refusal(400, f"INVALID_ARG_{name.upper()}", reason=f"{name} must be {wanted}")


def decimal(word: str) -> int | None:
    """Reads a number without sign, of at most 63 bits; anything else gives None."""
    if not (word.isascii() and word.isdigit() and len(word) <= INT64_DIGITS):
        return None
    number = int(word)
    return number if number <= INT64_MAX else None


def int64(word: str) -> int | None:
    """Reads a decimal number as Go does: a sign may lead, and it has 64 bits; anything else gives None."""
    digits = word[1:] if word[:1] in ("+", "-") else word
    if not (digits.isascii() and digits.isdigit()) or len(digits.lstrip("0")) > INT64_DIGITS:
        return None
    value = int(digits.lstrip("0") or "0")
    value = -value if word[0] == "-" else value
    return value if -INT64_MAX - 1 <= value <= INT64_MAX else None
