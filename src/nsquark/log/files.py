"""Small things about files that the log's parts share."""

import os
import threading
from pathlib import Path

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


def sync_directory(path: Path) -> None:
    """Makes the names of the files in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, data: bytes, *, sync: bool = True) -> None:
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


def write_all(fd: int, data: bytes | memoryview, offset: int | None = None) -> None:
    """Writes everything, or raises: a short write means that the disk is full."""
    view = memoryview(data)
    while view:
        written = os.write(fd, view) if offset is None else os.pwrite(fd, view, offset)
        view = view[written:]
        if offset is not None:
            offset += written
