"""Columns of bodies become MPUB bodies, in both forms of the kernel."""

import random
import struct
from array import array
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unit import kernel_forms

bodies_st = st.lists(st.binary(max_size=40), max_size=30)
UNLIMITED = 1 << 40


@pytest.fixture(params=kernel_forms.FORMS)
def mpub(request: pytest.FixtureRequest) -> ModuleType:
    return kernel_forms.load("mpub", request.param)


def column(bodies: list[bytes]) -> tuple[bytes, memoryview]:
    """Makes the buffers of an Arrow column, with bytes of other rows before the first."""
    offsets = array("i", [3])
    for body in bodies:
        offsets.append(offsets[-1] + len(body))
    return b"xyz" + b"".join(bodies), memoryview(offsets)


def mpub_body(bodies: list[bytes]) -> bytes:
    return struct.pack(">I", len(bodies)) + b"".join(struct.pack(">I", len(body)) + body for body in bodies)


def hashes(mpub: ModuleType, bodies: list[bytes]) -> tuple[list[int], int]:
    out = memoryview(array("Q", bytes(8 * len(bodies))))
    total = mpub.hash_rows(*column(bodies), 0, len(bodies), out)
    return out.tolist(), total


@given(bodies=bodies_st, first=st.integers(0, 30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_packs_rows_as_mpub_wants_them(mpub: ModuleType, bodies: list[bytes], first: int) -> None:
    first = min(first, len(bodies))
    packed, after = mpub.pack(*column(bodies), first, len(bodies), UNLIMITED, UNLIMITED)
    assert packed == mpub_body(bodies[first:])
    assert after == len(bodies)


@given(bodies=st.lists(st.binary(min_size=1, max_size=40), max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_packs_bodies_as_mpub_wants_them(mpub: ModuleType, bodies: list[bytes]) -> None:
    assert mpub.pack_bodies(bodies) == mpub_body(bodies)


def test_an_empty_body_is_refused(mpub: ModuleType) -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        mpub.pack_bodies([b"a", b""])


@given(bodies=bodies_st.filter(bool), bytes_max=st.integers(1, 200), count_max=st.integers(1, 10))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_row_is_packed_once_within_the_limits(
    mpub: ModuleType, bodies: list[bytes], bytes_max: int, count_max: int
) -> None:
    data, offsets = column(bodies)
    row = 0
    while row < len(bodies):
        packed, after = mpub.pack(data, offsets, row, len(bodies), bytes_max, count_max)
        assert packed == mpub_body(bodies[row:after])
        assert 1 <= after - row <= count_max
        assert len(packed) <= bytes_max or after - row == 1
        could_take_more = after < len(bodies) and after - row < count_max
        assert not could_take_more or len(packed) + 4 + len(bodies[after]) > bytes_max
        row = after


def test_rows_that_are_not_there_are_refused(mpub: ModuleType) -> None:
    data, offsets = column([b"a", b"b"])
    for first, last in ((-1, 1), (0, 3), (2, 1)):
        with pytest.raises(ValueError, match="not in a column of 2 rows"):
            mpub.pack(data, offsets, first, last, UNLIMITED, UNLIMITED)
    with pytest.raises(ValueError, match="beyond 3 bytes"):
        mpub.pack(b"xyz", offsets, 0, 2, UNLIMITED, UNLIMITED)
    with pytest.raises(ValueError, match="row 1 ends before it begins"):
        mpub.pack(data, memoryview(array("i", [0, 3, 1])), 0, 2, UNLIMITED, UNLIMITED)


@given(bodies=bodies_st)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_hashes_go_with_the_rows_and_their_sum_is_the_same_in_any_order(mpub: ModuleType, bodies: list[bytes]) -> None:
    found, total = hashes(mpub, bodies)
    shuffled = random.Random(1).sample(range(len(bodies)), len(bodies))
    again, same_total = hashes(mpub, [bodies[index] for index in shuffled])
    assert again == [found[index] for index in shuffled]
    assert same_total == total == sum(found) % (1 << 64)


def test_rows_that_differ_a_little_have_other_hashes(mpub: ModuleType) -> None:
    zeros = [bytes(size) for size in range(40)]
    flipped = [bytes(place) + bytes([1 << bit]) + bytes(19 - place) for place in range(20) for bit in range(8)]
    found, _ = hashes(mpub, zeros + flipped)
    assert len(set(found)) == len(found)
    assert len({value >> 48 for value in found}) > 150, "the high bits hardly differ"


def test_both_forms_give_the_same_hashes() -> None:
    bodies = [random.Random(size).randbytes(size) for size in range(70)]
    forms = [kernel_forms.load("mpub", form) for form in kernel_forms.FORMS]
    assert hashes(forms[0], bodies) == hashes(forms[1], bodies)


def test_hashes_need_room(mpub: ModuleType) -> None:
    with pytest.raises(ValueError, match="2 hashes do not fit into 1"):
        mpub.hash_rows(*column([b"a", b"b"]), 0, 2, memoryview(array("Q", [0])))


lines_of_text = st.lists(st.sampled_from([b"", b"", b"a", b"bc", b"\r", b"x" * 50]), max_size=40).map(b"\n".join)


@given(text=lines_of_text)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_are_counted_and_measured(mpub: ModuleType, text: bytes) -> None:
    lines = [line for line in text.split(b"\n") if line]
    assert mpub.measure_lines(text, 50) == len(lines)
    assert mpub.measure_lines(text, 49) == (-1 if any(len(line) > 49 for line in lines) else len(lines))


@given(text=lines_of_text, together=st.integers(min_value=1, max_value=10))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_become_sized_messages_a_few_at_a_time(mpub: ModuleType, text: bytes, together: int) -> None:
    pos, pieces = 0, []
    while pos < len(text):
        sized, count, after = mpub.size_lines(text, pos, together)
        assert pos < after <= len(text)
        assert count <= together
        pieces.append(bytes(sized))
        pos = after
    wanted = [line for line in text.split(b"\n") if line]
    assert b"".join(pieces) == b"".join(struct.pack(">i", len(line)) + line for line in wanted)
