"""Checks which messages exist, beside a plain set, on both forms of the kernel."""

from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from unit import kernel_forms

both_forms = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

Steps = list[tuple[str, int, int]]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 5), st.integers(1, 20)),
        st.tuples(st.just("remove_below"), st.integers(0, 150), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 150), st.integers(0, 40)),
    ),
    max_size=15,
)


@pytest.fixture(params=kernel_forms.FORMS)
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    return kernel_forms.load("extents", request.param)


def build(kernel: ModuleType, operations: Steps) -> tuple[Any, list[int]]:
    """Returns the extents after some operations, and the existing messages in order."""
    extents, existing, end = kernel.Extents(), set[int](), 1
    for kind, first, second in operations:
        if kind == "add":
            extents.add(end + first, second)
            existing.update(range(end + first, end + first + second))
            end += first + second
        elif kind == "remove_below":
            first = min(first, max(existing, default=0))  # the last segment always stays
            extents.remove_below(first)
            existing = {seq for seq in existing if seq >= first}
        else:
            lost = {seq for seq in existing if first <= seq < first + second}
            assert extents.remove(first, first + second) == len(lost)
            existing -= lost
    return extents, sorted(existing)


@both_forms
@given(steps)
def test_counts(kernel: ModuleType, operations: Steps) -> None:
    extents, existing = build(kernel, operations)
    assert extents.count == len(existing)
    found = [seq for first, count in extents.ranges() for seq in range(first, first + count)]
    assert found == existing


@both_forms
@given(steps, st.integers(0, 200), st.integers(0, 200))
def test_between_counts_what_exists(kernel: ModuleType, operations: Steps, low: int, high: int) -> None:
    extents, existing = build(kernel, operations)
    assert extents.between(low, high) == sum(low <= seq < high for seq in existing)


@both_forms
@given(steps, st.integers(0, 200))
def test_at_or_after_finds_the_next_one(kernel: ModuleType, operations: Steps, seq: int) -> None:
    extents, existing = build(kernel, operations)
    following = [found for found in existing if found >= seq]
    if following:
        assert extents.at_or_after(seq) == following[0]
    else:
        assert extents.at_or_after(seq) >= max([seq, *existing])


@both_forms
@given(steps)
def test_ordinals_and_sequence_numbers_are_inverse(kernel: ModuleType, operations: Steps) -> None:
    extents, existing = build(kernel, operations)
    ordinals = [extents.ordinal(seq) for seq in existing]
    assert ordinals == list(range(ordinals[0], ordinals[0] + len(existing))) if existing else not ordinals
    assert [extents.nth(ordinal) for ordinal in ordinals] == existing


@both_forms
@given(steps)
def test_removing_the_oldest_keeps_the_ordinals_of_the_rest(kernel: ModuleType, operations: Steps) -> None:
    extents, existing = build(kernel, operations)
    if existing:
        middle = existing[len(existing) // 2]
        before = extents.ordinal(middle)
        extents.remove_below(middle)
        assert extents.ordinal(middle) == before


def test_a_log_that_never_had_a_message(
    kernel: ModuleType,
) -> None:
    extents = kernel.Extents()
    assert (extents.head, extents.first, extents.count, extents.ranges()) == (0, 0, 0, [])
    assert (extents.between(0, 1 << 53), extents.at_or_after(0)) == (0, 0)


def test_adjacent_ranges_are_one(
    kernel: ModuleType,
) -> None:
    extents = kernel.Extents()
    extents.add(10, 5)
    extents.add(15, 5)
    assert extents.ranges() == [(10, 10)]
    assert extents.head == 20
