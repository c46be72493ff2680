"""Checks what a channel's ledger leaves for a restart: its journal, parking, notes, and the snapshot of a stop."""

from types import ModuleType
from typing import Any

import pytest

from nsquark.kernel.journal import JOURNAL_FINISHED, JOURNAL_PARKED, JOURNAL_REQUEUED, record
from unit.ledger_rig import (
    BLOCK,
    MSG_TIMEOUT_MS,
    counts,
    join,
    make_ledger,
    new_among,
    note_finished,
    records,
    redeliver_all,
    restarted,
    restore,
    snapshot,
)


class TestJournal:
    def test_requeues_and_timeouts_are_noted_with_attempts_and_due_time(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        book.wall_offset_ms = 1_000_000
        consumer = join(book)
        book.take(consumer, 3, 0)
        book.requeue(consumer, 0, 0, 0)
        book.requeue(consumer, 1, 300, 10)
        book.expire(MSG_TIMEOUT_MS)
        kind = JOURNAL_REQUEUED
        assert records(book.journal) == [(kind, 1, 0, 0, 0), (kind, 1, 1, 1_000_310, 300), (kind, 1, 2, 0, 0)]

    def test_first_deliveries_and_their_finish_cost_no_record(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, BLOCK, 0)
        for seq in range(BLOCK):
            book.finish(consumer, seq)
        book.raise_floor()
        assert not book.journal

    def test_what_it_knows_comes_back_with_attempts_and_delay(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        book.wall_offset_ms = 5_000
        consumer = join(book)
        book.take(consumer, 4, 0)
        book.requeue(consumer, 1, 0, 0)
        book.retake(consumer, 1, 0)
        book.requeue(consumer, 1, 0, 0)
        book.requeue(consumer, 3, 400, 0)
        again = make_ledger(ledger, 0)
        again.wall_offset_ms = 5_100  # the machine was started anew: another monotonic clock
        restore(again, bytes(book.journal), 0)
        assert counts(again) == (0, 1, 1)
        assert again.ahead == 2
        assert redeliver_all(again, join(again)) == {1: 3}
        assert again.expire(299) == 0
        assert again.expire(300) == 1

    def test_what_is_below_the_floor_is_out_of_date(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 4, 0)
        book.requeue(consumer, 1, 0, 0)
        again = make_ledger(ledger, 2)
        restore(again, bytes(book.journal), 0)
        assert counts(again) == (0, 0, 0)
        assert again.ahead == 0

    def test_new_messages_between_known_ones_are_still_new(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 6, 0)
        for seq in (1, 2, 4):
            book.requeue(consumer, seq, 0, 0)
        again = make_ledger(ledger, 0)
        restore(again, bytes(book.journal), 0)
        assert again.untouched(10) == 1
        assert new_among(again, 8) == [0, 3, 5, 6, 7]
        assert again.ahead == 0

    def test_finish_ahead_is_known_at_once_and_after_a_crash(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger, 10)
        book.finish_ahead(12, 3)
        again = make_ledger(ledger, 10)
        restore(again, bytes(book.journal), 0)
        for known in (book, again):
            assert known.ahead == 3
            assert new_among(known, 8) == [10, 11, 15, 16, 17]
            known.raise_floor()
            assert known.floor == 18


class TestParking:
    def held(self, ledger: ModuleType, held: int, blocks: int = 3) -> tuple:  # type: ignore[type-arg]
        """Makes a ledger in which the first `held` messages of the lowest of some blocks are unfinished."""
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, blocks * BLOCK, 0)
        for seq in range(held, blocks * BLOCK):
            book.finish(consumer, seq)
        book.raise_floor()
        return book, consumer

    @pytest.mark.parametrize("held", [1, 1024, 1025, BLOCK])
    def test_the_floor_passes_what_is_parked(self, ledger: ModuleType, held: int) -> None:
        book, consumer = self.held(ledger, held)
        assert book.floor == 0
        numbers = book.park(1)
        assert numbers == [0]
        book.raise_floor()
        assert book.floor == 0, "not before it is durable"
        book.let_pass(numbers)
        assert book.floor == 3 * BLOCK
        assert book.lowest() == 0
        assert book.unfinished_below(3 * BLOCK) == list(range(held))
        assert counts(book) == (held, 0, 0)
        for seq in range(held):
            assert book.finish(consumer, seq) == ledger.DONE
        assert book.lowest() == 3 * BLOCK
        assert book.unfinished_below(3 * BLOCK) == []

    @pytest.mark.parametrize("held", [3, 2000])
    def test_parked_messages_are_messages_like_others(self, ledger: ModuleType, held: int) -> None:
        book, consumer = self.held(ledger, held)
        book.let_pass(book.park(1))
        other = join(book)
        assert book.finish(other, 0) == ledger.NOT_OWNER
        assert book.finish(consumer, held) == ledger.NOT_IN_FLIGHT
        assert book.touch(consumer, 0, 500) == ledger.DONE
        assert book.requeue(consumer, 1, 200, 0) == ledger.DONE
        assert book.requeue(consumer, 2, 0, 0) == ledger.DONE
        assert book.next_queued() == 2
        assert book.retake(other, 2, 0) == 2
        assert book.expire(200) == 1
        assert book.next_queued() == 1
        book.discard(1)
        assert book.expire(MSG_TIMEOUT_MS) == held - 2
        assert book.expire(500 + MSG_TIMEOUT_MS) == 1
        assert counts(book) == (0, held - 1, 0)

    @pytest.mark.parametrize("held", [4, 2000])
    def test_a_crash_brings_back_what_is_parked_and_unfinished(self, ledger: ModuleType, held: int) -> None:
        book, consumer = self.held(ledger, held)
        book.requeue(consumer, 1, 0, 0)
        book.retake(consumer, 1, 0)
        book.let_pass(book.park(1))
        book.finish(consumer, 0)
        book.requeue(consumer, 2, 700, 0)
        again = make_ledger(ledger, book.floor)
        restore(again, bytes(book.journal), 0)
        assert (again.floor, again.lowest(), again.ahead) == (3 * BLOCK, 0, 0)
        assert counts(again) == (0, held - 2, 1)
        attempts = redeliver_all(again, join(again))
        assert attempts == {1: 3, **dict.fromkeys(range(3, held), 2)}

    def test_parked_messages_finished_after_a_crash_stay_finished(self, ledger: ModuleType) -> None:
        book, _ = self.held(ledger, 3)
        book.let_pass(book.park(1))
        journal = bytes(book.journal)
        again = make_ledger(ledger, book.floor)
        restore(again, journal, 0)
        consumer = join(again)
        for seq in redeliver_all(again, consumer):
            again.finish(consumer, seq)
        third = make_ledger(ledger, again.floor)
        restore(third, journal + bytes(again.journal), 0)
        assert counts(third) == (0, 0, 0)
        assert third.lowest() == third.floor

    def test_what_was_finished_before_it_became_durable_needs_no_parking(self, ledger: ModuleType) -> None:
        book, consumer = self.held(ledger, 1)
        numbers = book.park(1)
        book.finish(consumer, 0)
        book.let_pass(numbers)
        assert book.floor == book.lowest() == 3 * BLOCK
        again = make_ledger(ledger, book.floor)
        restore(again, bytes(book.journal), 0)
        assert counts(again) == (0, 0, 0)


class TestNoting:
    """Checks that what was finished above a message that is not is noted when that has lasted from one call to the
    next.
    """

    def noted(self, ledger: ModuleType, book: Any) -> list[tuple[int, int]]:
        book.raise_floor()
        note_finished(book)
        found = records(book.journal)
        book.journal.clear()
        assert all(noted.kind == JOURNAL_FINISHED for noted in found)
        return [(record.seq, record.span) for record in found]

    def test_nothing_while_messages_are_finished_as_they_came(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        for _ in range(5):
            book.take(consumer, BLOCK, 0)
            for seq in range(book.floor, book.next - 10):
                if seq % 7:
                    book.finish(consumer, seq)
            assert self.noted(ledger, book) == []
            for seq in range(book.floor, book.next):
                book.finish(consumer, seq)
            book.raise_floor()
        assert not book.has_news

    def test_runs_above_a_held_message_once_each(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 20, 0)
        assert self.noted(ledger, book) == []
        for seq in (1, 2, 3, 7, 9):
            book.finish(consumer, seq)
        assert book.has_news
        assert self.noted(ledger, book) == [(1, 3), (7, 1), (9, 1)]
        assert not book.has_news
        for seq in (8, 10, 15):
            book.finish(consumer, seq)
        assert self.noted(ledger, book) == [(8, 3), (15, 1)]
        assert self.noted(ledger, book) == []

    def test_whole_blocks_and_what_a_sample_left_out(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 2 * BLOCK, 0)
        book.skip(2 * BLOCK + 5)
        book.take(consumer, 5, 0)
        note_finished(book)
        for seq in (*range(1, 2 * BLOCK), 2 * BLOCK + 5, 2 * BLOCK + 9):
            book.finish(consumer, seq)
        assert self.noted(ledger, book) == [(BLOCK, BLOCK), (1, BLOCK - 1), (2 * BLOCK + 5, 1), (2 * BLOCK + 9, 1)]

    def test_a_crash_brings_back_only_what_is_unfinished(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 3 * BLOCK, 0)
        unfinished = {0, 17, BLOCK + 1, 3 * BLOCK - 1}
        book.requeue(consumer, 17, 0, 0)
        note_finished(book)
        for seq in range(3 * BLOCK):
            if seq not in unfinished:
                book.finish(consumer, seq)
        book.raise_floor()
        note_finished(book)
        again = make_ledger(ledger, book.floor)
        restore(again, bytes(book.journal), 0)
        assert set(new_among(again, 3 * BLOCK)) == unfinished - {17}
        assert redeliver_all(again, join(again)) == {17: 2}

    def test_what_was_restored_is_not_noted_again(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 10, 0)
        note_finished(book)
        for seq in range(5, 10):
            book.finish(consumer, seq)
        note_finished(book)
        again = make_ledger(ledger, 0)
        restore(again, bytes(book.journal), 0)
        other = join(again)
        again.take(other, 5, 0)
        again.skip(10)
        note_finished(again)
        again.finish(other, 4)
        assert self.noted(ledger, again) == [(4, 1)]

    def test_a_journal_of_old_ranges_is_read_quickly(self, ledger: ModuleType) -> None:
        """Below the floor only parked messages matter, not each number of a range."""
        ranges = b"".join(record(JOURNAL_FINISHED, 0, first << 32, 0, (1 << 32) - 1) for first in range(3))
        book = make_ledger(ledger, 3 << 32)
        restore(book, record(JOURNAL_PARKED, 1, 5, 0, 0) + ranges, 0, [((1 << 32) * 3, 1)])
        assert counts(book) == (0, 0, 0)


def test_blocks_made_after_the_channel_was_emptied_are_not_taken_for_parked(ledger: ModuleType) -> None:
    """Parking waits for the disk; meanwhile a channel may be sent back to messages that no journal has."""
    book = make_ledger(ledger)
    consumer = join(book)
    book.take(consumer, 2 * BLOCK, 0)
    numbers = book.park(1)
    book.empty(0)
    book.take(consumer, 2 * BLOCK, 0)
    book.let_pass(numbers)
    assert book.floor == 0


class TestRestart:
    def test_a_clean_restart_keeps_attempts_delays_and_what_is_finished(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger, 100)
        consumer = join(book)
        book.take(consumer, 10, 0)
        for seq in (100, 103, 104, 109):
            book.finish(consumer, seq)
        book.requeue(consumer, 105, 500, 0)
        book.requeue(consumer, 106, 0, 0)
        again = restarted(ledger, book)
        assert again.floor == again.next == 101
        assert counts(again) == (0, 5, 1)
        assert redeliver_all(again, join(again)) == {101: 2, 102: 2, 106: 2, 107: 2, 108: 2}
        assert new_among(again, 10) == [110]
        assert again.expire(500) == 1

    def test_a_snapshot_changes_nothing(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 10, 0)
        book.requeue(consumer, 1, 0, 0)
        journal = bytes(book.journal)
        assert snapshot(book) == snapshot(book)
        assert bytes(book.journal) == journal
        assert counts(book) == (9, 1, 0)

    def test_parked_messages_survive_a_clean_restart(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 3 * BLOCK, 0)
        for seq in range(2, 3 * BLOCK):
            book.finish(consumer, seq)
        book.let_pass(book.park(1))
        again = restarted(ledger, book)
        assert (again.floor, again.lowest()) == (3 * BLOCK, 0)
        assert redeliver_all(again, join(again)) == {0: 2, 1: 2}
