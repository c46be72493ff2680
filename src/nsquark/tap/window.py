"""Knows which messages a log has already, by the ids of its last ones, which a start reads back from the log."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from nsquark.log.range_heads import HeadsReader
from nsquark.log.range_read import RangeReader
from nsquark.log.topic_log import TopicLog
from nsquark.wire.batch_format import HEADER_BYTES, StoredBatch, scan
from nsquark.wire.record import ID_AT, ID_BYTES, RECORD_OVERHEAD_BYTES

READ_BYTES: Final = 512 << 10
GENERATIONS: Final = 8


class IdWindow:
    """Remembers the ids of at least the last `messages_min` messages, and of at most an eighth more (GENERATIONS).

    Ids are in sets by age: when the newest set is full, the oldest is forgotten. Forgetting ids one by one would need
    their order, which costs more memory than a few ids too many.
    """

    def __init__(self, messages_min: int) -> None:
        self.messages_min = messages_min
        self._full = -(-messages_min // GENERATIONS)
        self._newest: set[bytes] = set()
        self._generations: deque[set[bytes]] = deque([self._newest], maxlen=GENERATIONS + 1)

    def __contains__(self, message_id: bytes) -> bool:
        return any(message_id in generation for generation in self._generations)

    def __len__(self) -> int:
        return sum(map(len, self._generations))

    def add(self, ids: Iterable[bytes]) -> None:
        for message_id in ids:
            if len(self._newest) >= self._full:
                self._newest = set()
                self._generations.append(self._newest)
            self._newest.add(message_id)


class IdReader:
    """Reads the ids of a log's last messages. It is made in the event loop's thread; `ids` is for another thread."""

    def __init__(self, log: TopicLog, messages: int) -> None:
        assert log.segments is not None
        self._reader = HeadsReader(RangeReader(log.segments, window_start(log, messages), log.head))
        self._reader.open()

    def ids(self) -> list[bytes]:
        try:
            pieces = iter(lambda: self._reader.read(READ_BYTES), b"")
            return [message_id for piece in pieces for message_id in _ids(piece)]
        finally:
            self._reader.close()


def window_start(log: TopicLog, messages: int) -> int:
    """Returns the sequence number at which the last `messages` messages of a log begin."""
    return log.extents.nth(log.extents.ordinal(log.head) - messages)


def _ids(heads: bytes) -> Iterator[bytes]:
    """Yields the ids of messages from whole batches, whose records have no bodies."""
    for found in scan(memoryview(heads), 0):
        if isinstance(found, StoredBatch):
            first = found.offset + HEADER_BYTES + ID_AT
            for at in range(first, found.end, RECORD_OVERHEAD_BYTES):
                yield heads[at : at + ID_BYTES]
