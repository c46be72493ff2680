"""Decides which messages a search finds, by a piece of text or by the fields of their JSON.

    timeout                                   the body has this text somewhere
    .user.id == 7                             the body is JSON, and this field is 7
    .items[0].price >= 9.5 && !(.test)        several terms; `.test` alone: it is there, and neither false nor null
    .tags[] == "new" || .name contains "x"    `[]`: any of a list; `contains`: a piece of a string
    "Traceback" && .level == "error"          a quoted text is looked for in the whole body

Anything else is a piece of text as it stands. A field that is not there is like null. Values of different types are
never equal, and neither is greater than the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import msgspec

FILTER_CHARS_MAX: Final = 1000
TERMS_MAX: Final = 32
DEPTH_MAX: Final = 16
STEPS_MAX: Final = 32
"""A path has at most this many steps."""
VALUES_MAX: Final = 10_000
"""The `[]` of a path look at no more than this many values in one message."""


class FilterError(ValueError):
    """Says that a text is no valid filter; `at` is the index of the mistake in it."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(f"{reason} (at character {at + 1})")
        self.at = at


class Body:
    """Holds a message for filters: text is looked for in all of it, and fields in the content of its envelope, if it
    has one.

    The JSON is parsed once, and only if a filter asks for it.
    """

    __slots__ = ("_content", "_document", "raw")

    def __init__(self, raw: bytes, content: bytes | None = None) -> None:
        self.raw = raw
        self._content = raw if content is None else content
        self._document: Any = _UNREAD

    @property
    def document(self) -> Any:
        """Returns the parsed JSON of the content, or `NOT_JSON` if it is none."""
        if self._document is _UNREAD:
            try:
                self._document = msgspec.json.decode(self._content)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self._document = NOT_JSON
        return self._document


_UNREAD: Final = object()
NOT_JSON: Final = object()


class MessageFilter(Protocol):
    def matches(self, body: Body) -> bool: ...


class Everything(NamedTuple):
    def matches(self, body: Body) -> bool:
        return True


class TextFilter(NamedTuple):
    needle: bytes

    def matches(self, body: Body) -> bool:
        return self.needle in body.raw


class FieldFilter(NamedTuple):
    """Compares what a path leads to with a value. A step is a name, an index of a list, or None for any item."""

    path: tuple[str | int | None, ...]
    compare: Callable[[Any, Any], bool]
    value: Any

    def matches(self, body: Body) -> bool:
        document = body.document
        return document is not NOT_JSON and any(self.compare(found, self.value) for found in self._found(document))

    def _found(self, document: Any) -> list[Any]:
        values = [document]
        for step in self.path:
            if step is None:
                values = [item for value in values if isinstance(value, list) for item in value[:VALUES_MAX]]
                del values[VALUES_MAX:]
            else:
                values = [_at(value, step) for value in values]
        return values


class Not(NamedTuple):
    inner: MessageFilter

    def matches(self, body: Body) -> bool:
        return not self.inner.matches(body)


class Both(NamedTuple):
    terms: tuple[MessageFilter, ...]

    def matches(self, body: Body) -> bool:
        return all(term.matches(body) for term in self.terms)


class Either(NamedTuple):
    terms: tuple[MessageFilter, ...]

    def matches(self, body: Body) -> bool:
        return any(term.matches(body) for term in self.terms)


_EXPRESSION: Final = re.compile(r"""[.(!]|"(?:[^"\\]|\\.)*"\s*(?:$|&&|\|\|)""", re.DOTALL)


def parse_filter(text: str) -> MessageFilter:
    """Parses the filter that a person wrote, or raises FilterError, which says what is wrong with it."""
    text = text.strip()
    if len(text) > FILTER_CHARS_MAX:
        raise FilterError(f"a filter has at most {FILTER_CHARS_MAX} characters", FILTER_CHARS_MAX)
    if not text:
        return Everything()
    if not _EXPRESSION.match(text):
        return TextFilter(text.encode("utf-8", "surrogatepass"))
    return _Parser(text).parse()


# -- comparing -------------------------------------------------------------------------------------------


def _at(value: Any, step: str | int) -> Any:
    """Follows one step of a path; it returns None where there is nothing, as a missing field is like null."""
    if isinstance(step, str):
        return value.get(step) if isinstance(value, dict) else None
    return value[step] if isinstance(value, list) and -len(value) <= step < len(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _equal(found: Any, value: Any) -> bool:
    if _is_number(found) and _is_number(value):
        return bool(found == value)
    return type(found) is type(value) and bool(found == value)


def _ordered(test: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def compare(found: Any, value: Any) -> bool:
        are_numbers = _is_number(found) and _is_number(value)
        return (are_numbers or (isinstance(found, str) and isinstance(value, str))) and test(found, value)

    return compare


def _contains(found: Any, value: Any) -> bool:
    return isinstance(found, str) and value in found


def _is_true(found: Any, value: Any) -> bool:
    return found is not None and found is not False


_OPERATORS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "==": _equal,
    "!=": lambda found, value: not _equal(found, value),
    "<=": _ordered(lambda found, value: found <= value),
    ">=": _ordered(lambda found, value: found >= value),
    "<": _ordered(lambda found, value: found < value),
    ">": _ordered(lambda found, value: found > value),
    "contains": _contains,
}


# -- parsing ---------------------------------------------------------------------------------------------

_TOKEN: Final = re.compile(
    r"""\s*(?:
        (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<step>\.\[|\.?[^\W\d][\w-]*|\.)
      | (?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)
      | (?P<operator>==|!=|<=|>=|<|>|&&|\|\||!|\(|\)|\[|\])
    )""",
    re.VERBOSE | re.DOTALL,
)
_WORDS: Final = {"true": True, "false": False, "null": None}


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class _Parser:
    """Parses by recursive descent, no deeper than `DEPTH_MAX`."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._place = 0
        self._terms = 0
        self._depth = 0

    def parse(self) -> MessageFilter:
        found = self._any()
        if self._peek().kind != "end":
            self._fail(f"{self._peek().text!r} is not expected here")
        return found

    def _any(self) -> MessageFilter:
        terms = [self._all()]
        while self._accepts("||"):
            terms.append(self._all())
        return terms[0] if len(terms) == 1 else Either(tuple(terms))

    def _all(self) -> MessageFilter:
        terms = [self._term()]
        while self._accepts("&&"):
            terms.append(self._term())
        return terms[0] if len(terms) == 1 else Both(tuple(terms))

    def _term(self) -> MessageFilter:
        self._terms += 1
        self._depth += 1
        if self._terms > TERMS_MAX:
            self._fail(f"a filter has at most {TERMS_MAX} terms")
        if self._depth > DEPTH_MAX:
            self._fail(f"a filter has at most {DEPTH_MAX} levels")
        found = self._one()
        self._depth -= 1
        return found

    def _one(self) -> MessageFilter:
        if self._accepts("!"):
            return Not(self._term())
        if self._accepts("("):
            inner = self._any()
            self._expect(")")
            return inner
        if self._peek().kind == "string":
            return TextFilter(_string(self._next()).encode("utf-8", "surrogatepass"))
        return self._field()

    def _field(self) -> FieldFilter:
        token = self._peek()
        if token.kind != "step" or not token.text.startswith("."):
            self._fail('expected a field such as .user.id, a "text", ! or (')
        path = self._path()
        operator = self._peek().text
        if operator not in _OPERATORS:
            return FieldFilter(path, _is_true, None)
        at = self._next().at
        value = self._value()
        if operator == "contains" and not isinstance(value, str):
            raise FilterError('contains needs a "text"', at)
        return FieldFilter(path, _OPERATORS[operator], value)

    def _path(self) -> tuple[str | int | None, ...]:
        steps: list[str | int | None] = []
        while True:
            token = self._peek()
            if token.kind == "step" and token.text.startswith("."):
                self._next()
                if token.text == ".[":
                    steps.append(self._index())
                elif len(token.text) > 1:
                    steps.append(token.text[1:])
                elif steps:
                    self._fail("expected a name behind the dot")
                else:
                    return ()  # a dot alone is the whole document
            elif steps and self._accepts("["):
                steps.append(self._index())
            else:
                return tuple(steps)
            if len(steps) > STEPS_MAX:
                self._fail(f"a path has at most {STEPS_MAX} steps")

    def _index(self) -> str | int | None:
        """Reads what stands in brackets, once the opening one is read."""
        if self._accepts("]"):
            return None
        token = self._next()
        step: str | int
        if token.kind == "string":
            step = _string(token)
        elif token.kind == "number" and re.fullmatch(r"-?\d{1,9}", token.text):
            step = int(token.text)
        else:
            raise FilterError('expected a number, a "name" or ]', token.at)
        self._expect("]")
        return step

    def _value(self) -> Any:
        token = self._next()
        if token.kind == "string":
            return _string(token)
        if token.kind == "number":
            is_whole = not re.search("[.eE]", token.text)
            return int(token.text) if is_whole else float(token.text)
        if token.text in _WORDS:
            return _WORDS[token.text]
        raise FilterError('expected a number, a "text", true, false or null', token.at)

    def _peek(self) -> _Token:
        return self._tokens[self._place]

    def _next(self) -> _Token:
        token = self._tokens[self._place]
        if token.kind != "end":
            self._place += 1
        return token

    def _accepts(self, text: str) -> bool:
        token = self._peek()
        if token.kind == "operator" and token.text == text:
            self._place += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._accepts(text):
            self._fail(f"expected {text}")

    def _fail(self, reason: str) -> NoReturn:
        raise FilterError(reason, self._peek().at)


def _tokens(text: str) -> Iterator[_Token]:
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None or found.lastgroup is None:
            rest = text[place:].lstrip()
            raise FilterError(f"{rest[:1]!r} is not expected here", len(text) - len(rest))
        yield _Token(found.lastgroup, found[found.lastgroup], found.start(found.lastgroup))
        place = found.end()
    yield _Token("end", "the end", len(text))


def _string(token: _Token) -> str:
    try:
        return msgspec.json.decode(token.text, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError, UnicodeEncodeError):
        raise FilterError("the text has an escape that JSON does not know", token.at) from None
