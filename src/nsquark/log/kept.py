"""Messages that outlive their segment: a few that are held for long must not keep whole files on disk.

When nothing but such parked messages needs a segment any more, their records are copied here and the segment goes.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from nsquark.log.batches import HEADER_BYTES, NO_TOKEN, Batch, encode_header, scan
from nsquark.log.files import write_atomically

KEPT_MESSAGES_MAX = 100_000
"""More than this stay in their segments."""
REWRITE_BYTES_MIN = 1 << 20


class KeptInMemory:
    """The same for a log without files."""

    def __init__(self) -> None:
        self._records: dict[int, bytearray] = {}

    def __contains__(self, seq: object) -> bool:
        return seq in self._records

    def record(self, seq: int) -> bytearray | None:
        return self._records.get(seq)

    def replace(self, records: dict[int, bytearray]) -> None:
        self._records = records


class KeptMessages:
    """Records by sequence number, in a file of batches with one record each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[int, tuple[int, int]] = {}
        self._file_bytes = 0
        if path.exists():
            self._load()

    def _load(self) -> None:
        raw = memoryview(self._path.read_bytes())
        for item in scan(raw, 0):
            if isinstance(item, Batch):
                self._places[item.first_seq] = (item.offset + HEADER_BYTES, item.payload_bytes)
        self._file_bytes = len(raw)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, seq: object) -> bool:
        return seq in self._places

    def record(self, seq: int) -> bytearray | None:
        """A small read from a small file: it may be done in the event loop."""
        place = self._places.get(seq)
        if place is None:
            return None
        with self._path.open("rb") as file:
            return bytearray(os.pread(file.fileno(), place[1], place[0]))

    def content_with(self, records: dict[int, bytes], wanted: Iterable[int]) -> dict[int, bytes]:
        """The records of `wanted` that are here or in `records`; for `replace`."""
        content: dict[int, bytes] = {}
        for seq in wanted:
            record = records.get(seq) or self.record(seq)
            if record is not None:
                content[seq] = bytes(record)
        return content

    def replace(self, content: dict[int, bytes]) -> None:
        """Stores these and no others, durably; in a thread, while nothing else here is called but `record`."""
        places: dict[int, tuple[int, int]] = {}
        pieces: list[bytes] = []
        size = 0
        for seq, record in sorted(content.items()):
            pieces.append(encode_header(Batch(0, seq, 1, len(record), 0, 0, 0, NO_TOKEN), record))
            pieces.append(record)
            places[seq] = (size + HEADER_BYTES, len(record))
            size += HEADER_BYTES + len(record)
        if places:
            write_atomically(self._path, b"".join(pieces))
        else:
            self._path.unlink(missing_ok=True)
        self._places, self._file_bytes = places, size

    def wants_rewrite(self, live: int) -> bool:
        """Whether most of the file is of messages that are finished."""
        return bool(self._places) and (live == 0 or (self._file_bytes > REWRITE_BYTES_MIN and 2 * live < len(self)))
