"""Checks what a channel knows of its messages: each rule of the ledger by example, on both forms of the kernel."""

from types import ModuleType
from typing import Any

import pytest

from nsquark.kernel.journal import JOURNAL_FINISHED, JOURNAL_PARKED, JOURNAL_REQUEUED, record
from unit.ledger_rig import (
    BLOCK,
    MSG_TIMEOUT_MAX_MS,
    MSG_TIMEOUT_MS,
    REQ_TIMEOUT_MAX_MS,
    acknowledge,
    acknowledge_at,
    counts,
    join,
    make_ledger,
    message_id,
    new_among,
    note_finished,
    records,
    redeliver_all,
    restarted,
    restore,
    sequence_of,
    snapshot,
)

NEVER = 1 << 62


class TestDelivery:
    def test_taken_messages_are_in_flight_to_their_consumer(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger, 100)
        consumer = join(book)
        book.take(consumer, 5, 0)
        assert (book.floor, book.next) == (100, 105)
        assert counts(book) == (5, 0, 0)
        assert (consumer.in_flight, consumer.message_count) == (5, 5)

    def test_a_take_may_span_blocks(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger, BLOCK - 1)
        consumer = join(book)
        book.take(consumer, 2 * BLOCK + 2, 0)
        assert book.blocks_open == 4
        for seq in range(BLOCK - 1, 3 * BLOCK + 1):
            assert book.finish(consumer, seq) == ledger.DONE
        book.raise_floor()
        assert book.floor == book.next == 3 * BLOCK + 1

    def test_queued_messages_come_in_order(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 3 * BLOCK, 0)
        wanted = [3 * BLOCK - 1, 5, BLOCK + 7, 4, 2 * BLOCK]
        for seq in wanted:
            book.requeue(consumer, seq, 0, 0)
        assert book.queued == 5
        assert list(redeliver_all(book, consumer)) == sorted(wanted)
        assert book.next_queued() == -1

    def test_what_is_queued_behind_the_sweep_waits_for_the_next(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 3 * BLOCK, 0)
        for seq in (5, BLOCK + 1):
            book.requeue(consumer, seq, 0, 0)
        served = []
        for late in (2, 7, 2 * BLOCK, BLOCK + 3, BLOCK):
            served.append(book.next_queued())
            book.retake(consumer, served[-1], 0)
            book.requeue(consumer, late, 0, 0)
        assert served == [5, BLOCK + 1, 2, 7, BLOCK + 3]
        assert list(redeliver_all(book, consumer)) == [2 * BLOCK, BLOCK]

    def test_a_message_that_is_always_queued_again_lets_all_others_come(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 2 * BLOCK, 0)
        stubborn = (0, 1, BLOCK + 5)
        good = set(range(10, 2 * BLOCK, 400))
        for seq in (*stubborn, *good):
            book.requeue(consumer, seq, 0, 0)
        for _ in range(2 * (len(stubborn) + len(good))):
            seq = book.next_queued()
            book.retake(consumer, seq, 0)
            if seq in stubborn:
                book.requeue(consumer, seq, 0, 0)
            else:
                good.remove(seq)
                book.finish(consumer, seq)
        assert not good

    @pytest.mark.parametrize("held", [3, 2000])
    def test_the_order_is_fair_over_parking_too(self, ledger: ModuleType, held: int) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 2 * BLOCK, 0)
        for seq in range(held, 2 * BLOCK):
            book.finish(consumer, seq)
        for seq in range(held):
            book.requeue(consumer, seq, 0, 0)
        first = book.next_queued()
        book.retake(consumer, first, 0)
        book.requeue(consumer, first, 0, 0)
        book.let_pass(book.park(1))
        served = []
        for _ in range(held):
            served.append(book.next_queued())
            book.retake(consumer, served[-1], 0)
            book.requeue(consumer, served[-1], 0, 0)
        assert (first, served) == (0, [*range(1, held), 0])

    def test_discarded_messages_are_finished(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 2, 0)
        book.requeue(consumer, 0, 0, 0)
        book.discard(book.next_queued())
        assert counts(book) == (1, 0, 0)
        book.raise_floor()
        assert book.floor == 1

    def test_skipped_messages_do_not_hold_the_floor(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 1, 0)
        book.skip(10 * BLOCK)
        book.take(consumer, 1, 0)
        assert book.finish(consumer, 5) == ledger.NOT_IN_FLIGHT
        book.finish(consumer, 0)
        book.raise_floor()
        assert book.floor == 10 * BLOCK

    def test_next_never_goes_back(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger, 10)
        book.skip(5)
        assert book.next == 10

    def test_attempts_count_up_and_wrap_as_two_bytes(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        restore(book, record(JOURNAL_REQUEUED, 65534, 0, 0, 0), 0)
        consumer = join(book)
        attempts = []
        for _ in range(3):
            attempts.append(book.retake(consumer, 0, 0))
            book.requeue(consumer, 0, 0, 0)
        assert attempts == [65535, 0, 1]

    def test_a_requeue_that_does_not_count_takes_its_attempt_back(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 1, 0)
        for counted, attempt in ((False, 1), (False, 1), (True, 2), (False, 2)):
            assert book.requeue(consumer, 0, 0, 0, counted) == ledger.DONE
            assert book.retake(consumer, 0, 0) == attempt
        assert [note.attempts for note in records(book.journal)] == [0, 0, 1, 1]


class TestFloor:
    def test_stands_at_the_first_unfinished_message(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 10, 0)
        for seq in (0, 1, 3):
            book.finish(consumer, seq)
        book.raise_floor()
        assert book.floor == 2
        book.finish(consumer, 2)
        book.raise_floor()
        assert book.floor == 4

    @pytest.mark.parametrize("delay_ms", [0, 500])
    def test_requeued_and_deferred_messages_hold_it(self, ledger: ModuleType, delay_ms: int) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 3, 0)
        book.requeue(consumer, 1, delay_ms, 0)
        book.finish(consumer, 0)
        book.finish(consumer, 2)
        book.raise_floor()
        assert book.floor == 1

    def test_reaches_next_when_all_is_finished_and_blocks_are_let_go(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        for _ in range(20):
            book.take(consumer, BLOCK, 0)
            for seq in range(book.next - BLOCK, book.next):
                book.finish(consumer, seq)
            book.raise_floor()
            assert book.floor == book.next
            assert book.blocks_open <= 1
        assert book.lowest() == book.next

    def test_a_middle_block_goes_before_the_lowest(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 3 * BLOCK, 0)
        for seq in range(1, 3 * BLOCK):
            book.finish(consumer, seq)
        book.raise_floor()
        assert book.floor == 0
        book.finish(consumer, 0)
        book.raise_floor()
        assert book.floor == 3 * BLOCK


class TestAnswers:
    def test_only_the_owner_may_answer(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        owner, other = join(book), join(book)
        book.take(owner, 1, 0)
        assert book.finish(other, 0) == ledger.NOT_OWNER
        assert book.requeue(other, 0, 0, 0) == ledger.NOT_OWNER
        assert book.touch(other, 0, 0) == ledger.NOT_OWNER
        assert counts(book) == (1, 0, 0)
        assert book.finish(owner, 0) == ledger.DONE

    @pytest.mark.parametrize("seq", [0, 1, 4, 5, BLOCK, 1 << 52])
    def test_what_is_not_in_flight_cannot_be_answered(self, ledger: ModuleType, seq: int) -> None:
        book = make_ledger(ledger, 1)
        consumer = join(book)
        book.take(consumer, 4, 0)
        book.finish(consumer, 1)
        book.requeue(consumer, 4, 100, 0)
        before = counts(book)
        assert book.finish(consumer, seq) == ledger.NOT_IN_FLIGHT
        assert book.requeue(consumer, seq, 0, 0) == ledger.NOT_IN_FLIGHT
        assert book.touch(consumer, seq, 0) == ledger.NOT_IN_FLIGHT
        assert counts(book) == before

    def test_the_next_owner_is_whoever_got_it_last(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        first, second = join(book), join(book)
        book.take(first, 1, 0)
        book.expire(MSG_TIMEOUT_MS)
        book.retake(second, 0, 0)
        assert book.finish(first, 0) == ledger.NOT_OWNER
        assert book.finish(second, 0) == ledger.DONE
        assert (first.in_flight, second.in_flight) == (0, 0)

    def test_counts_of_answers(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 3, 0)
        book.finish(consumer, 0)
        book.requeue(consumer, 1, 0, 0)
        book.requeue(consumer, 2, 10, 0)
        assert (consumer.finish_count, consumer.requeue_count, consumer.in_flight) == (1, 2, 0)
        assert book.requeue_count == 2
        assert counts(book) == (0, 1, 1)

    def test_a_requeue_is_due_at_most_after_the_maximum(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 1, 0)
        book.requeue(consumer, 0, REQ_TIMEOUT_MAX_MS + 1, 5)
        assert book.expire(REQ_TIMEOUT_MAX_MS + 4) == 0
        assert book.expire(REQ_TIMEOUT_MAX_MS + 5) == 1
        assert counts(book) == (0, 1, 0)


class TestTime:
    def test_messages_time_out_at_their_deadline(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 3, 0)
        book.take(consumer, 1, 10)
        assert book.earliest == MSG_TIMEOUT_MS
        assert book.expire(MSG_TIMEOUT_MS - 1) == 0
        assert book.expire(MSG_TIMEOUT_MS) == 3
        assert counts(book) == (1, 3, 0)
        assert (book.timeout_count, consumer.in_flight) == (3, 1)
        assert book.earliest == MSG_TIMEOUT_MS + 10

    def test_nothing_is_due_when_nothing_is_out(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        assert book.earliest == NEVER
        consumer = join(book)
        book.take(consumer, 1, 0)
        book.finish(consumer, 0)
        book.expire(MSG_TIMEOUT_MS)
        assert book.earliest == NEVER

    def test_messages_of_a_consumer_that_left_time_out(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 2, 0)
        book.leave(consumer)
        assert counts(book) == (2, 0, 0)
        assert book.expire(MSG_TIMEOUT_MS) == 2

    def test_touch_gives_the_whole_timeout_again(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 1, 0)
        assert book.touch(consumer, 0, 900) == ledger.DONE
        assert book.expire(900 + MSG_TIMEOUT_MS - 1) == 0
        assert book.expire(900 + MSG_TIMEOUT_MS) == 1

    def test_touch_reaches_no_further_than_the_maximum_since_delivery(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 1, 7)
        for now_ms in range(7, MSG_TIMEOUT_MAX_MS, 500):
            assert book.touch(consumer, 0, now_ms) == ledger.DONE
            assert book.expire(now_ms) == 0
        assert book.expire(7 + MSG_TIMEOUT_MAX_MS - 1) == 0
        assert book.expire(7 + MSG_TIMEOUT_MAX_MS) == 1

    def test_a_redelivery_starts_the_maximum_anew(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 1, 0)
        book.expire(MSG_TIMEOUT_MS)
        book.retake(consumer, 0, MSG_TIMEOUT_MAX_MS)
        book.touch(consumer, 0, MSG_TIMEOUT_MAX_MS + 10)
        assert book.expire(MSG_TIMEOUT_MAX_MS + MSG_TIMEOUT_MS) == 0
        assert book.expire(MSG_TIMEOUT_MAX_MS + MSG_TIMEOUT_MS + 10) == 1

    def test_hasten_brings_one_consumers_deadlines_forward(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        leaving, staying = join(book), join(book)
        book.take(leaving, 2, 0)
        book.take(staying, 2, 0)
        book.requeue(leaving, 1, 800, 0)
        book.hasten(leaving, 50)
        assert book.earliest == 50
        assert book.expire(50) == 1
        assert counts(book) == (2, 1, 1)

    def test_hasten_never_delays(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 1, 0)
        book.hasten(consumer, 5 * MSG_TIMEOUT_MS)
        assert book.expire(MSG_TIMEOUT_MS) == 1


class TestAcknowledge:
    def take(self, ledger: ModuleType, count: int = 3) -> tuple:  # type: ignore[type-arg]
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, count, 0)
        return book, consumer

    COMMANDS = (
        b"FIN " + message_id(0) + b"\nRDY 12\nNOP\nTOUCH " + message_id(1) + b"\nREQ " + message_id(2) + b" 250\n"
    )

    def test_every_command(self, ledger: ModuleType) -> None:
        book, consumer = self.take(ledger)
        assert acknowledge(book, consumer, self.COMMANDS, 100) == len(self.COMMANDS)
        assert counts(book) == (1, 0, 1)
        assert consumer.rdy == 12
        assert book.expire(349) == 0
        assert book.expire(350) == 1  # the REQ
        assert book.expire(100 + MSG_TIMEOUT_MS - 1) == 0
        assert book.expire(100 + MSG_TIMEOUT_MS) == 1  # the TOUCH

    def test_every_split_into_two_reads_comes_to_the_same(self, ledger: ModuleType) -> None:
        ends = [index + 1 for index, byte in enumerate(self.COMMANDS) if byte == 10]
        for cut in range(len(self.COMMANDS) + 1):
            book, consumer = self.take(ledger)
            done = acknowledge(book, consumer, self.COMMANDS[:cut], 100)
            assert done == max([0, *(end for end in ends if end <= cut)])
            assert acknowledge(book, consumer, self.COMMANDS[done:], 100) == len(self.COMMANDS) - done
            assert (counts(book), consumer.rdy) == ((1, 0, 1), 12)

    def test_starts_and_ends_where_it_is_told(self, ledger: ModuleType) -> None:
        book, consumer = self.take(ledger)
        data = bytearray(b"RDY 1\nRDY 2\nRDY 3\n")
        assert acknowledge_at(book, consumer, data, 6, 12, 0) == 12
        assert consumer.rdy == 2
        assert acknowledge_at(book, consumer, data, 12, 17, 0) == 12
        assert consumer.rdy == 2

    @pytest.mark.parametrize(
        "command",
        [
            b"FIN " + message_id(0)[:-1] + b"\n",
            b"FIN " + message_id(0) + b" \n",
            b"FIN " + message_id(0) + b"\r\n",
            b"FIN  " + message_id(0)[1:] + b"\n",
            b"FIN " + message_id(0)[:-1] + b"g\n",
            b"FIN " + message_id(0)[:-1] + b"A\n",
            b"FIN " + message_id(0)[:-1] + b"/\n",
            b"FIN 8000000000000000\n",
            b"FIM " + message_id(0) + b"\n",
            b"FIN_" + message_id(0) + b"\n",
            b"fin " + message_id(0) + b"\n",
            b"REQ " + message_id(0) + b"\n",
            b"REQ " + message_id(0) + b" \n",
            b"REQ " + message_id(0) + b" -1\n",
            b"REQ " + message_id(0) + b" 1x\n",
            b"REQ " + message_id(0) + b"  1\n",
            b"REQ " + message_id(0) + b" 1 \n",
            b"REQ " + message_id(0) + b" 9999999999\n",
            b"REQ_" + message_id(0) + b" 1\n",
            b"RXQ " + message_id(0) + b" 1\n",
            b"TOUCH " + message_id(0)[:-1] + b"\n",
            b"TOUCH_" + message_id(0) + b"\n",
            b"TOUCK " + message_id(0) + b"\n",
            b"TOUCH " + message_id(0) + b"\r\n",
            b"RDY\n",
            b"RDY \n",
            b"RDY -1\n",
            b"RDY 1.5\n",
            b"RDY 2501\n",
            b"RDY 9999999999\n",
            b"RDY\t1\n",
            b"RDX 1\n",
            b"NOP \n",
            b"NOP\r\n",
            b"NOX\n",
            b"CLS\n",
            b"PUB x\n",
            b"\n\n\n\n\n",
            b"\x00" * 30,
            b"\xff" * 30,
            b"RDY " + b"1" * 40 + b"\n",
        ],
    )
    def test_what_is_malformed_is_left_for_the_session(self, ledger: ModuleType, command: bytes) -> None:
        book, consumer = self.take(ledger)
        assert acknowledge(book, consumer, b"RDY 3\n" + command + b"NOP\n") == 6
        assert (counts(book), consumer.rdy) == ((3, 0, 0), 3)

    @pytest.mark.parametrize(
        "command",
        [b"FIN " + message_id(9) + b"\n", b"REQ " + message_id(9) + b" 0\n", b"TOUCH " + message_id(9) + b"\n"],
    )
    def test_what_is_refused_is_left_for_the_session(self, ledger: ModuleType, command: bytes) -> None:
        book, consumer = self.take(ledger)
        assert acknowledge(book, consumer, b"NOP\n" + command + b"NOP\n") == 4

    def test_numbers_up_to_nine_digits_are_taken(self, ledger: ModuleType) -> None:
        book, consumer = self.take(ledger)
        assert acknowledge(book, consumer, b"REQ " + message_id(0) + b" 999999999\n") == 31
        assert book.expire(REQ_TIMEOUT_MAX_MS) == 3

    def test_the_node_in_an_id_does_not_matter(self, ledger: ModuleType) -> None:
        book, consumer = self.take(ledger)
        command = b"FIN " + message_id(0, node_id=1023) + b"\n"
        assert acknowledge(book, consumer, command) == len(command)

    def test_rdy_up_to_the_maximum(self, ledger: ModuleType) -> None:
        book, consumer = self.take(ledger)
        assert acknowledge(book, consumer, b"RDY 2500\n") == 9
        assert acknowledge(book, consumer, b"RDY 0\n") == 6
        assert consumer.rdy == 0


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


def test_empty_drops_everything_and_starts_anew(ledger: ModuleType) -> None:
    book = make_ledger(ledger)
    consumer = join(book)
    book.take(consumer, 2 * BLOCK, 0)
    book.requeue(consumer, 1, 0, 0)
    book.requeue(consumer, 2, 10, 0)
    book.empty(book.next)
    assert (book.floor, book.next, book.lowest()) == (2 * BLOCK,) * 3
    assert counts(book) == (0, 0, 0)
    assert (consumer.in_flight, book.next_queued(), book.earliest) == (0, -1, NEVER)
    assert book.finish(consumer, 5) == ledger.NOT_IN_FLIGHT
    book.take(consumer, 5, 0)
    assert book.finish(consumer, 2 * BLOCK) == ledger.DONE
    assert (book.in_flight, consumer.in_flight) == (4, 4)


@pytest.mark.parametrize(
    ("text", "seq"),
    [
        (b"0000000000000000", 0),
        (b"00000000000000ff", 255),
        (message_id((1 << 53) - 1, 1023), (1 << 53) - 1),
        (b"8000000000000000", -1),
        (b"00000000000000FF", -1),
        (b"000000000000000", -1),
        (b"00000000000000000", -1),
        (b"", -1),
        (b"000000000000000\n", -1),
    ],
)
def test_sequence_of_an_id(ledger: ModuleType, text: bytes, seq: int) -> None:
    assert sequence_of(ledger, text) == seq
