"""Remembers beside a log how far its messages were removed.

Sequence numbers have gaps, so the lowest message left does not tell whether there were any below it. A reader that
stopped at the end of what is now removed has lost nothing, one that stopped before it has: this file tells them apart.
"""

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path

from xxhash import xxh3_64_intdigest

from nsquark.log.files import read_surviving, write_atomically

_RECORD = struct.Struct("<QQ")
"""Packs where the removed messages end, and the base of the lowest segment left."""


class Removed:
    """Knows that messages below `to` were there and are gone; those from it on are there, or never were."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self._path = path
        self._report = report
        self.to = 0

    def load(self, base_left: int) -> None:
        """Reads the mark. After a crash it may not fit the lowest segment: then all below that counts as removed."""
        try:
            raw, whole = read_surviving(self._path, self._report)
        except FileNotFoundError:
            return
        self.to = base_left
        if len(raw) == _RECORD.size + 8 and xxh3_64_intdigest(raw[:-8]) == int.from_bytes(raw[-8:], "little"):
            to, expected_base = _RECORD.unpack(raw[:-8])
            if expected_base == base_left:
                self.to = to
            return
        if whole:
            self._report(f"REMOVED({self._path}): damaged; all below message {base_left} counts as removed")
        self.store(base_left, base_left)

    def store(self, to: int, base_left: int) -> None:
        """Stores the mark, before the files go. It is not synced: it reaches the disk no later than their removal does.

        On a full disk it is left out, since the removal is what makes room: the next start then counts all below the
        lowest segment as removed.
        """
        body = _RECORD.pack(to, base_left)
        with contextlib.suppress(OSError):
            write_atomically(self._path, body + xxh3_64_intdigest(body).to_bytes(8, "little"), sync=False)
        self.to = to
