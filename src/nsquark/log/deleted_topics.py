"""Remembers what was in a topic when it was deleted, so that a reader can be told how much it has lost.

A file for each name, of its last incarnation: a small document with the sequence numbers that existed. It is a help and
no promise: it is not synced, one that cannot be written is left out, and only the latest DELETED_MAX are kept.
"""

import contextlib
from pathlib import Path

import msgspec

from nsquark.kernel.extents import Extents
from nsquark.log.files import DIRECTORY_MODE, write_atomically

DELETED_MAX = 1000
RANGES_MAX = 100_000
"""The most ranges of sequence numbers in one document: a log with more gaps leaves none."""


class _Deleted(msgspec.Struct):
    id: str
    ranges: list[tuple[int, int]]


class DeletedTopics:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def note(self, name: str, topic_id: str, extents: Extents) -> None:
        """Notes what is in a topic that is being deleted."""
        ranges = extents.ranges()
        if len(ranges) > RANGES_MAX:
            return
        with contextlib.suppress(OSError):
            self._directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
            write_atomically(self._path(name), msgspec.json.encode(_Deleted(topic_id, ranges)), sync=False)
            self._drop_oldest()

    def count_from(self, name: str, topic_id: str, seq: int) -> int | None:
        """Counts the messages from `seq` on that went with this incarnation of a topic; None if that is not known."""
        try:
            found = msgspec.json.decode(self._path(name).read_bytes(), type=_Deleted)
        except (OSError, msgspec.MsgspecError):
            return None
        if found.id != topic_id:
            return None
        return sum(max(0, first + count - max(first, seq)) for first, count in found.ranges)

    def _path(self, name: str) -> Path:
        return self._directory / f"t.{name}"  # `.` and `..` are valid names

    def _drop_oldest(self) -> None:
        paths = list(self._directory.iterdir())
        if len(paths) > DELETED_MAX:
            min(paths, key=lambda path: path.stat().st_mtime_ns).unlink(missing_ok=True)
