"""Records that outlive their segments are read from the file their index was made with, and only if intact."""

import errno
import os
from pathlib import Path

import pytest

from log.rig import fail_directory_syncs, fail_reads, make_shared
from nsquark.log.outliving import KeptMessages

CONTENT = {seq: b"record %d " % seq * 10 for seq in (3, 5, 9)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def opened(path: Path, reports: list[str] | None = None) -> KeptMessages:
    return KeptMessages(make_shared(reports.append if reports is not None else lambda text: None), path)


def store(kept: KeptMessages, content: dict[int, bytes]) -> None:
    kept.adopt(kept.write(content))


def records(kept: KeptMessages) -> dict[int, bytes]:
    found = {seq: kept.record(seq) for seq in range(20)}
    return {seq: bytes(record) for seq, record in found.items() if record is not None}


def test_records_are_kept_over_restarts_and_replaced_as_a_whole(path: Path) -> None:
    kept = opened(path)
    assert records(kept) == {}
    store(kept, CONTENT)
    assert records(kept) == records(opened(path)) == CONTENT
    store(kept, kept.content_with({7: b"new"}, [5, 7, 8]))
    assert records(kept) == records(opened(path)) == {5: CONTENT[5], 7: b"new"}
    store(kept, {})
    assert records(kept) == {}
    assert not path.exists()


def test_a_file_that_was_replaced_is_not_read_by_the_index_of_before(path: Path) -> None:
    """The file was replaced in a thread, and is not yet adopted in the event loop."""
    kept = opened(path)
    store(kept, CONTENT)
    generation = kept.write({9: b"x"})
    assert records(kept) == CONTENT
    kept.adopt(generation)
    assert records(kept) == {9: b"x"}
    gone = kept.write({})
    assert records(kept) == {9: b"x"}
    kept.adopt(gone)
    assert records(kept) == {}


@pytest.mark.parametrize("seq", CONTENT)
@pytest.mark.parametrize("at", [0, 30, 80])
def test_a_flipped_bit_costs_one_record_and_is_told(path: Path, seq: int, at: int) -> None:
    store(opened(path), CONTENT)
    raw = bytearray(path.read_bytes())
    raw[list(CONTENT).index(seq) * len(raw) // len(CONTENT) + at] ^= 2
    path.write_bytes(raw)
    reports: list[str] = []
    assert records(opened(path, reports)) == {other: record for other, record in CONTENT.items() if other != seq}
    assert len(reports) == 1
    assert str(path) in reports[0]


def test_a_bit_that_flips_while_it_is_open(path: Path) -> None:
    reports: list[str] = []
    kept = opened(path, reports)
    store(kept, CONTENT)
    with path.open("r+b") as file:
        file.seek(len(path.read_bytes()) // 2)
        file.write(b"\xff")
    assert records(kept) == {3: CONTENT[3], 9: CONTENT[9]}
    assert 5 not in kept
    assert "message 5" in reports[0]


def test_what_cannot_be_read_at_the_start_is_set_aside(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {seq: bytes([seq]) * 3000 for seq in (1, 2, 3)}
    store(opened(path), content)
    before = path.read_bytes()
    reports: list[str] = []
    with monkeypatch.context() as patch:
        fail_reads(patch, lambda fd, _, offset: offset < 4096 and os.fstat(fd).st_size == len(before))
        kept = opened(path, reports)
    assert records(kept) == records(opened(path)) == {3: content[3]}
    assert any("cannot be read" in report for report in reports)
    assert path.with_name("kept.bad").read_bytes() == before


def test_what_can_be_read_stays_when_the_disk_takes_no_new_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {seq: bytes([seq]) * 3000 for seq in (1, 2, 3)}
    store(opened(path), content)
    size = path.stat().st_size

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        fail_reads(patch, lambda fd, _, offset: offset < 4096 and os.fstat(fd).st_size == size)
        patch.setattr("nsquark.log.outliving.write_atomically", full)
        for _ in range(2):
            assert records(opened(path)) == {3: content[3]}
        kept = opened(path)
    store(kept, {**kept.content_with({}, [3]), 4: b"later"})
    assert records(opened(path)) == {3: content[3], 4: b"later"}


def test_a_read_that_fails_once_is_made_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = opened(path)
    store(kept, CONTENT)
    failures = [True]
    fail_reads(monkeypatch, lambda *_: bool(failures) and failures.pop())
    assert records(kept) == CONTENT


def test_its_bytes_count_as_used_disk(path: Path) -> None:
    shared = make_shared()
    kept = KeptMessages(shared, path)
    store(kept, CONTENT)
    assert shared.disk_bytes == path.stat().st_size
    kept.close()
    assert shared.disk_bytes == 0


@pytest.mark.parametrize("step", ["the sync of its name", "opening it"])
def test_a_new_file_that_fails_at_the_last_step_costs_no_record(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The new file has the name by then, and its records are elsewhere in it."""
    content = {seq: bytes([seq]) * 3000 for seq in range(10)}
    store(opened(path), content)
    inode, intact = path.stat().st_ino, {seq: record for seq, record in content.items() if seq not in (1, 2)}
    real = os.open

    def refuse(name: object, flags: int, *more: int) -> int:
        if Path(str(name)) == path and path.stat().st_ino != inode:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(name, flags, *more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        fail_reads(patch, lambda fd, size, at: at < 8192 and at + size > 4096 and os.fstat(fd).st_ino == inode)
        if step == "opening it":
            patch.setattr(os, "open", refuse)
        else:
            fail_directory_syncs(patch, path.parent)
        reports: list[str] = []
        kept = opened(path, reports)
        assert path.stat().st_ino != inode
        assert any("could not be written anew" in report for report in reports)
    found = records(kept)
    assert set(found) >= set(intact) and records(opened(path)) == found
    store(kept, {**kept.content_with({}, [9]), 10: b"later"})
    assert records(opened(path)) == {9: content[9], 10: b"later"}
