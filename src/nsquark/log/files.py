"""Has small functions about files that the log's parts share."""

import contextlib
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
PAGE_BYTES = 4096
"""What a disk fails to read is left out in pieces of this size."""
READ_BYTES = 1 << 20
READ_PAUSE_S = 0.02
READ_TRIES = 50
"""A page that the disk fails to read is tried so many times, READ_PAUSE_S apart: for a second."""
READ_PAUSES_MAX = 150
"""Pages are waited for so many times in all in one process, so that a disk with many bad sectors holds no start."""
BAD_SUFFIX = ".bad"
"""Ends the names of files, and of copies of bytes, that could not be used and are left for people to look at."""
AWAY = (errno.EIO, errno.EROFS, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.ETIMEDOUT)
"""These errors of a write say that the disk does not answer, or that its file system has given it up."""
PROBE_NAME = "probe.tmp"
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""These errors say that a file cannot have a second name: its file system has no hard links, or no more of them."""


def names_like(directory: Path, *patterns: str) -> list[Path]:
    """Lists the files of a directory whose names match one of the patterns, in order, or raises OSError.

    `Path.glob` would say that there are none.
    """
    return [directory / name for name in sorted(os.listdir(directory)) if any(fnmatchcase(name, p) for p in patterns)]


def sync_directory(path: Path) -> None:
    """Makes the names of the files in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, data: bytes | bytearray, *, sync: bool = True) -> None:
    """Replaces a file as a whole: after a crash it has the old content or the new one.

    An error may come from the sync of the directory: then the file is the new one, and may be the old one again after
    a loss of power.
    """
    _write_atomically(path, (data,), sync)


def _write_atomically(path: Path, pieces: Iterable[bytes | bytearray], sync: bool) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        try:
            for piece in pieces:
                write_all(fd, piece)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)


def write_all(fd: int, data: bytes | bytearray | memoryview, offset: int | None = None) -> None:
    """Writes everything, or raises: a short write means that the disk is full."""
    written = os.write(fd, data) if offset is None else os.pwrite(fd, data, offset)
    if written == len(data):
        return
    # The view is released also if the write fails: a stored error would keep it alive, and `data` could not grow.
    with memoryview(data) as view:
        while written < len(view):
            with view[written:] as rest:
                written += os.write(fd, rest) if offset is None else os.pwrite(fd, rest, offset + written)


_pauses = iter(range(READ_PAUSES_MAX))


def _patiently(read: Callable[[], bytes]) -> bytes:
    """Reads something; a disk that fails to read is asked again, since what is left out does not come back."""
    for _ in range(READ_TRIES - 1):
        try:
            return read()
        except OSError as error:
            if error.errno != errno.EIO or next(_pauses, None) is None:
                raise
        time.sleep(READ_PAUSE_S)
    return read()


def read_surviving(path: Path, report: Callable[[str], None]) -> tuple[bytearray, bool]:
    """Returns what can be read of a file, with zeros for pages that cannot, and whether all of it could.

    A file that cannot be read as a whole is reported, and gets a second name under which it stays: the caller checks
    what it got by its checksums, and replaces the file. A file that cannot be opened may be whole: that is raised, as
    is any error of a read but EIO.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data, lost_bytes = bytearray(), 0
        for piece, missing in _readable_pieces(fd, path):
            data += piece
            lost_bytes += missing
    except OSError as error:
        error.filename = str(path)  # the system does not name an open file in its errors
        raise
    finally:
        os.close(fd)
    if lost_bytes:
        reason = os.strerror(errno.EIO)
        report(f"FILE({path}): {lost_bytes} of {len(data)} bytes cannot be read: {reason}; {_name_twice_text(path)}")
    return data, not lost_bytes


def set_aside(path: Path) -> Path:
    """Renames a file to one that nothing reads; returns its new name."""
    aside = _name_aside(path)
    if aside.exists():
        path.unlink()  # rename(2) does nothing where both names are of one file
    else:
        os.replace(path, aside)
    return aside


def name_twice(path: Path) -> Path:
    """Gives a file a second name, which nothing reads, and returns it. The file has its own name too until a new file
    takes that, so that a crash in between costs nothing.

    Where no file can have two names, a copy of what can be read gets the second one, durably.
    """
    aside = _name_aside(path)
    if not aside.exists():
        try:
            os.link(path, aside)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            return _copy_aside(path)
    return aside


def _copy_aside(path: Path) -> Path:
    """Copies what can be read of a file to a name that nothing reads, unless there is such a copy already."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        aside = next(aside for aside in _names_aside(path) if not aside.exists() or _is_copy(aside, fd))
        if not aside.exists():
            _write_atomically(aside, (piece for piece, _ in _readable_pieces(fd, path)), sync=True)
        return aside
    finally:
        os.close(fd)


def _is_copy(path: Path, original: int) -> bool:
    if path.stat().st_size != os.fstat(original).st_size:
        return False
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pairs = zip(_readable_pieces(original, path), _readable_pieces(fd, path), strict=False)
        return all(readable == copied for (readable, _), (copied, _) in pairs)
    finally:
        os.close(fd)


def _name_aside(path: Path) -> Path:
    """Returns a name for a file to set aside: one that is free, or that the same file has already."""
    return next(aside for aside in _names_aside(path) if not aside.exists() or aside.samefile(path))


def _names_aside(path: Path) -> Iterator[Path]:
    yield path.with_name(path.name + BAD_SUFFIX)
    for number in itertools.count(2):
        yield path.with_name(f"{path.name}.{number}{BAD_SUFFIX}")


def _name_twice_text(path: Path) -> str:
    try:
        return f"it stays as {name_twice(path).name}"
    except OSError as error:
        return f"it could not be set aside: {error}"


def _readable_pieces(fd: int, path: Path) -> Iterator[tuple[bytes, int]]:
    """Yields a file piece by piece, each with the number of its bytes that cannot be read, and are zeros."""
    offset = 0
    while offset < os.fstat(fd).st_size:
        piece, missing = read_readable(fd, READ_BYTES, offset, path)
        if not piece:
            return  # it got shorter meanwhile
        yield piece, missing
        offset += len(piece)


def read_readable(fd: int, size: int, offset: int, path: Path) -> tuple[bytes, int]:
    """Returns what can be read, and how many bytes could not: those are zeros, which no checksum accepts as content.

    What is left out does not come back. So it raises OSError if the disk of the file, whose `path` this is, takes no
    write either: then the disk is away, and nothing is known of its pages.
    """
    try:
        return os.pread(fd, size, offset), 0
    except OSError as error:
        if error.errno != errno.EIO:
            raise
    pieces: list[bytes] = []
    unreadable = 0
    end = min(offset + size, os.fstat(fd).st_size)
    while offset < end:
        wanted = min(PAGE_BYTES - offset % PAGE_BYTES, end - offset)
        try:
            piece = _patiently(lambda: os.pread(fd, wanted, offset))  # noqa: B023  (called at once)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            piece = bytes(wanted)
            unreadable += wanted
        if not piece:
            break  # it became shorter meanwhile
        pieces.append(piece)
        offset += len(piece)
    if unreadable:
        _require_answer(path)
    return b"".join(pieces), unreadable


def _require_answer(path: Path) -> None:
    """Raises OSError if nothing can be written durably beside a file, for want of a disk. A full one answers."""
    probe = path.with_name(PROBE_NAME)
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            os.write(fd, bytes(PAGE_BYTES))
            os.fsync(fd)
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                probe.unlink()
    except OSError as error:
        if error.errno in AWAY:
            reason = f"cannot be read, and its disk cannot be written to: {error.strerror}"
            raise OSError(errno.EIO, reason, str(path)) from error
