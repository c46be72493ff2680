"""Checks what a channel knows of its messages: each rule of the ledger by example, on both forms of the kernel."""

from types import ModuleType

import pytest

from nsquark.kernel.journal import JOURNAL_REQUEUED, record
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
    records,
    redeliver_all,
    restore,
    sequence_of,
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
