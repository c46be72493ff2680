"""Reads a range of a log without the bodies of its messages, for readers that only want to know which there are, and
when they were published.
"""

from nsquark.kernel.columns import without_bodies
from nsquark.log.range_read import RangeReader
from nsquark.log.writer import encode_header
from nsquark.wire.batch_format import HEADER_BYTES, StoredBatch, scan


class HeadsReader:
    """Makes batches in the same format, whose records end where the body began. What is damaged is left out; a reader
    that was told the number of messages notices that. `read` and `close` run in threads.
    """

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        self._rest = bytearray()

    @property
    def files(self) -> int:
        return self._reader.files

    def open(self) -> None:
        self._reader.open()

    def close(self) -> None:
        self._reader.close()

    def read(self, size: int) -> bytes:
        """Returns the next batches without bodies, or nothing at the end of the range."""
        while piece := self._reader.read(size):
            self._rest += piece
            if heads := self._heads():
                return heads
        return b""

    def _heads(self) -> bytes:
        """Returns all whole batches that were read, without bodies."""
        found, used = bytearray(), 0
        for item in scan(memoryview(bytes(self._rest)), 0):
            used = item.end
            if isinstance(item, StoredBatch):
                payload = without_bodies(self._rest, item.offset + HEADER_BYTES, item.end)
                batch = item._replace(payload_bytes=len(payload))
                found += encode_header(batch, payload) + payload
        del self._rest[:used]
        return bytes(found)
