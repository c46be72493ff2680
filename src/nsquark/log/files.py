"""Small things about files that the log's parts share."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
PAGE_BYTES = 4096
READ_BYTES = 1 << 20
BAD_SUFFIX = ".bad"
"""Of files and bytes that could not be used, kept for a look at them."""


def sync_directory(path: Path) -> None:
    """Makes the names of the files in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, data: bytes | bytearray, *, sync: bool = True) -> None:
    """Replaces a file as a whole: after a crash it has the old content or the new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        try:
            write_all(fd, data)
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
    view = memoryview(data)
    while view:
        written = os.write(fd, view) if offset is None else os.pwrite(fd, view, offset)
        view = view[written:]
        if offset is not None:
            offset += written


def read_surviving(path: Path, report: Callable[[str], None]) -> tuple[bytearray, bool]:
    """What can be read of a file, with zeros for pages that cannot, and whether all of it could.

    A file that cannot be read as a whole is reported and set aside, so that nothing overwrites it: the caller checks
    what it got by its checksums, and writes a new file. FileNotFoundError is raised as it is.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        report(f"FILE({path}): cannot be read: {error}; {_set_aside_text(path)}")
        return bytearray(), False
    try:
        data, lost_bytes, error_text = _read_pages(fd)
    finally:
        os.close(fd)
    if error_text:
        report(f"FILE({path}): {lost_bytes} of {len(data)} bytes cannot be read: {error_text}; {_set_aside_text(path)}")
    return data, not error_text


def set_aside(path: Path) -> Path:
    """Renames a file to one that nothing reads; its new name."""
    aside = path.with_name(path.name + BAD_SUFFIX)
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.{number}{BAD_SUFFIX}")
    os.replace(path, aside)
    return aside


def _set_aside_text(path: Path) -> str:
    try:
        return f"it is now {set_aside(path).name}"
    except OSError as error:
        return f"it could not be set aside: {error}"


def _read_pages(fd: int) -> tuple[bytearray, int, str]:
    """A whole file; where a large piece cannot be read, page by page. How many bytes are missing, and why."""
    size = os.fstat(fd).st_size
    data = bytearray(size)
    lost_bytes, reason, pos, piece = 0, "", 0, READ_BYTES
    while pos < size:
        want = min(piece, size - pos)
        try:
            read = os.pread(fd, want, pos)
        except OSError as error:
            if want > PAGE_BYTES:
                piece = PAGE_BYTES
                continue
            read, reason = bytes(want), str(error)
            lost_bytes += want
        if not read:  # it got shorter meanwhile
            break
        data[pos : pos + len(read)] = read
        pos += len(read)
        if pos % READ_BYTES == 0:
            piece = READ_BYTES
    return data[:pos], lost_bytes, reason
