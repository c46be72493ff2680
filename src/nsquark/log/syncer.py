"""Makes changed files durable in the background, within the time that --sync-timeout promises."""

import contextlib
import ctypes
import os
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from nsquark.log.disk import DiskState
from nsquark.log.durable import Directory, DurableFile

SYNCFS_FILES_MIN = 16
"""With this many files to sync, one sync of the whole file system costs less than one for each."""
LAG_ALLOWED_S = 1.0
"""Syncs may fall this far behind --sync-timeout before publishers are slowed."""


class Runner(Protocol):
    """Does slow work in a thread, then calls `done` with its error, if any, in the event loop's thread."""

    def __call__(self, work: Callable[[], None], done: Callable[[Exception | None], None]) -> None: ...


class Syncer:
    """Makes changed files durable: one round at a time, for all files whose time has nearly come, the oldest first.

    Two syncs at once would only wait for each other: a device has one queue, a file system one journal.

    Many files are synced by one sync of their file system. The system tells of a write that failed in the background
    once to each descriptor that was open before: so that sync uses one that stays open, and after its first failure
    every file is synced by itself, since those that are not in this round would not hear of theirs.
    """

    def __init__(
        self,
        run: Runner,
        run_round: Runner,
        later: Callable[[float, Callable[[], None]], object],
        disk: DiskState,
        report: Callable[[str], None],
        observe: Callable[[float], None],
        timeout_s: float,
    ) -> None:
        self.run = run
        self.later = later
        self.disk = disk
        self.report = report
        self._run_round = run_round
        self._observe = observe
        self._timeout_s = timeout_s
        self._changed: dict[DurableFile, float] = {}
        self._hurried: dict[DurableFile, None] = {}
        self._untrusted: dict[DurableFile, None] = {}
        self._round_since_s = 0.0
        self._in_round: list[DurableFile] = []
        self._directories: dict[Path, Directory] = {}
        self._file_system_fd: int | None = None
        """It is -1 if it is not to be used: it could not be opened, or a sync of it failed."""
        self.is_behind = False
        """Tells whether syncs take so long that --sync-timeout is exceeded: publishers are to be slowed."""
        self.on_behind: Callable[[], None] = lambda: None

    def directory(self, path: Path) -> Directory:
        """Returns the one Directory of this path; its parent's entries are made durable too."""
        found = self._directories.get(path)
        if found is None:
            parent = self._directories.get(path.parent)
            if parent is None:
                parent = self._directories[path.parent] = Directory(path.parent, None)
                self._open_file_system(path.parent)
            found = self._directories[path] = Directory(path, parent)
        return found

    def forget_directory(self, path: Path) -> Directory:
        """Forgets a directory that was renamed, with those in it; returns the one above, which is to be synced."""
        for known in [known for known in self._directories if known == path or known.parent == path]:
            del self._directories[known]
        parent = self._directories[path.parent]
        parent.changed()
        return parent

    def _open_file_system(self, path: Path) -> None:
        """Opens the directory for `syncfs`, before anything is written; without it every file is synced by itself."""
        if self._file_system_fd is None:
            self._file_system_fd = -1
            with contextlib.suppress(OSError):
                self._file_system_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                weakref.finalize(self, os.close, self._file_system_fd)

    def add(self, file: DurableFile) -> None:
        self._changed[file] = time.monotonic()

    def mark_unsafe(self, file: DurableFile, error: Exception) -> None:
        """Leaves out of the rounds a file that is not to be synced, but to be written anew."""
        self.forget(file)
        self._untrusted[file] = None
        self.disk.mark_unsafe(file, error)

    def forget(self, file: DurableFile) -> None:
        """Forgets a file that is durable, or gone."""
        self._changed.pop(file, None)
        self._hurried.pop(file, None)
        if file in self._untrusted:
            del self._untrusted[file]
            self.disk.mark_safe(file)

    def hurry(self, file: DurableFile) -> None:
        self._hurried[file] = None
        self._begin()

    def flush(self) -> None:
        """Makes everything durable here and now, or reports what cannot be, for a clean stop without threads."""
        files = list(self._changed)
        if self._sync_all(files):
            for file in files:
                file.became_durable()
        for file in [*self._changed, *self._untrusted]:
            try:
                file.make_durable()
            except OSError as error:  # the next start finds what is written, as after a crash
                self.report(f"LOG({file.path}): not synced: {error}")

    @property
    def lag_s(self) -> float:
        """Tells for how long the oldest change has not been durable."""
        oldest = next(iter(self._changed.values()), 0.0)
        if self._in_round:
            oldest = min(oldest or self._round_since_s, self._round_since_s)
        return time.monotonic() - oldest if oldest else 0.0

    def tick(self) -> None:
        """Begins a round if it is time for one; to be called several times within --sync-timeout."""
        if self._changed and time.monotonic() - next(iter(self._changed.values())) >= self._timeout_s:
            self._begin()
        behind = self.lag_s > 2 * self._timeout_s + LAG_ALLOWED_S
        if behind != self.is_behind:
            self.is_behind = behind
            self.report(
                f"SYNC: the disk is {self.lag_s:.1f} s behind, --sync-timeout cannot be kept: publishers are slowed"
                if behind
                else "SYNC: the disk has caught up"
            )
            self.on_behind()

    def _begin(self) -> None:
        if self._in_round:
            return  # when it has ended, the next begins if it is due
        nearly_due_s = time.monotonic() - self._timeout_s / 2
        files = [
            file
            for file, since_s in self._changed.items()
            if file.sync_error is None and (since_s <= nearly_due_s or file in self._hurried)
        ]
        self._hurried.clear()
        if not files:
            return
        self._round_since_s = min(self._changed[file] for file in files)
        self._in_round = files
        extra = [(file, file.begin()) for file in files]
        for file in files:
            del self._changed[file]
        started_s = time.monotonic()
        errors: dict[DurableFile, Exception] = {}
        later: list[str] = []

        def work() -> None:
            failures = {} if self._sync_all(files) else _sync_each(files)
            errors.update(failures)
            for file, after in extra:
                if after is not None and file not in failures:
                    try:
                        after()
                    except OSError as error:  # an index: a start makes up for it
                        later.append(f"LOG({file.path}): its index could not be stored: {error}")

        def done(error: Exception | None) -> None:
            self._observe(time.monotonic() - started_s)
            for text in later:
                self.report(text)
            faults: list[Exception] = []
            for file in files:
                try:
                    file.ended(error or errors.get(file))
                except Exception as fault:  # of who waited for this file; the others are to end too
                    faults.append(fault)
            self._in_round = []  # not before: a round that a callback began would be forgotten here
            if self._hurried:
                self._begin()
            else:
                self.tick()
            if faults:
                raise faults[0]

        self._run_round(work, done)

    def _sync_all(self, files: list[DurableFile]) -> bool:
        """Makes many files durable by one sync of their file system; returns False if that was not possible."""
        fd = self._file_system_fd
        if len(files) < SYNCFS_FILES_MIN or fd is None or fd < 0 or _syncfs is None:
            return False
        try:
            names = [entry for file in files for entry in file.directory.unsynced()]
            device = os.fstat(fd).st_dev
            if not all(file.directory.is_on(device) for file in files):
                return False
        except OSError:
            return False
        if _syncfs(fd) != 0:
            self._file_system_fd = -1
            return False  # which file failed is told by syncing each
        for directory, changes in names:
            directory.became_durable(changes)
        return True


def _sync_each(files: Iterable[DurableFile]) -> dict[DurableFile, Exception]:
    errors: dict[DurableFile, Exception] = {}
    for file in files:
        try:
            file.sync()
        except OSError as error:
            errors[file] = error
    return errors


def _find_syncfs() -> Callable[[int], int] | None:
    """Returns the system's syncfs where it tells of failed writes, which is Linux from 5.8 on, or None."""
    system, release = os.uname().sysname, os.uname().release
    try:
        major, minor = (int(part) for part in release.split(".")[:2])
        function: Callable[[int], int] = ctypes.CDLL(None).syncfs
    except (ValueError, AttributeError, OSError):
        return None
    return function if system == "Linux" and (major, minor) >= (5, 8) else None


_syncfs = _find_syncfs()
