"""Checks idempotency tokens: those of the log, and of segments that are gone."""

import errno
import os
from pathlib import Path

import pytest

from log.rig import make_shared
from nsquark.log import tokens as tokens_module
from nsquark.log.segment import Segment
from nsquark.log.tokens import RECORD_BYTES, TOKENS_MAX, Tokens


def token(number: int) -> bytes:
    return b"%016d" % number


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


def opened(
    path: Path, in_log: list[bytes] | None = None, reports: list[str] | None = None, tokens_max: int = TOKENS_MAX
) -> Tokens:
    shared = make_shared(reports.append if reports is not None else lambda text: None)
    return Tokens(shared, path, in_log or [], tokens_max)


def segment_with(path: Path, *numbers: int) -> Segment:
    segment = Segment(make_shared().syncer, path.parent, 1)
    segment.tokens = [token(number) for number in numbers]
    return segment


def known(tokens: Tokens, end: int = 20) -> list[int]:
    return [number for number in range(end) if token(number) in tokens]


def test_those_of_the_log_and_of_segments_that_went(path: Path) -> None:
    first = opened(path, [token(1), token(2)])
    first.add(token(3))
    first.store_of(segment_with(path, 1))
    assert known(first) == [1, 2, 3]
    assert known(opened(path, [token(3)])) == [1, 3]


def test_they_are_stored_as_a_whole_or_not_at_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(path, [token(1), token(2)])
    first.store_of(segment_with(path, 1))

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            first.store_of(segment_with(path, 2))
    assert known(opened(path)) == [1]
    first.store_of(segment_with(path, 2))
    assert known(opened(path)) == [1, 2]


def test_on_a_full_disk_the_index_of_the_segment_makes_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, segment = opened(path), segment_with(path, 1)
    segment.index_path.write_bytes(b"an index")
    real = tokens_module.write_atomically

    def full(target: Path, data: bytes) -> None:
        if segment.index_path.exists():
            raise OSError(errno.ENOSPC, "no space left on device")
        real(target, data)

    monkeypatch.setattr(tokens_module, "write_atomically", full)
    tokens.store_of(segment)
    assert known(opened(path)) == [1]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("at", [0, 15, 16, 23])
def test_a_flipped_bit_costs_one_and_is_told(path: Path, number: int, at: int) -> None:
    opened(path).store_of(segment_with(path, 0, 1, 2))
    raw = bytearray(path.read_bytes())
    raw[number * RECORD_BYTES + at] ^= 1
    path.write_bytes(raw)
    reports: list[str] = []
    assert known(opened(path, reports=reports)) == [other for other in range(3) if other != number]
    assert "1 of 3 tokens" in reports[0]
    reports.clear()
    opened(path, reports=reports)
    assert not reports


def test_a_file_of_format_1_is_read_and_written_anew(path: Path) -> None:
    path.write_bytes(token(1) + token(2) + bytes(16) + b"torn")
    for _ in range(2):
        found = opened(path)
        assert known(found) == [1, 2]
        assert bytes(16) not in found
    assert path.stat().st_size == 2 * RECORD_BYTES


def test_they_are_bounded_in_memory_and_on_disk(path: Path) -> None:
    found = opened(path, tokens_max=10)
    for number in range(0, 100, 2):
        found.add(token(number))
        found.add(token(number + 1))
        found.store_of(segment_with(path, number, number + 1))
        assert path.stat().st_size <= 10 * RECORD_BYTES
    for memory in (found, opened(path, tokens_max=10)):
        assert known(memory, 100) == list(range(90, 100))
