"""The frame scanner of clients finds every frame, however its bytes are cut; it does so in both forms of the kernel."""

import struct
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unit import kernel_forms


@pytest.fixture(params=kernel_forms.FORMS, scope="module")
def frames(request: pytest.FixtureRequest) -> ModuleType:
    return kernel_forms.load("frames", request.param)


ID = b"0123456789abcdef"


def frame(kind: int, data: bytes) -> bytes:
    return struct.pack(">ii", 4 + len(data), kind) + data


def message(body: bytes, timestamp_ns: int = 1, attempts: int = 1, message_id: bytes = ID) -> bytes:
    return frame(2, struct.pack(">qH16s", timestamp_ns, attempts, message_id) + body)


messages_st = st.tuples(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 65535),
    st.binary(min_size=16, max_size=16),
    st.binary(max_size=60),
)
others_st = st.tuples(st.integers(-(2**31), 2**31 - 1).filter(lambda kind: kind != 2), st.binary(max_size=20))
stream_st = st.lists(st.one_of(messages_st, others_st), max_size=12)


def encode(item: tuple[Any, ...]) -> bytes:
    if len(item) == 4:
        timestamp_ns, attempts, message_id, body = item
        return message(body, timestamp_ns, attempts, message_id)
    return frame(*item)


def scan_in_pieces(frames: ModuleType, stream: bytes, cuts: list[int]) -> tuple[list[Any], list[Any], list[int]]:
    """Scans a stream that comes in pieces: returns its messages, its other frames, and what was left after each."""
    scanner = frames.FrameScanner()
    pending, pos = bytearray(), 0
    found, others, left_bytes = [], [], []
    for cut in [*cuts, len(stream)]:
        pending += stream[pos : pos + cut]
        pos += cut
        consumed, messages, more = scanner.scan(pending, 0, len(pending))
        found += messages
        others += more
        del pending[:consumed]
        left_bytes.append(len(pending))
    return found, others, left_bytes


def test_scan_gives_every_field_of_messages_and_other_frames(frames: ModuleType) -> None:
    stream = message(b"hello", 1_700_000_000_123_456_789, 258) + frame(0, b"OK") + message(b"", -1, 65535)
    consumed, messages, others = frames.FrameScanner().scan(stream, 0, len(stream))
    assert consumed == len(stream)
    assert messages == [(1_700_000_000_123_456_789, 258, ID, b"hello"), (-1, 65535, ID, b"")]
    assert others == [(0, b"OK")]
    assert {type(field) for found in messages for field in found} == {int, bytes}


@pytest.mark.parametrize("kind", [bytes, bytearray, lambda raw: memoryview(bytearray(raw))])
def test_scan_takes_any_buffer_and_its_results_outlive_it(frames: ModuleType, kind: Any) -> None:
    stream = message(b"body")
    buffer = kind(b"??" + stream + b"??")
    consumed, messages, _ = frames.FrameScanner().scan(buffer, 2, 2 + len(stream))
    if not isinstance(buffer, bytes):
        buffer[:] = bytes(len(buffer))
    assert (consumed, messages) == (len(stream), [(1, 1, ID, b"body")])


@given(items=stream_st, cuts=st.lists(st.integers(1, 70), max_size=20))
def test_a_stream_cut_anywhere_gives_the_same_frames(frames: ModuleType, items: Any, cuts: Any) -> None:
    stream = b"".join(map(encode, items))
    found, others, left_bytes = scan_in_pieces(frames, stream, cuts)
    assert found == [item for item in items if len(item) == 4]
    assert others == [item for item in items if len(item) == 2]
    assert left_bytes[-1] == 0


def test_a_partial_frame_is_left(frames: ModuleType) -> None:
    whole = frame(0, b"OK")
    partial = message(b"x" * 1000)
    scanner = frames.FrameScanner()
    assert scanner.scan(whole + partial[:-1], 0, len(whole) + len(partial) - 1) == (
        len(whole),
        [],
        [(0, b"OK")],
    )
    assert scanner.scan(partial[:7], 0, 7) == (0, [], [])
    assert scanner.scan(partial, 0, len(partial)) == (len(partial), [(1, 1, ID, b"x" * 1000)], [])


@given(
    sizes=st.lists(st.integers(65_400, 65_700) | st.integers(0, 300_000), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 100) | st.integers(1, 100_000), max_size=20),
)
def test_large_messages_are_gathered_as_they_come(frames: ModuleType, sizes: Any, cuts: Any) -> None:
    """What a caller has to keep is never more than LARGE_FRAME_BYTES, whatever the size of messages."""
    bodies = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    stream = b"".join(message(body, number, number) for number, body in enumerate(bodies)) + frame(0, b"OK")
    found, others, left_bytes = scan_in_pieces(frames, stream, cuts)
    assert max(left_bytes) < frames.LARGE_FRAME_BYTES + 4
    assert found == [(number, number, ID, body) for number, body in enumerate(bodies)]
    assert {type(body) for *_, body in found} == {bytes}
    assert others == [(0, b"OK")] and left_bytes[-1] == 0


def test_an_answer_is_never_large(frames: ModuleType) -> None:
    largest = frame(1, b"x" * (frames.LARGE_FRAME_BYTES - 4))
    assert frames.FrameScanner().scan(largest, 0, len(largest))[2] == [(1, largest[8:])]
    prefix = struct.pack(">ii", frames.LARGE_FRAME_BYTES + 1, 1)
    with pytest.raises(frames.FrameError, match="frame size 65537 is above the limit of 65536 bytes"):
        frames.FrameScanner().scan(prefix, 0, len(prefix))


@given(items=stream_st, room=st.integers(21, 130), cut=st.integers(0, 400))
def test_finish_all_answers_each_message_once_whatever_the_room(
    frames: ModuleType, items: Any, room: Any, cut: Any
) -> None:
    stream = b"".join(map(encode, items))
    out, sent, others_found, count, pos = bytearray(room), b"", [], 0, 0
    for end in [min(cut, len(stream))] * 13 + [len(stream)] * 13:
        consumed, messages, written, others = frames.finish_all(stream, pos, end, out)
        sent += out[:written]
        others_found += others
        count += messages
        pos += consumed
    expected = [item[2] for item in items if len(item) == 4]
    assert sent == b"".join(b"FIN " + message_id + b"\n" for message_id in expected)
    assert count == len(expected)
    assert others_found == [item for item in items if len(item) == 2]
    assert pos == len(stream)


def test_finish_all_without_room_consumes_nothing_and_writes_nothing(frames: ModuleType) -> None:
    stream = message(b"body")
    out = bytearray(frames.FIN_COMMAND_BYTES - 1)
    assert frames.finish_all(stream, 0, len(stream), out) == (0, 0, 0, [])
    assert out == bytes(20)


BAD_STREAMS = [
    (struct.pack(">ii", -1, 0), "frame size -1 is below 4"),
    (struct.pack(">ii", 3, 0), "frame size 3 is below 4"),
    (struct.pack(">ii", 2**31 - 1, 2), "above the limit of"),
    (b"HTTP/1.1 400 Bad Request", "above the limit of"),
    (struct.pack(">ii", 29, 2) + bytes(25), "too short for its header"),
]


@pytest.mark.parametrize(("stream", "text"), BAD_STREAMS)
def test_a_size_that_cannot_be_is_a_clear_error(frames: ModuleType, stream: Any, text: Any) -> None:
    good = frame(0, b"OK")
    with pytest.raises(frames.FrameError, match=text):
        frames.FrameScanner().scan(good + stream, 0, len(good + stream))
    with pytest.raises(frames.FrameError, match=text):
        frames.finish_all(stream, 0, len(stream), bytearray(100))


def test_the_size_limit_is_the_callers_and_inclusive(frames: ModuleType) -> None:
    fits, too_big = frame(0, b"x" * 96), frame(0, b"x" * 97)
    scanner = frames.FrameScanner(100)
    assert scanner.scan(fits, 0, len(fits))[2] == [(0, b"x" * 96)]
    with pytest.raises(frames.FrameError, match="frame size 101 is above the limit of 100 bytes"):
        scanner.scan(too_big, 0, len(too_big))


@pytest.mark.parametrize(("start", "end"), [(-1, 4), (3, 2), (0, 11)])
def test_a_range_outside_the_buffer_is_refused(frames: ModuleType, start: Any, end: Any) -> None:
    buffer = bytearray(10)
    with pytest.raises(ValueError, match="does not lie in a buffer of 10 bytes"):
        frames.FrameScanner().scan(buffer, start, end)
    with pytest.raises(ValueError, match="does not lie in a buffer of 10 bytes"):
        frames.finish_all(buffer, start, end, bytearray(100))


def test_nothing_gives_nothing(frames: ModuleType) -> None:
    assert frames.FrameScanner().scan(bytearray(), 0, 0) == (0, [], [])
    assert frames.finish_all(bytearray(), 0, 0, bytearray()) == (0, 0, 0, [])
