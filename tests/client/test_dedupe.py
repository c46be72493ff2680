"""Checks the memory of keys: of the copies of a message one is handled, and a failed one is not held against the
others.
"""

import time
from datetime import timedelta
from typing import Any

import pytest

from nsquark.client.dedupe import Dedupe
from nsquark.client.errors import ConfigError

A, B, C = b"a", b"b", b"c"


def test_a_key_is_seen_when_its_message_is_finished() -> None:
    memory = Dedupe()
    assert memory.claim(A) == "new"
    assert memory.claim(A) == "busy", "a copy that comes meanwhile must be asked for again"
    memory.done(A)
    assert memory.claim(A) == "seen"
    assert memory.claim(B) == "new"


def test_a_copy_of_a_failed_message_is_new() -> None:
    memory = Dedupe()
    memory.claim(A)
    memory.release(A)
    assert memory.claim(A) == "new"


def test_the_oldest_are_forgotten_first() -> None:
    memory = Dedupe(keys_max=2)
    for key in (A, B, C):
        assert memory.claim(key) == "new"
        memory.done(key)
    assert [memory.claim(key) for key in (C, B)] == ["seen", "seen"]
    assert memory.claim(A) == "new"


def test_claims_are_bounded_too() -> None:
    memory = Dedupe(keys_max=10)
    for number in range(1000):
        memory.claim(b"%d" % number)
    assert len(memory) == 10


def test_keys_are_forgotten_with_age() -> None:
    memory = Dedupe(age=timedelta(milliseconds=50))
    memory.claim(A)
    memory.done(A)
    deadline = time.monotonic() + 5
    while memory.claim(A) == "seen":
        assert time.monotonic() < deadline
    assert len(memory) == 1


def test_a_claim_that_nobody_settles_ends() -> None:
    memory = Dedupe(claim_age="50ms")
    assert memory.claim(A) == "new"
    deadline = time.monotonic() + 5
    while memory.claim(A) == "busy":
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keys_max": 0}, "invalid keys_max ! 0 < 1"),
        ({"keys_max": "9"}, "keys_max.*expected a whole number"),
        ({"age": "0"}, "invalid age ! 0s <= 0s"),
        ({"age": 60}, r"failed to coerce option age \(60\) - a plain number has no unit"),
        ({"claim_age": "-1s"}, "invalid claim_age ! -1s <= 0s"),
    ],
)
def test_mistakes_fail_at_once(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Dedupe(**options)
