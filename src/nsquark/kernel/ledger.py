# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""What a channel knows of each message between its floor and the next one to deliver.

The state of messages lies in blocks of 4096 slots of C arrays. A block comes with the first message taken
from it and goes when all of them are finished, wherever it lies, so an idle channel holds none.
"""

from collections import deque
from heapq import heappop, heappush

import cython

from nsquark.kernel.journal import JOURNAL_FINISHED, JOURNAL_PARKED, JOURNAL_RECORD, JOURNAL_REQUEUED
from nsquark.wire import record as record_layout

if cython.compiled:
    from cython.cimports.nsquark.kernel.bytes import i64, little_u64, u32
    from cython.cimports.nsquark.kernel.journal import record
else:
    from nsquark.kernel.bytes import i64, little_u64, u32
    from nsquark.kernel.journal import record

BLOCK_BITS = cython.declare(cython.int, 12)
BLOCK_SLOTS = cython.declare(cython.int, 4096)
SLOT_MASK = cython.declare(cython.int, 4095)
SEQ_MASK = cython.declare(cython.longlong, record_layout.SEQ_MASK)
SIZE_BYTES = cython.declare(cython.longlong, record_layout.SIZE_BYTES)
TIMESTAMP_AT = cython.declare(cython.longlong, record_layout.TIMESTAMP_AT)
NEVER = cython.declare(cython.longlong, (1 << 62))

FREE = cython.declare(cython.int, 0)
IN_FLIGHT = cython.declare(cython.int, 1)
QUEUED = cython.declare(cython.int, 2)
DEFERRED = cython.declare(cython.int, 3)
FINISHED = cython.declare(cython.int, 4)
NOTED = cython.declare(cython.int, 5)  # finished, and the journal says so

# What FIN, REQ and TOUCH come to. The plain names are for callers in Python, the others for C.
DONE, NOT_IN_FLIGHT, NOT_OWNER = 0, 1, 2
_DONE = cython.declare(cython.int, 0)
_NOT_IN_FLIGHT = cython.declare(cython.int, 1)
_NOT_OWNER = cython.declare(cython.int, 2)

# A parked block with fewer messages than this is kept as a short sorted list instead of 4096 slots.
SPARSE_SLOTS_MAX = cython.declare(cython.int, 1024)
BLOCKS_POOLED_MAX = cython.declare(cython.int, 64)

# How many blocks below the floor are kept with all slots while a journal is read.
DENSE_BLOCKS_RESTORED_MAX = cython.declare(cython.int, 256)

RECORD_BYTES = cython.declare(cython.int, JOURNAL_RECORD.size)
REQUEUED_KIND = cython.declare(cython.int, JOURNAL_REQUEUED)
PARKED_KIND = cython.declare(cython.int, JOURNAL_PARKED)
FINISHED_KIND = cython.declare(cython.int, JOURNAL_FINISHED)


@cython.cclass
class Consumer:
    """The share of one client in a channel: its window and its counts."""

    id = cython.declare(cython.uint, visibility="readonly")
    rdy = cython.declare(cython.longlong, visibility="public")
    rdy_max = cython.declare(cython.longlong, visibility="public")
    in_flight = cython.declare(cython.longlong, visibility="public")
    msg_timeout_ms = cython.declare(cython.longlong, visibility="public")
    message_count = cython.declare(cython.longlong, visibility="public")
    finish_count = cython.declare(cython.longlong, visibility="public")
    requeue_count = cython.declare(cython.longlong, visibility="public")

    def __init__(self, consumer_id: cython.uint, rdy_max: cython.longlong, msg_timeout_ms: cython.longlong):
        self.id = consumer_id
        self.rdy = 0
        self.rdy_max = rdy_max
        self.in_flight = 0
        self.msg_timeout_ms = msg_timeout_ms
        self.message_count = 0
        self.finish_count = 0
        self.requeue_count = 0


@cython.cclass
class Block:
    """4096 slots, or, once parked and thinly populated, a sorted list of those that still matter."""

    number: cython.longlong
    size: cython.int
    active: cython.int
    queued_from: cython.int  # below this index nothing waits for the sweep that is under way
    later_from: cython.int  # below this one nothing waits for the next sweep
    active_from: cython.int
    earliest: cython.longlong
    noted: cython.bint  # what is unfinished here is in the journal, and stays there until finished
    parked: cython.bint  # that is durable: the floor has passed
    listed: cython.bint  # among the blocks that the sweep has yet to finish
    listed_later: cython.bint  # among those of the next sweep
    unnoted: cython.bint  # something was finished here that is not in the journal
    sparse: cython.bint
    slots: cython.ushort[::1]
    state: cython.uchar[::1]
    attempts: cython.ushort[::1]
    owner: cython.uint[::1]
    deadline: cython.longlong[::1]
    delivered: cython.longlong[::1]
    published: cython.longlong[::1]  # ns; only where latency is measured

    def __init__(self, size: cython.int, measure: cython.bint):
        self.size = size
        self.slots = memoryview(bytearray(2 * (size if size < BLOCK_SLOTS else 1))).cast("H")
        self.state = memoryview(bytearray(size))
        self.attempts = memoryview(bytearray(2 * size)).cast("H")
        self.owner = memoryview(bytearray(4 * size)).cast("I")
        self.deadline = memoryview(bytearray(8 * size)).cast("q")
        self.delivered = memoryview(bytearray(8 * size)).cast("q")
        self.published = memoryview(bytearray(8 * (size if measure else 1))).cast("q")
        self.reset(0)

    @cython.ccall
    def reset(self, number: cython.longlong) -> cython.void:
        self.number = number
        self.active = 0
        self.queued_from = 0
        self.later_from = 0
        self.active_from = 0
        self.earliest = NEVER
        self.noted = False
        self.parked = False
        self.listed = False
        self.listed_later = False
        self.unnoted = False
        self.sparse = self.size < BLOCK_SLOTS
        index: cython.int
        if not self.sparse:
            for index in range(self.size):
                self.state[index] = 0

    @cython.cfunc
    @cython.exceptval(check=False)
    def index(self, slot: cython.int) -> cython.int:
        """Where a slot's state lies; -1 if it is no longer kept."""
        if not self.sparse:
            return slot
        low: cython.int = 0
        high: cython.int = self.size - 1
        middle: cython.int
        while low <= high:
            middle = (low + high) >> 1
            if self.slots[middle] == slot:
                return middle
            if self.slots[middle] < slot:
                low = middle + 1
            else:
                high = middle - 1
        return -1

    @cython.cfunc
    @cython.exceptval(check=False)
    def slot_of(self, index: cython.int) -> cython.int:
        return self.slots[index] if self.sparse else index

    @cython.cfunc
    @cython.exceptval(check=False)
    def is_active(self, index: cython.int) -> cython.bint:
        return FREE < self.state[index] < FINISHED

    @cython.cfunc
    def thinned(self, measure: cython.bint):
        """The same block with only what is active in it."""
        thin: Block = Block(self.active, measure)
        at: cython.int = 0
        index: cython.int
        for index in range(self.size):
            if self.is_active(index):
                thin.slots[at] = self.slot_of(index)
                thin.state[at] = self.state[index]
                thin.attempts[at] = self.attempts[index]
                thin.owner[at] = self.owner[index]
                thin.deadline[at] = self.deadline[index]
                thin.delivered[at] = self.delivered[index]
                if measure:
                    thin.published[at] = self.published[index]
                at += 1
                if index < self.queued_from:
                    thin.queued_from = at
                if index < self.later_from:
                    thin.later_from = at
        thin.number = self.number
        thin.active = self.active
        thin.earliest = self.earliest
        thin.noted = self.noted
        thin.parked = self.parked
        thin.listed = self.listed
        thin.listed_later = self.listed_later
        return thin


@cython.cclass
class Ledger:
    """The messages of one channel that are neither untouched nor forgotten.

    * Below `floor` every message is finished or parked (its state is in the journal and its block kept aside).
    * From `next` on no message was delivered since the start; some may be known from the journal: `ahead` of them.
    * Between the two each message is in flight, queued (for delivery again), deferred or finished.
    * `in_flight`, `queued` and `deferred` are the numbers of messages in these states, wherever they lie.
    * What is queued is delivered in sweeps over rising sequence numbers, each up to where there was something when it
      began. What is queued behind the sweep waits for the next one: so none comes a third time before all that waited
      when it came first, and the log is read in its order. (A queue would take memory for each message.)
    * While `has_news`, messages above the floor were finished that the journal does not know of.
    * With `measure`, messages are stamped when taken, and `finished_ns` gets the publish time of each one finished.
    """

    floor = cython.declare(cython.longlong, visibility="readonly")
    next = cython.declare(cython.longlong, visibility="readonly")
    in_flight = cython.declare(cython.longlong, visibility="readonly")
    queued = cython.declare(cython.longlong, visibility="readonly")
    deferred = cython.declare(cython.longlong, visibility="readonly")
    ahead = cython.declare(cython.longlong, visibility="readonly")
    requeue_count = cython.declare(cython.longlong, visibility="readonly")
    timeout_count = cython.declare(cython.longlong, visibility="readonly")
    earliest = cython.declare(cython.longlong, visibility="readonly")
    wall_offset_ms = cython.declare(cython.longlong, visibility="public")
    msg_timeout_max_ms = cython.declare(cython.longlong, visibility="readonly")
    req_timeout_max_ms = cython.declare(cython.longlong, visibility="readonly")
    journal = cython.declare(object, visibility="public")
    has_news = cython.declare(cython.bint, visibility="readonly")
    measure = cython.declare(cython.bint, visibility="public")  # set before the first message is taken
    finished_ns = cython.declare(list, visibility="readonly")
    _blocks: dict
    _order: object
    _sweep: list  # a heap of the blocks that the sweep has yet to finish
    _sweep_at: cython.longlong
    _sweep_end: cython.longlong
    _next_sweep: list
    _seen_ms: cython.longlong  # when a message was requeued last, or before
    _whole: list  # blocks that were finished as a whole, and the journal does not know
    _mark: cython.longlong
    _parked: set
    _pool: list
    _consumers: dict
    _consumer_id: cython.longlong
    _recent: Block

    def __init__(
        self, floor: cython.longlong, msg_timeout_max_ms: cython.longlong, req_timeout_max_ms: cython.longlong
    ):
        self.measure = False
        self.finished_ns = []
        self.msg_timeout_max_ms = msg_timeout_max_ms
        self.req_timeout_max_ms = req_timeout_max_ms
        self.wall_offset_ms = 0
        self.requeue_count = 0
        self.timeout_count = 0
        self._consumers = {}
        self._consumer_id = 0
        self._pool = []
        self._seen_ms = 0
        self.journal = bytearray()
        self._clear(floor)

    # -- consumers ---------------------------------------------------------------------------------------

    def join(self, rdy_max: cython.longlong, msg_timeout_ms: cython.longlong) -> Consumer:
        self._consumer_id = (self._consumer_id + 1) & 0xFFFFFFFF
        consumer: Consumer = Consumer(self._consumer_id, rdy_max, msg_timeout_ms)
        self._consumers[self._consumer_id] = consumer
        return consumer

    def leave(self, consumer: Consumer) -> None:
        """The consumer's messages stay in flight until their deadlines."""
        self._consumers.pop(consumer.id, None)

    def hasten(self, consumer: Consumer, deadline_ms: cython.longlong) -> None:
        """Brings the deadlines of a consumer's messages forward to `deadline_ms`."""
        block: Block
        index: cython.int
        for block in self._blocks.values():
            for index in range(block.size):
                if (
                    block.state[index] == IN_FLIGHT
                    and block.owner[index] == consumer.id
                    and block.deadline[index] > deadline_ms
                ):
                    block.deadline[index] = deadline_ms
                    self._due(block, deadline_ms)

    # -- delivery ----------------------------------------------------------------------------------------

    def untouched(self, count: cython.longlong) -> cython.longlong:
        """How many of the `count` messages from `next` on are new; negative: so many, or more, are known already."""
        if self.ahead == 0:
            return count
        seq: cython.longlong = self.next
        end: cython.longlong = seq + count
        if self._is_known(seq):
            while self._is_known(seq):
                seq += 1
            return self.next - seq
        while seq < end and not self._is_known(seq):
            seq += 1
        return seq - self.next

    def take(self, consumer: Consumer, count: cython.longlong, now_ms: cython.longlong) -> None:
        """Puts the `count` messages from `next` on, all untouched, in flight to a consumer."""
        seq: cython.longlong = self.next
        end: cython.longlong = seq + count
        deadline: cython.longlong = now_ms + consumer.msg_timeout_ms
        block: Block
        slot: cython.int
        stop: cython.int
        while seq < end:
            block = self._open(seq >> BLOCK_BITS)
            slot = seq & SLOT_MASK
            stop = BLOCK_SLOTS if end - seq > BLOCK_SLOTS - slot else slot + (end - seq)
            seq += stop - slot
            block.active += stop - slot
            if slot < block.active_from:
                block.active_from = slot
            self._due(block, deadline)
            while slot < stop:
                block.state[slot] = IN_FLIGHT
                block.attempts[slot] = 1
                block.owner[slot] = consumer.id
                block.deadline[slot] = deadline
                block.delivered[slot] = now_ms
                slot += 1
        self.next = end
        self.in_flight += count
        consumer.in_flight += count
        consumer.message_count += count

    def skip(self, seq: cython.longlong) -> None:
        """Moves `next` forward to `seq` over messages that are known already, discarded, or do not exist."""
        at: cython.longlong
        end: cython.longlong
        number: cython.longlong
        first: cython.longlong = self.next >> BLOCK_BITS
        if self.ahead > 0:
            is_short: cython.bint = (seq >> BLOCK_BITS) - first < len(self._blocks)
            for number in range(first, (seq >> BLOCK_BITS) + 1) if is_short else self._blocks:
                at = max(self.next, number << BLOCK_BITS)
                end = min(seq, (number + 1) << BLOCK_BITS)
                while at < end:
                    if self._is_known(at):
                        self.ahead -= 1
                    at += 1
        if seq > self.next:
            self.next = seq

    def next_queued(self) -> cython.longlong:
        """The message to be delivered again next; -1 if there is none."""
        block: Block
        index: cython.int
        if not self._sweep:
            self._begin_sweep()
        while self._sweep:
            self._sweep_at = self._sweep[0]
            block = self._blocks.get(self._sweep_at)
            if block is not None and block.listed:
                index = block.queued_from
                while index < block.size and block.state[index] != QUEUED:
                    index += 1
                block.queued_from = index
                if index < block.size:
                    return (block.number << BLOCK_BITS) + block.slot_of(index)
                block.listed = False
            heappop(self._sweep)
            if not self._sweep:
                self._begin_sweep()
        return -1

    @cython.cfunc
    def _begin_sweep(self):
        block: Block
        for number in sorted(self._next_sweep):
            block = self._blocks.get(number)
            if block is not None and block.listed_later:
                block.listed_later = False
                block.listed = True
                block.queued_from = block.later_from
                self._sweep.append(number)
        self._next_sweep = []
        self._sweep_at = -1
        self._sweep_end = self._sweep[len(self._sweep) - 1] if self._sweep else -1

    def retake(self, consumer: Consumer, seq: cython.longlong, now_ms: cython.longlong) -> cython.int:
        """Puts a queued message in flight again; which attempt this is."""
        block: Block = self._blocks[seq >> BLOCK_BITS]
        index: cython.int = block.index(seq & SLOT_MASK)
        deadline: cython.longlong = now_ms + consumer.msg_timeout_ms
        block.state[index] = IN_FLIGHT
        block.attempts[index] = (block.attempts[index] + 1) & 0xFFFF
        block.owner[index] = consumer.id
        block.deadline[index] = deadline
        block.delivered[index] = now_ms
        self._unqueue(block, index)
        self.in_flight += 1
        consumer.in_flight += 1
        consumer.message_count += 1
        self._due(block, deadline)
        return block.attempts[index]

    def stamp(self, seq: cython.longlong, records: cython.uchar[::1]) -> None:
        """Notes the publish times of messages just taken, the first of which is `seq`, from their records."""
        pos: cython.longlong = 0
        end: cython.longlong = len(records)
        block: Block
        while pos < end:
            block = self._find(seq)
            block.published[block.index(seq & SLOT_MASK)] = i64(records, pos + TIMESTAMP_AT)
            pos += SIZE_BYTES + u32(records, pos)
            seq += 1

    def discard(self, seq: cython.longlong) -> None:
        """Finishes a queued message that no consumer gets: sampled out, or its body is lost."""
        block: Block = self._blocks[seq >> BLOCK_BITS]
        index: cython.int = block.index(seq & SLOT_MASK)
        self._unqueue(block, index)
        self._finished(block, index, seq)

    # -- answers -----------------------------------------------------------------------------------------

    @cython.ccall
    def finish(self, consumer: Consumer, seq: cython.longlong) -> cython.int:
        block: Block = self._find(seq)
        index: cython.int = -1 if block is None else block.index(seq & SLOT_MASK)
        if index < 0 or block.state[index] != IN_FLIGHT:
            return _NOT_IN_FLIGHT
        if block.owner[index] != consumer.id:
            return _NOT_OWNER
        self.in_flight -= 1
        consumer.in_flight -= 1
        consumer.finish_count += 1
        if self.measure:
            self.finished_ns.append(block.published[index])
        self._finished(block, index, seq)
        return _DONE

    @cython.ccall
    def requeue(
        self,
        consumer: Consumer,
        seq: cython.longlong,
        delay_ms: cython.longlong,
        now_ms: cython.longlong,
        counted: cython.bint = True,
    ) -> cython.int:
        """Gives a message back; one that was not `counted` has as many attempts as before this delivery."""
        block: Block = self._find(seq)
        index: cython.int = -1 if block is None else block.index(seq & SLOT_MASK)
        if index < 0 or block.state[index] != IN_FLIGHT:
            return _NOT_IN_FLIGHT
        if block.owner[index] != consumer.id:
            return _NOT_OWNER
        if delay_ms > self.req_timeout_max_ms:
            delay_ms = self.req_timeout_max_ms
        consumer.in_flight -= 1
        consumer.requeue_count += 1
        self.in_flight -= 1
        self.requeue_count += 1
        if not counted:
            block.attempts[index] = (block.attempts[index] - 1) & 0xFFFF
        self._seen_ms = now_ms
        if delay_ms > 0:
            block.state[index] = DEFERRED
            block.deadline[index] = now_ms + delay_ms
            self.deferred += 1
            self._due(block, block.deadline[index])
        else:
            self._queue(block, index)
        self._note(block, index)
        return _DONE

    @cython.ccall
    def touch(self, consumer: Consumer, seq: cython.longlong, now_ms: cython.longlong) -> cython.int:
        block: Block = self._find(seq)
        index: cython.int = -1 if block is None else block.index(seq & SLOT_MASK)
        if index < 0 or block.state[index] != IN_FLIGHT:
            return _NOT_IN_FLIGHT
        if block.owner[index] != consumer.id:
            return _NOT_OWNER
        deadline: cython.longlong = now_ms + consumer.msg_timeout_ms
        if deadline > block.delivered[index] + self.msg_timeout_max_ms:
            deadline = block.delivered[index] + self.msg_timeout_max_ms
        block.deadline[index] = deadline
        self._due(block, deadline)
        return _DONE

    def acknowledge(
        self,
        consumer: Consumer,
        data: cython.uchar[::1],
        pos: cython.longlong,
        end: cython.longlong,
        now_ms: cython.longlong,
    ) -> cython.longlong:
        """Carries out the FIN, REQ, TOUCH, RDY and NOP commands at `pos`; where the first other thing starts.

        What is incomplete, malformed or refused is left there for the session, which knows how to answer.
        """
        seq: cython.longlong
        value: cython.longlong
        after: cython.longlong
        first: cython.int
        while pos + 4 <= end:
            first = data[pos]
            if first == 70:  # FIN <16 hex digits>
                if pos + 21 > end or data[pos + 1] != 73 or data[pos + 2] != 78 or data[pos + 3] != 32:
                    break
                seq = _sequence(data, pos + 4)
                if seq < 0 or data[pos + 20] != 10 or self.finish(consumer, seq) != 0:
                    break
                pos += 21
            elif first == 82 and data[pos + 1] == 68:  # RDY <n>
                after = _number_end(data, pos + 4, end)
                if after < 0 or data[pos + 2] != 89 or data[pos + 3] != 32:
                    break
                value = _number(data, pos + 4, after)
                if value > consumer.rdy_max:
                    break
                consumer.rdy = value
                pos = after + 1
            elif first == 82:  # REQ <16 hex digits> <ms>
                if pos + 23 > end or data[pos + 1] != 69 or data[pos + 2] != 81 or data[pos + 3] != 32:
                    break
                seq = _sequence(data, pos + 4)
                after = _number_end(data, pos + 21, end)
                if seq < 0 or data[pos + 20] != 32 or after < 0:
                    break
                if self.requeue(consumer, seq, _number(data, pos + 21, after), now_ms) != 0:
                    break
                pos = after + 1
            elif first == 84:  # TOUCH <16 hex digits>
                if pos + 23 > end or data[pos + 1] != 79 or data[pos + 2] != 85 or data[pos + 3] != 67:
                    break
                seq = _sequence(data, pos + 6)
                if data[pos + 4] != 72 or data[pos + 5] != 32 or seq < 0 or data[pos + 22] != 10:
                    break
                if self.touch(consumer, seq, now_ms) != 0:
                    break
                pos += 23
            elif first == 78:  # NOP
                if data[pos + 1] != 79 or data[pos + 2] != 80 or data[pos + 3] != 10:
                    break
                pos += 4
            else:
                break
        return pos

    # -- time --------------------------------------------------------------------------------------------

    def expire(self, now_ms: cython.longlong) -> cython.longlong:
        """Queues what timed out and what was deferred until now; how many messages that is."""
        changed: cython.longlong = 0
        earliest: cython.longlong = NEVER
        block: Block
        if now_ms < self.earliest:
            return 0
        for block in self._blocks.values():
            if block.earliest <= now_ms:
                changed += self._expire_block(block, now_ms)
            if block.earliest < earliest:
                earliest = block.earliest
        self.earliest = earliest
        return changed

    @cython.cfunc
    def _expire_block(self, block: Block, now_ms: cython.longlong) -> cython.longlong:
        changed: cython.longlong = 0
        earliest: cython.longlong = NEVER
        index: cython.int
        owner: Consumer
        for index in range(block.size):
            if block.state[index] != IN_FLIGHT and block.state[index] != DEFERRED:
                continue
            if block.deadline[index] > now_ms:
                if block.deadline[index] < earliest:
                    earliest = block.deadline[index]
                continue
            if block.state[index] == IN_FLIGHT:
                self.in_flight -= 1
                self.timeout_count += 1
                owner = self._consumers.get(block.owner[index])
                if owner is not None:
                    owner.in_flight -= 1
                self._queue(block, index)
                self._note(block, index)
            else:
                self.deferred -= 1
                self._queue(block, index)
            changed += 1
        block.earliest = earliest
        return changed

    # -- the floor, parking and the journal ----------------------------------------------------------------

    def settle(self) -> None:
        """Moves the floor up to the first message that is not finished, and lets go of finished blocks."""
        number: cython.longlong
        block: Block
        while self._order:
            number = self._order[0]
            block = self._blocks.get(number)
            if block is not None and block.active > 0 and not block.parked:
                while not block.is_active(block.active_from):
                    block.active_from += 1
                self.floor = (number << BLOCK_BITS) + block.slot_of(block.active_from)
                # What the journal knows ahead may lie above messages that were never delivered.
                if self.floor > self.next:
                    self.floor = self.next
                return
            if number >= self.next >> BLOCK_BITS and block is not None:
                break
            self._order.popleft()
            if block is not None and block.active == 0:
                self._release(block)
        self.floor = self.next
        self.has_news = False
        self._whole.clear()

    @property
    def blocks_open(self) -> int:
        """How many blocks hold the floor back."""
        first_ahead: cython.longlong = self.next >> BLOCK_BITS
        if self.ahead == 0:
            return len(self._order)
        return sum(number < first_ahead for number in self._order)

    def park(self, count: cython.longlong) -> list:
        """Notes what is unfinished in the `count` lowest blocks; once that is durable, `let_pass` them."""
        first_ahead: cython.longlong = self.next >> BLOCK_BITS
        numbers: list = [
            number for number in list(self._order)[:count] if number in self._blocks and number < first_ahead
        ]
        index: cython.int
        block: Block
        for number in numbers:
            block = self._blocks[number]
            block.noted = True
            for index in range(block.size):
                if block.is_active(index):
                    self._note(block, index)
        return numbers

    def let_pass(self, numbers: list) -> None:
        """The floor may pass these blocks: what is unfinished in them is in the journal."""
        block: Block
        for number in numbers:
            block = self._blocks.get(number)
            # One that is not noted came after the channel was emptied or sent back.
            if block is not None and block.active > 0 and block.noted:
                self._set_aside(block)
        self.settle()

    @cython.cfunc
    def _set_aside(self, block: Block):
        block.noted = True
        block.parked = True
        self._parked.add(block.number)
        if block.active <= SPARSE_SLOTS_MAX:
            self._blocks[block.number] = block.thinned(self.measure)
            self._pool_add(block)
            self._recent = None

    def lowest(self) -> cython.longlong:
        """No message below this one is needed any more."""
        if not self._parked:
            return self.floor
        lowest: cython.longlong = min(self._parked) << BLOCK_BITS
        return lowest if lowest < self.floor else self.floor

    @property
    def parked_count(self) -> int:
        """How many messages are parked."""
        count: cython.longlong = 0
        block: Block
        for number in self._parked:
            block = self._blocks[number]
            count += block.active
        return count

    def unfinished_below(self, seq: cython.longlong) -> list:
        """The messages below `seq` that are not finished, in order; below the floor these are the parked ones."""
        found: list = []
        index: cython.int
        block: Block
        for number in sorted(self._blocks):
            block = self._blocks[number]
            if number << BLOCK_BITS >= seq:
                break
            for index in range(block.size):
                if block.is_active(index):
                    found.append((block.number << BLOCK_BITS) + block.slot_of(index))
        return [found_seq for found_seq in found if found_seq < seq]

    def count_below(self, seq: cython.longlong) -> tuple:
        """How many messages below `seq` are unfinished, and how many from `next` up to it are known already."""
        unfinished: cython.longlong = 0
        known: cython.longlong = 0
        last: cython.longlong = seq >> BLOCK_BITS
        at: cython.longlong
        index: cython.int
        block: Block
        for block in self._blocks.values():
            if block.number < last:
                unfinished += block.active
            if block.number > last or (block.number < last and self.ahead == 0):
                continue
            for index in range(block.size):
                at = (block.number << BLOCK_BITS) + block.slot_of(index)
                if at < seq:
                    if block.number == last and block.is_active(index):
                        unfinished += 1
                    if at >= self.next and block.state[index] != FREE:
                        known += 1
        return unfinished, known

    def waiting(
        self, in_flight: cython.bint, seq: cython.longlong, count: cython.longlong, slots_max: cython.longlong
    ) -> tuple:
        """Up to `count` messages from `seq` on that are in flight, or to be delivered again; and where to go on, or -1.

        Each is (sequence number, attempts, consumer's id, when it was delivered, deadline or due time; 0: now).
        No more than `slots_max` slots and one block are looked at.
        """
        found: list = []
        looked_at: cython.longlong = 0
        at: cython.longlong
        index: cython.int
        block: Block
        for number in sorted([number for number in self._blocks if number >= seq >> BLOCK_BITS]):
            block = self._blocks[number]
            if block.active == 0:
                continue
            if looked_at >= slots_max:
                return found, block.number << BLOCK_BITS
            looked_at += block.size
            for index in range(block.size):
                if not block.is_active(index) or (block.state[index] == IN_FLIGHT) != in_flight:
                    continue
                at = (block.number << BLOCK_BITS) + block.slot_of(index)
                if at < seq:
                    continue
                if len(found) >= count:
                    return found, at
                due: cython.longlong = 0 if block.state[index] == QUEUED else block.deadline[index]
                found.append((at, block.attempts[index], block.owner[index], block.delivered[index], due))
        return found, -1

    def snapshot(self) -> bytes:
        """Everything worth keeping over a restart, as records of the journal."""
        kept, self.journal = self.journal, bytearray()
        block: Block
        for number in sorted({*self._blocks, *self._order}):
            block = self._blocks.get(number)
            if block is not None:
                self._note_block(block)
            elif number < self.next >> BLOCK_BITS:  # finished as a whole, above the floor
                self._note_finished(number << BLOCK_BITS, BLOCK_SLOTS)
        snapshot, self.journal = bytes(self.journal), kept
        return snapshot

    def note_finished(self) -> None:
        """Notes what was finished above a message that was not between two calls of this: a crash repeats the rest.

        While messages are finished about as they came, the floor follows and nothing has to be noted.
        """
        block: Block
        number: cython.longlong
        if self.floor < self._mark:
            for number in self._whole:
                if (number + 1) << BLOCK_BITS > self.floor:
                    self._note_finished(number << BLOCK_BITS, BLOCK_SLOTS)
            self._whole.clear()
            for number in self._order:
                block = self._blocks.get(number)
                if block is not None and block.unnoted and not block.parked:
                    self._note_news(block)
            self.has_news = False
        else:
            self._whole = [number for number in self._whole if (number + 1) << BLOCK_BITS > self.floor]
        self._mark = self.next

    @cython.cfunc
    def _note_news(self, block: Block):
        first: cython.longlong = block.number << BLOCK_BITS
        index: cython.int = self.floor - first if self.floor > first else 0
        run: cython.int
        end: cython.int = 0
        while index < block.size:
            if block.state[index] != FINISHED:
                index += 1
                continue
            run = index
            while run < block.size and self._is_done(block, run):
                if block.state[run] == FINISHED:
                    block.state[run] = NOTED
                    end = run + 1
                run += 1
            self._note_finished(first + index, end - index)
            index = run
        block.unnoted = False

    @cython.cfunc
    def _note_block(self, block: Block):
        index: cython.int = 0
        run: cython.int
        if not block.parked and self.floor > block.number << BLOCK_BITS:
            index = self.floor - (block.number << BLOCK_BITS)
        while index < block.size:
            run = index + 1
            if block.is_active(index):
                self._note(block, index)
            elif not block.sparse and self._is_done(block, index):
                while run < block.size and self._is_done(block, run):
                    run += 1
                self._note_finished((block.number << BLOCK_BITS) + index, run - index)
            index = run

    @cython.cfunc
    def _is_done(self, block: Block, slot: cython.int) -> cython.bint:
        """Finished, or passed over."""
        if block.state[slot] >= FINISHED:
            return True
        return block.state[slot] == FREE and (block.number << BLOCK_BITS) + slot < self.next

    @cython.cfunc
    def _note_finished(self, seq: cython.longlong, count: cython.longlong):
        self.journal += record(FINISHED_KIND, 0, seq, 0, count)

    def restore(
        self, records: object, now_ms: cython.longlong, ranges: object = None, kept: object = ()
    ) -> cython.longlong:
        """Takes up a journal's records, in order; only before anything was taken.

        `ranges` are the messages that exist, as (first, count) in order; of others only those in `kept` matter. None
        is due later than it was when it was noted: how many would have been, since the clock was ahead then.
        """
        data: cython.uchar[::1] = memoryview(records if isinstance(records, bytearray) else bytearray(records))
        starts: cython.longlong[::1] = _column(ranges, False)
        ends: cython.longlong[::1] = _column(ranges, True)
        pos: cython.longlong = 0
        end: cython.longlong = data.shape[0] - RECORD_BYTES + 1
        at: cython.longlong
        stop: cython.longlong
        kind: cython.int
        due_ms: cython.longlong
        brought_forward: cython.longlong = 0
        self._seen_ms = now_ms
        while pos < end:
            kind = data[pos + 4]
            at = little_u64(data, pos + 8)
            if kind == FINISHED_KIND:
                stop = at + little_u64(data, pos + 24)
                while at < stop:
                    if at < self.floor and self._find(at) is None:
                        at = min(self.floor, ((at >> BLOCK_BITS) + 1) << BLOCK_BITS)
                        continue
                    if at < self.floor or _exists(starts, ends, at):
                        self._restore_finished(at)
                    at += 1
            elif (at >= self.floor or kind == PARKED_KIND) and (_exists(starts, ends, at) or at in kept):
                due_ms = little_u64(data, pos + 16) - self.wall_offset_ms
                if due_ms - now_ms > little_u64(data, pos + 24):
                    due_ms = now_ms + little_u64(data, pos + 24)
                    brought_forward += 1
                self._restore_waiting(at, data[pos + 6] | (data[pos + 7] << 8), due_ms, now_ms)
                if kind == PARKED_KIND:
                    self._find(at).noted = True
            pos += RECORD_BYTES
        self._set_parked_aside()
        self.settle()
        return brought_forward

    @cython.cfunc
    def _restore_finished(self, seq: cython.longlong):
        block: Block = self._dense(seq, seq >= self.floor)
        if block is None:
            return
        slot: cython.int = seq & SLOT_MASK
        if block.state[slot] == FREE and seq >= self.next:
            self.ahead += 1
        self._restore_nothing(block, slot)
        if seq >= self.floor:
            block.state[slot] = NOTED

    @cython.cfunc
    def _restore_waiting(
        self, seq: cython.longlong, attempts: cython.int, due_ms: cython.longlong, now_ms: cython.longlong
    ):
        block: Block = self._dense(seq, True)
        slot: cython.int = seq & SLOT_MASK
        if block.state[slot] == FREE and seq >= self.next:
            self.ahead += 1
        self._restore_nothing(block, slot)
        block.active += 1
        block.attempts[slot] = attempts
        if slot < block.active_from:
            block.active_from = slot
        if due_ms > now_ms:
            block.state[slot] = DEFERRED
            block.deadline[slot] = due_ms
            self.deferred += 1
            self._due(block, due_ms)
        else:
            self._queue(block, slot)

    @cython.cfunc
    def _restore_nothing(self, block: Block, slot: cython.int):
        """Takes back what an earlier record said of a message."""
        if block.state[slot] == QUEUED:
            self.queued -= 1
            block.active -= 1
        elif block.state[slot] == DEFERRED:
            self.deferred -= 1
            block.active -= 1
        block.state[slot] = FREE

    @cython.cfunc
    def _dense(self, seq: cython.longlong, make: cython.bint) -> Block:
        """The block of a message with all its slots; while restoring, below the floor only some are at a time."""
        block: Block = self._find(seq)
        if block is not None and not block.sparse:
            return block
        if block is None and not make:
            return None
        if len(self._order) >= DENSE_BLOCKS_RESTORED_MAX:
            self._set_parked_aside()
            block = self._find(seq)
        if block is None:
            self._recent = None
            return self._open(seq >> BLOCK_BITS)
        dense: Block = self._pool.pop() if self._pool else Block(BLOCK_SLOTS, self.measure)
        dense.reset(block.number)
        self._widen(block, dense)
        self._blocks[block.number] = dense
        self._parked.discard(block.number)
        self._order.append(block.number)
        self._recent = None
        return dense

    @cython.cfunc
    def _widen(self, thin: Block, dense: Block):
        index: cython.int
        slot: cython.int
        for index in range(thin.size):
            slot = thin.slots[index]
            dense.state[slot] = thin.state[index]
            dense.attempts[slot] = thin.attempts[index]
            dense.deadline[slot] = thin.deadline[index]
        dense.active = thin.active
        dense.earliest = thin.earliest
        dense.noted = thin.noted
        dense.listed_later = thin.listed_later

    @cython.cfunc
    def _set_parked_aside(self):
        """Blocks wholly below the floor hold parked messages, or nothing any more."""
        block: Block
        first_open: cython.longlong = self.floor >> BLOCK_BITS
        for number in [number for number in self._order if number < first_open]:
            block = self._blocks[number]
            if block.active > 0:
                self._set_aside(block)
            else:
                self._release(block)
        self._order = deque(sorted(number for number in self._order if number >= first_open))

    def finish_ahead(self, seq: cython.longlong, count: cython.longlong) -> None:
        """Finishes untouched messages from `next` on that this channel is not to deliver."""
        self._finish_ahead(seq, seq + count)
        self._note_finished(seq, count)

    @cython.cfunc
    def _finish_ahead(self, seq: cython.longlong, end: cython.longlong):
        block: Block
        while seq < end:
            block = self._open(seq >> BLOCK_BITS)
            if block.state[seq & SLOT_MASK] == FREE:
                block.state[seq & SLOT_MASK] = NOTED
                self.ahead += 1
            seq += 1

    def empty(self, seq: cython.longlong) -> None:
        """Drops everything, in flight too, and starts anew at `seq`."""
        consumer: Consumer
        for consumer in self._consumers.values():
            consumer.in_flight = 0
        self._clear(seq)

    # -- inside ------------------------------------------------------------------------------------------

    @cython.cfunc
    def _clear(self, seq: cython.longlong):
        self.floor = seq
        self.next = seq
        self.in_flight = 0
        self.queued = 0
        self.deferred = 0
        self.ahead = 0
        self.earliest = NEVER
        self._blocks = {}
        self._order = deque()
        self._sweep = []
        self._sweep_at = -1
        self._sweep_end = -1
        self._next_sweep = []
        self._whole = []
        self._mark = seq
        self.has_news = False
        self._parked = set()
        self._recent = None

    @cython.cfunc
    @cython.inline
    def _find(self, seq: cython.longlong) -> Block:
        block: Block = self._recent
        if block is None or block.number != seq >> BLOCK_BITS:
            block = self._blocks.get(seq >> BLOCK_BITS)
            if block is not None:
                self._recent = block
        return block

    @cython.cfunc
    def _open(self, number: cython.longlong) -> Block:
        block: Block = self._blocks.get(number)
        if block is None:
            block = self._pool.pop() if self._pool else Block(BLOCK_SLOTS, self.measure)
            block.reset(number)
            self._blocks[number] = block
            if self._order and number < self._order[len(self._order) - 1]:  # the journal knew of later ones
                self._order = deque(sorted([*self._order, number]))
            else:
                self._order.append(number)
        return block

    @cython.cfunc
    def _release(self, block: Block):
        self._blocks.pop(block.number, None)
        self._parked.discard(block.number)
        self._pool_add(block)
        self._recent = None

    @cython.cfunc
    def _pool_add(self, block: Block):
        if not block.sparse and len(self._pool) < BLOCKS_POOLED_MAX:
            self._pool.append(block)

    @cython.cfunc
    def _is_known(self, seq: cython.longlong) -> cython.bint:
        block: Block = self._blocks.get(seq >> BLOCK_BITS)
        return block is not None and block.state[seq & SLOT_MASK] != FREE

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _due(self, block: Block, deadline: cython.longlong) -> cython.void:
        if deadline < block.earliest:
            block.earliest = deadline
            if deadline < self.earliest:
                self.earliest = deadline

    @cython.cfunc
    def _queue(self, block: Block, index: cython.int):
        block.state[index] = QUEUED
        self.queued += 1
        if block.listed and index >= block.queued_from:
            return  # the sweep comes to it
        if self._sweep_at < block.number <= self._sweep_end:
            block.queued_from = index
            if not block.listed:
                heappush(self._sweep, block.number)
                block.listed = True
        elif not block.listed_later:
            self._next_sweep.append(block.number)
            block.listed_later = True
            block.later_from = index
        elif index < block.later_from:
            block.later_from = index

    @cython.cfunc
    def _unqueue(self, block: Block, index: cython.int):
        self.queued -= 1
        if index == block.queued_from:  # if it is queued again, that is behind the sweep
            block.queued_from = index + 1

    @cython.cfunc
    def _finished(self, block: Block, index: cython.int, seq: cython.longlong):
        block.active -= 1
        if block.noted:
            block.state[index] = NOTED
            self._note_finished(seq, 1)
        else:
            block.state[index] = FINISHED
            block.unnoted = True
            self.has_news = True
        if block.active == 0 and block.number < self.next >> BLOCK_BITS:
            if block.unnoted:
                self._whole.append(block.number)
            self._release(block)

    @cython.cfunc
    def _note(self, block: Block, index: cython.int):
        due_ms: cython.longlong = 0
        left_ms: cython.longlong = 0
        if block.state[index] == DEFERRED:
            due_ms = block.deadline[index] + self.wall_offset_ms
            left_ms = block.deadline[index] - self._seen_ms
        self.journal += record(
            PARKED_KIND if block.noted else REQUEUED_KIND,
            block.attempts[index],
            (block.number << BLOCK_BITS) + block.slot_of(index),
            due_ms,
            left_ms if left_ms > 0 else 0,
        )


def _column(ranges: object, ends: bool) -> object:
    """Where the ranges start, or end, as a C array; without ranges, one that holds everything."""
    if ranges is None:
        values = [NEVER if ends else 0]
    else:
        values = [first + count if ends else first for first, count in ranges]
    column = memoryview(bytearray(8 * max(1, len(values)))).cast("q")
    for index, value in enumerate(values):
        column[index] = value
    return column


@cython.cfunc
@cython.exceptval(check=False)
def _exists(starts: cython.longlong[::1], ends: cython.longlong[::1], seq: cython.longlong) -> cython.bint:
    low: cython.longlong = 0
    high: cython.longlong = starts.shape[0] - 1
    middle: cython.longlong
    while low < high:
        middle = (low + high + 1) >> 1
        if starts[middle] <= seq:
            low = middle
        else:
            high = middle - 1
    return starts[low] <= seq < ends[low]


@cython.cfunc
@cython.exceptval(check=False)
def _sequence(data: cython.uchar[::1], pos: cython.longlong) -> cython.longlong:
    """The sequence number in a message id, without the node's bits; -1 if it is not an id of ours."""
    value: cython.longlong = 0
    end: cython.longlong = pos + 16
    char: cython.int
    if data[pos] > 55:  # the sign bit is never set
        return -1
    while pos < end:
        char = data[pos]
        if 48 <= char <= 57:
            char -= 48
        elif 97 <= char <= 102:
            char -= 87
        else:
            return -1
        value = (value << 4) | char
        pos += 1
    return value & SEQ_MASK


def sequence_of(message_id: bytes) -> int:
    """The sequence number in a message id; -1 if it is not an id of ours."""
    return _sequence(memoryview(bytearray(message_id)), 0) if len(message_id) == 16 else -1


@cython.cfunc
@cython.exceptval(check=False)
def _number_end(data: cython.uchar[::1], pos: cython.longlong, end: cython.longlong) -> cython.longlong:
    """Where the line feed after 1 to 9 digits is; -1 if there is something else."""
    at: cython.longlong = pos
    while at < end and 48 <= data[at] <= 57 and at - pos < 10:
        at += 1
    if at >= end or data[at] != 10 or at == pos or at - pos > 9:
        return -1
    return at


@cython.cfunc
@cython.exceptval(check=False)
def _number(data: cython.uchar[::1], pos: cython.longlong, end: cython.longlong) -> cython.longlong:
    value: cython.longlong = 0
    while pos < end:
        value = value * 10 + (data[pos] - 48)
        pos += 1
    return value
