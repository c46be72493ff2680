"""Damages files of deferred messages, on disks that refuse a step of their repair: no message is lost that is intact,
and none that is published afterwards.
"""

import errno
import os
from pathlib import Path

import pytest

from log.rig import Rig, fail_directory_syncs, make_shared, refuse_links
from log.test_deferred import NOW_MS, add, opened, take_bodies
from nsquark.log.deferred import DeferredMessages
from nsquark.log.deferred_appends import Appends
from nsquark.log.deferred_bucket import DeferredBucket, Entry
from nsquark.log.deferred_records import BUCKET_MS

DUE_MS = NOW_MS + 5 * BUCKET_MS
INTACT = [b"body 0", b"body 2"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "deferred"


@pytest.fixture
def path(directory: Path) -> Path:
    """Returns a file with three messages, of which the second is damaged."""
    before = opened(directory)
    for number in range(3):
        add(before, b"body %d" % number, 1, DUE_MS)
    before.make_durable()
    before.close()
    (path,) = directory.iterdir()
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"body 1")] ^= 1
    path.write_bytes(raw)
    return path


def _bodies(waiting: DeferredMessages) -> list[bytes]:
    return [body for _, _, body in waiting.waiting()]


def test_the_new_file_is_used_though_its_name_could_not_be_synced(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one has no name any more, but for the one under which people look at it."""
    (tmp_path / "topic").mkdir()
    rig = Rig(tmp_path, tmp_path / "topic")
    told: list[Exception | None] = []
    with monkeypatch.context() as patch:
        failed = fail_directory_syncs(patch, path.parent)
        waiting = DeferredMessages(rig.shared, path.parent, Appends(), 1, NOW_MS)
        waiting.add(b"published", 1, NOW_MS, DUE_MS - NOW_MS).when_durable(told.append)
        rig.shared.drain()
        assert failed, "a name that nobody syncs is lost with the power"
        assert told == [] or isinstance(told[0], OSError)
    rig.settle()
    assert _bodies(waiting) == [*INTACT, b"published"]
    waiting.close()
    rig.crash()
    assert _bodies(opened(path.parent)) == [*INTACT, b"published"]


def test_no_descriptor_for_the_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(name: object, flags: int, *more: int) -> int:
        if flags & os.O_DIRECTORY:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(name, flags, *more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        waiting = opened(path.parent)
    add(waiting, b"published", 1, DUE_MS)
    waiting.make_durable()
    waiting.close()
    assert _bodies(opened(path.parent)) == [*INTACT, b"published"]


def test_without_hard_links_the_damaged_file_is_copied(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = path.read_bytes()
    refuse_links(monkeypatch)
    reports: list[str] = []
    assert _bodies(opened(path.parent)) == INTACT
    assert _bodies(opened(path.parent, reports=reports)) == INTACT
    assert not reports, "it is repaired"
    assert path.with_name(path.name + ".bad").read_bytes() == damaged
    assert len(list(path.parent.iterdir())) == 2


@pytest.mark.parametrize("step", ["replace", "link"])
def test_a_file_that_could_not_be_repaired_is_used_and_then_set_aside(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    damaged, real = path.read_bytes(), os.replace

    def refuse(source: Path, target: Path) -> None:
        if step == "link" or target == path:
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, step, refuse)
        waiting = opened(path.parent)
        assert sorted(path.parent.iterdir()) in ([path], [path, path.with_name(path.name + ".bad")])
        assert take_bodies(waiting, DUE_MS + BUCKET_MS) == INTACT
    if path.exists():
        waiting.next_due(DUE_MS + BUCKET_MS)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name + ".bad"]
    assert path.with_name(path.name + ".bad").read_bytes().startswith(damaged)
    assert _bodies(opened(path.parent)) == []


def test_a_torn_end_that_cannot_be_cut_off_costs_no_message(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = opened(directory)
    for number in range(3):
        add(before, b"body %d" % number, 1, DUE_MS)
    before.close()
    (path,) = directory.iterdir()
    with path.open("ab") as file:
        file.write(path.read_bytes()[:60])
    reports: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", _refuse_to_cut)
        waiting = opened(directory, reports=reports)
        assert len(waiting.found) == 3
        assert any("could not be cut off" in report for report in reports)
        add(waiting, b"published", 1, DUE_MS)
    waiting.close()
    assert _bodies(opened(directory)) == [b"body 0", b"body 1", b"body 2", b"published"]


def _refuse_to_cut(fd: int, size: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_file_that_cannot_be_read_is_closed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = make_shared()
    with monkeypatch.context() as patch:
        patch.setattr("nsquark.log.deferred_bucket.scan", _fail_to_read)
        with pytest.raises(OSError, match="Input/output error"):
            DeferredMessages(shared, path.parent, Appends(), 1, NOW_MS)
    assert str(path) not in [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    assert shared.disk_bytes == 0
    assert not shared.syncer._changed, "it would be synced, and copied if that fails"


def _fail_to_read(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("failures", [1, 2, 3, 4])
def test_messages_that_could_not_be_moved_durably_come_once(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """The clock was ahead, so they wait in the file of another minute than the one their delays ask for."""
    before = opened(directory, now_ms=DUE_MS)
    for number in range(3):
        before.add(b"body %d" % number, 1, DUE_MS, BUCKET_MS)
    before.close()
    (tmp_path / "topic").mkdir()
    rig = Rig(tmp_path, tmp_path / "topic")
    real, left = os.fdatasync, [True] * failures

    def fail(fd: int) -> None:
        if left:
            left.pop()
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        waiting = DeferredMessages(rig.shared, directory, Appends(), 1, NOW_MS)
        rig.settle()
        rig.shared.flush()
    assert waiting.count == 3
    again = opened(directory)
    assert len(_bodies(again)) == 3
    again.close()
    assert len(take_bodies(waiting, NOW_MS + BUCKET_MS)) == 3
    assert take_bodies(waiting, DUE_MS + 2 * BUCKET_MS) == []
    rig.crash()


class _KilledError(Exception):
    """Stands for the end of the process: nothing of it handles this."""


@pytest.mark.parametrize("starts_killed", [1, 2])
def test_messages_that_a_killed_start_had_moved_come_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch, starts_killed: int
) -> None:
    """The start was killed when they were in the right minute's file, and the other file did not say so yet."""

    def kill(bucket: DeferredBucket, entries: list[Entry]) -> None:
        raise _KilledError

    before = opened(directory, now_ms=DUE_MS)
    for number in range(3):
        before.add(b"body %d" % number, 1 + number, DUE_MS, BUCKET_MS)
    before.close()
    with monkeypatch.context() as patch:
        patch.setattr(DeferredBucket, "note_moved", kill)
        for start in range(starts_killed):
            with pytest.raises(_KilledError):
                opened(directory, now_ms=NOW_MS + start * BUCKET_MS)
    waiting = opened(directory)
    assert waiting.found == [1, 2, 3]
    assert waiting.count == 3
    again = opened(directory)
    assert len(take_bodies(again, NOW_MS + BUCKET_MS)) == 3
    assert take_bodies(again, DUE_MS + 2 * BUCKET_MS) == []


def test_two_messages_of_one_number_both_come(directory: Path, tmp_path: Path) -> None:
    """A file was moved away, so the number of its message was given again, and is put back."""
    before = opened(directory)
    before.add(b"away for a while", 1, NOW_MS, BUCKET_MS)
    before.close()
    (path,) = directory.glob("*.deferred")
    away = path.rename(tmp_path / path.name)
    meanwhile = opened(directory)
    meanwhile.add(b"another", 2, NOW_MS, 2 * BUCKET_MS)
    meanwhile.close()
    away.rename(path)
    waiting = opened(directory)
    assert waiting.found == [1, 1]
    assert take_bodies(waiting, NOW_MS + 3 * BUCKET_MS) == [b"away for a while", b"another"]
