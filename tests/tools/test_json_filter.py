"""Checks which JSON messages nsq_to_nsq sends on, and what it makes of them."""

import json

import pytest

from nsquark.tools.json_filter import FieldMissing, JsonFilter, NotJson, write_object


def test_without_flags_nothing_is_looked_at() -> None:
    assert not JsonFilter("", "", []).is_used
    assert not JsonFilter("", "5", []).is_used, "a value without a field asks for nothing"


@pytest.mark.parametrize(
    "body", [b"", b"no", b"[1]", b'"text"', b"7", b'{"a":1}x', b'{"a":NaN}', b'{"a":1e999}', b"\x00"]
)
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(NotJson):
        JsonFilter("a", "", []).apply(body)


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(NotJson):
        JsonFilter("a", "", []).apply(b'{"a":' * 100_000)


def test_a_required_field() -> None:
    wanted = JsonFilter("a", "", [])
    assert wanted.apply(b' {"a" : null} ') == b' {"a" : null} ', "the body goes on as it is"
    assert wanted.apply(b'{"b":1}') is None
    assert wanted.apply(b"null") is None


@pytest.mark.parametrize(
    ("value", "body", "passes"),
    [
        ("x", b'{"a":"x"}', True),
        ("x", b'{"a":"X"}', False),
        ("5", b'{"a":5}', True),
        ("5", b'{"a":5.0}', True),
        ("5.0", b'{"a":5}', True),
        ("5", b'{"a":"5"}', True),
        ("5.0", b'{"a":"5"}', False),
        ("5", b'{"a":6}', False),
        ("x", b'{"a":5}', False),
        ("1", b'{"a":true}', False),
        ("true", b'{"a":true}', False),
        ("x", b'{"a":["x"]}', False),
        ("x", b'{"a":null}', False),
    ],
)
def test_a_required_value(value: str, body: bytes, passes: bool) -> None:
    assert JsonFilter("a", value, []).apply(body) == (body if passes else None)


def test_a_required_value_of_a_field_that_is_not_there() -> None:
    with pytest.raises(FieldMissing):
        JsonFilter("a", "x", []).apply(b'{"b":1}')


def test_the_whitelist_makes_a_new_object() -> None:
    only = JsonFilter("", "", ["z", "a", "missing", "a"])
    assert only.apply(b'{"b":1, "z":{"y":2.50,"x":[1, 2.0]}, "a":"<&>"}') == (
        b'{"a":"\\u003c\\u0026\\u003e","z":{"x":[1,2],"y":2.5}}'
    )
    assert only.apply(b'{"b":1}') == b"{}"


def test_required_and_whitelist_together() -> None:
    both = JsonFilter("kind", "order", ["id"])
    assert both.apply(b'{"kind":"order","id":1.0}') == b'{"id":1}'
    assert both.apply(b'{"kind":"other","id":1}') is None


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (1e20, "100000000000000000000"),
        (1e21, "1e+21"),
        (1e-7, "1e-7"),
        (0.000001, "0.000001"),
        (1.5e-9, "1.5e-9"),
        (-1.25e-100, "-1.25e-100"),
        (123456.789, "123456.789"),
        (12345678901234567890, "12345678901234567890"),
        (3.0, "3"),
    ],
)
def test_numbers_are_written_as_go_writes_them(value: float, written: str) -> None:
    assert write_object({"a": value}) == f'{{"a":{written}}}'.encode()


def test_texts_are_written_as_go_writes_them() -> None:
    text = '\b\f\n\r\t\x01\x7f<>&\u2028 é \ud800 / "\\'
    expected = '"\\u0008\\u000c\\n\\r\\t\\u0001\x7f\\u003c\\u003e\\u0026\\u2028 é \ufffd / \\"\\\\"'
    assert write_object({"a": text}) == f'{{"a":{expected}}}'.encode()
    assert json.loads(write_object({"a": "\U0001f600"})) == {"a": "\U0001f600"}
