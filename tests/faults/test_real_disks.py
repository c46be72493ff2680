"""Runs the short form of real_disks.py; `make torture KINDS=ext4,xfs,full` runs the long one."""

import ctypes
import os
import random
from pathlib import Path

import pytest

from faults.real_disks import NotHere, check_full, check_shutdown, failing_disk, make_disk, make_read_only, mounted
from harness import Nsqd
from harness.nsqd import StartError
from log.rig import Rig
from nsquark.log.durable import DurableFile
from nsquark.log.syncer import SYNCFS_FILES_MIN

pytestmark = pytest.mark.ours


@pytest.mark.parametrize(("kind", "mode"), [("ext4", "default"), ("ext4", "sync-every=1"), ("xfs", "sync-every=1")])
def test_a_file_system_that_loses_its_memory(kind: str, mode: str) -> None:
    try:
        tally = check_shutdown(kind, mode, seed=3, steps=120)
    except NotHere as reason:
        pytest.skip(str(reason))
    assert tally.is_good, tally
    assert tally.acknowledged > 100, "hardly anything was published"


@pytest.mark.parametrize("kill", [False, True], ids=["SIGTERM", "kill -9"])
def test_a_disk_filled_to_the_last_byte_and_freed(kill: bool) -> None:
    try:
        tally = check_full("tmpfs", seed=4, kill=kill)
    except NotHere as reason:
        pytest.skip(str(reason))
    assert tally.is_good, tally
    assert tally.acknowledged > 100, "hardly anything was published"


def test_a_file_system_that_becomes_read_only(tmp_path: Path) -> None:
    """The kernel makes it so after an error: publishers are refused, consumers are served, nothing is lost."""
    try:
        image = make_disk(tmp_path, "ext4")
        with mounted(str(image), tmp_path, "-o", "loop,errors=remount-ro") as disk:
            data_path = disk / "data"
            data_path.mkdir()
            with Nsqd(data_path) as daemon:
                _publish_and_become_read_only(daemon, disk)
            with pytest.raises(StartError, match=r"failed to instantiate nsqd - .*Read-only file system"):
                daemon.start()
        with mounted(str(image), tmp_path, "-o", "loop") as disk, Nsqd(disk / "data") as daemon:
            shown = daemon.channel("t")
            assert (shown["depth"], shown["deferred_count"]) == (20, 1), "the disk did not take what was finished"
    except NotHere as reason:
        pytest.skip(str(reason))


def _publish_and_become_read_only(daemon: Nsqd, disk: Path) -> None:
    for path in ("/topic/create", "/channel/create"):
        assert daemon.post(path, topic="t", channel="ch").status == 200
    for number in range(20):
        assert daemon.post("/pub", b"%d" % number, topic="t").status == 200
    assert daemon.post("/pub", b"later", topic="t", defer=600_000).status == 200
    assert _sync_file_system(disk) == 0
    make_read_only(disk)
    for query in ({"topic": "t"}, {"topic": "new"}, {"topic": "t", "defer": 600_000}):
        refused = daemon.post("/pub", b"refused", **query)
        assert refused.status == 503 and "Read-only file system" in refused.text
    assert daemon.get("/ping").status == 500
    with daemon.connect() as consumer:
        consumer.subscribe("t", rdy=20)
        consumer.read_messages(20, finish=True)
        consumer.assert_usable()
    assert daemon.stop() == 0
    assert daemon.log.count("publishes are refused") == 1
    assert "Traceback" not in daemon.log and "INTERNAL" not in daemon.log


@pytest.mark.parametrize("seen_by", ["another program", "an earlier round"])
def test_a_write_that_failed_in_the_background(tmp_path: Path, seen_by: str) -> None:
    """The system tells of it once: who syncs the whole file system later is told that all is well."""
    try:
        with failing_disk(tmp_path) as (disk, fill, free):
            rig = Rig(disk, None)
            others = [_file(rig, disk / f"other{number}") for number in range(2 * SYNCFS_FILES_MIN)]
            victim = _file(rig, disk / "victim")
            _sync_together(rig, [*others, victim])
            fill()
            content = random.Random(1).randbytes(8 << 20)
            victim.write(content, 0)
            if seen_by == "another program":
                assert _sync_file_system(disk) != 0, "the disk took what it should not have had room for"
            else:
                for other in others:
                    other.write(b"b", 0)
                _sync_together(rig, others)
            free()
            told: list[DurableFile] = []
            victim.when_synced(lambda: told.append(victim))
            for other in others:
                other.write(b"c", 0)
            _sync_together(rig, [*others, victim])
            assert told == [victim]
            for file in (*others, victim):
                file.close()
            rig.crash()
            _forget_memory(disk)
            assert (disk / "victim").read_bytes() == content
    except NotHere as reason:
        pytest.skip(str(reason))


def _file(rig: Rig, path: Path) -> DurableFile:
    file = DurableFile(rig.shared.syncer, path)
    file.open(os.O_RDWR | os.O_CREAT)
    file.write(b"a", 0)
    return file


def _sync_together(rig: Rig, files: list[DurableFile]) -> None:
    """Syncs files in one round, as when their time has come."""
    for file in files:
        rig.shared.syncer._hurried[file] = None
    files[0].hurry()
    rig.settle()


def _sync_file_system(disk: Path) -> int:
    fd = os.open(disk, os.O_RDONLY)
    try:
        return int(ctypes.CDLL(None).syncfs(fd))
    finally:
        os.close(fd)


def _forget_memory(disk: Path) -> None:
    """Lets what is read from here on come from the disk."""
    for path in disk.iterdir():
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
