"""Appends messages of a tapped nsqd to a log, with their own ids and times, and syncs them before they are finished."""

from collections.abc import Iterator, Sequence
from typing import Final

from nsquark.client.message import Message
from nsquark.log.durable import sync_data
from nsquark.log.sequences import LEASE_SEQS_MAX, LEASE_SEQS_MIN, Sequences
from nsquark.log.writer import BatchWriter
from nsquark.wire.batch_format import HEADER_BYTES, NO_TOKEN, StoredBatch
from nsquark.wire.frames import message_frame
from nsquark.wire.record import RECORD_OVERHEAD_BYTES

BATCH_BYTES: Final = 128 << 10
"""A batch has at most this many bytes, unless it is one larger message: readers get whole batches."""
WRITE_BYTES: Final = 1 << 20
FIRST_ATTEMPT: Final = 1


class Numbers:
    """Hands out sequence numbers for one log. It uses up each lease before the next, so that there are few gaps."""

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        self._next = self._end = 0
        self._lease_seqs = LEASE_SEQS_MIN

    def next(self, count: int) -> list[range]:
        """Returns the next `count` numbers, in rising order; raises OSError if they cannot be reserved."""
        given: list[range] = []
        while count:
            if self._next == self._end:
                self._next, self._end = self._sequences.lease(self._lease_seqs)
                self._lease_seqs = min(self._lease_seqs * 2, LEASE_SEQS_MAX)
            until = min(self._next + count, self._end)
            given.append(range(self._next, until))
            count -= len(given[-1])
            self._next = until
        return given


class FrameAppend:
    """Writes a group of messages as records that keep the ids and times of the messages. It is a `ThreadedAppend`."""

    def __init__(self, messages: Sequence[Message], numbers: list[range]) -> None:
        self._messages = messages
        self._numbers = numbers
        self.first_seq = numbers[0].start
        records = sum(len(message.body) + RECORD_OVERHEAD_BYTES for message in messages)
        # Two neighbouring batches have more than BATCH_BYTES together, unless a range of numbers ends between them.
        batches_max = 2 * records // BATCH_BYTES + 1 + len(numbers)
        self.bytes_max = records + batches_max * HEADER_BYTES

    def write(self, fd: int, offset: int) -> list[StoredBatch]:
        with BatchWriter(fd, offset, unwritten_bytes_max=WRITE_BYTES) as writer:
            for batch, payload in self._batches():
                writer.add(batch, payload)
            writer.flush()
            sync_data(fd)
        return writer.batches

    def _batches(self) -> Iterator[tuple[StoredBatch, bytes]]:
        at = 0
        for numbers in self._numbers:
            end = at + len(numbers)
            seq = numbers.start
            while at < end:
                stop = self._fitting(at, end)
                group = self._messages[at:stop]
                times = [message.timestamp for message in group]
                payload = b"".join(map(_record, group))
                yield StoredBatch(0, seq, len(group), len(payload), min(times), max(times), 0, NO_TOKEN), payload
                seq += len(group)
                at = stop

    def _fitting(self, at: int, end: int) -> int:
        """Returns the index after the messages from `at` on that fit in a batch; one always does, whatever its size."""
        stop, size = at, 0
        while stop < end:
            size += len(self._messages[stop].body) + RECORD_OVERHEAD_BYTES
            if size > BATCH_BYTES and stop > at:
                break
            stop += 1
        return stop


def _record(message: Message) -> bytes:
    return message_frame(message.timestamp, FIRST_ATTEMPT, message.id, message.body)
