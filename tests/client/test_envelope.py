"""The envelope of copies: what goes in comes out, and nothing else is taken for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsquark.client.envelope import ENVELOPE_BYTES, KEY_BYTES, MAGIC, new_key, unwrap, wrap


@given(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), st.binary())
def test_what_was_wrapped_comes_out(key: bytes, body: bytes) -> None:
    for form in (body, bytearray(body), memoryview(body)):
        assert unwrap(wrap(key, form)) == (key, body)


@given(st.binary())
def test_other_bodies_stay_as_they_are(body: bytes) -> None:
    if not body.startswith(MAGIC):
        assert unwrap(body) == (None, body)


def test_a_body_too_short_for_an_envelope_is_none() -> None:
    body = MAGIC + b"k" * (KEY_BYTES - 1)
    assert len(body) == ENVELOPE_BYTES - 1
    assert unwrap(body) == (None, body)


def test_an_envelope_may_be_in_another() -> None:
    outer, inner = new_key(), new_key()
    assert unwrap(wrap(outer, wrap(inner, b"body"))) == (outer, wrap(inner, b"body"))


def test_keys_differ_and_have_one_size() -> None:
    keys = {new_key() for _ in range(1000)}
    assert len(keys) == 1000
    assert {len(key) for key in keys} == {KEY_BYTES}
    with pytest.raises(ValueError, match="16 bytes, not 3"):
        wrap(b"key", b"body")
