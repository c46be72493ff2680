"""Who gets which message next: a channel's messages are shared among the consumers that are ready for some."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsquark.base.clock import now_ms
from nsquark.broker.topology import Closeness, TopologyCounts
from nsquark.wire.record import ATTEMPTS_AT, ID_AT

if TYPE_CHECKING:
    from nsquark.broker.observe.latency import LatencyWindow
    from nsquark.broker.tcp.session import Session
    from nsquark.broker.topic import Topic
    from nsquark.kernel.ledger import Ledger

RUN_BYTES_MAX = 64 << 10
"""The longest run of messages written to one consumer at a time."""
REDELIVERY_RUN_MAX = 256
REFILL_DELAY_S = 0.005
"""A consumer with most of its window in flight is refilled in larger portions, at most this much later."""


class Delivery:
    """The part of a channel that delivers; the channel sets what is declared here.

    * Messages are new from `ledger.next` up to the topic's pump, less the ranges in `_skips`; others are the ledger's.
    * A consumer is ready while its RDY exceeds what it has in flight and its socket takes more.
    """

    topic: Topic
    ledger: Ledger
    sessions: list[Session]
    paused: bool
    is_deleted: bool
    is_trimmed: bool
    latency: LatencyWindow | None
    topology: TopologyCounts | None
    _skips: list[tuple[int, int]]

    def __init__(self) -> None:
        self._rotation = 0
        self._is_loading = False
        self._refill_due = False
        self._refill_timer = False
        self._credit = 0
        """How many redeliveries may come before the next new message, while both wait; see `_take_turns`."""

    @property
    def new_count(self) -> int:
        """Messages never delivered since the start."""
        extents, start, pump = self.topic.log.extents, self.ledger.next, self.topic.pump
        count = extents.between(start, pump) - self.ledger.ahead
        for low, high in self._skips:
            count -= extents.between(max(low, start), min(high, pump))
        return max(0, count)

    @property
    def depth(self) -> int:
        return self.new_count + self.ledger.queued

    def persist(self) -> None:
        """Notes how far the channel came, before anything is delivered; the channel knows how."""
        raise NotImplementedError

    def wake(self) -> None:
        self.topic.nsqd.turn.wake(self)

    def deliver(self) -> None:
        """Shares what is available among the consumers that are ready, starting with another one each time."""
        if not self.paused and self.sessions and not self.is_deleted:
            self._deliver()
        if self.is_trimmed:
            self._trim()

    def _deliver(self) -> None:
        ledger, topic = self.ledger, self.topic
        eager, self._refill_due = self._refill_due, False
        ready = [session for session in self.sessions if session.is_ready]
        if not eager and self.topology is None:  # to wait for the near would send to the far
            for session in ready:
                if session.is_nearly_full:
                    ready = self._without_nearly_full(ready)
                    break
        # Whether there may be something: cheaper than `depth`, which counts it.
        if not ready or not (ledger.queued or ledger.next < topic.pump):
            return
        now = now_ms()
        if self.topology is not None:
            self._share_by_closeness(self.topology, ready, now)
        elif len(ready) == 1:
            self._fill(ready[0], ready[0].free, now)
        else:
            self._share(ready, self.depth, now)
        if (ledger.queued or ledger.next < topic.pump) and not self._is_loading:
            for session in ready:
                if session.is_ready:
                    self.wake()
                    break

    def _share(self, ready: list[Session], available: int, now: int) -> None:
        share = -(-available // len(ready))
        self._rotation = (self._rotation + 1) % len(ready)
        for session in ready[self._rotation :] + ready[: self._rotation]:
            self._fill(session, min(session.free, share), now)

    def _share_by_closeness(self, topology: TopologyCounts, ready: list[Session], now: int) -> None:
        """Those in this nsqd's zone first, then those in its region; the others get what is left."""
        for closeness in Closeness:
            group = [session for session in ready if topology.closeness(session.settings) is closeness]
            sent = -1
            while group and sent != 0 and (available := self.depth) > 0:
                in_flight = self.ledger.in_flight
                self._share(group, available, now)
                sent = self.ledger.in_flight - in_flight
                topology.sent[closeness] += sent
                group = [session for session in group if session.is_ready]

    def _without_nearly_full(self, ready: list[Session]) -> list[Session]:
        """Leaves out who would get a small portion now and a larger one in a few milliseconds."""
        chosen = [session for session in ready if not session.is_nearly_full]
        if not self._refill_timer:
            self._refill_timer = True
            self.topic.nsqd.loop.call_later(REFILL_DELAY_S, self._refill)
        return chosen

    def _refill(self) -> None:
        self._refill_timer = False
        self._refill_due = True
        self.wake()

    def _fill(self, session: Session, want: int, now: int) -> None:
        if self.ledger.queued:
            self._take_turns(session, want, now)
        else:
            self._send_new(session, want, now)

    def _take_turns(self, session: Session, want: int, now: int) -> None:
        """While new messages wait, no more than half of what all consumers get are redeliveries, whatever their RDY.

        So a message that fails for ever does not keep others waiting, nor do new ones keep a redelivery waiting.
        """
        assert session.consumer is not None
        ledger, pump = self.ledger, self.topic.pump
        allowed = max(0, (want + self._credit) // 2) if ledger.next < pump else want
        redelivered = self._redeliver(session, allowed, now)
        before = session.consumer.message_count
        self._send_new(session, want - redelivered, now)
        new = session.consumer.message_count - before
        if (ledger.next >= pump or self._is_loading) and session.is_ready:  # no new one is to be had at the moment
            redelivered += self._redeliver(session, want - redelivered - new, now)
        self._credit += new - redelivered
        if ledger.next >= pump:
            self._credit = 0
        else:
            self._credit = max(-REDELIVERY_RUN_MAX, min(self._credit, 1))

    def _send_new(self, session: Session, want: int, now: int) -> None:
        while want > 0 and session.is_ready:
            sent = self._send_run(session, want, now)
            if sent == 0:
                return
            want -= sent

    def _send_run(self, session: Session, want: int, now: int) -> int:
        """One run of new messages, as a slice of the log; how many."""
        ledger, log = self.ledger, self.topic.log
        limit = self._next_run_end() if self._skips or ledger.ahead else self._skip_gap(self.topic.pump)
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
        if self.latency is not None:
            ledger.stamp(seq, records)
        session.send(records)
        return count

    def _next_run_end(self) -> int:
        """Steps over what does not exist, was voided or is known; where the messages from there on end."""
        ledger = self.ledger
        while True:
            end = self._end_before_skips()
            if not ledger.ahead or ledger.next >= end or (known := -ledger.untouched(1)) < 0:
                return end
            ledger.skip(min(ledger.next + known, end))

    def _end_before_skips(self) -> int:
        ledger, pump = self.ledger, self.topic.pump
        end = pump
        for low, high in self._skips:
            self._skip_gap(min(low, pump))
            if low <= ledger.next < high:
                ledger.skip(high)
            elif ledger.next < low:
                end = min(low, pump)
                break
        return self._skip_gap(end)

    def _skip_gap(self, limit: int) -> int:
        """Moves on to the next message that exists, if that is below `limit`; which it returns."""
        self.ledger.skip(min(self.topic.log.extents.at_or_after(self.ledger.next), limit))
        return limit

    def _send_sampled(self, session: Session, count: int, now: int) -> int:
        """Draws for each message; what loses is discarded for the whole channel, as NSQ does."""
        assert session.consumer is not None
        for _ in range(count):
            seq = self.ledger.next
            if session.draws():
                record = self._record(seq)
                if record is None:
                    return 0
                self.ledger.take(session.consumer, 1, now)
                if self.latency is not None:
                    self.ledger.stamp(seq, record)
                session.send(record)
            else:
                self.ledger.skip(seq + 1)
        return count

    def _redeliver(self, session: Session, want: int, now: int) -> int:
        """Messages that were delivered before: copies with their attempts, since the log has the first attempt."""
        assert session.consumer is not None
        pieces: list[bytes] = []
        while len(pieces) < min(want, REDELIVERY_RUN_MAX) and self.ledger.queued:
            seq = self.ledger.next_queued()
            if not self.topic.log.extents.between(seq, seq + 1) and seq not in self.topic.kept:
                self.ledger.discard(seq)  # damaged, or removed by a disk policy
                continue
            record = self._record(seq)
            if record is None:
                break
            if session.sample_rate > 0 and not session.draws():
                self.ledger.discard(seq)
                continue
            attempts = self.ledger.retake(session.consumer, seq, now)
            if self.latency is not None:
                self.ledger.stamp(seq, record)
            pieces.append(b"".join((record[:ATTEMPTS_AT], attempts.to_bytes(2, "big"), record[ID_AT:])))
        if pieces:
            session.send(b"".join(pieces))
        return len(pieces)

    def _record(self, seq: int) -> memoryview | None:
        kept = self.topic.kept.record(seq)
        if kept is not None:
            return memoryview(kept)
        chunk = self.topic.log.chunk_at(seq) or self._load(seq)
        if chunk is None:
            return None
        index = seq - chunk.first_seq
        return chunk.view[chunk.offset(index) : chunk.offset(index + 1)]

    def _load(self, seq: int):  # type: ignore[no-untyped-def]
        if self._is_loading:
            return None
        chunk = self.topic.log.load(seq, self._loaded)
        self._is_loading = chunk is None
        return chunk

    def _loaded(self) -> None:
        self._is_loading = False
        self.wake()

    def _trim(self) -> None:
        """In memory a channel never holds more than --mem-queue-size messages back; the oldest go."""
        excess = self.new_count - self.topic.nsqd.options.mem_queue_size
        if excess > 0:
            extents = self.topic.log.extents
            self.ledger.skip(extents.nth(extents.ordinal(self.ledger.next) + excess))
