"""What requests to the Log API may say, and how they are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsquark.broker.topic import Topic
from nsquark.web.messages import NSQ_HEADER, Request
from nsquark.wire.names import is_valid_name

if TYPE_CHECKING:
    from nsquark.broker.nsqd import Nsqd

INT64_MAX = 2**63 - 1
RETRY_AFTER = ("Retry-After", "1")
CHALLENGE = ("WWW-Authenticate", "Bearer")


class Refusal(Exception):
    """The request is answered with an error: a code for programs, and fields or a text that say what to do."""

    def __init__(self, status: int, code: str, **fields: object) -> None:
        super().__init__(code)
        self.status = status
        self.code = code
        self.fields = fields


class Arguments:
    """The query of one request. Each getter refuses the request if its argument is missing or no good."""

    def __init__(self, nsqd: Nsqd, request: Request) -> None:
        if not request.query_ok:
            raise Refusal(400, "INVALID_REQUEST")
        self._nsqd = nsqd
        self._query = request.query

    def __contains__(self, name: str) -> bool:
        return name in self._query

    def text(self, name: str, chars_max: int) -> str:
        value = self._query.get(name)
        if value is None:
            raise Refusal(400, f"MISSING_ARG_{name.upper()}")
        if not 1 <= len(value) <= chars_max:
            raise invalid(name, f"1 to {chars_max} characters")
        return value

    def number(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self._query.get(name)
        if value is None:
            if default is None:
                raise Refusal(400, f"MISSING_ARG_{name.upper()}")
            return default
        number = decimal(value)
        if number is None or not low <= number <= high:
            raise invalid(name, f"a number from {low} to {high}")
        return number

    def seconds(self, name: str, most: float) -> float:
        """0 if it is not given; no more than `most`."""
        try:
            seconds = float(self._query.get(name, "0"))
        except ValueError:
            seconds = -1.0
        if not seconds >= 0:  # not a number either
            raise invalid(name, "seconds, 0 or more")
        return min(seconds, most)

    def name(self, name: str) -> str:
        """A topic's or a channel's name."""
        value = self._query.get(name)
        if value is None:
            raise Refusal(400, f"MISSING_ARG_{name.upper()}")
        if not is_valid_name(value):
            raise Refusal(400, f"INVALID_ARG_{name.upper()}")
        return value

    def topic(self) -> Topic:
        """One that exists."""
        topic = self._nsqd.topics.get(self.name("topic"))
        if topic is None:
            raise Refusal(404, "TOPIC_NOT_FOUND")
        return topic

    def stored_topic(self) -> Topic:
        topic = self.topic()
        require_stored(topic)
        return topic


def require_stored(topic: Topic) -> None:
    if topic.directory is None:
        raise Refusal(400, "EPHEMERAL_TOPIC", reason="an ephemeral topic has no file; use a topic that is kept")


def invalid(name: str, wanted: str) -> Refusal:
    return Refusal(400, f"INVALID_ARG_{name.upper()}", reason=f"{name} must be {wanted}")


def decimal(word: str) -> int | None:
    """A number without sign, of at most 63 bits."""
    if not (word.isascii() and word.isdigit() and len(word) <= len(str(INT64_MAX))):
        return None
    number = int(word)
    return number if number <= INT64_MAX else None


def extra_headers(nsqd_id: str, status: int) -> tuple[tuple[str, str], ...]:
    """Every answer says which nsqd gave it; one that asks to try again says when."""
    identity = (NSQ_HEADER, ("X-Nsquark-Id", nsqd_id))
    if status == 401:
        return (*identity, CHALLENGE)
    return (*identity, RETRY_AFTER) if status == 503 else identity
