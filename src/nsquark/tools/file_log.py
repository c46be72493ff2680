"""Writes the files of nsq_to_file: it names them, begins new ones, and makes what is written durable.

Everything here blocks; nsq_to_file calls it in threads, one call at a time for each log.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nsquark.base.logs import Logger
from nsquark.log.files import sync_directory, write_all

DIRECTORY_MODE: Final = 0o770
FILE_MODE: Final = 0o666
GZIP_WINDOW_BITS: Final = 31
"""Makes zlib use a window of 32 KiB, and write gzip's header and trailer."""
REV: Final = "<REV>"
DATETIME: Final = "<DATETIME>"
_DIRECTIVE: Final = re.compile("%(.)", re.DOTALL)
_LETTERS: Final = frozenset("aAbBdHImMpSyYzZ%")


class FileFailed(Exception):
    """Says that a file cannot be opened, written, synced or moved, so that nothing more may be acknowledged."""


@dataclass(frozen=True)
class Settings:
    """Holds the options for the files of one topic."""

    label: str
    """This is `[topic/channel]`, which begins log lines."""
    filename_format: str
    """This is the name with `<REV>` and `<DATETIME>` still in it."""
    datetime_format: str
    output_dir: str
    work_dir: str
    gzip: bool
    gzip_level: int
    rotate_size: int
    rotate_interval_s: float

    @property
    def moves_files(self) -> bool:
        return self.work_dir != self.output_dir

    @property
    def wants_new_files(self) -> bool:
        """Tells whether a file that is there already must not be appended to."""
        return self.gzip or self.rotate_interval_s > 0


def format_time(form: str, at: time.struct_time) -> str:
    """Formats a time as strftime does, with NSQ's letters only; others are copied as they are."""
    return _DIRECTIVE.sub(lambda found: time.strftime(found[0], at) if found[1] in _LETTERS else found[0], form)


class FileLog:
    """Writes messages as lines of files. After FileFailed it ends, and what was not synced is delivered again.

    * When `sync` has returned, every line before it is on the disk, in a file whose name is on the disk too.
    * No file is overwritten, or cut below what was synced: a file that is there is appended to or left alone.
    * A gzip file is a sequence of whole members, one for each sync.
    """

    def __init__(self, settings: Settings, logger: Logger) -> None:
        self._settings = settings
        self._logger = logger
        self._fd = -1
        self._path = Path()
        self._name = ""
        """This is the current file's name, with `<REV>` in it."""
        self._rev = 0
        self._opened_s = 0.0
        self._size = 0
        """This is the size that --rotate-size limits: what the file had when it was opened, and what was written since,
        before compression.
        """
        self._unsynced: list[bytes] = []
        """These lines become the gzip member that the next sync writes."""
        self._is_dirty = False

    # -- what nsq_to_file asks for -----------------------------------------------------------------------

    def append(self, bodies: Sequence[bytes]) -> None:
        """Writes a line for each body, and begins new files as rotation demands."""
        while bodies:
            if self._needs_new_file():
                self._begin_file()
            count = self._count_for_this_file(bodies)
            self._write(b"\n".join([*bodies[:count], b""]))
            bodies = bodies[count:]

    def sync(self) -> None:
        """Returns when all that was appended is on the disk."""
        if not self._is_dirty:
            return
        if self._unsynced:
            self._write_all(self._member(b"".join(self._unsynced)))
            self._unsynced.clear()
        with _explained("failed syncing messages"):
            os.fdatasync(self._fd)
        self._is_dirty = False

    def rotate_if_due(self, skips_empty_files: bool) -> None:
        """Begins a new file if it is time, without waiting for a message. If no file may be empty, it only ends the
        current one.
        """
        if self._needs_new_file():
            if skips_empty_files:
                self.close()
            else:
                self._begin_file()

    def close(self) -> None:
        """Syncs and closes the current file and, with a work-dir, moves it to the output-dir."""
        if self._fd < 0:
            return
        self.sync()
        label, path = self._settings.label, self._path
        with _explained(f"{label} unable to close {path}"):
            if self._settings.gzip and os.fstat(self._fd).st_size == 0:
                self._write_all(self._member(b""))  # an empty file is no gzip file
                os.fdatasync(self._fd)
            fd, self._fd = self._fd, -1
            os.close(fd)
        if self._settings.moves_files:
            with _explained(f"{label} unable to move file {path}"):
                self._hand_over(path, self._name, self._rev)

    # -- names and rotation ------------------------------------------------------------------------------

    def _name_now(self) -> str:
        settings = self._settings
        return settings.filename_format.replace(DATETIME, format_time(settings.datetime_format, time.localtime()))

    def _needs_new_file(self) -> bool:
        settings = self._settings
        if self._fd < 0:
            return True
        name = self._name_now()
        if name != self._name:
            self._logger.info(f"{settings.label} new filename {name}, rotating...")
            return True
        age_s = time.monotonic() - self._opened_s
        if 0 < settings.rotate_interval_s < age_s:
            self._logger.info(f"{settings.label} {age_s:.3f}s since last open, rotating...")
            return True
        return self._is_full()

    def _is_full(self) -> bool:
        limit = self._settings.rotate_size
        if not 0 < limit < self._size:
            return False
        self._logger.info(f"{self._settings.label} {self._path} currently {self._size} bytes (> {limit}), rotating...")
        return True

    def _count_for_this_file(self, bodies: Sequence[bytes]) -> int:
        """Returns how many of the lines go into this file: up to the one that brings it over its limit."""
        limit = self._settings.rotate_size
        if limit <= 0:
            return len(bodies)
        size = self._size
        for count, body in enumerate(bodies, 1):
            size += len(body) + 1
            if size > limit:
                return count
        return len(bodies)

    def _begin_file(self) -> None:
        self.close()
        name = self._name_now()
        self._rev = self._rev + 1 if name == self._name else 0
        self._name = name
        while not self._open(_with_rev(name, self._rev)):
            self._rev += 1
        self._opened_s = time.monotonic()

    def _open(self, name: str) -> bool:
        """Opens a file; it returns False if the name is taken by one that is full or must not be appended to."""
        settings = self._settings
        path = Path(settings.work_dir, name)
        with _explained(f"{settings.label} unable to create dir"):
            _make_directory(path.parent)
        if settings.moves_files:
            target = Path(settings.output_dir, name)
            with _explained(f"{settings.label} unable to stat output file {target}"):
                _make_directory(target.parent)
                if os.path.lexists(target):
                    self._logger.warning(f"{settings.label} output file already exists: {target}")
                    return False
        exclusive = os.O_EXCL if settings.wants_new_files else os.O_APPEND
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | exclusive | os.O_CLOEXEC, FILE_MODE)
        except FileExistsError:
            self._logger.warning(f"{settings.label} working file already exists: {path}")
            return False
        except OSError as error:
            raise FileFailed(f"{settings.label} unable to open {path}: {error.strerror}") from None
        self._fd, self._path = fd, path
        with _explained(f"{settings.label} unable to open {path}"):
            fcntl.flock(fd, fcntl.LOCK_SH)  # shows `recover` of other processes that the file is in use
            self._logger.info(f"{settings.label} opening {path}")
            self._size = os.fstat(fd).st_size
            sync_directory(path.parent)
        if self._is_full():
            os.close(fd)
            self._fd = -1
            return False
        self._end_broken_line()
        return True

    def _end_broken_line(self) -> None:
        """Ends a line that a killed process may have left half written, so that the next one is not joined to it."""
        if self._size and os.pread(self._fd, 1, self._size - 1) != b"\n":
            self._logger.warning(f"{self._settings.label} {self._path} ends in the middle of a line")
            self._write_all(b"\n")
            self._size += 1

    # -- writing -----------------------------------------------------------------------------------------

    def _write(self, lines: bytes) -> None:
        """Writes lines. A plain file has them at once, so that others can read them; a gzip file has them when their
        member is whole.
        """
        if self._settings.gzip:
            self._unsynced.append(lines)
        else:
            self._write_all(lines)
        self._size += len(lines)
        self._is_dirty = True

    def _write_all(self, data: bytes) -> None:
        start = os.fstat(self._fd).st_size
        try:
            write_all(self._fd, data)
        except OSError as error:
            self._cut_back(start, len(data))
            raise FileFailed(f"{self._settings.label} writing message to disk: {error.strerror}") from None

    def _cut_back(self, start: int, size: int) -> None:
        """Removes what a failed write left, unless another process writes to the file too."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if start < os.fstat(self._fd).st_size < start + size:
                os.ftruncate(self._fd, start)

    def _member(self, data: bytes) -> bytes:
        return zlib.compress(data, self._settings.gzip_level, GZIP_WINDOW_BITS)

    # -- the work-dir ------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Moves the files that a killed process left in the work-dir, unless another process writes to them."""
        if not self._settings.moves_files:
            return
        form = re.escape(self._settings.filename_format)
        pattern = form.replace(REV, r"-(?P<rev>\d{6,})", 1).replace(REV, r"-\d{6,}").replace(DATETIME, ".*")
        for path in sorted(Path(self._settings.work_dir).rglob("*")):
            name = str(path.relative_to(self._settings.work_dir))
            found = re.fullmatch(pattern, name)
            if found is not None and path.is_file() and not path.is_symlink():
                start, end = found.span("rev")
                with _explained(f"{self._settings.label} unable to move file {path}"):
                    self._hand_over_unless_used(path, f"{name[: start - 1]}{REV}{name[end:]}", int(found["rev"]))

    def _hand_over_unless_used(self, path: Path, name: str, rev: int) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        else:
            self._hand_over(path, name, rev)
        finally:
            os.close(fd)

    def _hand_over(self, source: Path, name: str, rev: int) -> None:
        """Moves a file to the output-dir by link and unlink, which never overwrites. If the name is taken, it tries the
        next `<REV>`.
        """
        label, output_dir = self._settings.label, self._settings.output_dir
        while True:
            target = Path(output_dir, _with_rev(name, rev))
            _make_directory(target.parent)
            if target.name == source.name and os.path.samefile(target.parent, source.parent):
                return  # both options name one directory, and the unlink would remove the only name of the file
            try:
                self._logger.info(f"{label} moving finished file {source} to {target}")
                os.link(source, target)
            except FileExistsError:
                if not os.path.samefile(source, target):  # else a process was killed between link and unlink
                    self._logger.warning(f"{label} destination file already exists: {target}")
                    rev += 1
                    continue
            sync_directory(target.parent)
            os.unlink(source)
            sync_directory(source.parent)
            return


def _with_rev(name: str, rev: int) -> str:
    return name.replace(REV, f"-{rev:06d}")


def _make_directory(path: Path) -> None:
    """Makes a directory and those above it, and makes their names durable."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir(DIRECTORY_MODE)
    sync_directory(path.parent)


@contextlib.contextmanager
def _explained(text: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileFailed(f"{text}: {error.strerror or error}") from None
