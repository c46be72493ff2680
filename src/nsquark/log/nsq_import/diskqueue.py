"""Reads the disk queues that NSQ's nsqd left, and writes those that it is to find.

A queue named `base` is `base.diskqueue.meta.dat`, three lines of text:

    depth LF read file,read position LF write file,write position LF

and the numbered files `base.diskqueue.000000.dat` with records, all numbers big-endian:

    i32 size of the rest | i64 timestamp ns | u16 attempts | 16 bytes id, ascii hex | body

The meta file may be older than the data after a crash. So reading starts where it says, but ends where the files end:
whole records behind the recorded write position are good. Files that NSQ found damaged end in `.bad`; it never reads
them again, and neither do we.
"""

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from nsquark.log.files import FILE_MODE

READ_BYTES = 1 << 20
WRITE_BYTES = 1 << 20
FILE_BYTES_MAX = 100 << 20
"""A file that is written is not made longer than this, as by NSQ's default."""

_FILE_NAME = re.compile(r"(?P<base>.+)\.diskqueue\.(?P<kind>\d{6,}|meta)\.dat(?P<rest>\.bad|\.\d+\.tmp|)", re.DOTALL)
_META = re.compile(rb"(-?\d+)\n(\d+),(\d+)\n(\d+),(\d+)\n?")
_RECORD = struct.Struct(">iqH16s")
QUEUED_OVERHEAD_BYTES = _RECORD.size
"""A message costs this many bytes in a disk queue beside its body."""
_ID_AND_BEFORE_BYTES = _RECORD.size - 4
"""A record's size counts this many bytes besides the body."""
_LOOKS_LIKE_A_RECORD = re.compile(rb"(?=[\x00-\x7f].{3}[\x0d-\x39].{7}.{2}[0-9a-f]{16})", re.DOTALL)
"""Finds a record behind damage: a size, a time between 1999 and 2100, attempts, an id."""

Record = tuple[int, int, int, int]
"""Has position and size of a message's body in the piece, its timestamp in ns and its attempts."""


class Piece(NamedTuple):
    """Has some bytes of a file, and the whole records in them."""

    data: bytearray
    records: list[Record]
    end: int


@dataclass(slots=True)
class DiskQueue:
    """Knows the files of a queue, and after `pieces` was read to its end, what was wrong with them."""

    base: str
    data_files: dict[int, Path] = field(default_factory=dict)
    other_files: list[Path] = field(default_factory=list)
    depth: int = 0
    read_file: int = 0
    read_position: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[Path]:
        return [*self.data_files.values(), *self.other_files]

    @property
    def unread_bytes(self) -> int:
        sizes = {number: path.stat().st_size for number, path in self._unread()}
        if self.read_file in sizes:
            sizes[self.read_file] = max(0, sizes[self.read_file] - self.read_position)
        return sum(sizes.values())

    def pieces(self) -> Iterator[Piece]:
        """Yields all unread records in order; `problems` tells of bytes between them that are none."""
        found = 0
        for number, path in self._unread():
            for piece in self._read(path, self.read_position if number == self.read_file else 0):
                found += len(piece.records)
                yield piece
        if found < self.depth:
            self.problems.append(f"{self.base}: {found} messages found of {self.depth} that the meta file names")

    def _unread(self) -> list[tuple[int, Path]]:
        return sorted((number, path) for number, path in self.data_files.items() if number >= self.read_file)

    def _load_meta(self, path: Path) -> None:
        match = _META.fullmatch(path.read_bytes())
        if match is None:
            self.problems.append(f"{path.name} is damaged: all of its queue is taken, messages may come again")
            return
        self.depth, self.read_file, self.read_position, _, _ = map(int, match.groups())

    def _read(self, path: Path, offset: int) -> Iterator[Piece]:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            end = os.fstat(fd).st_size
            want = READ_BYTES
            while offset < end:
                data = bytearray(min(want, end - offset))
                del data[os.preadv(fd, [data], offset) :]
                records, used, needed = _parse(data, end - offset)
                if records:
                    yield Piece(data, records, used)
                offset += used
                if needed < 0:
                    after = _find_record(fd, offset + 1, end)
                    self.problems.append(f"{path.name}: bytes {offset} to {after} are damaged and left out")
                    offset = after
                want = max(READ_BYTES, needed)
        finally:
            os.close(fd)


class DiskQueueWriter:
    """Writes a queue anew. A queue without messages has no files.

    NSQ reads a file to its end if that is not the one it writes to, whatever its --max-bytes-per-file. So the meta file
    says that writing goes on in a file behind the last, which is empty.
    """

    def __init__(self, directory: Path, base: str, file_bytes_max: int = FILE_BYTES_MAX) -> None:
        self.depth = 0
        self.message_bytes_max = 0
        self._directory = directory
        self._base = base
        self._file_bytes_max = file_bytes_max
        self._file: BinaryIO | None = None
        self._files = 0
        self._size = 0

    def add(self, timestamp_ns: int, attempts: int, message_id: bytes, body: bytes | memoryview) -> None:
        size = _RECORD.size + len(body)
        if self._file is None or self._size + size > self._file_bytes_max:
            self._file = self._next_file()
        self._file.write(_RECORD.pack(_ID_AND_BEFORE_BYTES + len(body), timestamp_ns, attempts, message_id))
        self._file.write(body)
        self._size += size
        self.depth += 1
        self.message_bytes_max = max(self.message_bytes_max, len(body))

    def finish(self) -> None:
        """Writes the rest; everything is on disk when this returns, but for the names in the directory."""
        if self._file is None:
            return
        self._next_file().close()
        meta = f"{self.depth}\n0,0\n{self._files - 1},0\n"
        with self._open("meta") as file:
            file.write(meta.encode())
            _sync(file)

    def _next_file(self) -> BinaryIO:
        if self._file is not None:
            _sync(self._file)
            self._file.close()
        self._files += 1
        self._size = 0
        return self._open(f"{self._files - 1:06d}")

    def _open(self, kind: str) -> BinaryIO:
        path = self._directory / f"{self._base}.diskqueue.{kind}.dat"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        return os.fdopen(fd, "wb", WRITE_BYTES)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def find_queues(directory: Path) -> dict[str, DiskQueue]:
    """Finds all queues of which any file lies in the directory, by name."""
    queues: dict[str, DiskQueue] = {}
    for path in sorted(directory.iterdir()):
        match = _FILE_NAME.fullmatch(path.name)
        if match is None or not path.is_file():
            continue
        queue = queues.setdefault(match["base"], DiskQueue(match["base"]))
        if match["kind"] != "meta" and not match["rest"]:
            queue.data_files[int(match["kind"])] = path
            continue
        queue.other_files.append(path)
        if match["rest"] == ".bad":
            queue.problems.append(f"{path.name} was set aside by NSQ as damaged: its messages are left out")
        elif not match["rest"]:
            queue._load_meta(path)
    return queues


def _parse(data: bytearray, left: int) -> tuple[list[Record], int, int]:
    """Reads the whole records at the start of `data`, of which `left` bytes are left in the file. Returns them, where
    they end, and how many bytes the next record needs: 0 if that is not known, -1 if there is none.
    """
    records: list[Record] = []
    pos, end = 0, len(data)
    while pos + _RECORD.size <= end:
        size, timestamp_ns, attempts, message_id = _RECORD.unpack_from(data, pos)
        after = pos + 4 + size
        if size < _ID_AND_BEFORE_BYTES or after > left or not message_id.isalnum():
            return records, pos, -1
        if after > end:
            return records, pos, 4 + size
        records.append((pos + _RECORD.size, size - _ID_AND_BEFORE_BYTES, timestamp_ns, attempts))
        pos = after
    is_torn = pos < end == left
    return records, pos, -1 if is_torn else 0


def _find_record(fd: int, offset: int, end: int) -> int:
    """Returns where the next record starts, or the file's end if there is none."""
    while offset + _RECORD.size <= end:
        data = os.pread(fd, READ_BYTES, offset)
        for match in _LOOKS_LIKE_A_RECORD.finditer(data):
            at = match.start()
            size = int.from_bytes(data[at : at + 4], "big")
            if size >= _ID_AND_BEFORE_BYTES and offset + at + 4 + size <= end:
                return offset + at
        offset += max(1, len(data) - _RECORD.size + 1)
    return end
