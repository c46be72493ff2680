"""Reads grants: what an auth server allows, in its words, and whether that covers a command."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import msgspec

from nsquark.web.messages import encode_json
from nsquark.wire.documents import decode_json_as_go

EXPRESSIONS_MAX: Final = 10_000
EXPRESSION_MEMORY_BYTES_MAX: Final = 1 << 20
EXPRESSIONS_AT_ONCE_MAX: Final = 256
"""At most this many expressions are searched on the event loop, in about a millisecond; a thread searches more."""
DECISIONS_MAX: Final = 1024

Permission = Literal["subscribe", "publish", "admin"]
Question = tuple[Permission, str, str]
"""Names a permission, and the topic and channel it is asked for; the channel is empty where none is meant."""


class AuthError(Exception):
    """Says that an auth server did not answer, or not as it should; the text is for the log."""


class _Authorization(msgspec.Struct):
    topic: str = ""
    channels: list[str] | None = None
    permissions: list[Permission] | None = None


class _Answer(msgspec.Struct):
    ttl: int = 0
    identity: str = ""
    identity_url: str = ""
    authorizations: list[_Authorization] | None = None


class _Expression(Protocol):
    def search(self, name: str) -> object | None: ...


@dataclass(frozen=True, slots=True)
class _Permit:
    topic: _Expression
    channels: list[_Expression]
    permissions: frozenset[str]

    def allows(self, permission: str, topic: str, channel: str) -> bool:
        return (
            permission in self.permissions
            and self.topic.search(topic) is not None
            and any(expression.search(channel) for expression in self.channels)
        )


class Grant:
    """Knows what an auth server allows, for a time. Reading its answer takes long if it has many expressions."""

    def __init__(self, body: bytes) -> None:
        try:
            answer = decode_json_as_go(body, _Answer)
        except ValueError as error:
            raise AuthError(f"bad answer: {error}") from None
        if answer.ttl <= 0:
            raise AuthError(f"bad answer: a ttl of {answer.ttl} is not above 0")
        self.identity = answer.identity
        self.identity_url = answer.identity_url
        entries = answer.authorizations or ()
        self._expressions = sum(1 + len(entry.channels or ()) for entry in entries)
        if self._expressions > EXPRESSIONS_MAX:
            raise AuthError(f"bad answer: {self._expressions} expressions, at most {EXPRESSIONS_MAX} are taken")
        compiled = _Compiled()
        self.permits = [
            _Permit(
                compiled[entry.topic],
                [compiled[channel] for channel in entry.channels or ()],
                frozenset(entry.permissions or ()),
            )
            for entry in entries
        ]
        self._decisions: dict[Question, bool] = {}
        self._expires_at_s = time.monotonic() + answer.ttl

    @property
    def is_expired(self) -> bool:
        return time.monotonic() >= self._expires_at_s

    def decides_at_once(self, question: Question) -> bool:
        """Tells whether `allows` may be called on the event loop."""
        return self._expressions <= EXPRESSIONS_AT_ONCE_MAX or question in self._decisions

    def allows(self, question: Question) -> bool:
        decision = self._decisions.get(question)
        if decision is None:
            decision = any(permit.allows(*question) for permit in self.permits)
            if len(self._decisions) >= DECISIONS_MAX:
                self._decisions.clear()
            self._decisions[question] = decision
        return decision

    def shown(self) -> bytes:
        """Returns the answer to AUTH."""
        return encode_json(
            {
                "identity": self.identity,
                "identity_url": self.identity_url,
                "permission_count": len(self.permits),
            }
        )


class _Compiled(dict[str, _Expression]):
    """Keeps expressions by their text, in the syntax of Go's `regexp`; a search is linear in the name's length."""

    def __init__(self) -> None:
        import re2  # only with AUTH, so that others start without it

        self._re2 = re2
        self._options = re2.Options()
        self._options.log_errors = False
        self._options.never_capture = True
        self._options.max_mem = EXPRESSION_MEMORY_BYTES_MAX

    def __missing__(self, text: str) -> _Expression:
        try:
            expression: _Expression = self._re2.compile(text, self._options)
        except (self._re2.error, UnicodeEncodeError) as error:
            raise AuthError(f"bad answer: {_reason(error)}, in the expression {text!r}") from None
        self[text] = expression
        return expression


def _reason(error: Exception) -> str:
    """Returns RE2's reason, which it gives as bytes."""
    raw = error.args[0] if error.args else b""
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(error)
