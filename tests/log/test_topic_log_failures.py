"""Checks a disk that is full or fails: publishers are told, nothing acknowledged is lost, and it recovers by itself."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from log.rig import Rig
from nsquark.log.topic_log import LogDiscarded
from nsquark.wire.batch_format import StoredBatch

MakeRig = Callable[..., Rig]


class Disk:
    """Stands between the log and the system: lets calls through, or fails them as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.write_error = 0
        self.short_by = 0
        self.sync_error = 0
        self.syncs = 0
        self._pwritev, self._fdatasync = os.pwritev, os.fdatasync
        monkeypatch.setattr(os, "pwritev", self.pwritev)
        monkeypatch.setattr(os, "fdatasync", self.fdatasync)

    def pwritev(self, fd: int, pieces: Sequence[bytes | memoryview], offset: int) -> int:
        raw = b"".join(bytes(piece) for piece in pieces)
        if self.short_by or self.write_error:
            os.pwrite(fd, raw[: max(0, len(raw) - (self.short_by or len(raw) // 2))], offset)
        if self.write_error:
            raise OSError(self.write_error, os.strerror(self.write_error))
        return self._pwritev(fd, pieces, offset) - self.short_by

    def fdatasync(self, fd: int) -> None:
        self.syncs += 1
        if self.sync_error:
            raise OSError(self.sync_error, os.strerror(self.sync_error))
        self._fdatasync(fd)

    def heal(self) -> None:
        self.write_error = self.short_by = self.sync_error = 0


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    yield Disk(monkeypatch)
    monkeypatch.undo()


@pytest.mark.parametrize("sync_every", [1, 2500])
@pytest.mark.parametrize("fault", ["ENOSPC", "EIO", "short by 1", "short by half"])
def test_a_failed_write_fails_exactly_its_publishers(
    make_rig: MakeRig, disk: Disk, fault: str, sync_every: int
) -> None:
    rig = make_rig(sync_every=sync_every)
    assert rig.publish(b"before").error is None
    if fault.startswith("short"):
        disk.short_by = 1 if fault.endswith("1") else 40
    else:
        disk.write_error = getattr(errno, fault)
    commit = rig.publish(b"lost", b"too")
    assert isinstance(commit.error, OSError)
    assert rig.shared.disk.error is not None
    assert rig.bodies() == [b"before"]
    disk.heal()
    assert rig.publish(b"after").error is None
    assert rig.shared.disk.error is None
    assert rig.bodies() == [b"before", b"after"]
    rig.crash()
    again = make_rig()
    assert again.bodies() == [b"before", b"after"]
    assert again.reports == []


def test_what_was_appended_behind_a_failing_write_fails_too(make_rig: MakeRig, disk: Disk) -> None:
    rig = make_rig(sync_every=1)
    rig.publish(b"before")
    disk.write_error = errno.EIO
    first = rig.append(b"first")
    rig.log.write()
    second = rig.append(b"second")
    assert second is not first
    rig.settle()
    assert first.error is not None
    assert second.error is not None
    disk.heal()
    assert rig.publish(b"after").error is None
    rig.crash()
    assert make_rig().bodies() == [b"before", b"after"]


class NoRoom:
    """Is a staged append, of numbers leased for it, that the disk has no room for."""

    bytes_max = 10_000

    def __init__(self, rig: Rig) -> None:
        self.first_seq, _ = rig.shared.sequences.lease(1)

    def write(self, fd: int, offset: int) -> list[StoredBatch]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_that_a_failed_append_began_is_not_used_for_lower_numbers(make_rig: MakeRig) -> None:
    """Files are in the order of their names: the numbers of what failed are not those of what comes next."""
    rig = make_rig(max_bytes_per_file=500)
    expected = [b"%d" % number + b"." * 100 for number in range(20)]
    for body in expected[:3]:
        assert rig.publish(body).error is None
    failing = rig.log.append_threaded(NoRoom(rig), 1)
    rig.log.write()
    rig.settle()
    assert failing.error is not None
    for body in expected[3:]:
        assert rig.publish(body).error is None
    assert rig.bodies() == expected
    names = [segment.base_seq for segment in rig.log.segments or ()]
    assert names == sorted(names)
    assert all(segment.base_seq <= segment.extents.first for segment in rig.log.segments or ())
    rig.crash()
    assert make_rig(max_bytes_per_file=500).bodies() == expected


def test_everything_that_waits_for_the_disk_fails_when_the_log_is_discarded(make_rig: MakeRig) -> None:
    rig = make_rig()
    assert rig.publish(b"before").error is None
    written = rig.log.append_threaded(NoRoom(rig), 1)
    rig.log.write()
    waiting, opened = rig.log.append_threaded(NoRoom(rig), 1), rig.append(b"opened")
    rig.log.discard()
    rig.settle()
    assert all(isinstance(commit.error, LogDiscarded) for commit in (written, waiting, opened))


def test_a_file_with_lower_numbers_than_its_name_is_put_in_order(make_rig: MakeRig) -> None:
    rig = make_rig(max_bytes_per_file=500)
    expected = [b"%d" % number + b"." * 100 for number in range(12)]
    for body in expected:
        rig.publish(body)
    rig.sync()
    segments = list(rig.log.segments or ())
    assert len(segments) >= 4
    beyond = segments[-1].base_seq + 5000
    rig.crash()
    segments[1].path.rename(segments[1].path.with_name(f"{beyond:020d}.log"))
    segments[1].index_path.unlink(missing_ok=True)
    again = make_rig(max_bytes_per_file=500)
    assert again.bodies() == expected
    names = [segment.base_seq for segment in again.log.segments or ()]
    assert names == sorted(names)
    assert all(segment.base_seq <= segment.extents.first for segment in again.log.segments or ())


@pytest.mark.parametrize("count", [1, 300])
def test_failures_over_several_chunks_leave_no_trace(make_rig: MakeRig, disk: Disk, count: int) -> None:
    rig = make_rig()
    rig.publish(*[b"b" * 500] * 40)
    for _ in range(3):
        disk.write_error = errno.ENOSPC
        assert rig.publish(*[b"x" * 500] * count).error is not None
        disk.heal()
        assert rig.publish(b"ok").error is None
    expected = [b"b" * 500] * 40 + [b"ok"] * 3
    assert rig.bodies() == expected
    assert not rig.log.is_congested
    rig.crash()
    assert make_rig().bodies() == expected


def test_with_sync_every_1_ok_means_synced(make_rig: MakeRig, disk: Disk) -> None:
    rig = make_rig(sync_every=1)
    before = disk.syncs
    commit = rig.publish(b"a")
    assert commit.error is None
    assert disk.syncs > before
    disk.sync_error = errno.EIO
    assert rig.publish(b"b").error is not None
    assert rig.publish(b"refused until the file is written anew").error is not None
    disk.heal()
    rig.settle()
    assert rig.publish(b"c").error is None
    assert rig.bodies() == [b"a", b"c"]
    rig.crash()
    assert make_rig().bodies() == [b"a", b"c"]


def test_a_failed_sync_loses_nothing_that_was_acknowledged(make_rig: MakeRig, disk: Disk) -> None:
    rig = make_rig(sync_every=3)
    rig.publish(b"a", b"b", b"c")
    disk.sync_error = errno.EIO
    assert rig.publish(b"d", b"e", b"f").error is None
    rig.sync()
    assert rig.shared.disk.error is not None
    assert any("sync failed" in report for report in rig.reports)
    assert rig.publish(b"x").error is not None, "neither synced nor written anew: nothing may be accepted"
    disk.heal()
    rig.settle()
    assert rig.publish(b"g").error is None
    assert rig.shared.disk.error is None
    assert rig.bodies() == [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]
    rig.crash()
    assert make_rig().bodies() == [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]


def test_syncs_come_after_so_many_messages(make_rig: MakeRig, disk: Disk) -> None:
    rig = make_rig(sync_every=10)
    rig.publish(*[b"a"] * 9)
    assert disk.syncs == 0
    rig.publish(b"a")
    assert disk.syncs == 1
    assert rig.log.segments is not None
    rig.sync()
    assert disk.syncs == 1, "nothing new to sync"
    rig.publish(b"a")
    rig.sync()
    assert disk.syncs == 2


_ON_A_SMALL_DISK = """
import subprocess, sys
from pathlib import Path
root = Path(sys.argv[1])
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", root]).returncode:
    sys.exit(77)
sys.path.insert(0, sys.argv[2])
from log.rig import Rig
(root / "ballast").write_bytes(bytes(16384))
rig = Rig(root, root / "topic")
accepted = 0
while rig.publish(b"x" * 5000).error is None:
    accepted += 1
    assert accepted < 100
assert accepted > 20, accepted
assert rig.shared.disk.error is not None
assert len(rig.bodies()) == accepted
for _ in range(3):
    assert rig.publish(b"x" * 5000).error is not None
rig.crash()
(root / "ballast").unlink()
again = Rig(root, root / "topic")
assert len(again.bodies()) == accepted, (len(again.bodies()), accepted)
assert again.reports == [], again.reports
assert again.publish(b"x").error is None
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    script = [sys.executable, "-c", _ON_A_SMALL_DISK, str(tmp_path), str(Path(__file__).parents[1])]
    try:
        done = subprocess.run(
            ["unshare", "--mount", "--map-root-user", *script], capture_output=True, text=True, timeout=60, check=False
        )
    except FileNotFoundError:
        pytest.skip("unshare is not installed, so a small disk cannot be mounted")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
