"""This is a channel: a cursor over its topic's log, and the consumers that share its messages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nsquark.base.clock import now_ms
from nsquark.broker.deferrals import Awaited
from nsquark.broker.feed import Feed
from nsquark.broker.observe.latency import LatencyWindow
from nsquark.broker.sharing import Sharing
from nsquark.broker.topology import TopologyCounts, is_aware
from nsquark.kernel.journal import JOURNAL_PARKED, JOURNAL_RECORD
from nsquark.kernel.ledger import Ledger
from nsquark.kernel.restart import note_finished, restore, snapshot
from nsquark.log.cursors import ChannelState, Slot, encode_state
from nsquark.log.journal import Journal
from nsquark.log.services import LogShared
from nsquark.wire.names import is_ephemeral

if TYPE_CHECKING:
    from nsquark.broker.tcp.session import Session
    from nsquark.broker.topic import Topic

PARK_BLOCKS = 64
"""With more blocks than this above the floor, the lowest are parked: that bounds the memory a held message costs."""
NOTE_INTERVAL_S = 0.1
"""What was finished above a held message is noted this often: a crash repeats twice as much of it at most."""
NOT_STORED = 0


class RangeChannelError(Exception):
    """Says that push and range use of one channel exclude each other."""


def journal_of(logs: LogShared, directory: Path, channel: str) -> Journal:
    """Returns the journal of a channel, whose topic has this directory."""
    return Journal(logs, directory / f"c.{channel}.journal")


class Channel:
    """Has consumers, a position that survives, and what operators do with both.

    * `feed` has the messages, `sharing` decides which consumer gets how many, `ledger` knows what became of each.
    * `_slot` is what the cursor file has of this channel; `persist` brings it up to date once a turn.
    """

    def __init__(self, topic: Topic, slot: Slot | None, state: ChannelState, position: int, deferred: Awaited) -> None:
        nsqd, options = topic.nsqd, topic.nsqd.options
        self.topic = topic
        self.name = name = state.name
        self.ephemeral = is_ephemeral(name)
        self.is_trimmed = self.ephemeral or topic.directory is None
        """Tells whether the messages that wait lie in memory only, so that their number is bounded."""
        self.paused = state.paused
        self.owner = state.owner
        self.owner_ttl_ms = state.owner_ttl_ms
        self._owner_seen_ms = now_ms()
        """Says when the owner was heard of last, by the monotonic clock; a start of nsqd counts as hearing of it."""
        self.deferred = deferred
        self.sessions: list[Session] = []
        self.had_subscribers = state.had_subscribers
        self.is_deleted = False
        is_measured = bool(options.e2e_processing_latency_percentile)
        self.ledger = Ledger(position, options.max_msg_timeout.ms, options.max_req_timeout.ms, is_measured)
        self.ledger.wall_offset_ms = nsqd.clock.offset_ms()
        self.latency: LatencyWindow | None = None
        if is_measured:
            self.latency = LatencyWindow(options.e2e_processing_latency_window_time.seconds, time.monotonic())
        self.topology = TopologyCounts(options) if is_aware(options) else None
        self.feed = Feed(topic, self.ledger, list(state.skips), self.latency, self.wake)
        self.sharing = Sharing(self.feed, self.topology, self.wake, nsqd.loop.call_later)
        self._joined_at = topic.pumped
        self._counted_ahead = 0
        """Counts the deferred messages in the log that the topic has yet to count."""
        self._slot = slot
        self._journal: Journal | None = None
        self._is_parking = False
        self._note_timer = False
        if slot is not None and topic.directory is not None:
            self._journal = journal_of(nsqd.logs, topic.directory, name)
            self._journal.on_mended = self.wake
            try:
                self._restore(self._journal)
            except BaseException:
                self.abandon()
                raise

    def _restore(self, journal: Journal) -> None:
        ledger, topic = self.ledger, self.topic
        records = journal.load(ledger.req_timeout_max_ms)
        if records and restore(ledger, records, now_ms(), topic.log.extents.ranges(), topic.retention.kept):
            with contextlib.suppress(OSError):  # only the next start would let them wait again
                journal.rewrite(snapshot(ledger))

    # -- delivery ----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Asks for `persist` and `deliver` in this turn or the next."""
        self.topic.nsqd.turn.wake(self)

    def deliver(self) -> None:
        """Sends what is available to the consumers that are ready."""
        if self.sessions and not self.paused and not self.is_deleted:
            self.sharing.deliver(self.sessions)
        if self.is_trimmed:
            self.feed.trim(self.topic.nsqd.options.mem_queue_size)

    # -- what /stats shows -------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        return self.feed.depth

    @property
    def backend_depth(self) -> int:
        """Counts the messages that wait below the part of the log that is in memory."""
        log = self.topic.log
        if log.segments is None:
            return 0
        return min(self.depth, log.extents.between(self.ledger.next, min(self.topic.pump, log.resident_from)))

    @property
    def deferred_count(self) -> int:
        return self.ledger.deferred + self.deferred.count

    @property
    def message_count(self) -> int:
        return self.topic.pumped - self._joined_at + self.deferred.count

    def deferred_came(self, appended: Iterable[tuple[int, int]], *, pumped: bool) -> None:
        """Is told that deferred messages entered the log, as (number, sequence number); `pumped` tells that the topic
        counts them.

        One that is for this channel was counted when it was published, one that is not is never counted: so what the
        topic counts, now or when its pump follows again, is taken off.
        """
        for number, seq in appended:
            if number < self.deferred.first:
                self.ledger.finish_ahead(seq, 1)
                self._joined_at += pumped
            else:
                self.deferred.count -= 1
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
            self._store_state()
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
            try:
                self.topic.delete_channel(self.name)
            except OSError as error:  # it is gone; that its topic has no channel any more is stored later
                self.topic.nsqd.logs.disk.failed(error)

    # -- what survives -----------------------------------------------------------------------------------

    def persist(self) -> None:
        """Notes how far the channel came: the journal before the cursor, since the cursor relies on it."""
        ledger = self.ledger
        if self.latency is not None and ledger.finished_ns:
            self.latency.finished(ledger.finished_ns, time.time_ns(), time.monotonic())
            ledger.finished_ns.clear()
        ledger.raise_floor()
        if self._slot is None or self.is_deleted:
            ledger.journal.clear()
            return
        try:
            if ledger.journal:
                self._append_journal()
                self._shorten_journal()
            skips = self.feed.skips
            if skips and skips[0][1] <= ledger.floor and self._drop_skips():
                self._write_state()
            elif ledger.floor != self._slot.position:
                self.topic.slots.move_on(self._slot, ledger.floor)
            if ledger.blocks_open > PARK_BLOCKS and not self._is_parking and not self._is_journal_replaced:
                self._park()
            if ledger.has_news and not self._note_timer:
                self._note_timer = True
                self.topic.nsqd.loop.call_later(NOTE_INTERVAL_S, self._note_finished)
        except OSError as error:  # tried again with the next thing to note
            self._slot.position = NOT_STORED
            self.topic.nsqd.logs.disk.failed(error)

    def _drop_skips(self) -> bool:
        """Forgets the skips that the floor has passed, when they are half of all: the state may be long to write."""
        skips = self.feed.skips
        passed = sum(high <= self.ledger.floor for _, high in skips)
        if 2 * passed < len(skips):
            return False
        del skips[:passed]
        return True

    def _note_finished(self) -> None:
        """Notes what is finished above a held message, which keeps the floor down: no crash is to repeat it."""
        self._note_timer = False
        if not self.ledger.journal:  # else the disk has refused what was noted before
            note_finished(self.ledger)
        if self.ledger.has_news or self.ledger.journal:
            self.wake()

    def _append_journal(self) -> None:
        assert self._journal is not None
        self._journal.append(self.ledger.journal)
        self.ledger.journal.clear()

    def _shorten_journal(self) -> None:
        """Lets a journal that is mostly out of date be replaced, unless what is being parked relies on it."""
        assert self._journal is not None
        ledger = self.ledger
        live = ledger.in_flight + ledger.queued + ledger.deferred
        if not self._is_parking and self._journal.wants_rewrite(live):
            self._journal.replace_later(snapshot(ledger))

    @property
    def _is_journal_replaced(self) -> bool:
        return self._journal is not None and self._journal.is_being_replaced

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
        """Returns the position that the cursor file has, which may be ahead of a log that lost its end."""
        return self._slot.position if self._slot is not None else 0

    @property
    def floor_needed(self) -> int:
        """Returns the position below which only parked messages are needed; an ephemeral channel needs nothing."""
        return self.topic.log.head if self.ephemeral else self.ledger.floor

    def state(self) -> ChannelState:
        return ChannelState(
            self.name, self.paused, self.owner, self.owner_ttl_ms, 0, tuple(self.feed.skips), self.had_subscribers
        )

    def _write_state(self) -> None:
        self._write_slot(self.state(), self.deferred.first, self.ledger.floor)

    def _write_slot(self, state: ChannelState, deferred_first: int, position: int) -> None:
        if self._slot is not None:
            self._slot.state, self._slot.brief = encode_state(state)
            self._slot.deferred, self._slot.position = deferred_first, position
            self.topic.slots.store(self._slot)

    def _store_state(self) -> None:
        """Stores the state where nobody can be told of an error: if the disk refuses it, it is stored with the next
        thing to note.
        """
        try:
            self._write_state()
        except OSError as error:
            assert self._slot is not None
            self._slot.position = NOT_STORED
            self.topic.nsqd.logs.disk.failed(error)

    # -- verbs -------------------------------------------------------------------------------------------

    def set_paused(self, paused: bool) -> None:
        self.paused = paused
        self._write_state()
        self.wake()

    def empty(self) -> None:
        self.seek(self.topic.pump)

    def seek(self, seq: int) -> None:
        """Drops all state, deferred messages too, and goes on from `seq`."""
        awaited = Awaited(self.topic.deferrals.number)
        self.restart_at(seq, awaited.first)
        self._joined_at -= self.deferred.count  # they stay counted
        self.deferred = awaited

    def seek_counts(self, seq: int) -> tuple[int, int]:
        """Counts the finished messages that would come again after a seek to `seq`, and the others that never would."""
        log, ledger = self.topic.log, self.ledger
        unfinished, known = ledger.count_below(seq)
        unfinished += self._new_below(seq, known)
        unfinished_in_all = ledger.in_flight + ledger.queued + ledger.deferred + self._new_below(log.head, ledger.ahead)
        come_again = log.extents.between(seq, log.head) - (unfinished_in_all - unfinished)
        return max(0, come_again), unfinished + self.deferred.count

    def _new_below(self, seq: int, known: int) -> int:
        """Counts the messages below `seq` that were never delivered, whether or not the topic's
        pump has come to them.
        """
        extents, start = self.topic.log.extents, self.ledger.next
        skipped = sum(extents.between(max(low, start), min(high, seq)) for low, high in self.feed.skips)
        return max(0, extents.between(start, seq) - known - skipped)

    def restart_at(self, seq: int, deferred_first: int | None = None) -> None:
        """Drops all state but for the deferred messages from `deferred_first` on, and goes on from `seq`. If the disk
        refuses that, the channel stays as it is.
        """
        if deferred_first is None:
            deferred_first = self.deferred.first
        parked = self._parked_from(seq)
        try:
            # In one step, and before the journal goes: only that knows the parked messages below the old position.
            self._write_slot(msgspec.structs.replace(self.state(), skips=()), deferred_first, seq)
            if self._journal is not None:
                self._journal.rewrite(parked)
        except OSError:
            self._store_state()
            self.wake()
            raise
        self._is_parking = False
        self.ledger.empty(seq)
        self.ledger.journal.clear()
        self.feed.skips = []
        self.wake()
        if parked:
            self.topic.slots.when_durable(self._forget_parked)

    def _parked_from(self, seq: int) -> bytes:
        """Returns the journal's records of the parked messages from `seq` on: they stay until a lower position is
        durable, since a loss of power may bring the old one back.
        """
        if not self.ledger.parked_count:
            return b""
        records = JOURNAL_RECORD.iter_unpack(snapshot(self.ledger))
        return b"".join(JOURNAL_RECORD.pack(*one) for one in records if one[1] == JOURNAL_PARKED and one[3] >= seq)

    def _forget_parked(self) -> None:
        """Lets the journal go on without messages that come again, since the channel went back below them."""
        if self._journal is None or self.is_deleted:
            return
        if self._is_parking or self._is_journal_replaced:
            self.topic.nsqd.loop.call_later(NOTE_INTERVAL_S, self._forget_parked)
        else:
            self._journal.replace_later(snapshot(self.ledger))

    def skip_range(self, low: int, high: int) -> None:
        """Skips the messages in `low <= seq < high`, which are not for this channel."""
        self._counted_ahead = 0  # the pump passes them uncounted
        skips = self.feed.skips
        if skips and skips[-1][1] == low:
            skips[-1] = (skips[-1][0], high)
        elif low < high:
            skips.append((low, high))
        self._write_state()
        self.wake()

    def commit(self, owner: str, seq: int, ttl_ms: int) -> None:
        """Moves on for a reader by range that is done with everything below `seq`."""
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
        self.ledger.raise_floor()
        self._write_state()
        if is_new:
            self.topic.nsqd.metadata_changed(self.ephemeral)

    @property
    def owner_idle_ms(self) -> int:
        """Tells for how long the owner by range has not been heard of; a start of nsqd counts as hearing of it."""
        return now_ms() - self._owner_seen_ms

    @property
    def is_abandoned(self) -> bool:
        """Tells whether the owner by range has not been heard of for longer than it asked for."""
        return bool(self.owner and self.owner_ttl_ms and self.owner_idle_ms > self.owner_ttl_ms)

    def close(self) -> None:
        """Stops cleanly: attempts, due times and what was finished out of order are stored."""
        if self._slot is None or self.is_deleted:
            return
        self.ledger.raise_floor()
        try:
            if self._journal is not None:
                self._journal.rewrite(snapshot(self.ledger))
                self._journal.close()
        finally:
            self._write_state()
            self.is_deleted = True  # a turn or timer that is still due must not write behind this

    def abandon(self) -> None:
        """Lets go of the files of a channel that cannot be used after all; they stay as they are."""
        self.is_deleted = True
        if self._journal is not None:
            self._journal.close()

    def delete(self) -> None:
        self.is_deleted = True
        for session in list(self.sessions):
            session.abort()
        if self._slot is not None:
            self.topic.slots.free(self._slot)
        if self._journal is not None:
            self._journal.delete()
