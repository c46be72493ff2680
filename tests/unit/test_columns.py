"""Records of a log become Arrow columns, in both forms of the kernel."""

from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from nsquark.wire.frames import message_frame

FIRST_SEQ = (1 << 52) + 4095
NOW_NS = 1_700_000_000_123_456_789
ROOM_BYTES = 1 << 16

both_forms = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
bodies = st.lists(st.binary(max_size=200), max_size=40)


def payload(messages: list[bytes], time_ns: int = NOW_NS) -> bytes:
    return b"".join(message_frame(time_ns + i, 1, b"%016x" % (FIRST_SEQ + i), body) for i, body in enumerate(messages))


def rows(
    taken: tuple[int, bytearray, bytearray, bytearray, bytearray, bytearray],
) -> list[tuple[int, int, bytes, bytes]]:
    """Returns (sequence number, time in us, id, body) of each row."""
    count, seqs, times, ids, offsets, data = taken
    ends = memoryview(offsets).cast("i")
    assert ends[0] == 0
    return [
        (
            memoryview(seqs).cast("q")[row],
            memoryview(times).cast("q")[row],
            bytes(ids[16 * row : 16 * row + 16]),
            bytes(data[ends[row] : ends[row + 1]]),
        )
        for row in range(count)
    ]


def everything(builder: Any, data: bytes) -> list[list[tuple[int, int, bytes, bytes]]]:
    """Returns all batches that the payload fills."""
    batches, pos, seq = [], 0, FIRST_SEQ
    while True:
        pos, seq = builder.append(data, pos, len(data), seq)
        if pos == len(data):
            break
        batches.append(rows(builder.hand_over()))
    if builder.rows:
        batches.append(rows(builder.hand_over()))
    return batches


@both_forms
@given(bodies, st.integers(0, 40), st.integers(0, 40), st.integers(1, 10))
def test_every_message_of_the_range_is_a_row_once(
    columns: ModuleType, messages: list[bytes], low: int, high: int, rows_max: int
) -> None:
    builder = columns.ColumnBuilder(FIRST_SEQ + low, FIRST_SEQ + high, rows_max, 256)
    batches = everything(builder, payload(messages))
    assert [row for batch in batches for row in batch] == [
        (FIRST_SEQ + i, (NOW_NS + i) // 1000, b"%016x" % (FIRST_SEQ + i), body)
        for i, body in enumerate(messages)
        if low <= i < high
    ]
    assert all(0 < len(batch) <= rows_max for batch in batches)
    assert all(sum(len(row[3]) for row in batch) <= 256 for batch in batches)


def test_a_body_larger_than_a_batch_gets_one_of_its_own(columns: ModuleType) -> None:
    builder = columns.ColumnBuilder(0, 1 << 62, 10, 8)
    batches = everything(builder, payload([b"small", b"x" * 1000, b"", b"end"]))
    assert [[row[3] for row in batch] for batch in batches] == [[b"small"], [b"x" * 1000], [b"", b"end"]]


def test_what_was_taken_stays_as_it_is(columns: ModuleType) -> None:
    builder = columns.ColumnBuilder(0, 1 << 62, 10, ROOM_BYTES)
    data = payload([b"first"])
    builder.append(data, 0, len(data), FIRST_SEQ)
    taken = builder.hand_over()
    builder.append(payload([b"other"]), 0, len(data), FIRST_SEQ + 9)
    assert [row[3] for row in rows(taken)] == [b"first"]


def test_bodies_that_nobody_asked_for_are_not_copied(columns: ModuleType) -> None:
    builder = columns.ColumnBuilder(0, 1 << 62, 10, 4, False)
    [batch] = everything(builder, payload([b"some bytes", b"more bytes"]))
    assert [(row[0], row[3]) for row in batch] == [(FIRST_SEQ, b""), (FIRST_SEQ + 1, b"")]


@both_forms
@given(bodies)
def test_records_without_bodies_are_what_empty_messages_would_be(columns: ModuleType, messages: list[bytes]) -> None:
    data = b"before" + payload(messages) + b"behind"
    heads = columns.without_bodies(data, 6, len(data) - 6)
    assert heads == payload([b""] * len(messages))


def test_what_are_no_records_has_no_heads(columns: ModuleType) -> None:
    data = payload([b"some bytes"])
    for wrong in (data[:-1], data + b"x", b"\xff\xff\xff\xff" + data[4:], b"\x00\x00\x00\x00" + data[4:]):
        with pytest.raises(columns.RecordError):
            columns.without_bodies(wrong, 0, len(wrong))


@pytest.mark.parametrize("time_ns", [-1, -1000, -1001, 0, 999, 1000, 2**63 - 100, -(2**63) + 2000])
def test_times_are_rounded_down(columns: ModuleType, time_ns: int) -> None:
    builder = columns.ColumnBuilder(0, 1 << 62, 10, ROOM_BYTES)
    [[row]] = everything(builder, payload([b"x"], time_ns))
    assert row[1] == time_ns // 1000


@pytest.mark.parametrize(
    "broken",
    [
        payload([b"body"])[:-1],
        payload([b"body"]) + b"\0" * 5,
        b"\x00\x00\x00\x05" + payload([b"body"])[4:],
        b"\xff\xff\xff\xff" + payload([b"body"])[4:],
        payload([b"body"]).replace(b"\0\0\0\x02", b"\0\0\0\x01", 1),
    ],
    ids=["cut", "rest", "short", "huge", "type"],
)
def test_a_payload_that_is_not_records_is_refused(columns: ModuleType, broken: bytes) -> None:
    builder = columns.ColumnBuilder(0, 1 << 62, 10, ROOM_BYTES)
    with pytest.raises(columns.RecordError):
        builder.append(broken, 0, len(broken), FIRST_SEQ)


def test_positions_outside_of_the_buffer_are_refused(columns: ModuleType) -> None:
    builder = columns.ColumnBuilder(0, 1 << 62, 10, ROOM_BYTES)
    for start, end in ((-1, 0), (1, 0), (0, 11)):
        with pytest.raises(ValueError, match="does not lie"):
            builder.append(bytes(10), start, end, 1)
