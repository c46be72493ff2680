"""A channel: a cursor over its topic's log, and the consumers that share its messages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nsquark.broker.clock import now_ms
from nsquark.broker.latency import LatencyWindow
from nsquark.broker.topology import Closeness, TopologyCounts, is_aware
from nsquark.kernel.ledger import Ledger
from nsquark.log.cursors import ChannelRest, Slot, encode_rest
from nsquark.log.journal import Journal
from nsquark.wire.names import is_ephemeral

if TYPE_CHECKING:
    from nsquark.broker.session import Session
    from nsquark.broker.topic import Topic

RUN_BYTES_MAX = 64 << 10
"""The longest run of messages written to one consumer at a time."""
REDELIVERY_RUN_MAX = 256
PARK_BLOCKS = 64
"""When this many blocks lie above the floor, the lowest are parked: that bounds what a crash repeats."""
REFILL_DELAY_S = 0.005
"""A consumer with most of its window in flight is refilled in larger portions, at most this much later."""
NOTE_INTERVAL_S = 0.1
"""How often what was finished above a held message is noted: a crash repeats twice as much of it at most."""
NOT_STORED = 0
SUBSCRIBERS_LOGGED_MAX = 10


class RangeChannelError(Exception):
    """Push and range use of one channel exclude each other."""


class Channel:
    """Who may get which message next.

    * Messages are new from `ledger.next` up to the topic's pump, less the ranges in `_skips`; others are the ledger's.
    * A consumer is ready while its RDY exceeds what it has in flight and its socket takes more.
    * `_slot` is what the cursor file has of this channel; `persist` brings it up to date once a turn.
    """

    def __init__(
        self, topic: Topic, name: str, slot: Slot | None, rest: ChannelRest, position: int, deferred: int
    ) -> None:
        options = topic.nsqd.options
        self.topic = topic
        self.name = name
        self.ephemeral = is_ephemeral(name)
        self.is_trimmed = self.ephemeral or topic.directory is None
        """What it holds back lies in memory only, so it is bounded."""
        self.paused = rest.paused
        self.owner = rest.owner
        self.owner_ttl_ms = rest.owner_ttl_ms
        self._owner_seen_ms = now_ms()
        """By the monotonic clock; while nsqd was down nobody could be heard of."""
        self.deferred_from = deferred
        """Deferred messages with lower numbers are not for this channel."""
        self.sessions: list[Session] = []
        self.had_subscribers = rest.had_subscribers
        self.is_deleted = False
        self.ledger = Ledger(position, options.max_msg_timeout.ms, options.max_req_timeout.ms)
        self.ledger.wall_offset_ms = topic.nsqd.clock.offset_ms()
        self.latency: LatencyWindow | None = None
        if options.e2e_processing_latency_percentile:
            self.latency = LatencyWindow(options.e2e_processing_latency_window_time.seconds, time.monotonic())
            self.ledger.measure = True
        self.topology = TopologyCounts(options) if is_aware(options) else None
        self.deferred_pending = topic.deferred_found(deferred)
        self._joined_at = topic.pumped
        self._counted_ahead = 0
        """Deferred messages in the log that the topic has yet to count."""
        self._skips = list(rest.skips)
        self._slot = slot
        self._journal: Journal | None = None
        self._rotation = 0
        self._is_loading = False
        self._is_parking = False
        self._refill_due = False
        self._refill_timer = False
        self._note_timer = False
        self._credit = 0
        """How many redeliveries may come before the next new message, while both wait; see `_take_turns`."""
        if slot is not None and topic.directory is not None:
            self._journal = Journal(topic.nsqd.logs, topic.directory / f"c.{name}.journal")
            self._journal.on_mended = self.wake
            self._restore(self._journal)

    def _restore(self, journal: Journal) -> None:
        ledger, topic = self.ledger, self.topic
        records = journal.load(ledger.req_timeout_max_ms)
        if records and ledger.restore(records, now_ms(), topic.log.extents.ranges(), topic.kept):
            with contextlib.suppress(OSError):  # only the next start would let them wait again
                journal.rewrite(ledger.snapshot())

    # -- what /stats shows ---------------------------------------------------------------------------------

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

    @property
    def backend_depth(self) -> int:
        """What lies below the part of the log that is in memory."""
        log = self.topic.log
        if log.segments is None:
            return 0
        return min(self.depth, log.extents.between(self.ledger.next, min(self.topic.pump, log.resident_from)))

    @property
    def deferred_count(self) -> int:
        return self.ledger.deferred + self.deferred_pending

    @property
    def message_count(self) -> int:
        return self.topic.pumped - self._joined_at + self.deferred_pending

    def deferred_came(self, appended: Iterable[tuple[int, int]], *, pumped: bool) -> None:
        """Deferred messages entered the log, as (number, sequence number); `pumped` tells that the topic counts them.

        One that is for this channel was counted when it was published, one that is not is never counted: so what the
        topic counts, now or when its pump follows again, is taken off.
        """
        for number, seq in appended:
            if number < self.deferred_from:
                self.ledger.finish_ahead(seq, 1)
                self._joined_at += pumped
            else:
                self.deferred_pending -= 1
                self._joined_at -= not pumped
            self._counted_ahead += not pumped
        self.wake()

    def pump_follows(self) -> None:
        self._joined_at += self._counted_ahead
        self._counted_ahead = 0

    # -- consumers ---------------------------------------------------------------------------------------

    def add(self, session: Session) -> None:
        self.sessions.append(session)
        if not self.had_subscribers:
            self.had_subscribers = True
            self._note_state()
        self.topic.listening[self] = None

    def remove(self, session: Session) -> None:
        if session not in self.sessions:
            return
        self.sessions.remove(session)
        if not self.sessions and not self.is_trimmed:
            self.topic.listening.pop(self, None)
        assert session.consumer is not None
        delay = self.topic.nsqd.options.requeue_on_disconnect
        if delay is not None:
            self.ledger.hasten(session.consumer, now_ms() + delay.ms)
        self.ledger.leave(session.consumer)
        if self.ephemeral and not self.sessions and not self.is_deleted:
            self.topic.delete_channel(self.name)

    # -- delivery ----------------------------------------------------------------------------------------

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
            pieces.append(b"".join((record[:16], attempts.to_bytes(2, "big"), record[18:])))
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

    # -- what survives -----------------------------------------------------------------------------------

    def persist(self) -> None:
        """Notes how far the channel came: the journal before the cursor, since the cursor relies on it."""
        ledger = self.ledger
        if self.latency is not None and ledger.finished_ns:
            self.latency.finished(ledger.finished_ns, time.time_ns(), time.monotonic())
            ledger.finished_ns.clear()
        ledger.settle()
        if self._slot is None or self.is_deleted:
            ledger.journal.clear()
            return
        try:
            if ledger.journal:
                self._append_journal()
            if self._skips and self._skips[0][1] <= ledger.floor and self._drop_skips():
                self._write_rest()
            elif ledger.floor != self._slot.position:
                self._slot.position = ledger.floor
                self.topic.store(self._slot)
            if ledger.blocks_open > PARK_BLOCKS and not self._is_parking:
                self._park()
            if ledger.has_news and not self._note_timer:
                self._note_timer = True
                self.topic.nsqd.loop.call_later(NOTE_INTERVAL_S, self._note_finished)
        except OSError as error:  # tried again with the next thing to note
            self._slot.position = NOT_STORED
            self.topic.nsqd.logs.disk.failed(error)

    def _drop_skips(self) -> bool:
        """Forgets the skips that the floor has passed, when they are half of all: the state may be long to write."""
        passed = sum(high <= self.ledger.floor for _, high in self._skips)
        if 2 * passed < len(self._skips):
            return False
        del self._skips[:passed]
        return True

    def _note_finished(self) -> None:
        """A held message keeps the floor down, but not what is finished above it from being remembered."""
        self._note_timer = False
        if not self.ledger.journal:  # else the disk has not taken what was noted before
            self.ledger.note_finished()
        if self.ledger.has_news or self.ledger.journal:
            self.wake()

    def _append_journal(self) -> None:
        assert self._journal is not None
        self._journal.append(self.ledger.journal)
        self.ledger.journal.clear()
        ledger = self.ledger
        live = ledger.in_flight + ledger.queued + ledger.deferred
        if self._journal.wants_rewrite(live) and not self._is_parking:
            self._journal.rewrite(ledger.snapshot())

    def _park(self) -> None:
        assert self._journal is not None
        numbers = self.ledger.park(self.ledger.blocks_open - PARK_BLOCKS // 2)
        self._append_journal()
        self._is_parking = True

        def parked() -> None:
            self._is_parking = False
            if not self.is_deleted:
                self.ledger.let_pass(numbers)
                self.wake()

        self._journal.when_synced(parked)

    def expire(self, now: int) -> None:
        if self.ledger.expire(now):
            self.wake()

    @property
    def stored_position(self) -> int:
        """What the cursor file says, which may be ahead of a log that lost its end."""
        return self._slot.position if self._slot is not None else 0

    @property
    def floor_needed(self) -> int:
        """Below this one only parked messages are needed; an ephemeral channel holds nothing back."""
        return self.topic.log.head if self.ephemeral else self.ledger.floor

    def rest(self) -> ChannelRest:
        return ChannelRest(
            self.name, self.paused, self.owner, self.owner_ttl_ms, 0, tuple(self._skips), self.had_subscribers
        )

    def _write_rest(self) -> None:
        if self._slot is not None:
            self._slot.rest, self._slot.brief = encode_rest(self.rest())
            self._slot.deferred = self.deferred_from
            self._slot.position = self.ledger.floor
            self.topic.store(self._slot)

    def _note_state(self) -> None:
        """The same where nobody can be refused: if the disk does, it is stored with the next thing to note."""
        try:
            self._write_rest()
        except OSError as error:
            assert self._slot is not None
            self._slot.position = NOT_STORED
            self.topic.nsqd.logs.disk.failed(error)

    # -- verbs -------------------------------------------------------------------------------------------

    def set_paused(self, paused: bool) -> None:
        self.paused = paused
        self._write_rest()
        self.wake()

    def empty(self) -> None:
        self.restart_at(self.topic.pump)
        self.deferred_from = self.topic.deferred.number
        self._joined_at -= self.deferred_pending  # they stay counted
        self.deferred_pending = 0
        self._write_rest()

    def restart_at(self, seq: int) -> None:
        """Drops all state and goes on from `seq`."""
        self.ledger.empty(seq)
        self.ledger.journal.clear()
        self._skips = []
        if self._journal is not None:
            self._journal.rewrite(b"")
            self._is_parking = False
        self._write_rest()
        self.wake()

    def skip_range(self, low: int, high: int) -> None:
        """The messages in `low <= seq < high` are not for this channel."""
        self._counted_ahead = 0  # the pump passes them uncounted
        if self._skips and self._skips[-1][1] == low:
            self._skips[-1] = (self._skips[-1][0], high)
        elif low < high:
            self._skips.append((low, high))
        self._write_rest()
        self.wake()

    def commit(self, owner: str, seq: int, ttl_ms: int) -> None:
        """A reader by range is done with everything below `seq`."""
        if self.sessions or (self.owner and self.owner != owner):
            raise RangeChannelError(
                f"channel {self.name} is owned by {self.owner}"
                if self.owner
                else f"channel {self.name} has subscribers"
            )
        if not self.owner and (
            self.had_subscribers or self.ledger.in_flight or self.ledger.queued or self.ledger.deferred
        ):
            raise RangeChannelError(f"channel {self.name} is used by SUB; commit to another channel")
        is_new = not self.owner
        self.owner, self.owner_ttl_ms, self._owner_seen_ms = owner, ttl_ms, now_ms()
        self.ledger.skip(min(seq, self.topic.log.head))
        self.ledger.settle()
        self._write_rest()
        if is_new:
            self.topic.nsqd.metadata_changed(self.ephemeral)

    @property
    def is_abandoned(self) -> bool:
        """Its owner by range has not been heard of for longer than it asked for."""
        return bool(self.owner and self.owner_ttl_ms and now_ms() - self._owner_seen_ms > self.owner_ttl_ms)

    def close(self) -> None:
        """At a clean stop: keeps attempts, due times and what was finished out of order."""
        if self._slot is None or self.is_deleted:
            return
        self.ledger.settle()
        try:
            if self._journal is not None:
                self._journal.rewrite(self.ledger.snapshot())
                self._journal.close()
        finally:
            self._write_rest()
            self.is_deleted = True  # a turn or timer that is still due must not write behind this

    def delete(self) -> None:
        self.is_deleted = True
        for session in list(self.sessions):
            session.abort()
        if self._slot is not None:
            self.topic.free(self._slot)
        if self._journal is not None:
            self._journal.delete()
