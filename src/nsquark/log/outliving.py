"""Keeps messages that outlive their segment: a few that are held for long must not keep whole files on disk.

When nothing but such parked messages needs a segment any more, their records are copied here and the segment goes. The
file is replaced as a whole. It is read only through the descriptor that was opened with its index: the two are one
generation, and nobody looks for a record in the file of another generation.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from nsquark.log.files import read_readable, read_surviving, write_atomically
from nsquark.log.services import READ_TRIES, LogShared
from nsquark.log.writer import encode_header
from nsquark.wire.batch_format import HEADER_BYTES, NO_TOKEN, Damage, StoredBatch, scan

KEPT_MESSAGES_MAX = 100_000
"""At most this many messages are kept; more stay in their segments."""
REWRITE_BYTES_MIN = 1 << 20


class KeptInMemory:
    """Keeps records in memory for a topic that has no files."""

    def __init__(self) -> None:
        self._records: dict[int, bytearray] = {}

    def __contains__(self, seq: object) -> bool:
        return seq in self._records

    def record(self, seq: int) -> bytearray | None:
        return self._records.get(seq)

    def replace(self, records: dict[int, bytearray]) -> None:
        self._records = records

    def close(self) -> None:
        self._records = {}


@dataclass(slots=True)
class Generation:
    """Is a file that is not changed any more, open as `fd`, and knows where the batch with each record is in it."""

    fd: int
    places: dict[int, tuple[int, int]]
    size: int

    def read(self, seq: int) -> bytes | None:
        """Returns a record, or None if it is not intact."""
        offset, size = self.places[seq]
        raw = os.pread(self.fd, size, offset)
        for item in scan(memoryview(raw), offset):
            if isinstance(item, StoredBatch) and item.first_seq == seq and item.end == offset + size:
                return raw[HEADER_BYTES:]
        return None

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class KeptMessages:
    """Keeps records by sequence number, in a file of batches with one record each. Its bytes count as used disk."""

    def __init__(self, shared: LogShared, path: Path) -> None:
        self._shared = shared
        self._path = path
        self._now = Generation(-1, {}, 0)
        try:
            raw, whole = read_surviving(path, shared.report)
        except FileNotFoundError:
            return
        self._load(raw, whole)

    def _load(self, raw: bytearray, whole: bool) -> None:
        batches: list[StoredBatch] = []
        end = 0
        for item in scan(memoryview(raw), 0):
            end = item.end
            if isinstance(item, StoredBatch):
                batches.append(item)
            else:
                self._report_damage(item)
        if end < len(raw):
            self._report_damage(Damage(end, len(raw), "no batch header"))
        places = {batch.first_seq: (batch.offset, batch.end - batch.offset) for batch in batches}
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC) if places else -1
        self.adopt(Generation(fd, places, len(raw)))
        if not whole:
            content = {batch.first_seq: bytes(raw[batch.offset + HEADER_BYTES : batch.end]) for batch in batches}
            try:
                self.adopt(self.write(content))
            except OSError as error:  # what is intact can be read where it is, whether or not that has the name still
                self._shared.syncer.directory(self._path.parent).changed()
                self._shared.report(f"KEPT({self._path}): could not be written anew: {error}")

    def _report_damage(self, damage: Damage) -> None:
        self._shared.report(
            f"KEPT({self._path}): bytes {damage.offset} to {damage.end} are damaged and lost: {damage.reason}"
        )

    def __len__(self) -> int:
        return len(self._now.places)

    def __contains__(self, seq: object) -> bool:
        return seq in self._now.places

    def record(self, seq: int) -> bytearray | None:
        """Returns a record, or None if it is not here, or not any more. It is a small read from a small file, which the
        event loop may do. If that fails, it raises OSError, and `read_again` finds out what can be done.
        """
        for tries in range(1, READ_TRIES + 1 if seq in self._now.places else 1):
            try:
                found = self._now.read(seq)
            except OSError as error:
                self._shared.report(f"KEPT({self._path}): reading message {seq} failed: {error}")
                if tries == READ_TRIES:
                    raise
                continue
            if found is not None:
                return bytearray(found)
            self._give_up(seq)
            break
        return None

    def read_again(self, seq: int, then: Callable[[], None]) -> None:
        """Reads in a thread a record that could not be read, for as long as that fails, and calls `then`. It is lost if
        its pages cannot be read while their disk answers.
        """
        offset, size = self._now.places[seq]

        def again() -> None:
            if seq in self._now.places:
                self.read_again(seq, then)
            else:
                then()  # its message is finished, or the topic is closed

        def read(fd: int) -> int:
            return read_readable(fd, size, offset, self._path)[1]

        def done(lost_bytes: int) -> None:
            if lost_bytes:
                self._give_up(seq)
            then()

        self._shared.read(self._now.fd, f"KEPT({self._path}): reading message {seq}", read, done, again)

    def _give_up(self, seq: int) -> None:
        if self._now.places.pop(seq, None) is not None:
            self._shared.report(f"KEPT({self._path}): message {seq} is damaged and lost")

    def content_with(self, records: dict[int, bytes], wanted: Iterable[int]) -> dict[int, bytes]:
        """Collects in a thread, for `write`, the records of `wanted` that are here or in `records`."""
        now = self._now
        content: dict[int, bytes] = {}
        for seq in wanted:
            record = records.get(seq) or (now.read(seq) if seq in now.places else None)
            if record is not None:
                content[seq] = record
        return content

    def write(self, content: dict[int, bytes]) -> Generation:
        """Stores in a thread these records and no others, durably. They count once they are adopted."""
        places: dict[int, tuple[int, int]] = {}
        data = bytearray()
        for seq, record in sorted(content.items()):
            places[seq] = (len(data), HEADER_BYTES + len(record))
            data += encode_header(StoredBatch(0, seq, 1, len(record), 0, 0, 0, NO_TOKEN), record)
            data += record
        if not places:
            self._path.unlink(missing_ok=True)
            return Generation(-1, {}, 0)
        write_atomically(self._path, data)
        return Generation(os.open(self._path, os.O_RDONLY | os.O_CLOEXEC), places, len(data))

    def adopt(self, generation: Generation) -> None:
        """Lets records be read from a file that `write` made; to be called in the event loop's thread."""
        before, self._now = self._now, generation
        self._shared.disk_bytes += generation.size - before.size
        before.close()

    def wants_rewrite(self, live: int) -> bool:
        """Tells whether most of the file is of messages that are finished."""
        return bool(self._now.places) and (
            live == 0 or (self._now.size > REWRITE_BYTES_MIN and 2 * live < len(self._now.places))
        )

    def close(self) -> None:
        self.adopt(Generation(-1, {}, 0))
