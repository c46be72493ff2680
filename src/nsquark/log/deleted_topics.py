"""Remembers what was in a topic when it was deleted, so that a reader can be told how much it has lost.

Each name has a file for its last incarnations: a small document with the sequence numbers that existed. It is a help
and no promise: it is not synced, and only the latest DELETED_MAX stay. But what it says is all there was: where an
incarnation cannot be remembered, those before it are forgotten too, since a reader that knew them has lost this one as
well.
"""

import contextlib
from pathlib import Path

import msgspec

from nsquark.kernel.extents import Extents
from nsquark.log.files import DIRECTORY_MODE, write_atomically
from nsquark.wire.documents import decode_json

DELETED_MAX = 1000
INCARNATIONS_MAX = 16
"""At most this many incarnations of one name are remembered."""
RANGES_MAX = 100_000
"""A document has at most this many ranges of sequence numbers: a log with more gaps leaves none."""


class _Incarnation(msgspec.Struct):
    id: str
    ranges: list[tuple[int, int]]


class _Deleted(_Incarnation):
    before: list[_Incarnation] = []
    """Has the earlier incarnations, the oldest first."""


class DeletedTopics:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def remember(self, name: str, topic_id: str, extents: Extents) -> None:
        """Remembers what is in a topic that is being deleted."""
        before = self._remembered(name)[1 - INCARNATIONS_MAX :]
        remembered = _Deleted(topic_id, extents.ranges(), before)
        with contextlib.suppress(OSError):
            if sum(len(one.ranges) for one in (remembered, *before)) > RANGES_MAX:
                self._path(name).unlink(missing_ok=True)
                return
            self._directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
            try:
                write_atomically(self._path(name), msgspec.json.encode(remembered), sync=False)
            except OSError:
                self._path(name).unlink(missing_ok=True)
            self._drop_oldest()

    def count_from(self, name: str, topic_id: str, seq: int) -> int | None:
        """Returns how many messages from `seq` on went with this incarnation of a topic and with those that followed
        it, or None if that is not known.
        """
        remembered = self._remembered(name)
        place = next((place for place, one in enumerate(remembered) if one.id == topic_id), None)
        if place is None:
            return None
        ranges = [found for one in remembered[place:] for found in one.ranges]
        return sum(max(0, first + count - max(first, seq)) for first, count in ranges)

    def _remembered(self, name: str) -> list[_Incarnation]:
        """Reads the incarnations of a name that are remembered, the oldest first."""
        try:
            found = decode_json(self._path(name).read_bytes(), _Deleted)
        except (OSError, ValueError):
            return []
        return [*found.before, _Incarnation(found.id, found.ranges)]

    def _path(self, name: str) -> Path:
        return self._directory / f"t.{name}"  # `.` and `..` are valid names

    def _drop_oldest(self) -> None:
        paths = list(self._directory.iterdir())
        if len(paths) > DELETED_MAX:
            min(paths, key=lambda path: path.stat().st_mtime_ns).unlink(missing_ok=True)
