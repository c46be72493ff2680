"""Durations are read and written in Go's syntax, as every NSQ command line has them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsquark.base.durations import DURATION_NS_MAX, Duration


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("0", 0),
        ("0s", 0),
        ("250ms", 250_000_000),
        ("1m30s", 90_000_000_000),
        ("1.5h", 5_400_000_000_000),
        (".5s", 500_000_000),
        ("1.s", 1_000_000_000),
        ("-1.5s", -1_500_000_000),
        ("+5s", 5_000_000_000),
        ("10us", 10_000),
        ("10\u00b5s", 10_000),
        ("10\u03bcs", 10_000),
        ("1h1m1s1ms1us1ns", 3_661_001_001_001),
        ("0.0000000001s", 0),
    ],
)
def test_reads_go_syntax(text: str, ns: int) -> None:
    assert Duration.parse(text) == ns


@pytest.mark.parametrize(
    "text",
    ["", "-", "5", "1m30", "s", "1d", "5 s", " 5s", "5s ", ".s", "1..5s", "1e3s", "\u0665s", "9999999h"],
)
def test_refuses_the_rest_and_says_what_it_saw(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        Duration.parse(text)


def test_a_very_long_text_is_refused_without_being_read() -> None:
    with pytest.raises(ValueError, match="too long"):
        Duration.parse("1" * 1_000_000 + "s")


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0s"),
        (1, "1ns"),
        (1_100, "1.1\u00b5s"),
        (250_000_000, "250ms"),
        (1_000_000_000, "1s"),
        (1_500_000_000, "1.5s"),
        (60_000_000_000, "1m0s"),
        (90_000_000_000, "1m30s"),
        (129_140_493_974, "2m9.140493974s"),
        (3_600_000_000_000, "1h0m0s"),
        (-1_500_000, "-1.5ms"),
        (DURATION_NS_MAX, "2562047h47m16.854775807s"),
    ],
)
def test_is_written_as_go_writes_it(ns: int, text: str) -> None:
    assert str(Duration(ns)) == text
    assert f"{Duration(ns)}" == text


@given(st.integers(min_value=-DURATION_NS_MAX, max_value=DURATION_NS_MAX))
def test_reading_what_was_written_gives_the_same(ns: int) -> None:
    assert Duration.parse(str(Duration(ns))) == ns


def test_other_units() -> None:
    assert Duration.parse("1m").ms == 60_000
    assert Duration.parse("1999us").ms == 1
    assert Duration.parse("-1999us").ms == -1
    assert Duration.parse("250ms").seconds == 0.25
