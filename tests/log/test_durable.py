"""Syncs that fail: the pages they were for are never trusted again, and nothing that was acknowledged is lost."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from log.rig import Rig
from nsquark.log import durable
from nsquark.log.durable import ANEW_SUFFIX, DurableFile

MakeRig = Callable[..., Rig]
SMALL_FILE_BYTES = 1000
BODY = b"x" * 350


class FailingDisk:
    """Keeps, for each file, what a sync has confirmed: all that is left of it after the power is lost.

    As Linux does, a failed sync forgets that the pages are dirty, so the next sync of them confirms nothing new.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures = 0
        """So many syncs fail from now on."""
        self.calls = 0
        self._durable: dict[tuple[int, int], bytes] = {}
        self._dropped: dict[tuple[int, int], int] = {}
        self._real = {"fdatasync": os.fdatasync, "fsync": os.fsync}
        for name in self._real:
            monkeypatch.setattr(os, name, lambda fd, name=name: self._sync(name, fd))
        self._open = os.open
        monkeypatch.setattr(os, "open", self.open)

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        """A new file may get the number of one that was deleted."""
        fd = self._open(path, flags, mode)
        status = os.fstat(fd)
        if flags & os.O_CREAT and status.st_size == 0:
            self._durable.pop((status.st_dev, status.st_ino), None)
            self._dropped.pop((status.st_dev, status.st_ino), None)
        return fd

    def _sync(self, name: str, fd: int) -> None:
        self.calls += 1
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        if self.failures:
            self.failures -= 1
            self._dropped[key] = status.st_size
            raise OSError(errno.EIO, "input/output error")
        self._real[name](fd)
        if not os.path.isdir(f"/proc/self/fd/{fd}"):
            self._durable[key] = self._readable(fd, status.st_size, self._dropped.get(key, 0), key)

    def _readable(self, fd: int, size: int, dropped: int, key: tuple[int, int]) -> bytes:
        """The pages of a failed sync stay as they were on the disk, whatever is synced later."""
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            content = file.read(size)
        before = self._durable.get(key, b"")
        return before[:dropped].ljust(min(dropped, size), b"\0") + content[dropped:]

    def lose_power(self, directory: Path, to: Path) -> Path:
        """Returns what the next start finds: each file as it was last confirmed."""
        to.mkdir()
        for path in directory.iterdir():
            status = path.stat()
            durable = self._durable.get((status.st_dev, status.st_ino))
            if durable is not None and path.is_file():
                (to / path.name).write_bytes(durable)
        return to


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingDisk]:
    yield FailingDisk(monkeypatch)
    monkeypatch.undo()


@pytest.mark.parametrize("failures", [1, 2, 3, 4])
@pytest.mark.parametrize("before", [0, 3])
def test_syncs_that_fail_in_a_row(
    make_rig: MakeRig, tmp_path: Path, disk: FailingDisk, failures: int, before: int
) -> None:
    rig = make_rig()
    bodies = [b"before %d" % number for number in range(before)]
    for body in bodies:
        rig.publish(body)
    rig.sync()
    bodies += [b"a", b"b"]
    rig.publish(b"a", b"b")
    disk.failures = failures
    rig.sync()
    rig.settle()
    assert disk.failures == 0
    assert rig.shared.disk.error is None, "it was written anew"
    assert rig.publish(b"after").error is None
    rig.sync()
    left = disk.lose_power(tmp_path / "topic", tmp_path / "left")
    assert make_rig(left).bodies() == [*bodies, b"after"]
    rig.crash()
    again = make_rig()
    assert again.bodies() == [*bodies, b"after"]
    assert not list((tmp_path / "topic").glob(f"*{ANEW_SUFFIX}"))


def test_of_a_sealed_segment(make_rig: MakeRig, tmp_path: Path, disk: FailingDisk) -> None:
    rig = make_rig(max_bytes_per_file=SMALL_FILE_BYTES)
    rig.publish(b"first" + BODY)
    rig.publish(b"second" + BODY)
    disk.failures = 1
    rig.publish(b"third" + BODY)  # seals the file of the first two
    rig.settle()
    assert disk.failures == 0
    rig.sync()
    left = disk.lose_power(tmp_path / "topic", tmp_path / "left")
    assert make_rig(left).bodies() == [b"first" + BODY, b"second" + BODY, b"third" + BODY]


def test_while_it_cannot_be_written_anew_publishes_are_refused(
    make_rig: MakeRig, tmp_path: Path, disk: FailingDisk
) -> None:
    rig = make_rig()
    rig.publish(b"a")
    disk.failures = 1000
    rig.sync()
    assert isinstance(rig.publish(b"b").error, OSError)
    assert rig.shared.disk.error is not None
    rig.crash()
    disk.failures = 0
    again = make_rig()
    assert again.bodies() == [b"a"], "kill -9: the file is there under its name"
    assert again.publish(b"c").error is None


def test_a_file_that_could_not_be_synced_and_is_removed_refuses_no_more(make_rig: MakeRig, disk: FailingDisk) -> None:
    """Its messages were finished before it could be written anew."""
    rig = make_rig(max_bytes_per_file=SMALL_FILE_BYTES)
    rig.publish(b"first" + BODY)
    rig.publish(b"second" + BODY)
    rig.sync()
    disk.failures = 1000
    rig.publish(b"third" + BODY)
    rig.settle()
    assert rig.publish(b"refused").error is not None
    disk.failures = 0
    assert rig.log.segments is not None
    while len(rig.log.segments) > 1:
        rig.log.segments.remove_first()
    rig.settle()
    assert rig.publish(b"after").error is None


def test_a_clean_stop_after_a_failed_sync_writes_the_file_anew(
    make_rig: MakeRig, tmp_path: Path, disk: FailingDisk
) -> None:
    rig = make_rig()
    rig.publish(b"a")
    disk.failures = 1
    rig.close()
    left = disk.lose_power(tmp_path / "topic", tmp_path / "left")
    assert make_rig(left).bodies() == [b"a"]


def test_what_a_killed_process_wrote_is_synced_by_the_next(
    make_rig: MakeRig, tmp_path: Path, disk: FailingDisk
) -> None:
    rig = make_rig()
    rig.publish(b"a")
    rig.crash()
    again = make_rig()
    again.sync()
    left = disk.lose_power(tmp_path / "topic", tmp_path / "left")
    assert make_rig(left).bodies() == [b"a"]


def test_an_index_that_cannot_be_written_is_no_failed_sync(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full to the last byte takes no index; the data is as safe as before."""
    rig = make_rig(max_bytes_per_file=SMALL_FILE_BYTES)
    replace = os.replace

    def no_index(source: str, target: Path) -> None:
        if str(target).endswith(".idx"):
            raise OSError(errno.ENOSPC, "no space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", no_index)
        for _ in range(6):
            assert rig.publish(BODY).error is None
        rig.settle()
        assert rig.shared.disk.error is None
    rig.close()
    assert make_rig().bodies() == [BODY] * 6


def test_no_descriptor_for_the_directory_is_no_failed_sync(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    rig.publish(b"a")
    before = next(iter(rig.log.segments or ())).path.stat().st_ino
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", _too_many_files)
        rig.sync()
        assert rig.publish(b"b").error is None
    rig.sync()
    assert rig.shared.disk.error is None
    assert rig.log.segments is not None
    assert next(iter(rig.log.segments)).path.stat().st_ino == before, "it was not copied"
    assert len(rig.log.segments) == 1
    rig.close()
    assert make_rig().bodies() == [b"a", b"b"]


def _too_many_files(*_arguments: object, **_more: object) -> int:
    raise OSError(errno.EMFILE, "too many open files")


class TestWhenSynced:
    def file(self, rig: Rig, path: Path) -> DurableFile:
        file = DurableFile(rig.shared.syncer, path)
        file.open(os.O_RDWR | os.O_CREAT)
        return file

    def test_only_a_sync_that_began_later_counts(self, make_rig: MakeRig, tmp_path: Path) -> None:
        rig = make_rig()
        file = self.file(rig, tmp_path / "file")
        told: list[str] = []
        file.write(b"a", 0)
        file.hurry()
        file.write(b"b", 1)
        file.when_synced(lambda: told.append("b"))
        rig.shared.drain()
        assert told == []
        file.hurry()
        rig.settle()
        assert told == ["b"]
        file.when_synced(lambda: told.append("at once"))
        assert told == ["b", "at once"]
        file.close()

    def test_a_sync_that_is_asked_for_by_whoever_is_told_is_another(self, make_rig: MakeRig, tmp_path: Path) -> None:
        """A round that has ended tells several; what one of them asks for, it must not confirm to the next."""
        rig = make_rig()
        first, second = (self.file(rig, tmp_path / name) for name in ("first", "second"))
        told_under_way: list[bool] = []

        def again() -> None:
            second.write(b"b", 1)
            second.hurry()
            second.when_synced(lambda: told_under_way.append(bool(rig.shared.running)))

        first.write(b"a", 0)
        second.write(b"a", 0)
        first.when_synced(again)
        rig.shared.syncer._hurried[second] = None
        first.hurry()
        rig.settle()
        assert told_under_way == [False]
        first.close()
        second.close()

    def test_a_failed_sync_does_not_count(self, make_rig: MakeRig, tmp_path: Path, disk: FailingDisk) -> None:
        rig = make_rig()
        file = self.file(rig, tmp_path / "file")
        told: list[int] = []
        file.write(b"a", 0)
        file.when_synced(lambda: told.append(disk.calls))
        disk.failures = 1
        file.hurry()
        rig.settle()
        assert len(told) == 1 and told[0] >= 2, "told by the sync of the copy"
        file.close()


def test_many_files_are_synced_together(make_rig: MakeRig, tmp_path: Path, disk: FailingDisk) -> None:
    rig = make_rig()
    files = [DurableFile(rig.shared.syncer, tmp_path / f"file{number}") for number in range(40)]
    told: list[DurableFile] = []
    for file in files:
        file.open(os.O_RDWR | os.O_CREAT)
        file.write(b"a", 0)
        file.when_synced(lambda file=file: told.append(file))
        rig.shared.syncer._hurried[file] = None
    files[0].hurry()
    rig.settle()
    assert sorted(told, key=files.index) == files
    assert disk.calls <= len(files) + 2
    for file in files:
        file.close()


def test_who_waits_for_a_file_that_is_removed_waits_no_more(make_rig: MakeRig) -> None:
    """If it waited on, the file of deferred messages, which the log has now, would stay for ever."""
    rig = make_rig()
    rig.publish(b"a")
    told: list[str] = []
    assert rig.log.segments is not None
    rig.log.segments.when_synced(lambda: told.append("gone"))
    rig.log.segments.remove_first()
    rig.settle()
    assert told == ["gone"]


def test_a_file_that_is_abandoned_while_it_is_written_anew(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: FailingDisk
) -> None:
    """Its name is another file's by then, and nobody waits for the disk to be well again."""
    rig = make_rig()
    path = tmp_path / "topic" / "file"
    file = DurableFile(rig.shared.syncer, path)
    file.open(os.O_RDWR | os.O_CREAT)
    file.write(b"old", 0)
    copied, go_on = threading.Event(), threading.Event()

    def slowly(source: int, target: int, size: int) -> None:
        copied.set()
        assert go_on.wait(30)

    monkeypatch.setattr(durable, "_copy_content", slowly)
    disk.failures = 1
    file.hurry()
    while not copied.is_set():  # the failure is told to the rig's loop, which then has the file copied
        rig.turn()
    assert rig.shared.disk.error is not None
    file.abandon()
    path.write_bytes(b"new")
    go_on.set()
    rig.settle()
    assert path.read_bytes() == b"new"
    assert rig.shared.disk.error is None
    assert not list(path.parent.glob(f"*{ANEW_SUFFIX}"))


def test_a_file_is_not_synced_while_it_is_written_anew(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: FailingDisk
) -> None:
    """A write in a thread may end meanwhile. A sync would be of pages that nothing makes durable any more, and of a
    descriptor that is closed when the new file is put into use.
    """
    rig = make_rig()
    path = tmp_path / "topic" / "file"
    file = DurableFile(rig.shared.syncer, path)
    file.open(os.O_RDWR | os.O_CREAT)
    file.write(b"content", 0)
    real, copied, go_on = durable._copy_content, threading.Event(), threading.Event()

    def slowly(source: int, target: int, size: int) -> None:
        copied.set()
        assert go_on.wait(30)
        real(source, target, size)

    monkeypatch.setattr(durable, "_copy_content", slowly)
    disk.failures = 1
    file.hurry()
    while not copied.is_set():
        rig.turn()
    told: list[str] = []
    file.hurry()
    file.when_synced(lambda: told.append("durable"))
    assert not rig.shared.syncer._in_round, "a round for it would sync it again"
    go_on.set()
    rig.settle()
    assert told == ["durable"]
    assert file.is_durable and rig.shared.disk.error is None
    file.write(b"CON", 0)
    rig.settle()
    file.close()
    assert path.read_bytes() == b"CONtent"


class TestMadeDurableHereAndNow:
    """Two syncs fail in a row: that of the file and that of its copy."""

    @pytest.fixture
    def file(self, make_rig: MakeRig, tmp_path: Path, disk: FailingDisk) -> tuple[Rig, DurableFile]:
        rig = make_rig()
        file = DurableFile(rig.shared.syncer, tmp_path / "topic" / "file")
        file.open(os.O_RDWR | os.O_CREAT)
        file.write(b"content", 0)
        disk.failures = 2
        with pytest.raises(OSError, match="sync failed"):
            file.make_durable()
        return rig, file

    def test_it_is_written_anew_later(self, file: tuple[Rig, DurableFile], tmp_path: Path, disk: FailingDisk) -> None:
        rig, failed = file
        assert rig.shared.disk.error is not None
        with pytest.raises(OSError, match="not written anew yet"):
            failed.write(b"more", 7)
        told: list[str] = []
        failed.when_synced(lambda: told.append("durable"))
        rig.settle()
        assert told == ["durable"]
        assert failed.is_durable and rig.shared.disk.error is None
        failed.close()
        left = disk.lose_power(tmp_path / "topic", tmp_path / "left")
        assert (left / "file").read_bytes() == b"content"

    def test_other_files_are_synced_meanwhile(self, file: tuple[Rig, DurableFile], tmp_path: Path) -> None:
        rig, failed = file
        other = DurableFile(rig.shared.syncer, tmp_path / "topic" / "other")
        other.open(os.O_RDWR | os.O_CREAT)
        other.write(b"other", 0)
        told: list[str] = []
        failed.hurry()
        other.hurry()
        other.when_synced(lambda: told.append("durable"))
        rig.shared.drain()
        assert told == ["durable"]
        other.close()
        failed.close()


def test_a_round_does_not_depend_on_what_follows_the_sync_of_one_file(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    files = [DurableFile(rig.shared.syncer, tmp_path / f"file{number}") for number in range(3)]
    told: list[DurableFile] = []

    def fail() -> None:
        raise ValueError("no index can be made")

    files[1].after_sync = fail
    for file in files:
        file.open(os.O_RDWR | os.O_CREAT)
        file.write(b"a", 0)
        file.when_synced(lambda file=file: told.append(file))
        rig.shared.syncer._hurried[file] = None
    files[0].hurry()
    rig.settle()
    assert told == files
    assert any("file1" in report and "no index can be made" in report for report in rig.reports)
    files[1].after_sync = lambda: None
    files[0].write(b"b", 0)
    files[0].hurry()
    rig.settle()
    assert all(file.is_durable for file in files)
    for file in files:
        file.close()


def test_a_round_ends_for_all_files_whoever_waited_for_one_of_them_fails(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    files = [DurableFile(rig.shared.syncer, tmp_path / f"file{number}") for number in range(2)]

    def fail() -> None:
        raise ValueError("whoever waited has a fault")

    for file in files:
        file.open(os.O_RDWR | os.O_CREAT)
        file.write(b"a", 0)
        rig.shared.syncer._hurried[file] = None
    files[0].when_synced(fail)
    files[0].hurry()
    with pytest.raises(ValueError, match="whoever waited"):
        rig.settle()
    rig.settle()
    assert all(file.is_durable for file in files)
    for file in files:
        file.close()
