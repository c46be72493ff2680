# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Keeps the state of a channel's messages in blocks of 4096 slots of C arrays: a message is found by a shift and an
index.

A block is made when the first of its messages is taken, and goes when all of them are finished, wherever it lies: so an
idle channel has none. The C types, and the constants for C, are in blocks.pxd.
"""

from collections import deque

import cython

from nsquark.wire import record

if cython.compiled:
    from cython.cimports.nsquark.kernel.bytes import i64, u32
else:
    from nsquark.kernel.bytes import i64, u32

if not cython.compiled:
    BLOCK_BITS = 12
    BLOCK_SLOTS = 1 << BLOCK_BITS
    SLOT_MASK = BLOCK_SLOTS - 1

    # These are the states of a slot. A message that is NOTED is finished, and the journal says so.
    FREE, IN_FLIGHT, QUEUED, DEFERRED, FINISHED, NOTED = range(6)

NEVER = cython.declare(cython.longlong, 1 << 62)
SIZE_BYTES = cython.declare(cython.longlong, record.SIZE_BYTES)
TIMESTAMP_AT = cython.declare(cython.longlong, record.TIMESTAMP_AT)

SPARSE_SLOTS_MAX = cython.declare(cython.int, 1024)
"""A parked block with at most this many active messages becomes a short sorted list instead of 4096 slots."""
BLOCKS_POOLED_MAX = cython.declare(cython.int, 64)


class Block:
    """Has 4096 slots, or, once parked and thinly populated, a sorted list of the active ones."""

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

    def reset(self, number: cython.longlong) -> cython.void:
        """Makes this the block of this number, with all slots free."""
        self.number = number
        self.active = 0
        self.active_from = 0
        self.queued_from = 0
        self.later_from = 0
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

    def index(self, slot: cython.int) -> cython.int:
        """Returns where a slot's state lies, or -1 if it is not here any more."""
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

    def slot_of(self, index: cython.int) -> cython.int:
        return self.slots[index] if self.sparse else index

    def seq_of(self, index: cython.int) -> cython.longlong:
        return (self.number << BLOCK_BITS) + self.slot_of(index)

    def is_active(self, index: cython.int) -> cython.bint:
        """Tells whether a message is in flight, queued or deferred."""
        return FREE < self.state[index] < FINISHED

    def thinned(self, measure: cython.bint):
        """Makes a copy of this block with only its active slots."""
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

    def widened(self, dense):
        """Copies a thinned block to one with all slots, while a journal is read: nothing was delivered yet."""
        index: cython.int
        slot: cython.int
        dense.reset(self.number)
        for index in range(self.size):
            slot = self.slots[index]
            dense.state[slot] = self.state[index]
            dense.attempts[slot] = self.attempts[index]
            dense.deadline[slot] = self.deadline[index]
        dense.active = self.active
        dense.earliest = self.earliest
        dense.noted = self.noted
        dense.listed_later = self.listed_later
        return dense


class Blocks:
    """Finds the blocks of one channel by number.

    * `order` has the numbers of the blocks from the floor's on, rising; a released one may stay there for a while.
    * `parked` has the numbers of the blocks that the floor has passed; each has something active.
    * `recent` is the block that was found last, if it is still there.
    """

    def __init__(self, measure: cython.bint):
        self.measure = measure
        self._pool = []
        self.clear()

    def clear(self) -> cython.void:
        """Forgets all messages."""
        self.by_number = {}
        self.order = deque()
        self.parked = set()
        self.recent = None

    def find(self, seq: cython.longlong):
        """Returns the block of a message, or None if there is none."""
        block: Block = self.recent
        if block is None or block.number != seq >> BLOCK_BITS:
            block = self.by_number.get(seq >> BLOCK_BITS)
            if block is not None:
                self.recent = block
        return block

    def get(self, number: cython.longlong):
        return self.by_number.get(number)

    def open(self, number: cython.longlong):
        """Finds the block of this number, or makes it."""
        block: Block = self.by_number.get(number)
        if block is None:
            block = self._fresh(number)
            self.by_number[number] = block
            if self.order and number < self.order[len(self.order) - 1]:  # the journal named later blocks
                self.order = deque(sorted([*self.order, number]))
            else:
                self.order.append(number)
        return block

    def dense(self, sparse: Block):
        """Puts a block with all slots in the place of one that was thinned."""
        dense: Block = sparse.widened(self._fresh(sparse.number))
        self.by_number[sparse.number] = dense
        self.parked.discard(sparse.number)
        self.order.append(sparse.number)
        self.recent = None
        return dense

    def release(self, block: Block) -> cython.void:
        """Lets go of a block in which all is finished."""
        self.by_number.pop(block.number, None)
        self.parked.discard(block.number)
        self._pool_add(block)
        self.recent = None

    def set_aside(self, block: Block) -> cython.void:
        """Lets the floor pass a block whose active messages are in the journal."""
        block.noted = True
        block.parked = True
        self.parked.add(block.number)
        if block.active <= SPARSE_SLOTS_MAX:
            self.by_number[block.number] = block.thinned(self.measure)
            self._pool_add(block)
            self.recent = None

    def set_parked_aside(self, floor: cython.longlong) -> cython.void:
        """Sets aside the blocks wholly below the floor that have parked messages, and lets go of the others."""
        block: Block
        first_open: cython.longlong = floor >> BLOCK_BITS
        for number in [number for number in self.order if number < first_open]:
            block = self.by_number[number]
            if block.active > 0:
                self.set_aside(block)
            else:
                self.release(block)
        self.order = deque(sorted(number for number in self.order if number >= first_open))

    def is_known(self, seq: cython.longlong) -> cython.bint:
        """Tells whether a message from the ledger's `next` on has a state already."""
        block: Block = self.by_number.get(seq >> BLOCK_BITS)
        return block is not None and block.state[seq & SLOT_MASK] != FREE

    def stamp(self, seq: cython.longlong, records: cython.uchar[::1]) -> None:
        """Remembers the publish times of messages, the first of which is `seq`, from their records."""
        pos: cython.longlong = 0
        end: cython.longlong = len(records)
        block: Block
        while pos < end:
            block = self.find(seq)
            block.published[block.index(seq & SLOT_MASK)] = i64(records, pos + TIMESTAMP_AT)
            pos += SIZE_BYTES + u32(records, pos)
            seq += 1

    @property
    def parked_messages(self) -> int:
        count: cython.longlong = 0
        block: Block
        for number in self.parked:
            block = self.by_number[number]
            count += block.active
        return count

    def active_below(self, seq: cython.longlong) -> list:
        """Lists the messages below `seq` that are not finished, in order."""
        found: list = []
        index: cython.int
        block: Block
        for number in sorted(self.by_number):
            block = self.by_number[number]
            if number << BLOCK_BITS >= seq:
                break
            for index in range(block.size):
                if block.is_active(index):
                    found.append(block.seq_of(index))
        return [found_seq for found_seq in found if found_seq < seq]

    def count_below(self, seq: cython.longlong, next_seq: cython.longlong, has_ahead: cython.bint) -> tuple:
        """Counts the messages below `seq` that are active, and those from `next_seq` up to `seq` that have a state."""
        active: cython.longlong = 0
        known: cython.longlong = 0
        last: cython.longlong = seq >> BLOCK_BITS
        at: cython.longlong
        index: cython.int
        block: Block
        for block in self.by_number.values():
            if block.number < last:
                active += block.active
            if block.number > last or (block.number < last and not has_ahead):
                continue
            for index in range(block.size):
                at = block.seq_of(index)
                if at < seq:
                    if block.number == last and block.is_active(index):
                        active += 1
                    if at >= next_seq and block.state[index] != FREE:
                        known += 1
        return active, known

    def waiting(
        self, in_flight: cython.bint, seq: cython.longlong, count: cython.longlong, slots_max: cython.longlong
    ) -> tuple:
        """Lists up to `count` messages from `seq` on that are in flight, or to be delivered again.

        The second value tells where to go on, or is -1. Each message is (sequence number, attempts, consumer's id, when
        it was delivered, deadline or due time, which is 0 for now). No more than `slots_max` slots and one block are
        looked at.
        """
        found: list = []
        looked_at: cython.longlong = 0
        at: cython.longlong
        index: cython.int
        block: Block
        for number in sorted([number for number in self.by_number if number >= seq >> BLOCK_BITS]):
            block = self.by_number[number]
            if block.active == 0:
                continue
            if looked_at >= slots_max:
                return found, block.number << BLOCK_BITS
            looked_at += block.size
            for index in range(block.size):
                if not block.is_active(index) or (block.state[index] == IN_FLIGHT) != in_flight:
                    continue
                at = block.seq_of(index)
                if at < seq:
                    continue
                if len(found) >= count:
                    return found, at
                due: cython.longlong = 0 if block.state[index] == QUEUED else block.deadline[index]
                found.append((at, block.attempts[index], block.owner[index], block.delivered[index], due))
        return found, -1

    def _fresh(self, number: cython.longlong):
        block: Block = self._pool.pop() if self._pool else Block(BLOCK_SLOTS, self.measure)
        block.reset(number)
        return block

    def _pool_add(self, block: Block) -> cython.void:
        if not block.sparse and len(self._pool) < BLOCKS_POOLED_MAX:
            self._pool.append(block)
