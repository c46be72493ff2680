"""Makes real file systems in a file: shut down as if the power had gone, or filled to the last byte.

    .venv/bin/python -m tests.faults.torture --kinds ext4,xfs,full --seconds 60 --seed 1

Both need root, loop devices and the programs that make file systems; without them `NotHere` says what is missing.
"""

import contextlib
import fcntl
import os
import random
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from faults.drain import bad_lines, start_and_judge
from faults.fates import COSTS_NOTHING, Accident, Book, Tally
from faults.script import Script, wait_for_syncs
from harness import Nsqd, eventually
from nsquark.broker.upkeep import TICK_S
from nsquark.log.syncer import LAG_ALLOWED_S

SYNC_TIMEOUT_S = 0.2
FLAGS = ("--max-bytes-per-file=32768", f"--sync-timeout={int(SYNC_TIMEOUT_S * 1000)}ms")
MODES: dict[str, tuple[str, ...]] = {"default": (), "sync-every=1": ("--sync-every=1",)}
UNSYNCED_S = 2 * SYNC_TIMEOUT_S + LAG_ALLOWED_S + TICK_S
"""Beyond this time an OK waits for its sync, as in rebuilt_disks.py."""
STEPS = (40, 200)
STEP_S = 0.008
DISK_MIB = {"ext4": 64, "xfs": 320}
"""File systems are as small as the programs that make them allow."""
FAILING_DISK_MIB = 32
MOUNT_COPY = {"ext4": "loop", "xfs": "loop,nouuid"}
SHUT_DOWN_NOW = 0x8004587D
"""This ioctl of xfs, which ext4 has too, stops the file system: nothing that is in memory reaches the disk."""
WITHOUT_LOG = 2
SMALL_DISK = "4m"
WELL_AGAIN_S = 60.0
FILL_STEPS = 400
UNMOUNT_TIMEOUT_S = 60.0
FILE_SIZES: tuple[tuple[str, ...], ...] = ((), ("--max-bytes-per-file=104857600",))


class NotHere(Exception):
    """This machine cannot do that; the text says why."""


def _run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise NotHere(f"{command[0]}: {done.stderr.strip()[-200:] or done.returncode}")


@contextlib.contextmanager
def mounted(what: str, directory: Path, *options: object) -> Iterator[Path]:
    if os.geteuid() != 0:
        raise NotHere("only root may mount a file system")
    target = directory / "mounted"
    target.mkdir(exist_ok=True)
    _run("mount", *options, what, target)
    try:
        yield target
    finally:
        _unmount(target)


def _unmount(target: Path) -> None:
    """Unmounts, though a process that has just ended may hold it for a moment: one only detached could not be
    mounted anew.
    """
    deadline = time.monotonic() + UNMOUNT_TIMEOUT_S
    while subprocess.run(["umount", str(target)], capture_output=True).returncode:
        if time.monotonic() > deadline:
            subprocess.run(["umount", "--lazy", str(target)], capture_output=True)
            raise OSError(f"{target} cannot be unmounted")
        time.sleep(0.05)


def make_disk(directory: Path, kind: str) -> Path:
    image = directory / "disk.image"
    with image.open("wb") as file:
        file.truncate(DISK_MIB[kind] << 20)
    if shutil.which(f"mkfs.{kind}") is None:
        raise NotHere(f"no mkfs.{kind}")
    _run(f"mkfs.{kind}", "-q", image)
    return image


@contextlib.contextmanager
def failing_disk(directory: Path) -> Iterator[tuple[Path, Callable[[], None], Callable[[], None]]]:
    """Makes an ext4 on a disk that can be made to refuse writes to new blocks, and to take them again.

    Its image is a file with holes in a small file system: what fills that makes the disk fail, in the background too.
    """
    below, above = directory / "below", directory / "above"
    below.mkdir()
    above.mkdir()
    with mounted("tmpfs", below, "-t", "tmpfs", "-o", f"size={FAILING_DISK_MIB}m") as backing:
        image = backing / "disk.image"
        with image.open("wb") as file:
            file.truncate(DISK_MIB["ext4"] << 20)
        # With a journal the whole file system would be read-only after the first failure.
        _run("mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=0", image)
        with mounted(str(image), above, "-o", "loop") as disk:
            yield disk, lambda: _take_all(backing, "ballast", leave_bytes=0), (backing / "ballast").unlink


def make_read_only(disk: Path) -> None:
    """Lets the kernel find an error in an ext4 that is mounted with errors=remount-ro."""
    device = subprocess.run(["findmnt", "-no", "SOURCE", str(disk)], capture_output=True, text=True).stdout.strip()
    trigger = Path("/sys/fs/ext4") / Path(device).name / "trigger_fs_error"
    try:
        trigger.write_text("a test\n")
    except OSError as error:
        raise NotHere(f"to give a file system an error is not permitted here: {error}") from error


def check_shutdown(kind: str, mode: str, seed: int, steps: int) -> Tally:
    """Runs the script, shuts the file system down at a random moment, mounts it again and starts nsqd."""
    flags = (*FLAGS, *MODES[mode])
    book = Book()
    with tempfile.TemporaryDirectory(prefix=kind) as name:
        directory = Path(name)
        image = make_disk(directory, kind)
        with mounted(str(image), directory, "-o", "loop") as disk:
            daemon = Nsqd(disk / "data", *flags)
            daemon.data_path.mkdir()
            _sync_directory(disk)
            script = Script(daemon, book, seed)
            try:
                daemon.start()
                script.set_up()
                script.run(steps, STEP_S)
                in_time_s = wait_for_syncs(daemon, UNSYNCED_S)
                at_s = time.time()
                _shut_down(disk)
            finally:
                daemon.kill()
                script.close()
        # Not the image itself: a process in another mount namespace may still hold the file system that was shut down.
        again = directory / "again.image"
        _run("cp", "--sparse=always", image, again)
        with mounted(str(again), directory, "-o", MOUNT_COPY[kind]) as disk:
            unsynced_s = UNSYNCED_S + script.slowest_answer_s + at_s - in_time_s
            grace_s = 0.0 if mode == "sync-every=1" else unsynced_s
            accident = Accident(at_s, grace_s, unsynced_s, may_double_deferred=True)
            tally = start_and_judge(Nsqd(disk / "data", *flags), book, accident)
    tally.faults = [f"{kind}, {mode}, seed {seed}, {steps} steps: {fault}" for fault in tally.faults]
    return tally


def _shut_down(disk: Path) -> None:
    fd = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, SHUT_DOWN_NOW, struct.pack("I", WITHOUT_LOG))
    except OSError as error:
        raise NotHere(f"this file system cannot be shut down: {error}") from error
    finally:
        os.close(fd)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _shutdown_rounds(kind: str, seed: int) -> Iterator[Tally]:
    rng = random.Random(seed)
    while True:
        for mode in MODES:
            yield check_shutdown(kind, mode, rng.getrandbits(32), rng.randint(*STEPS))


def ext4_rounds(seed: int) -> Iterator[Tally]:
    return _shutdown_rounds("ext4", seed)


def xfs_rounds(seed: int) -> Iterator[Tally]:
    return _shutdown_rounds("xfs", seed)


# -- a full disk -----------------------------------------------------------------------------------------


def check_full(kind: str, seed: int, *, kill: bool) -> Tally:
    """Publishes until nothing fits, takes the last byte, goes on; then there is room again, and nsqd starts anew."""
    book = Book()
    with tempfile.TemporaryDirectory(prefix="full") as name:
        directory = Path(name)
        if kind == "tmpfs":
            disk_of = mounted("tmpfs", directory, "-t", "tmpfs", "-o", f"size={SMALL_DISK}")
        else:
            disk_of = mounted(str(make_disk(directory, kind)), directory, "-o", "loop")
        with disk_of as disk:
            tally = _fill_and_free(disk, book, seed, kill)
    tally.faults = [f"full {kind}, {'kill -9' if kill else 'SIGTERM'}, seed {seed}: {fault}" for fault in tally.faults]
    return tally


def _fill_and_free(disk: Path, book: Book, seed: int, kill: bool) -> Tally:
    rng = random.Random(seed)
    daemon = Nsqd(disk / "data", *FLAGS, *rng.choice(FILE_SIZES))
    daemon.data_path.mkdir()
    faults: list[str] = []
    try:
        daemon.start()
        script = Script(daemon, book, seed, body_bytes=2000)
        script.set_up()
        script.run(30, STEP_S)
        ballast = _take_all(disk, "ballast", leave_bytes=rng.choice((0, 30_000, 200_000)))
        for _ in range(FILL_STEPS):
            script.run(1)
            if len(script.refusals) > 5:
                break
        rest = _take_all(disk, "rest", leave_bytes=0)
        script.run(60, STEP_S)
        ballast.unlink()
        rest.unlink()
        eventually(lambda: script.pub_all_topics() == 0 and daemon.get("/ping").text == "OK", WELL_AGAIN_S, 0.2)
        script.run(40, STEP_S)
        script.close()
        if not kill and daemon.stop() != 0:
            faults.append("SIGTERM: " + daemon.log[-300:])
        daemon.kill()
        faults += bad_lines(daemon.log)
        tally = start_and_judge(Nsqd(disk / "data", *FLAGS), book, COSTS_NOTHING)
    except AssertionError as error:
        tally = Tally(rounds=1, faults=[str(error)])
    finally:
        daemon.kill()
    tally.faults = faults + tally.faults
    return tally


def _take_all(disk: Path, name: str, leave_bytes: int) -> Path:
    """Writes a file until so many bytes are left; to the last one, if none are to be."""
    path = disk / name
    with path.open("wb", buffering=0) as file:
        for size in (65536, 4096, 512, 1):
            with contextlib.suppress(OSError):
                while os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize > leave_bytes or not leave_bytes:
                    if not file.write(bytes(size)):
                        break
            if leave_bytes:
                break
    return path


def full_rounds(seed: int) -> Iterator[Tally]:
    rng = random.Random(seed)
    while True:
        for kind in ("tmpfs", "ext4"):
            yield check_full(kind, rng.getrandbits(32), kill=rng.random() < 0.5)
