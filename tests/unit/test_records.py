"""Records lie in memory, in the log and on the wire as is documented, in both forms of the kernel."""

import struct
from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from nsquark.wire.frames import message_frame

NODE_ID = 1023
FIRST_SEQ = (1 << 52) + 4095
NOW_NS = 1_700_000_000_123_456_789

bodies = st.lists(st.binary(min_size=1, max_size=200), max_size=30)
both_forms = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def frame_of(seq: int, body: bytes, timestamp_ns: int = NOW_NS) -> bytes:
    return message_frame(timestamp_ns, 1, b"%016x" % (NODE_ID << 53 | seq), body)


def sized(messages: list[bytes]) -> bytearray:
    return bytearray(b"".join(struct.pack(">i", len(body)) + body for body in messages))


def make_chunk(records: ModuleType, size: int = 1 << 16, count_max: int = 1000) -> Any:
    return records.Chunk(NODE_ID, FIRST_SEQ, size, count_max)


def filled(records: ModuleType, messages: list[bytes]) -> Any:
    chunk = make_chunk(records)
    for body in messages:
        assert chunk.append(bytearray(body), 0, len(body), NOW_NS)
    return chunk


def content(chunk: Any) -> bytes:
    return bytes(chunk.view[: chunk.used])


@both_forms
@given(bodies)
def test_records_are_the_frames_a_consumer_gets(records: ModuleType, messages: list[bytes]) -> None:
    chunk = filled(records, messages)
    frames = [frame_of(FIRST_SEQ + index, body) for index, body in enumerate(messages)]
    assert content(chunk) == b"".join(frames)
    assert chunk.count == len(messages)
    for index, frame in enumerate(frames):
        assert bytes(chunk.view[chunk.offset(index) : chunk.offset(index + 1)]) == frame
        assert chunk.timestamp(index) == NOW_NS


@both_forms
@given(bodies)
def test_sized_messages_give_the_same_records_as_single_ones(records: ModuleType, messages: list[bytes]) -> None:
    chunk = make_chunk(records)
    source = sized(messages)
    assert chunk.append_sized(source, 0, len(messages), NOW_NS) == len(messages)
    assert chunk.resume == len(source)
    assert content(chunk) == content(filled(records, messages))


def test_appends_take_a_slice_of_their_source(records: ModuleType) -> None:
    chunk = make_chunk(records)
    assert chunk.append(bytearray(b"...body..."), 3, 4, NOW_NS)
    assert content(chunk) == frame_of(FIRST_SEQ, b"body")


@pytest.mark.parametrize("node_id", [0, 1, 1023])
@pytest.mark.parametrize("seq", [0, 1, (1 << 53) - 2])
def test_ids_hold_the_node_and_the_whole_sequence_number(records: ModuleType, node_id: int, seq: int) -> None:
    chunk = records.Chunk(node_id, seq, 100, 1)
    assert chunk.append(bytearray(b"x"), 0, 1, 0)
    assert int(content(chunk)[18:34], 16) == node_id << 53 | seq


class TestRoom:
    def test_a_chunk_is_full_by_bytes(self, records: ModuleType) -> None:
        chunk = records.Chunk(NODE_ID, FIRST_SEQ, 2 * 34 + 10, 100)
        assert chunk.append(bytearray(5), 0, 5, NOW_NS)
        assert not chunk.append(bytearray(6), 0, 6, NOW_NS)
        assert chunk.append(bytearray(5), 0, 5, NOW_NS)
        assert chunk.used == 78
        assert not chunk.append(bytearray(1), 0, 0, NOW_NS)

    def test_a_chunk_is_full_by_count(self, records: ModuleType) -> None:
        chunk = records.Chunk(NODE_ID, FIRST_SEQ, 1000, 2)
        assert chunk.append_sized(sized([b"a", b"b", b"c"]), 0, 3, NOW_NS) == 2
        assert chunk.resume == 10
        assert not chunk.append(bytearray(b"c"), 0, 1, NOW_NS)
        assert chunk.count == 2

    def test_sized_messages_go_on_where_the_chunk_was_full(self, records: ModuleType) -> None:
        messages = [b"a" * 10, b"b" * 10, b"c" * 10]
        source = sized(messages)
        first = records.Chunk(NODE_ID, FIRST_SEQ, 2 * 44 + 43, 100)
        assert first.append_sized(source, 0, 3, NOW_NS) == 2
        second = records.Chunk(NODE_ID, FIRST_SEQ + 2, 100, 100)
        assert second.append_sized(source, first.resume, 1, NOW_NS) == 1
        assert content(first) + content(second) == content(filled(records, messages))

    def test_a_refused_message_changes_nothing(self, records: ModuleType) -> None:
        chunk = records.Chunk(NODE_ID, FIRST_SEQ, 40, 10)
        assert chunk.append(bytearray(b"abc"), 0, 3, NOW_NS)
        before = content(chunk)
        assert not chunk.append(bytearray(b"abcd"), 0, 4, NOW_NS)
        assert chunk.append_sized(sized([b"abcd"]), 0, 1, NOW_NS) == 0
        assert (content(chunk), chunk.count, chunk.resume) == (before, 1, 0)


class TestTruncate:
    @pytest.mark.parametrize("count", range(4))
    def test_what_is_forgotten_can_be_written_anew(self, records: ModuleType, count: int) -> None:
        messages = [b"a", b"bb", b"ccc"]
        chunk = filled(records, messages)
        chunk.truncate(count)
        assert content(chunk) == content(filled(records, messages[:count]))
        assert chunk.offset(count) == chunk.used
        assert chunk.append(bytearray(b"new"), 0, 3, NOW_NS)
        assert content(chunk) == content(filled(records, [*messages[:count], b"new"]))

    def test_more_than_there_is_changes_nothing(self, records: ModuleType) -> None:
        chunk = filled(records, [b"a"])
        chunk.truncate(5)
        assert (chunk.count, chunk.used) == (1, 35)


class TestOffset:
    @pytest.mark.parametrize("index", [-1, 2])
    def test_outside_is_an_error(self, records: ModuleType, index: int) -> None:
        with pytest.raises(IndexError):
            filled(records, [b"a"]).offset(index)

    def test_an_empty_chunk_ends_where_it_starts(self, records: ModuleType) -> None:
        assert make_chunk(records).offset(0) == 0


class TestLoad:
    @both_forms
    @given(bodies, bodies)
    def test_what_was_written_is_found(self, records: ModuleType, messages: list[bytes], more: list[bytes]) -> None:
        written = filled(records, messages + more)
        cut = written.offset(len(messages))
        source = bytearray(b"head" + content(written))
        chunk = make_chunk(records, written.used, len(messages) + len(more))
        assert chunk.load(source, 4, cut, len(messages))
        assert chunk.load(source, 4 + cut, written.used - cut, len(more))
        assert content(chunk) == content(written)
        for index in range(chunk.count + 1):
            assert chunk.offset(index) == written.offset(index)

    def test_a_full_chunk_takes_no_more(self, records: ModuleType) -> None:
        source = bytearray(content(filled(records, [b"a", b"b"])))
        assert not make_chunk(records, 69, 2).load(source, 0, 70, 2)
        assert not make_chunk(records, 70, 1).load(source, 0, 70, 2)

    @pytest.mark.parametrize("count", [1, 3])
    def test_another_number_of_records_is_refused(self, records: ModuleType, count: int) -> None:
        source = bytearray(content(filled(records, [b"a", b"b"])))
        chunk = filled(records, [b"before"])
        assert not chunk.load(source, 0, len(source), count)
        assert (chunk.count, chunk.used) == (1, 40)

    @pytest.mark.parametrize("size", [0, 1, 32, 1 << 20, 0xFFFFFFFF])
    def test_a_size_that_leads_elsewhere_is_refused(self, records: ModuleType, size: int) -> None:
        source = bytearray(content(filled(records, [b"a", b"b"])))
        source[0:4] = size.to_bytes(4, "big")
        chunk = filled(records, [b"before"])
        assert not chunk.load(source, 0, len(source), 2)
        assert content(chunk) == content(filled(records, [b"before"]))

    @pytest.mark.parametrize("cut", [1, 20, 35, 69])
    def test_a_cut_record_is_refused(self, records: ModuleType, cut: int) -> None:
        source = bytearray(content(filled(records, [b"a", b"b"])))
        assert not make_chunk(records).load(source, 0, cut, 2)

    def test_after_a_refused_load_appending_goes_on(self, records: ModuleType) -> None:
        chunk = filled(records, [b"a"])
        assert not chunk.load(bytearray(100), 0, 100, 3)
        assert chunk.append(bytearray(b"b"), 0, 1, NOW_NS)
        assert content(chunk) == content(filled(records, [b"a", b"b"]))


@both_forms
@given(bodies, st.integers(0, 30), st.integers(0, 40), st.integers(0, 2000))
def test_fit_is_the_longest_run_within_both_limits(
    records: ModuleType, messages: list[bytes], index: int, count_max: int, bytes_max: int
) -> None:
    chunk = filled(records, messages)
    index = min(index, len(messages))
    sizes = [34 + len(body) for body in messages[index : index + count_max]]
    expected = min(1, len(sizes))
    while expected < len(sizes) and sum(sizes[: expected + 1]) <= bytes_max:
        expected += 1
    assert chunk.fit(index, count_max, bytes_max) == expected


class TestMeasureMpub:
    def measure(self, records: ModuleType, data: bytes, count: int, size_max: int = 100) -> tuple[int, int, int]:
        end, index, size, _ = records.measure_mpub(bytearray(data), 0, len(data), count, size_max)
        return end, index, size

    @both_forms
    @given(messages=bodies, cut=st.integers(min_value=0, max_value=1000))
    def test_goes_on_where_it_ended(self, records: ModuleType, messages: list[bytes], cut: int) -> None:
        source = sized(messages)
        end, done, _, start = records.measure_mpub(source, 0, min(cut, len(source)), len(messages), 200)
        if end == records.MPUB_INCOMPLETE:
            assert start == len(sized(messages[:done]))
            end, more, _, _ = records.measure_mpub(source, start, len(source), len(messages) - done, 200)
            done += more
        assert (end, done) == (len(source), len(messages))

    @both_forms
    @given(messages=bodies)
    def test_ends_behind_the_last_message(self, records: ModuleType, messages: list[bytes]) -> None:
        source = bytearray(b"12345" + sized(messages) + b"rest")
        end, index, _, _ = records.measure_mpub(source, 5, len(source), len(messages), 200)
        assert (end, index) == (len(source) - 4, len(messages))

    def test_incomplete_at_every_cut(self, records: ModuleType) -> None:
        source = bytes(sized([b"abc", b"defgh"]))
        for cut in range(len(source)):
            end, index, size = self.measure(records, source[:cut], 2)
            assert end == records.MPUB_INCOMPLETE
            assert index == (1 if cut >= 7 else 0)
            assert size == (-1 if cut - 7 * index < 4 else (3, 5)[index])

    @pytest.mark.parametrize("size", [0, -1, -(1 << 31)])
    def test_sizes_below_one_are_bad(self, records: ModuleType, size: int) -> None:
        source = bytes(sized([b"abc"])) + struct.pack(">i", size) + b"xxxx"
        assert self.measure(records, source, 2) == (records.MPUB_BAD_SIZE, 1, size)

    def test_a_size_above_the_limit_is_too_big_although_incomplete(self, records: ModuleType) -> None:
        assert self.measure(records, struct.pack(">i", 101), 1) == (records.MPUB_TOO_BIG, 0, 101)
        assert self.measure(records, struct.pack(">i", 0x7FFFFFFF), 1) == (records.MPUB_TOO_BIG, 0, 0x7FFFFFFF)

    def test_the_limit_itself_is_fine(self, records: ModuleType) -> None:
        assert self.measure(records, bytes(sized([b"x" * 100])), 1) == (104, 1, 100)
