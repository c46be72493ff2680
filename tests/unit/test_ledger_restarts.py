"""Checks by example what a channel knows after restarts and crashes at awkward moments, on both forms of the kernel."""

from types import ModuleType
from typing import Any

from nsquark.kernel.journal import JOURNAL_REQUEUED, record
from unit.ledger_rig import BLOCK, counts, join, make_ledger, new_among, redeliver_all, restarted, restore


def test_whole_blocks_finished_above_the_floor_stay_finished(ledger: ModuleType) -> None:
    book = make_ledger(ledger)
    consumer = join(book)
    book.take(consumer, 4 * BLOCK, 0)
    for seq in range(1, 4 * BLOCK):
        assert book.finish(consumer, seq) == ledger.DONE
    again = restarted(ledger, book)
    assert again.floor == 0
    assert new_among(again, 4 * BLOCK) == []


def test_what_a_sample_left_out_between_deliveries_stays_out(ledger: ModuleType) -> None:
    book = make_ledger(ledger)
    consumer = join(book)
    book.take(consumer, 1, 0)
    book.skip(5)
    book.take(consumer, 1, 0)
    assert new_among(restarted(ledger, book), 6) == []


def test_parked_before_a_crash_and_finished_after_it_does_not_come_back(ledger: ModuleType) -> None:
    """The journal tells of the parking, but the process ended before the floor passed."""
    book = make_ledger(ledger)
    book.take(join(book), 2 * BLOCK, 0)
    book.park(1)
    journal = bytes(book.journal)
    second = make_ledger(ledger)
    restore(second, journal, 0)
    consumer = join(second)
    for seq in redeliver_all(second, consumer):
        assert second.finish(consumer, seq) == ledger.DONE
    second.skip(BLOCK)
    second.raise_floor()
    assert second.floor == BLOCK
    third = make_ledger(ledger, second.floor)
    restore(third, journal + bytes(second.journal), 0)
    assert third.queued == 0


def _known_here_and_there(ledger: ModuleType, step: int) -> tuple[Any, bytes]:
    """Makes a ledger after a crash, which knows every `step`th message of three blocks, the others being new; and its
    journal.
    """
    book = make_ledger(ledger)
    consumer = join(book)
    book.take(consumer, 3 * BLOCK, 0)
    for seq in range(0, 3 * BLOCK, step):
        book.requeue(consumer, seq, 0, 0)
    journal = bytes(book.journal)
    again = make_ledger(ledger)
    restore(again, journal, 0)
    again.journal.clear()
    return again, journal


def test_parking_blocks_at_and_above_next_loses_none_of_their_new_messages(ledger: ModuleType) -> None:
    book, journal = _known_here_and_there(ledger, 2)
    numbers = book.park(2)
    journal += bytes(book.journal)
    book.journal.clear()
    book.let_pass(numbers)
    consumer = join(book)
    taken: list[int] = []
    while book.next < 2 * BLOCK:
        run = book.untouched(2 * BLOCK - book.next)
        if run < 0:
            book.skip(book.next - run)
        else:
            taken.extend(range(book.next, book.next + run))
            book.take(consumer, run, 0)
    assert taken == list(range(1, 2 * BLOCK, 2))
    book.raise_floor()
    third = make_ledger(ledger, book.floor)
    restore(third, journal + bytes(book.journal), 0)
    known = redeliver_all(third, join(third))
    assert [seq for seq in taken if seq < third.floor and seq not in known] == []


def test_a_sparse_block_at_next_is_stepped_through(ledger: ModuleType) -> None:
    book, _ = _known_here_and_there(ledger, 64)
    book.let_pass(book.park(2))
    assert book.untouched(64) == -1
    book.skip(1)
    assert book.untouched(640) == 63


def test_what_came_due_while_nobody_ran_is_queued_at_once(ledger: ModuleType) -> None:
    """Its clock was not ahead: nothing is brought forward."""
    book = make_ledger(ledger)
    assert restore(book, record(JOURNAL_REQUEUED, 3, 7, 100, 50), 1000) == 0
    assert counts(book) == (0, 1, 0)


def test_none_is_due_later_than_when_it_was_noted(ledger: ModuleType) -> None:
    book = make_ledger(ledger)
    assert restore(book, record(JOURNAL_REQUEUED, 3, 7, 5000, 50), 1000) == 1
    assert (counts(book), book.earliest) == ((0, 0, 1), 1050)
