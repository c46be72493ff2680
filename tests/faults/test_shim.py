"""Checks the instruments: what is recorded is what happened, rules and clocks act, disks are rebuilt as the models
say.
"""

import errno
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faults.crash_states import Disk
from faults.shim import DELAY, KILL, SHORT_WRITE, Rule, Shim
from harness import Nsqd

pytestmark = pytest.mark.ours


class Rig:
    """Runs small programs under the shim, on a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        self.root.mkdir()
        self.shim = Shim(directory, self.root, record=True)
        self.disk = Disk(self.root)
        self._applied = 0

    def run(self, program: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", "import os, time\n" + program],
            cwd=self.root,
            env=self.shim.environment,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip() + (f"exit {done.returncode} {done.stderr[-500:]}" if done.returncode else "")

    def left(self, model: str, seed: int = 0) -> dict[str, bytes]:
        """Returns the files that a power cut at the end may leave, by this model."""
        calls = list(self.shim.trace())
        self.disk.apply(calls[self._applied :])
        self._applied = len(calls)
        target = self.root.parent / f"left.{model}.{seed}"
        self.disk.rebuild(target, model, random.Random(seed))
        files = [path for path in target.rglob("*") if path.is_file()]
        return {str(path.relative_to(target)): path.read_bytes() for path in files}


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


WRITE = """
def write(path, data, sync=False, flags=os.O_WRONLY | os.O_CREAT):
    fd = os.open(path, flags)
    os.write(fd, data)
    if sync:
        os.fsync(fd)
    os.close(fd)
def sync_directory(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
"""


def test_a_name_is_kept_by_a_sync_of_its_directory_and_content_by_one_of_the_file(rig: Rig) -> None:
    rig.run(WRITE + "write('a', b'synced', True); write('b', b'not'); sync_directory('.'); write('c', b'later', True)")
    assert rig.left("posix-min") == {"a": b"synced", "b": b""}
    assert rig.left("journal") == {"a": b"synced", "b": b"not", "c": b"later"}


def test_a_new_directory_needs_a_sync_of_its_parent(rig: Rig) -> None:
    rig.run(WRITE + "os.makedirs('x/y'); write('x/y/f', b'1', True); sync_directory('x/y'); sync_directory('.')")
    assert rig.left("posix-min") == {}
    rig.run(WRITE + "sync_directory('x')")
    assert rig.left("posix-min", 1) == {"x/y/f": b"1"}


def test_renames_removals_and_cuts_are_undone_where_nothing_was_synced(rig: Rig) -> None:
    rig.run(WRITE + "write('a', b'old', True); write('b', b'gone', True); sync_directory('.')")
    rig.run(WRITE + "write('t', b'new', True); os.replace('t', 'a'); os.unlink('b')")
    assert rig.left("posix-min") == {"a": b"old", "b": b"gone"}
    assert rig.left("journal") == {"a": b"new"}
    rig.run(WRITE + "sync_directory('.'); os.truncate('a', 1)")
    assert rig.left("posix-min", 1) == {"a": b"new"}
    assert rig.left("journal", 1) == {"a": b"n"}


def test_any_part_of_what_was_not_synced_may_be_there(rig: Rig) -> None:
    """Pages of one write reach the disk one by one; what is missing between them is zeros."""
    rig.run(WRITE + "write('f', b's' * 100, True); sync_directory('.'); write('f', b'x' * 50000, flags=os.O_WRONLY)")
    contents = [rig.left("posix", seed)["f"] for seed in range(30)]
    assert b"s" * 100 in contents and b"x" * 50000 in contents
    assert any(b"\0" in content and b"x" in content for content in contents)
    assert all(set(content) <= set(b"sx\0") and len(content) >= 100 for content in contents)


def test_what_a_failed_sync_should_have_covered_is_not_covered_by_the_next(rig: Rig) -> None:
    rig.shim.set_rules(Rule("sync", "f", errno.EIO, times=1))
    program = """
fd = os.open('f', os.O_WRONLY | os.O_CREAT)
sync_directory('.')
os.write(fd, b'one')
try:
    os.fsync(fd)
except OSError as error:
    print(error.errno)
os.fsync(fd)
os.write(fd, b'two')
os.fsync(fd)
"""
    assert rig.run(WRITE + program) == str(errno.EIO)
    assert rig.left("posix-min") == {"f": b"\0\0\0two"}
    assert rig.left("journal") == {"f": b"onetwo"}


def test_rules_fail_shorten_delay_and_kill(rig: Rig) -> None:
    rig.shim.set_rules(
        Rule("write", "*.a", errno.ENOSPC, after=1, times=1),
        Rule("write", "*.b", SHORT_WRITE),
        Rule("sync", "*.a", DELAY, delay_s=0.3),
        Rule("rename", "*.c", KILL),
        Rule("read", "*.a", errno.EIO, span=(4096, 8192)),
    )
    program = """
fd = os.open('1.a', os.O_RDWR | os.O_CREAT)
for _ in range(3):
    try:
        print(os.pwrite(fd, b'12345678', 0))
    except OSError as error:
        print(error.strerror)
begun = time.monotonic()
os.fdatasync(fd)
print(time.monotonic() - begun >= 0.3)
print(os.write(os.open('2.b', os.O_WRONLY | os.O_CREAT), b'12345678'))
print(len(os.pread(fd, 4096, 0)))
try:
    os.pread(fd, 10, 5000)
except OSError as error:
    print(error.strerror, flush=True)
os.rename('1.a', '2.c')
"""
    shown = "8\nNo space left on device\n8\nTrue\n4\n8\nInput/output error"
    assert rig.run(program) == f"{shown}exit -9 "
    assert [rig.shim.fired(number) for number in range(5)] == [1, 1, 1, 1, 1]
    assert rig.shim.matched(0) == 3
    assert sorted(path.name for path in rig.root.iterdir()) == ["1.a", "2.b"]


def test_the_clock_is_set_while_it_runs_and_files_elsewhere_are_left_alone(rig: Rig, tmp_path: Path) -> None:
    rig.shim.set_clock(-3600)
    rig.shim.set_rules(Rule("write", "*", errno.EIO))
    shown = rig.run(f"print(time.time()); open({str(tmp_path / 'elsewhere')!r}, 'w').write('x')")
    assert -3700 < float(shown) - time.time() < -3500
    assert (tmp_path / "elsewhere").read_text() == "x"


def test_the_trace_of_nsqd_tells_all_that_is_on_its_disk(tmp_path: Path) -> None:
    """Whatever the shim does not see would be missing in every rebuilt disk."""
    data_path = tmp_path / "data"
    data_path.mkdir()
    before = Disk(data_path)
    shim = Shim(tmp_path, data_path, record=True)
    daemon = Nsqd(data_path, "--max-bytes-per-file=8192", "--sync-timeout=100ms", environment=shim.environment)
    with daemon:
        consumer = daemon.connect().subscribe("t", "ch", rdy=100)
        publisher = daemon.connect()
        for number in range(40):
            publisher.publish("t", *[b"%d" % number + b"." * 300] * 2)
        for message in consumer.read_messages(60):
            consumer.FIN(message.id)
        publisher.DPUB("t", 600_000, b"later")
        publisher.expect_ok()
        for path, body in (("/log/stage", b"\0\0\0\1\0\0\0\1x"), ("/log/append", b"")):
            assert daemon.post(path, body, topic="t", token="t", part=0).status == 200
        assert daemon.post("/topic/create", topic="other").status == 200
        assert daemon.post("/topic/delete", topic="other").status == 200
        assert daemon.stop() == 0
    calls = list(shim.trace())
    before.apply(calls)
    before.rebuild(tmp_path / "journal", "journal", random.Random(1))
    compared = subprocess.run(["diff", "-r", data_path, tmp_path / "journal"], capture_output=True, text=True)
    assert compared.returncode == 0, compared.stdout
    assert {"create", "mkdir", "write", "sync", "rename", "unlink"} <= {call.kind for call in calls}
