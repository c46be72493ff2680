"""Checks the ledger beside a plain dictionary, through every order of deliveries, answers, parking, restarts and
crashes.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hypothesis_profiles import run_model
from nsquark.kernel.journal import JOURNAL_FINISHED
from unit import kernel_forms
from unit.ledger_rig import (
    BLOCK,
    MSG_TIMEOUT_MAX_MS,
    MSG_TIMEOUT_MS,
    REQ_TIMEOUT_MAX_MS,
    make_ledger,
    note_finished,
    records,
    restore,
    snapshot,
)

IN_FLIGHT, QUEUED, DEFERRED = "in flight", "queued", "deferred"


@dataclass
class Entry:
    """Is an unfinished message."""

    state: str
    attempts: int
    deadline_ms: int = 0
    owner: Any = None
    delivered_ms: int = 0
    queued_at: int = 0
    """Says how many redeliveries there had been when the message was queued, and when it was redelivered lately."""
    redelivered_at: tuple[int, ...] = ()


class LedgerModel(RuleBasedStateMachine):
    """`entries` are the unfinished messages, `done` what was finished or skipped; the rest from `next` on is new."""

    kernel: ModuleType

    @initialize(first=st.sampled_from([0, 5 * BLOCK - 10, 7 * BLOCK]))
    def start(self, first: int) -> None:
        self.first = self.next = self.frontier = first
        self.entries: dict[int, Entry] = {}
        self.done: set[int] = set()
        self.skipped: set[int] = set()
        self.gaps: list[tuple[int, int]] = []
        self.passed: set[int] = set()
        self.parking: list[int] | None = None
        self.consumers: list[Any] = []
        self.now_ms = 1_000_000
        self.redeliveries = 0
        self.mark = first
        self.noted: set[int] = set()
        self.book = make_ledger(self.kernel, first)
        self.stored_floor = first
        self.stored_journal = b""
        self.stored_unfinished: set[int] = set()
        self.notes: dict[int, tuple[int, int]] = {}
        self.stored_notes: dict[int, tuple[int, int]] = {}
        self.join(MSG_TIMEOUT_MS)

    # -- helpers -----------------------------------------------------------------------------------------

    def of_state(self, state: str) -> list[int]:
        return sorted(seq for seq, entry in self.entries.items() if entry.state == state)

    def some(self, data: st.DataObject, seqs: list[int]) -> list[int]:
        """Chooses one, a few or thousands of these, from either end or the middle."""
        count = data.draw(st.sampled_from([1, 2, 50, 1500, 6000]), label="count")
        start = data.draw(st.sampled_from([0, 1, len(seqs) // 2, max(0, len(seqs) - count)]), label="start")
        stride = data.draw(st.sampled_from([1, 1, 2, 5]), label="stride")
        return seqs[start : start + count * stride : stride]

    def is_known(self, seq: int) -> bool:
        return seq in self.entries or seq in self.done

    def note(self, seq: int) -> None:
        entry = self.entries[seq]
        self.notes[seq] = (entry.attempts, entry.deadline_ms if entry.state == DEFERRED else 0)

    def queue(self, seq: int) -> None:
        self.entries[seq].state = QUEUED
        self.entries[seq].queued_at = self.redeliveries

    def put_in_flight(self, seq: int, consumer: Any, attempts: int) -> None:
        deadline_ms = self.now_ms + consumer.msg_timeout_ms
        self.entries[seq] = Entry(IN_FLIGHT, attempts, deadline_ms, consumer, self.now_ms)

    # -- consumers and time ------------------------------------------------------------------------------

    @rule(timeout_ms=st.sampled_from([MSG_TIMEOUT_MS, 5 * MSG_TIMEOUT_MS]))
    def join(self, timeout_ms: int) -> None:
        self.consumers.append(self.book.join(2500, timeout_ms))

    @precondition(lambda self: len(self.consumers) > 1)
    @rule(data=st.data(), hasten=st.booleans())
    def leave(self, data: st.DataObject, hasten: bool) -> None:
        consumer = self.consumers.pop(data.draw(st.integers(0, len(self.consumers) - 1)))
        if hasten:
            deadline_ms = self.now_ms + 100
            self.book.hasten(consumer, deadline_ms)
            for entry in self.entries.values():
                if entry.state == IN_FLIGHT and entry.owner is consumer:
                    entry.deadline_ms = min(entry.deadline_ms, deadline_ms)
        self.book.leave(consumer)

    @rule(passed_ms=st.sampled_from([1, 150, MSG_TIMEOUT_MS, 6 * MSG_TIMEOUT_MS]))
    def expire(self, passed_ms: int) -> None:
        self.now_ms += passed_ms
        due = [
            seq
            for seq, entry in self.entries.items()
            if entry.state in (IN_FLIGHT, DEFERRED) and entry.deadline_ms <= self.now_ms
        ]
        assert self.book.expire(self.now_ms) == len(due)
        for seq in due:
            timed_out = self.entries[seq].state == IN_FLIGHT
            self.queue(seq)
            if timed_out:
                self.note(seq)

    # -- delivery ----------------------------------------------------------------------------------------

    @rule(data=st.data(), want=st.sampled_from([1, 7, 300, 1500, 5000]))
    def take(self, data: st.DataObject, want: int) -> None:
        """Does what a channel does: steps over what does not exist or is known, then takes a run of new messages."""
        consumer = data.draw(st.sampled_from(self.consumers))
        for low, high in self.gaps:
            if low <= self.next < high:
                self.skip_to(high)
            elif self.next < low:
                want = min(want, low - self.next)
        known = self.is_known(self.next)
        end = self.next
        while (known or end < self.next + want) and self.is_known(end) == known:
            end += 1
        assert self.book.untouched(want) == (self.next - end if known else end - self.next)
        if known:
            self.skip_to(end)
            return
        self.book.take(consumer, end - self.next, self.now_ms)
        for seq in range(self.next, end):
            self.put_in_flight(seq, consumer, 1)
        self.next = end
        self.frontier = max(self.frontier, end)

    def skip_to(self, seq: int) -> None:
        self.book.skip(seq)
        self.next = seq
        self.frontier = max(self.frontier, seq)

    @rule(count=st.sampled_from([1, 100, BLOCK]))
    def discard_new(self, count: int) -> None:
        """Discards new messages, which a sample leaves out."""
        if any(low < self.next + count and self.next < high for low, high in self.gaps):
            return
        skipped = [seq for seq in range(self.next, self.next + count) if not self.is_known(seq)]
        self.done.update(skipped)
        self.skipped.update(skipped)
        self.skip_to(self.next + count)

    @precondition(lambda self: self.next == self.frontier)
    @rule(count=st.sampled_from([5, 3 * BLOCK, 1 << 30]))
    def gap(self, count: int) -> None:
        """Begins a new lease: the sequence numbers before it do not exist."""
        if len(self.gaps) < 3:
            self.gaps.append((self.next, self.next + count))
            self.skip_to(self.next + count)

    @precondition(lambda self: self.next == self.frontier)
    @rule(offset=st.integers(0, 3), count=st.sampled_from([1, 5, 200]))
    def finish_ahead(self, offset: int, count: int) -> None:
        """Messages at the log's end that are not for this channel."""
        seqs = range(self.next + offset, self.next + offset + count)
        if any(self.is_known(seq) for seq in seqs):
            return
        self.book.finish_ahead(seqs.start, count)
        self.done.update(seqs)

    @rule(data=st.data(), count=st.sampled_from([1, 20, 2000]), discard=st.booleans())
    def redeliver(self, data: st.DataObject, count: int, discard: bool) -> None:
        consumer = data.draw(st.sampled_from(self.consumers))
        for _ in range(min(count, len(self.of_state(QUEUED)))):
            seq = self.book.next_queued()
            entry = self.entries[seq]
            assert entry.state == QUEUED
            if discard:
                self.book.discard(seq)
                del self.entries[seq]
                self.done.add(seq)
                continue
            assert self.book.retake(consumer, seq, self.now_ms) == entry.attempts + 1
            self.put_in_flight(seq, consumer, entry.attempts + 1)
            self.redeliveries += 1
            self.entries[seq].redelivered_at = (*entry.redelivered_at[-1:], self.redeliveries)
            if len(entry.redelivered_at) == 2:
                oldest = min((e.queued_at for e in self.entries.values() if e.state == QUEUED), default=0)
                assert oldest >= entry.redelivered_at[0] or not self.of_state(QUEUED), f"{seq} pushes in"
        if not self.of_state(QUEUED):
            assert self.book.next_queued() == -1

    # -- answers -----------------------------------------------------------------------------------------

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        for seq in self.some(data, self.of_state(IN_FLIGHT)):
            owner = self.entries[seq].owner
            assert self.book.finish(owner, seq) == self.kernel.DONE
            del self.entries[seq]
            self.done.add(seq)

    @rule(data=st.data(), delay_ms=st.sampled_from([0, 0, 200, 5000, REQ_TIMEOUT_MAX_MS + 1]))
    def requeue(self, data: st.DataObject, delay_ms: int) -> None:
        for seq in self.some(data, self.of_state(IN_FLIGHT)):
            entry = self.entries[seq]
            assert self.book.requeue(entry.owner, seq, delay_ms, self.now_ms) == self.kernel.DONE
            if delay_ms:
                entry.state = DEFERRED
            else:
                self.queue(seq)
            entry.deadline_ms = self.now_ms + min(delay_ms, REQ_TIMEOUT_MAX_MS)
            self.note(seq)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        for seq in self.some(data, self.of_state(IN_FLIGHT)):
            entry = self.entries[seq]
            assert self.book.touch(entry.owner, seq, self.now_ms) == self.kernel.DONE
            entry.deadline_ms = min(self.now_ms + entry.owner.msg_timeout_ms, entry.delivered_ms + MSG_TIMEOUT_MAX_MS)

    @rule(data=st.data(), seq=st.integers(0, 40 * BLOCK))
    def answer_wrongly(self, data: st.DataObject, seq: int) -> None:
        consumer = data.draw(st.sampled_from(self.consumers))
        entry = self.entries.get(seq)
        if entry is None or entry.state != IN_FLIGHT:
            expected = self.kernel.NOT_IN_FLIGHT
        elif entry.owner is not consumer:
            expected = self.kernel.NOT_OWNER
        else:
            return
        assert self.book.finish(consumer, seq) == expected
        assert self.book.requeue(consumer, seq, 0, self.now_ms) == expected
        assert self.book.touch(consumer, seq, self.now_ms) == expected

    # -- what survives -----------------------------------------------------------------------------------

    @rule()
    def persist(self) -> None:
        """Ends a turn: the journal is written, then the floor."""
        self.book.raise_floor()
        expected = min([seq for seq in self.entries if seq // BLOCK not in self.passed] + [self.next])
        assert self.book.floor == expected
        self.stored_journal += bytes(self.book.journal)
        self.book.journal.clear()
        self.stored_floor = self.book.floor
        self.stored_unfinished = set(self.entries)
        self.stored_notes.update(self.notes)

    @rule()
    def note_finished(self) -> None:
        """Notes now and then what is finished above the floor, if that stood still since the last time."""
        self.persist()
        note_finished(self.book)
        if self.book.floor < self.mark:
            self.noted = {seq for seq in self.done - self.skipped if self.book.floor <= seq < self.next}
            assert not self.book.has_news
        self.mark = self.next
        self.persist()

    @precondition(lambda self: self.parking is None)
    @rule(count=st.integers(1, 4))
    def park(self, count: int) -> None:
        self.persist()
        self.parking = self.book.park(count)
        for seq in self.entries:
            if seq // BLOCK in self.parking:
                self.note(seq)
        self.persist()

    @precondition(lambda self: self.parking is not None)
    @rule()
    def let_pass(self) -> None:
        assert self.parking is not None
        self.book.let_pass(self.parking)
        unfinished = {seq // BLOCK for seq in self.entries}
        self.passed |= unfinished.intersection(self.parking)
        self.parking = None

    @rule()
    def restart(self) -> None:
        """A clean stop and start loses nothing and brings nothing back that was done.

        Messages left out by a sample may be new again, where nothing else of their block was delivered.
        """
        self.persist()
        journal = snapshot(self.book)
        floor, next_before = self.book.floor, self.next
        known = self.reopen(floor, journal)
        assert known == {
            seq: (entry.attempts, self.still_due(entry.deadline_ms) if entry.state == DEFERRED else 0)
            for seq, entry in self.entries.items()
        }
        again = [seq for seq in self.done - self.finished_now - self.skipped if floor <= seq < next_before]
        assert not again, f"{len(again)} from {min(again)} on were done and are new again"
        self.adopt(floor, known)
        self.stored_journal = journal
        self.stored_notes = dict(known)

    @rule()
    def crash(self) -> None:
        """Crashes: only the last floor and the journal up to it are left."""
        floor = self.stored_floor
        known = self.reopen(floor, self.stored_journal)
        again = {seq for seq in self.noted if seq >= floor} - self.finished_now
        assert not again, f"{len(again)} from {min(again)} on were noted as finished and are new again"
        for seq in self.entries:
            assert seq in known or (seq >= floor and seq not in self.finished_now), f"{seq} is lost"
        for seq, kept in known.items():
            assert seq < self.frontier or seq in self.done
            assert seq >= floor or seq in self.stored_unfinished, f"{seq} was finished"
            attempts, due_ms = self.stored_notes[seq]
            assert kept == (attempts, self.still_due(due_ms)), f"attempts or delay of {seq}"
        assert self.finished_now <= self.done
        self.adopt(floor, known)

    def still_due(self, due_ms: int) -> int:
        """A delay that is over leaves no trace in a restart."""
        return due_ms if due_ms > self.now_ms else 0

    def reopen(self, floor: int, journal: bytes) -> dict[int, tuple[int, int]]:
        """Makes a ledger from what is stored; returns the unfinished messages it knows, with attempts and due time."""
        self.book = make_ledger(self.kernel, floor)
        restore(self.book, journal, self.now_ms)
        known: dict[int, tuple[int, int]] = {}
        self.finished_now: set[int] = set()
        for record in records(snapshot(self.book)):
            if record.kind == JOURNAL_FINISHED:
                self.finished_now.update(range(record.seq, record.seq + record.span))
            else:
                known[record.seq] = (record.attempts, record.due_ms)
        return known

    def adopt(self, floor: int, known: dict[int, tuple[int, int]]) -> None:
        self.entries = {}
        for seq, (attempts, due_ms) in known.items():
            self.entries[seq] = Entry(DEFERRED if due_ms > self.now_ms else QUEUED, attempts, due_ms)
        self.done = {seq for seq in self.done if seq < floor and seq not in known} | self.finished_now
        self.next = floor
        self.passed = {seq // BLOCK for seq in known if seq // BLOCK < floor // BLOCK}
        self.parking = None
        self.consumers = []
        self.notes = {}
        self.mark = floor
        self.noted = set()
        self.stored_floor = floor
        self.stored_unfinished = set(known)
        self.join(MSG_TIMEOUT_MS)

    # -- what always holds -------------------------------------------------------------------------------

    # -- looking -----------------------------------------------------------------------------------------

    @rule(count=st.sampled_from([1, 700, 100_000]), slots_max=st.sampled_from([1, 2 * BLOCK, 1000 * BLOCK]))
    def list_what_waits(self, count: int, slots_max: int) -> None:
        for in_flight in (True, False):
            listed: list[Any] = []
            seq = 0
            while seq >= 0 and len(listed) < 3 * count:
                found, seq = self.book.waiting(in_flight, seq, count, slots_max)
                assert len(found) <= count
                listed += found
            expected = [seq for seq, entry in sorted(self.entries.items()) if (entry.state == IN_FLIGHT) == in_flight]
            assert [row[0] for row in listed] == (expected if seq < 0 else expected[: len(listed)])
            for row in listed:
                self.check_row(self.entries[row[0]], *row[1:])

    def check_row(self, entry: Entry, attempts: int, consumer_id: int, delivered_ms: int, due_ms: int) -> None:
        assert attempts == entry.attempts
        assert due_ms == (0 if entry.state == QUEUED else entry.deadline_ms)
        if entry.state == IN_FLIGHT:
            assert (consumer_id, delivered_ms) == (entry.owner.id, entry.delivered_ms)

    @rule(data=st.data())
    def count_below(self, data: st.DataObject) -> None:
        places = [self.first, self.next, self.next + BLOCK // 2, *list(self.entries)[:: max(1, len(self.entries) // 4)]]
        seq = data.draw(st.sampled_from(places), label="below")
        ahead = sum(self.next <= at < seq for at in self.entries) + sum(self.next <= at < seq for at in self.done)
        assert self.book.count_below(seq) == (sum(at < seq for at in self.entries), ahead)

    @invariant()
    def counts_agree(self) -> None:
        states = [entry.state for entry in self.entries.values()]
        assert self.book.in_flight == states.count(IN_FLIGHT)
        assert self.book.queued == states.count(QUEUED)
        assert self.book.deferred == states.count(DEFERRED)
        assert self.book.next == self.next
        known_ahead = sum(seq >= self.next for seq in self.entries) + sum(seq >= self.next for seq in self.done)
        assert self.book.ahead == known_ahead
        for consumer in self.consumers:
            held = sum(e.owner is consumer for e in self.entries.values() if e.state == IN_FLIGHT)
            assert consumer.in_flight == held

    @invariant()
    def nothing_unfinished_lies_below_the_floor_unless_parked(self) -> None:
        assert all(seq >= self.book.floor or seq // BLOCK in self.passed for seq in self.entries)
        parked = sorted(seq for seq in self.entries if seq // BLOCK in self.passed)
        assert self.book.unfinished_below(self.book.floor) == [seq for seq in parked if seq < self.book.floor]
        assert self.book.lowest() <= min([*self.entries, self.book.floor])

    @invariant()
    def the_earliest_deadline_is_not_missed(self) -> None:
        deadlines = [e.deadline_ms for e in self.entries.values() if e.state in (IN_FLIGHT, DEFERRED)]
        assert self.book.earliest <= min(deadlines, default=1 << 62)


@pytest.mark.timeout(3600)  # for HYPOTHESIS_PROFILE=long
@pytest.mark.parametrize("form", kernel_forms.FORMS)
def test_the_ledger_agrees_with_the_model(form: str) -> None:
    run_model(LedgerModel, 1.5 if form == "compiled" else 0.4, kernel=kernel_forms.load("ledger", form))
