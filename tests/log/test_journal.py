"""Checks that a channel's journal has what was appended, but for single records that are damaged."""

import errno
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from xxhash import xxh32_intdigest

from log.rig import Rig, fail_directory_syncs, fail_reads, make_shared
from nsquark.kernel import journal as kernel
from nsquark.kernel.journal import JOURNAL_FINISHED, JOURNAL_RECORD, JOURNAL_REQUEUED
from nsquark.log import durable
from nsquark.log import journal as journal_module
from nsquark.log.journal import REPLACEMENT_SUFFIX, Journal

DELAY_MAX_MS = 3_600_000


def record(number: int) -> bytes:
    return kernel.record(JOURNAL_REQUEUED, 1, number, 0, 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def opened(path: Path, reports: list[str] | None = None) -> Journal:
    return Journal(make_shared(reports.append if reports is not None else lambda text: None), path)


def loaded(path: Path, reports: list[str] | None = None) -> bytes:
    journal = opened(path, reports)
    records = journal.load(DELAY_MAX_MS)
    journal.close()
    return bytes(records)


def test_a_channel_without_a_journal_has_no_records(path: Path) -> None:
    assert loaded(path) == b""
    assert not path.exists()


def test_records_come_back_in_order_over_restarts(path: Path) -> None:
    for number in range(3):
        journal = opened(path)
        journal.load(DELAY_MAX_MS)
        journal.append(record(2 * number))
        journal.append(record(2 * number + 1))
        journal.close()
    assert loaded(path) == b"".join(record(number) for number in range(6))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    position=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_a_flipped_bit_costs_one_record(tmp_path: Path, pieces: list[int], position: float, bit: int) -> None:
    path = tmp_path / "damaged"
    path.unlink(missing_ok=True)
    journal = opened(path)
    numbers = iter(range(sum(pieces)))
    for size in pieces:
        journal.append(b"".join(record(next(numbers)) for _ in range(size)))
    journal.close()
    raw = bytearray(path.read_bytes())
    at = int(position * len(raw))
    raw[at] ^= 1 << bit
    path.write_bytes(raw)
    reports: list[str] = []
    expected = b"".join(record(number) for number in range(sum(pieces)) if number != at // JOURNAL_RECORD.size)
    assert loaded(path, reports) == expected
    assert len(reports) == 1
    assert str(path) in reports[0]
    assert f"1 of {sum(pieces)} records" in reports[0]
    reports.clear()
    assert loaded(path, reports) == expected
    assert not reports, "the damaged record is gone"


@pytest.mark.parametrize("page", [0, 1, 2])
def test_a_lost_page_costs_its_records(path: Path, page: int) -> None:
    journal = opened(path)
    count = 3 * 4096 // JOURNAL_RECORD.size
    journal.append(b"".join(record(number) for number in range(count)))
    journal.close()
    raw = bytearray(path.read_bytes())
    raw[page * 4096 : (page + 1) * 4096] = bytes(4096)
    path.write_bytes(raw)
    lost = range(page * 128, (page + 1) * 128)
    assert loaded(path) == b"".join(record(number) for number in range(count) if number not in lost)


@pytest.mark.parametrize("torn", [1, 7, 31])
def test_a_torn_end_is_cut_and_writing_goes_on(path: Path, torn: int) -> None:
    journal = opened(path)
    journal.append(record(1) + record(2))
    journal.close()
    path.write_bytes(path.read_bytes()[:-torn])
    reports: list[str] = []
    again = opened(path, reports)
    assert again.load(DELAY_MAX_MS) == record(1)
    again.append(record(3))
    again.close()
    assert loaded(path) == record(1) + record(3)
    assert not reports, "a crash is no damage"


def in_first_page(fd: int, size: int, offset: int) -> bool:
    return offset < 4096


def test_pages_that_cannot_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(path)
    journal.append(b"".join(record(number) for number in range(256)))
    journal.close()
    before = path.read_bytes()
    reports: list[str] = []
    with monkeypatch.context() as patch:
        fail_reads(patch, in_first_page)
        records = loaded(path, reports)
    assert records == b"".join(record(number) for number in range(128, 256))
    assert any("cannot be read" in report for report in reports)
    assert path.with_name("journal.bad").read_bytes() == before
    assert loaded(path) == records


def test_what_can_be_read_stays_when_the_disk_takes_no_new_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes that follow are written behind it, so that the next start finds all of them."""
    journal = opened(path)
    journal.append(b"".join(record(number) for number in range(256)))
    journal.close()
    path.write_bytes(path.read_bytes()[:-7])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    survivors = b"".join(record(number) for number in range(128, 255))
    with monkeypatch.context() as patch:
        fail_reads(patch, in_first_page)
        patch.setattr("nsquark.log.journal.write_atomically", full)
        again = opened(path)
        assert again.load(DELAY_MAX_MS) == survivors
        again.append(record(1000))
        again.close()
        assert loaded(path) == survivors + record(1000)
    with monkeypatch.context() as patch:
        fail_reads(patch, in_first_page)
        assert loaded(path) == survivors + record(1000)
    assert loaded(path) == survivors + record(1000)


class TestFormat1:
    RECORD = struct.Struct("<BxHIQq")

    def piece(self, *numbers: int) -> bytes:
        records = b"".join(self.RECORD.pack(1, 2, 1, number, 5000 * number) for number in numbers)
        return b"NQJ1" + len(records).to_bytes(4, "little") + xxh32_intdigest(records).to_bytes(4, "little") + records

    def converted(self, *numbers: int) -> bytes:
        delays = {number: DELAY_MAX_MS if number else 0 for number in numbers}
        return b"".join(kernel.record(1, 2, number, 5000 * number, delays[number]) for number in numbers)

    def test_is_read_and_written_anew(self, path: Path) -> None:
        path.write_bytes(self.piece(0, 1) + self.piece(2) + self.piece(3, 4, 5))
        reports: list[str] = []
        for _ in range(2):
            assert loaded(path, reports) == self.converted(0, 1, 2, 3, 4, 5)
        assert not reports
        assert not path.read_bytes().startswith(b"NQJ1")

    def test_finished_messages_are_counted(self, path: Path) -> None:
        records = self.RECORD.pack(JOURNAL_FINISHED, 0, 4096, 77, 0)
        check = xxh32_intdigest(records).to_bytes(4, "little")
        path.write_bytes(b"NQJ1" + len(records).to_bytes(4, "little") + check + records)
        assert loaded(path) == kernel.record(JOURNAL_FINISHED, 0, 77, 0, 4096)

    @pytest.mark.parametrize("at", [0, 5, 9, 20])
    def test_a_damaged_piece_is_left_out(self, path: Path, at: int) -> None:
        first, second, third = self.piece(0, 1), self.piece(2, 3), self.piece(4)
        raw = bytearray(first + second + third)
        raw[len(first) + at] ^= 1
        path.write_bytes(raw)
        reports: list[str] = []
        assert loaded(path, reports) == self.converted(0, 1, 4)
        assert "damaged" in reports[0]


def test_rewriting_replaces_everything(path: Path) -> None:
    journal = opened(path)
    journal.append(record(1))
    journal.rewrite(record(2))
    journal.append(record(3))
    assert loaded(path) == record(2) + record(3)
    journal.rewrite(b"")
    assert not path.exists()
    journal.append(record(4))
    assert loaded(path) == record(4)
    journal.delete()
    assert not path.exists()


def test_is_rewritten_when_most_of_it_is_out_of_date(path: Path) -> None:
    journal = Journal(make_shared(), path, compact_bytes_min=100)
    assert not journal.wants_rewrite(0)
    journal.append(record(1) * 10)
    assert journal.wants_rewrite(0)
    assert not journal.wants_rewrite(10)
    journal.append(record(1) * 35)
    assert journal.wants_rewrite(10)
    journal.rewrite(record(1) * 10)
    assert not journal.wants_rewrite(10)


def test_its_bytes_count_as_used_disk(path: Path) -> None:
    shared = make_shared()
    journal = Journal(shared, path)
    journal.append(record(1) * 10)
    assert shared.disk_bytes == 320
    journal.rewrite(record(1))
    assert shared.disk_bytes == 32
    journal.close()
    assert shared.disk_bytes == 0
    again = Journal(shared, path)
    again.load(DELAY_MAX_MS)
    assert shared.disk_bytes == 32
    again.delete()
    assert shared.disk_bytes == 0


@pytest.mark.parametrize("written", [0, 5, 40])
def test_a_failed_append_leaves_what_was_there_and_can_be_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    journal = opened(path)
    journal.append(record(1))
    real = durable.write_all

    def short(fd: int, data: bytes, offset: int) -> None:
        real(fd, data[:written], offset)
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write_all", short)
        with pytest.raises(OSError, match="no space"):
            journal.append(record(2) * 5)
    journal.append(record(2))
    journal.close()
    assert loaded(path) == record(1) + record(2) * max(1, written // 32)


def test_a_failed_sync_writes_it_anew_and_whoever_waits_is_told_then(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, None)
    journal = Journal(rig.shared, path)
    journal.append(record(1))
    inode, told, mended = path.stat().st_ino, list[bool](), list[bool]()
    journal.on_mended = lambda: mended.append(True)
    real, failures = os.fdatasync, [OSError(errno.EIO, "Input/output error")]

    def fdatasync(fd: int) -> None:
        if failures:
            raise failures.pop()
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fdatasync)
        journal.when_synced(lambda: told.append(True))
        rig.settle()
    assert told
    assert mended
    assert path.stat().st_ino != inode
    assert any("sync failed" in report for report in rig.reports)
    journal.append(record(2))
    journal.close()
    assert loaded(path) == record(1) + record(2)


def test_after_a_rewrite_whose_name_was_not_synced_the_new_file_is_written_to(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(path)
    journal.append(record(1))

    def fail(_path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("nsquark.log.files.sync_directory", fail)
        with pytest.raises(OSError, match="Input/output"):
            journal.rewrite(record(2))
    journal.append(record(3))
    assert loaded(path) == record(2) + record(3)


# -- replaced while nsqd runs ----------------------------------------------------------------------------


class Syncs:
    """Stands before os.fdatasync: syncs wait until they are let go, or fail; none may come from the test's thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go = threading.Event()
        self.begun = threading.Event()
        self.failing: tuple[str, ...] = ()
        """Has the names of files whose syncs fail."""
        self._real = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self._sync)
        monkeypatch.setattr(os, "fsync", self._sync)

    def _sync(self, fd: int) -> None:
        assert threading.current_thread() is not threading.main_thread(), "all clients would wait for this sync"
        self.begun.set()
        assert self.may_go.wait(30)
        if os.readlink(f"/proc/self/fd/{fd}").endswith(self.failing or ("nothing",)):
            raise OSError(errno.EIO, "Input/output error")
        self._real(fd)


class Replaced:
    """Holds a journal of which most is out of date, and a replacement that is being synced; `path` as a crash leaves
    it.
    """

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig = Rig(tmp_path, None)
        self.path = tmp_path / "journal"
        self.syncs = Syncs(monkeypatch)
        self.journal = Journal(self.rig.shared, self.path, compact_bytes_min=100)
        self.journal.append(record(1) * 20)
        assert self.journal.wants_rewrite(1)
        self.journal.replace_later(record(1))
        assert self.syncs.begun.wait(30)
        self.journal.append(record(2))
        assert (self.on_disk(), self.journal.is_being_replaced) == (record(1) * 20 + record(2), True)
        assert not self.journal.wants_rewrite(1), "one at a time"

    def on_disk(self) -> bytes:
        return self.path.read_bytes()

    def end(self) -> None:
        self.syncs.may_go.set()
        self.rig.settle()
        assert not self.journal.is_being_replaced

    def left(self) -> list[str]:
        return sorted(path.name for path in self.path.parent.iterdir() if path.name.startswith("journal"))


@pytest.fixture
def replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replaced]:
    found = Replaced(tmp_path, monkeypatch)
    yield found
    found.syncs.may_go.set()
    found.rig.settle()


def test_a_replacement_takes_the_name_when_it_is_durable_and_has_what_came_meanwhile(replaced: Replaced) -> None:
    told: list[bool] = []
    replaced.journal.on_mended = lambda: told.append(True)
    replaced.end()
    assert told
    assert replaced.on_disk() == record(1) + record(2)
    assert replaced.left() == ["journal"]
    assert replaced.rig.shared.disk_bytes == 64
    replaced.journal.append(record(3))
    assert replaced.on_disk() == record(1) + record(2) + record(3)
    synced: list[bool] = []
    replaced.journal.when_synced(lambda: synced.append(True))
    replaced.rig.settle()
    assert synced


@pytest.mark.parametrize("failing", ["sync", "write", "rename"])
def test_a_replacement_that_fails_leaves_all_as_it_is(
    replaced: Replaced, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*_arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(journal_module, "REPLACE_RETRY_S", 3600.0)  # "not at once" is not over on a slow machine
    with monkeypatch.context() as patch:
        if failing == "sync":
            replaced.syncs.failing = (REPLACEMENT_SUFFIX,)
        elif failing == "rename":
            patch.setattr(os, "replace", fail)
        else:
            real, written = durable.write_all, list[int]()

            def full(fd: int, data: bytes, offset: int) -> None:
                written.append(fd)
                fail() if len(written) == 2 else real(fd, data, offset)

            patch.setattr(durable, "write_all", full)
            replaced.journal.append(record(3))
        replaced.end()
    expected = record(1) * 20 + record(2) + (record(3) if failing == "write" else b"")
    assert replaced.on_disk() == expected
    assert replaced.left() == ["journal"]
    assert replaced.rig.shared.disk.error is None
    assert not replaced.journal.wants_rewrite(1), "not at once again"
    replaced.journal.append(record(4))
    assert replaced.on_disk() == expected + record(4)


@pytest.mark.parametrize("way", ["emptied", "rewritten", "closed", "deleted"])
def test_what_replaces_all_at_once_wins_over_a_replacement(
    replaced: Replaced, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    expected = {"emptied": b"", "rewritten": record(5), "closed": record(1) * 20 + record(2), "deleted": b""}[way]
    if way in ("emptied", "rewritten"):
        monkeypatch.setattr("nsquark.log.files.os.fsync", lambda fd: None)  # this way is for a stop, and waits
        replaced.journal.rewrite(expected)
    elif way == "closed":
        replaced.journal.close()
    else:
        replaced.journal.delete()
    replaced.end()
    assert replaced.left() == (["journal"] if expected else [])
    assert not expected or replaced.on_disk() == expected


def test_nothing_replaces_a_journal_that_is_being_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy that is made of it after a failed sync would take the name back."""
    rig, syncs = Rig(tmp_path, None), Syncs(monkeypatch)
    journal = Journal(rig.shared, tmp_path / "journal", compact_bytes_min=100)
    journal.append(record(1) * 20)
    syncs.failing = ("journal", "journal.anew")
    syncs.may_go.set()
    journal.when_synced(lambda: None)
    rig.shared.drain()
    assert rig.shared.disk.error is not None
    journal.replace_later(record(1))
    rig.shared.drain()
    assert not journal.is_being_replaced
    syncs.failing = ()
    rig.settle()
    assert rig.shared.disk.error is None
    journal.append(record(2))
    assert (tmp_path / "journal").read_bytes() == record(1) * 20 + record(2)
    assert sorted(path.name for path in tmp_path.glob("journal*")) == ["journal"]


def test_a_journal_that_was_replaced_has_its_name_synced_with_it(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(path)
    journal.append(record(1))
    journal.close()
    with path.open("ab") as file:
        file.write(b"torn")
    shared = make_shared()
    shared.syncer.directory(tmp_path).sync()
    journal = Journal(shared, path)
    with monkeypatch.context() as patch:
        fail_directory_syncs(patch, tmp_path)
        assert journal.load(DELAY_MAX_MS) == record(1)
        assert path.read_bytes() == record(1), "only the sync of its name failed"
        with pytest.raises(OSError, match="Input/output error"):
            journal.make_durable()
    journal.make_durable()
    journal.close()
    assert loaded(path) == record(1)
