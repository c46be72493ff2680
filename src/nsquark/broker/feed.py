"""Sends what a channel has to give: messages that are new, as slices of the log, and those that come again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nsquark.log.outliving import KeptMessages
from nsquark.wire.record import ATTEMPTS_AT, ID_AT

if TYPE_CHECKING:
    from nsquark.broker.observe.latency import LatencyWindow
    from nsquark.broker.tcp.session import Session
    from nsquark.broker.topic import Topic
    from nsquark.kernel.ledger import Ledger
    from nsquark.kernel.records import Chunk

RUN_BYTES_MAX = 64 << 10
"""A run of messages written to one consumer has at most this many bytes, or is one message."""
FILL_RUNS_MAX = 8
"""At most this many runs are sent to one consumer in a turn: others wait meanwhile, however much it takes."""
REDELIVERY_RUN_MAX = 256
REDELIVERY_BYTES_MAX = 512 << 10
"""A run of redeliveries has at most this many bytes and one message more."""


class Feed:
    """Sends the next messages of one channel to the consumer that it is told.

    * Messages are new from `ledger.next` up to the topic's pump, less the ranges in `skips`; others are the ledger's.
    * While `is_loading`, a part of the log or a kept message is read from the disk; `wake` is called when it has come.
    """

    def __init__(
        self,
        topic: Topic,
        ledger: Ledger,
        skips: list[tuple[int, int]],
        latency: LatencyWindow | None,
        wake: Callable[[], None],
    ) -> None:
        self.topic = topic
        self.ledger = ledger
        self.skips = skips
        """Has the ranges of sequence numbers that are not for this channel, in order."""
        self.is_loading = False
        self._latency = latency
        self._kept = topic.retention.kept
        self._wake = wake
        self._credit = 0
        """This many redeliveries may come before the next new message, while both wait; see `_alternate`."""

    # -- what there is -----------------------------------------------------------------------------------

    @property
    def new_count(self) -> int:
        """Tells how many messages below the pump were never delivered since the start."""
        extents, start, pump = self.topic.log.extents, self.ledger.next, self.topic.pump
        count = extents.between(start, pump) - self.ledger.ahead
        for low, high in self.skips:
            count -= extents.between(max(low, start), min(high, pump))
        return max(0, count)

    @property
    def depth(self) -> int:
        return self.new_count + self.ledger.queued

    def may_have_more(self) -> bool:
        """Tells whether there may be something to send: cheaper than `depth`, which counts it."""
        return bool(self.ledger.queued) or self.ledger.next < self.topic.pump

    def trim(self, messages_max: int) -> None:
        """Drops the oldest of the new messages beyond `messages_max`; it is for messages that lie in memory only."""
        excess = self.new_count - messages_max
        if excess > 0:
            extents = self.topic.log.extents
            self.ledger.skip(extents.nth(extents.ordinal(self.ledger.next) + excess))

    # -- sending -----------------------------------------------------------------------------------------

    def fill(self, session: Session, want: int, now: int) -> None:
        """Sends up to `want` messages."""
        if self.ledger.queued:
            self._alternate(session, want, now)
        else:
            self._send_new(session, want, now)

    def _alternate(self, session: Session, want: int, now: int) -> None:
        """Lets redeliveries be no more than half of what all consumers get while new messages wait, whatever their RDY.

        So a message that fails for ever does not keep others waiting, nor do new ones keep a redelivery waiting.
        """
        assert session.consumer is not None
        ledger, pump = self.ledger, self.topic.pump
        allowed = max(0, (want + self._credit) // 2) if ledger.next < pump else want
        redelivered = self._redeliver(session, allowed, now)
        before = session.consumer.message_count
        self._send_new(session, want - redelivered, now)
        new = session.consumer.message_count - before
        if (ledger.next >= pump or self.is_loading) and session.is_ready:  # no new one is to be had at the moment
            redelivered += self._redeliver(session, want - redelivered - new, now)
        self._credit += new - redelivered
        if ledger.next >= pump:
            self._credit = 0
        else:
            self._credit = max(-REDELIVERY_RUN_MAX, min(self._credit, 1))

    def _send_new(self, session: Session, want: int, now: int) -> None:
        for _ in range(FILL_RUNS_MAX):
            if want <= 0 or not session.is_ready:
                return
            sent = self._send_run(session, want, now)
            if sent == 0:
                return
            want -= sent

    def _send_run(self, session: Session, want: int, now: int) -> int:
        """Sends one run of new messages, as a slice of the log; returns how many these were."""
        ledger, log = self.ledger, self.topic.log
        limit = self._next_run_end() if self.skips or ledger.ahead else self._skip_gap(self.topic.pump)
        seq = ledger.next
        if seq >= limit:
            return 0
        chunk = log.chunk_at(seq) or self._load(seq)
        if chunk is None:
            return 0
        index = seq - chunk.first_seq
        count = chunk.fit(index, min(want, limit - seq), RUN_BYTES_MAX)
        if ledger.ahead:
            count = ledger.untouched(count)
        assert session.consumer is not None
        if session.sample_rate > 0:
            return self._send_sampled(session, count, now)
        records = chunk.view[chunk.offset(index) : chunk.offset(index + count)]
        ledger.take(session.consumer, count, now)
        if self._latency is not None:
            ledger.stamp(seq, records)
        session.send(records)
        return count

    def _send_sampled(self, session: Session, count: int, now: int) -> int:
        """Draws lots for each message; one that loses is discarded for the whole channel, as in NSQ."""
        assert session.consumer is not None
        for _ in range(count):
            seq = self.ledger.next
            if session.draws():
                record = self._record(seq)
                if record is None:
                    return 0
                self.ledger.take(session.consumer, 1, now)
                if self._latency is not None:
                    self.ledger.stamp(seq, record)
                session.send(record)
            else:
                self.ledger.skip(seq + 1)
        return count

    def _redeliver(self, session: Session, want: int, now: int) -> int:
        """Sends messages that were delivered before: copies with their attempts, since the log has the first one."""
        assert session.consumer is not None
        pieces: list[bytes] = []
        pieces_bytes = 0
        while (
            len(pieces) < min(want, REDELIVERY_RUN_MAX) and pieces_bytes < REDELIVERY_BYTES_MAX and self.ledger.queued
        ):
            seq = self.ledger.next_queued()
            if not self.topic.log.extents.between(seq, seq + 1) and seq not in self._kept:
                self.ledger.discard(seq)  # damaged, or removed by a disk policy
                continue
            record = self._record(seq)
            if record is None:
                break
            if session.sample_rate > 0 and not session.draws():
                self.ledger.discard(seq)
                continue
            attempts = self.ledger.retake(session.consumer, seq, now)
            if self._latency is not None:
                self.ledger.stamp(seq, record)
            pieces.append(b"".join((record[:ATTEMPTS_AT], attempts.to_bytes(2, "big"), record[ID_AT:])))
            pieces_bytes += len(record)
        if pieces:
            session.send(b"".join(pieces))
        return len(pieces)

    # -- what comes next ---------------------------------------------------------------------------------

    def _next_run_end(self) -> int:
        """Moves `next` over what does not exist, is skipped or known; returns where the messages from there on end."""
        ledger = self.ledger
        while True:
            end = self._end_before_skips()
            if not ledger.ahead or ledger.next >= end or (known := -ledger.untouched(1)) < 0:
                return end
            ledger.skip(min(ledger.next + known, end))

    def _end_before_skips(self) -> int:
        ledger, pump = self.ledger, self.topic.pump
        end = pump
        for low, high in self.skips:
            self._skip_gap(min(low, pump))
            if low <= ledger.next < high:
                ledger.skip(high)
            elif ledger.next < low:
                end = min(low, pump)
                break
        return self._skip_gap(end)

    def _skip_gap(self, limit: int) -> int:
        """Moves `next` on to a message that exists, or to `limit` if that comes first; returns `limit`."""
        self.ledger.skip(min(self.topic.log.extents.at_or_after(self.ledger.next), limit))
        return limit

    def _record(self, seq: int) -> memoryview | None:
        try:
            kept = self._kept.record(seq)
        except OSError:
            self._read_kept_again(seq)
            return None
        if kept is not None:
            return memoryview(kept)
        chunk = self.topic.log.chunk_at(seq) or self._load(seq)
        if chunk is None:
            return None
        index = seq - chunk.first_seq
        return chunk.view[chunk.offset(index) : chunk.offset(index + 1)]

    def _read_kept_again(self, seq: int) -> None:
        assert isinstance(self._kept, KeptMessages), "what is in memory can be read"
        if not self.is_loading:
            self.is_loading = True
            self._kept.read_again(seq, self._loaded)

    def _load(self, seq: int) -> Chunk | None:
        if self.is_loading:
            return None
        chunk = self.topic.log.load(seq, self._loaded)
        self.is_loading = chunk is None
        return chunk

    def _loaded(self) -> None:
        self.is_loading = False
        self._wake()
