"""Checks the status lines, as NSQ's tools write them."""

from nsquark.tools.timings import Timings, percentile


def test_a_line_comes_with_the_first_request_behind_each_n() -> None:
    lines: list[str] = []
    timings = Timings(100, "[aggregate]:", lines.append)
    for number in range(1, 101):
        timings.took(number / 1000)
    assert lines == []
    timings.took(0.001)
    # The place of the 95th of a hundred is ceil(95.5) = 96, the fourth largest.
    assert lines == ["[aggregate]: finished 100 - 99th: 100.00ms - 95th: 97.00ms - avg: 50.50ms"]
    for _ in range(99):
        timings.took(0.001)
    assert len(lines) == 1
    timings.took(0.001)
    assert lines[1] == "[aggregate]: finished 100 - 99th: 1.00ms - 95th: 1.00ms - avg: 1.00ms"


def test_requests_that_took_the_same_time_count_one_by_one() -> None:
    one_by_one: list[str] = []
    together: list[str] = []
    first, second = Timings(100, "x", one_by_one.append), Timings(100, "x", together.append)
    for number, count in enumerate((1, 250, 99, 1, 100, 3), 1):
        for _ in range(count):
            first.took(number / 1000)
        second.took(number / 1000, count)
    assert together == one_by_one
    assert len(together) == 4


def test_zero_is_never() -> None:
    lines: list[str] = []
    Timings(0, "", lines.append).took(1.0, 1000)
    assert lines == []


def test_few_values_are_warned_of() -> None:
    lines: list[str] = []
    Timings(10, "", lines.append)
    assert lines and lines[0].startswith("Warning: ")


def test_percentiles_of_few() -> None:
    assert percentile(99, []) == 0.0
    assert percentile(99, [1.0]) == 1.0
    assert percentile(50, [1.0, 2.0, 3.0, 4.0]) == 4.0
