"""Arguments of requests are read, and bad ones refused with NSQ's codes."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from nsquark.web.arguments import Arguments, Refusal, decimal, int64
from nsquark.web.messages import Request
from nsquark.web.router import Router


def arguments(query: str) -> Arguments:
    target = Router().resolve(b"GET", f"/x?{query}".encode())
    return Arguments(Request(target, target.query, target.query_ok, b"", {}, "", False))


def refused(read: Callable[[Arguments], Any], query: str) -> tuple[int, dict[str, Any]]:
    with pytest.raises(Refusal) as caught:
        read(arguments(query))
    response = caught.value.response()
    return response.status, json.loads(response.body)


@pytest.mark.parametrize(
    ("read", "query", "code"),
    [
        (lambda given: given, "topic=%zz", "INVALID_REQUEST"),
        (lambda given: given.get("topic"), "channel=c", "MISSING_ARG_TOPIC"),
        (lambda given: given.name("topic"), "topic=", "INVALID_ARG_TOPIC"),
        (lambda given: given.name("topic", "INVALID_TOPIC"), "topic=a/b", "INVALID_TOPIC"),
        (lambda given: given.text("owner", 3), "owner=four", "INVALID_ARG_OWNER"),
        (lambda given: given.number("seq", 0, 9), "seq=10", "INVALID_ARG_SEQ"),
        (lambda given: given.number("seq", 0, 9), "seq=-1", "INVALID_ARG_SEQ"),
        (lambda given: given.seconds("wait", 60.0), "wait=nan", "INVALID_ARG_WAIT"),
    ],
)
def test_a_bad_argument_is_refused_by_name(read: Callable[[Arguments], Any], query: str, code: str) -> None:
    status, fields = refused(read, query)
    assert (status, fields["message"]) == (400, code)


def test_good_arguments_are_read() -> None:
    given = arguments("topic=t&empty=&seq=7&wait=90")
    assert "topic" in given
    assert (given.name("topic"), given.get("empty")) == ("t", "")
    assert (given.number("seq", 0, 9), given.number("other", 0, 9, 5)) == (7, 5)
    assert (given.seconds("wait", 60.0), given.seconds("other", 60.0)) == (60.0, 0.0)


def test_who_is_not_known_is_asked_for_a_secret() -> None:
    response = Refusal(401, "AUTH_REQUIRED", reason="send a secret").response()
    assert ("WWW-Authenticate", "Bearer") in response.headers
    assert json.loads(response.body) == {"message": "AUTH_REQUIRED", "reason": "send a secret"}


def test_numbers_are_those_of_64_bits() -> None:
    assert decimal(str(2**63 - 1)) == 2**63 - 1
    assert [decimal(word) for word in ("", "-1", "+1", "1_0", "٣", str(2**63))] == [None] * 6
    assert [int64(word) for word in ("-9", "+9", "0009", str(-(2**63)))] == [-9, 9, 9, -(2**63)]
    assert [int64(word) for word in ("", "-", "1e3", str(2**63))] == [None] * 4
