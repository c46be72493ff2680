"""Checks the message browser's filters: what they match, what they refuse, and that none of them takes long."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hypothesis_profiles
from nsquark.admin.filters import FILTER_CHARS_MAX, VALUES_MAX, Body, FilterError, parse_filter

hypothesis_profiles.load()


def matches(text: str, body: bytes) -> bool:
    return parse_filter(text).matches(Body(body))


ORDER = (
    b'{"user": {"id": 7, "name": "Ann"}, "tags": ["old", "new"], '
    b'"lines": [{"price": 2}, {"price": 9.5}], "test": false}'
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Ann",
        '"id": 7',
        ".user.id == 7",
        ".user.id==7",
        ".user.id == 7.0",
        ".user.id != 8",
        '.user.id != "7"',
        ".user.id > 6 && .user.id < 8",
        ".user.id >= 7 && .user.id <= 7",
        '.user.name == "Ann"',
        '.user.name contains "nn"',
        '.user["name"] == "Ann"',
        '.["user"].id == 7',
        '.user.name > "Amy"',
        '.tags[0] == "old"',
        '.tags[-1] == "new"',
        '.tags[] == "new"',
        ".lines[].price > 9",
        ".lines[1].price == 9.5",
        "!.test",
        "!(.test || .missing)",
        ".missing == null",
        ".user.missing.deeper == null",
        ".test == false",
        '"Ann" && .user.id == 7',
        ".user.id == 8 || .user.id == 7 && .tags",
        ".",
    ],
)
def test_a_filter_that_matches(text: str) -> None:
    assert matches(text, ORDER)


@pytest.mark.parametrize(
    "text",
    [
        "Bob",
        ".user.id == 8",
        '.user.id == "7"',
        ".user.id == true",
        ".test == 0",
        ".user > 1",
        '.user.id < "8"',
        ".tags[5]",
        '.tags == "new"',
        ".missing",
        ".test",
        "!.user",
        '.user.id contains "7"',
        "(.user.id == 8 || .user.id == 7) && .test",
    ],
)
def test_a_filter_that_does_not_match(text: str) -> None:
    assert not matches(text, ORDER)


@pytest.mark.parametrize("body", [b"", b"no json", b"\xff\xfe", b'{"a": 1', b"[" * 5000, b'{"a": "\xff"}'])
def test_a_body_that_is_no_json_has_no_fields(body: bytes) -> None:
    assert not matches(".a != 1", body)
    assert not matches(".a == null", body)


def test_bytes_that_are_no_text_are_searched_all_the_same() -> None:
    assert matches("needle", b"\xff\x00needle\xfe")
    assert matches("größe", "\x00größe".encode())


@pytest.mark.parametrize(
    ("text", "reason", "at"),
    [
        (".a ==", "expected a number", 5),
        (".a == word", "expected a number", 6),
        ("((.a", "expected )", 4),
        (".a..b", "expected a name", 3),
        ('"abc" && .a ==', "expected a number", 14),
        (".a == 1 .b", "is not expected here", 8),
        (".a contains 3", "contains needs", 3),
        (".a[1.5]", 'expected a number, a "name"', 3),
        ("..a", "is not expected here", 1),
        ("!" * 17 + ".a", "levels", 16),
        ("(" * 200, "levels", 16),
        (" || ".join([".a"] * 33), "terms", 192),
        (".a" * 33, "steps", 66),
        ("x" * (FILTER_CHARS_MAX + 1), "characters", FILTER_CHARS_MAX),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, reason: str, at: int) -> None:
    with pytest.raises(FilterError) as caught:
        parse_filter(text)
    assert reason in str(caught.value)
    assert caught.value.at == at


def test_lists_of_lists_are_looked_at_up_to_a_limit() -> None:
    inner = b"[" + b"0," * 999 + b"0]"
    body = b"[" + b",".join([inner] * 100) + b",[1]]"
    assert VALUES_MAX < 100 * 1000
    assert not matches(".[][] == 1", body)
    assert matches(".[100][] == 1", body)


@settings(max_examples=hypothesis_profiles.examples(3))
@given(st.text(alphabet='.[]"()!&|<>= aé1-\\', max_size=60), st.binary(max_size=60))
def test_whatever_is_written_is_a_filter_or_a_named_mistake(text: str, body: bytes) -> None:
    with contextlib.suppress(FilterError):
        assert matches(text, body) in (True, False)
