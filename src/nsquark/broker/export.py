"""Goes back to NSQ: what a stopped nsqd has is written as the files that NSQ's nsqd leaves when it stops.

    <topic>.diskqueue.*             what waits in the topic: it has no channel, or is paused
    <topic>:<channel>.diskqueue.*   what the channel has not finished: requeued, deferred, in flight at the stop, or new
    nsqd.dat                        topics, channels and pauses; written last, so without it an export is not complete

It is the reverse of takeover.py. None of nsqd's own files is removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nsquark.broker.data_path import METADATA_FILE, ListedTopic, encode_metadata
from nsquark.kernel.journal import JOURNAL_FINISHED, JOURNAL_RECORD
from nsquark.kernel.restart import snapshot
from nsquark.log.files import DIRECTORY_MODE, sync_directory, write_atomically
from nsquark.log.nsq_import.diskqueue import DiskQueueWriter
from nsquark.log.sequences import LEASE_SEQS_MIN
from nsquark.wire.record import BODY_AT, ID_AT, message_id, timestamp_of

if TYPE_CHECKING:
    from nsquark.broker.channel import Channel
    from nsquark.broker.nsqd import Nsqd
    from nsquark.broker.topic import Topic

Range = tuple[int, int]


class ExportError(Exception):
    """Says that the export is not possible; the text says why."""


class Exported(NamedTuple):
    """Tells what an export has written."""

    queues: dict[str, int]
    """Has the number of messages by the name of the queue: a topic, or a topic and a channel with a colon between."""
    message_bytes_max: int


class NsqExport:
    """Makes one pass over all topics of an nsqd that is loaded and serves nobody; it waits for the disk."""

    def __init__(self, nsqd: Nsqd, target: Path) -> None:
        self.nsqd = nsqd
        self.target = target
        self._queues: dict[str, int] = {}
        self._message_bytes_max = 0
        self._seqs = range(0)

    def run(self) -> Exported:
        if self.nsqd.unopened_topics:
            names = ", ".join(sorted(self.nsqd.unopened_topics))
            raise ExportError(f"these topics cannot be opened, and would be missing: {names}")
        try:
            self._prepare_target()
            return self._write_all()
        except OSError as error:
            raise ExportError(
                f"{self.target} is not complete - {error}; nothing is lost: remove it, and export again when this is"
                " mended"
            ) from None

    def _write_all(self) -> Exported:
        topics = [topic for topic in self.nsqd.topics.values() if not topic.ephemeral]
        for topic in topics:
            for channel in topic.channels.values():
                self._write(f"{topic.name}:{channel.name}", self._of_channel(topic, channel))
            self._write(topic.name, self._of_topic(topic))
        listed = [ListedTopic(topic.name, topic.paused, topic.listed_channels) for topic in topics]
        write_atomically(self.target / METADATA_FILE, encode_metadata(listed, ours=False))
        return Exported(self._queues, self._message_bytes_max)

    def _prepare_target(self) -> None:
        self.target.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        if any(self.target.iterdir()):
            raise ExportError(f"{self.target} is not empty: name a new directory, or remove what is there")

    def _write(self, base: str, messages: Iterator[tuple[int, int, bytes, bytes | memoryview]]) -> None:
        queue = DiskQueueWriter(self.target, base)
        for message in messages:
            queue.add(*message)
        queue.finish()
        sync_directory(self.target)
        self._queues[base] = queue.depth
        self._message_bytes_max = max(self._message_bytes_max, queue.message_bytes_max)

    # -- what is to be written: timestamp, attempts so far, id, body -------------------------------------

    def _of_channel(self, topic: Topic, channel: Channel) -> Iterator[tuple[int, int, bytes, bytes | memoryview]]:
        attempts, finished = _known(channel)
        for seq in sorted(attempts):
            kept = topic.retention.kept.record(seq)
            if kept is not None:
                yield _message(memoryview(kept), attempts[seq])
            else:
                yield from self._from_log(topic, [(seq, seq + 1)], attempts[seq])
        existing = [(first, first + count) for first, count in topic.log.extents.ranges()]
        between = [(max(low, channel.ledger.next), min(high, topic.pump)) for low, high in existing]
        passed_over = [*finished, *channel.state().skips, *((seq, seq + 1) for seq in attempts)]
        yield from self._from_log(topic, without(between, passed_over), 0)
        yield from self._deferred(topic, channel.deferred.first, topic.deferrals.own.first)

    def _of_topic(self, topic: Topic) -> Iterator[tuple[int, int, bytes, bytes | memoryview]]:
        existing = [(first, first + count) for first, count in topic.log.extents.ranges()]
        yield from self._from_log(topic, [(max(low, topic.pump), high) for low, high in existing], 0)
        yield from self._deferred(topic, topic.deferrals.own.first, topic.deferrals.number)

    def _from_log(
        self, topic: Topic, ranges: list[Range], attempts: int
    ) -> Iterator[tuple[int, int, bytes, bytes | memoryview]]:
        log = topic.log
        for low, high in ranges:
            seq = log.extents.at_or_after(low)
            while seq < high:
                chunk = log.chunk_at(seq) or log.load(seq, lambda: None)
                if chunk is None:
                    self.nsqd.logs.drain()
                    chunk = log.chunk_at(seq)
                if chunk is None:
                    after = log.extents.at_or_after(seq)
                    if after == seq:
                        raise ExportError(f"topic {topic.name} cannot be read from message {seq} on")
                    seq = after  # the message is damaged, which was reported
                    continue
                first, end = seq - chunk.first_seq, min(high - chunk.first_seq, chunk.count)
                for index in range(first, end):
                    yield _message(chunk.view[chunk.offset(index) : chunk.offset(index + 1)], attempts)
                seq = log.extents.at_or_after(chunk.first_seq + end)

    def _deferred(self, topic: Topic, low: int, high: int) -> Iterator[tuple[int, int, bytes, bytes]]:
        """Yields deferred messages. NSQ's files have no delays: these are ready at once, as after NSQ's restart."""
        for number, timestamp_ns, body in topic.deferrals.waiting():
            if low <= number < high:
                yield timestamp_ns, 0, self._new_id(), body

    def _new_id(self) -> bytes:
        """Makes an id for a deferred message, which has none yet."""
        if not self._seqs:
            self._seqs = range(*self.nsqd.logs.sequences.lease(LEASE_SEQS_MIN))
        seq, self._seqs = self._seqs[0], self._seqs[1:]
        return message_id(self.nsqd.logs.node_id, seq)


def _message(record: memoryview, attempts: int) -> tuple[int, int, bytes, memoryview]:
    return timestamp_of(record, 0), attempts, bytes(record[ID_AT:BODY_AT]), record[BODY_AT:]


def _known(channel: Channel) -> tuple[dict[int, int], list[Range]]:
    """Returns what was delivered and is not finished, with its attempts, and what is finished above the floor."""
    attempts: dict[int, int] = {}
    finished: list[Range] = []
    for _, kind, attempts_so_far, seq, _, span in JOURNAL_RECORD.iter_unpack(snapshot(channel.ledger)):
        if kind == JOURNAL_FINISHED:
            finished.append((seq, seq + span))
        else:
            attempts[seq] = attempts_so_far
    return attempts, finished


def without(ranges: list[Range], holes: list[Range]) -> list[Range]:
    """Returns the parts of `ranges`, which are in order, that lie in none of the `holes`."""
    left: list[Range] = []
    holes = sorted(hole for hole in holes if hole[0] < hole[1])
    place = 0
    for low, high in ranges:
        while place < len(holes) and holes[place][1] <= low:
            place += 1
        at = place
        while low < high and at < len(holes) and holes[at][0] < high:
            if low < holes[at][0]:
                left.append((low, holes[at][0]))
            low = max(low, holes[at][1])
            at += 1
        if low < high:
            left.append((low, high))
    return left
