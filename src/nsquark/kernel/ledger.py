# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Keeps what a channel knows of each message between its floor and the next one to deliver, and the rules for it.

The state of messages lies in blocks (blocks.py), what is queued again is delivered in sweeps (sweep.py), a consumer's
answers are read by answers.py, and a journal by restart.py. The C types are in ledger.pxd.
"""

import cython

from nsquark.kernel.journal import JOURNAL_FINISHED, JOURNAL_PARKED, JOURNAL_REQUEUED

if cython.compiled:
    from cython.cimports.nsquark.kernel.blocks import (
        BLOCK_BITS,
        BLOCK_SLOTS,
        DEFERRED,
        FINISHED,
        FREE,
        IN_FLIGHT,
        NOTED,
        SLOT_MASK,
        Block,
        Blocks,
    )
    from cython.cimports.nsquark.kernel.journal import record
    from cython.cimports.nsquark.kernel.share import Share
    from cython.cimports.nsquark.kernel.sweep import Sweep
else:
    from nsquark.kernel.blocks import (
        BLOCK_BITS,
        BLOCK_SLOTS,
        DEFERRED,
        FINISHED,
        FREE,
        IN_FLIGHT,
        NOTED,
        SLOT_MASK,
        Block,
        Blocks,
    )
    from nsquark.kernel.journal import record
    from nsquark.kernel.share import Share
    from nsquark.kernel.sweep import Sweep

NEVER = cython.declare(cython.longlong, 1 << 62)

# These are the outcomes of FIN, REQ and TOUCH. The plain names are for callers in Python, the others for C.
DONE, NOT_IN_FLIGHT, NOT_OWNER = 0, -1, -2
_DONE = cython.declare(cython.int, DONE)
_NOT_IN_FLIGHT = cython.declare(cython.int, NOT_IN_FLIGHT)
_NOT_OWNER = cython.declare(cython.int, NOT_OWNER)

REQUEUED_KIND = cython.declare(cython.int, JOURNAL_REQUEUED)
PARKED_KIND = cython.declare(cython.int, JOURNAL_PARKED)
FINISHED_KIND = cython.declare(cython.int, JOURNAL_FINISHED)


class Ledger:
    """Knows the messages of one channel that are neither untouched nor forgotten.

    * Below `floor` every message is finished or parked (its state is in the journal, and its block is set aside).
    * From `next` on no message was delivered since the start; some may be known from the journal: `ahead` of them.
    * Between the two each message is in flight, queued (for delivery again), deferred or finished.
    * `in_flight`, `queued` and `deferred` are the numbers of messages in these states, wherever they lie.
    * `journal` are the records that the channel has yet to append to its journal.
    * While `has_news`, messages above the floor were finished that the journal does not know of.
    * With `measure`, messages are stamped when taken, and `finished_ns` gets the publish time of each one finished.
    """

    def __init__(
        self,
        floor: cython.longlong,
        msg_timeout_max_ms: cython.longlong,
        req_timeout_max_ms: cython.longlong,
        measure: cython.bint = False,
    ):
        self.measure = measure
        self.finished_ns = []
        self.msg_timeout_max_ms = msg_timeout_max_ms
        self.req_timeout_max_ms = req_timeout_max_ms
        self.wall_offset_ms = 0
        self.requeue_count = 0
        self.timeout_count = 0
        self.seen_ms = 0
        self.journal = bytearray()
        self.blocks = Blocks(measure)
        self.sweep = Sweep(self.blocks)
        self._shares = {}
        self._share_id = 0
        self._clear(floor)

    @property
    def queued(self) -> cython.longlong:
        """Tells how many messages are queued for delivery again."""
        return self.sweep.count

    # -- consumers ---------------------------------------------------------------------------------------

    def join(self, rdy_max: cython.longlong, msg_timeout_ms: cython.longlong) -> Share:
        """Gives a consumer its share."""
        self._share_id = (self._share_id + 1) & 0xFFFFFFFF
        share: Share = Share(self._share_id, rdy_max, msg_timeout_ms)
        self._shares[self._share_id] = share
        return share

    def leave(self, share: Share) -> None:
        """Forgets a consumer; its messages stay in flight until their deadlines."""
        self._shares.pop(share.id, None)

    def hasten(self, share: Share, deadline_ms: cython.longlong) -> None:
        """Brings the deadlines of a consumer's messages forward to `deadline_ms`."""
        block: Block
        index: cython.int
        for block in self.blocks.by_number.values():
            for index in range(block.size):
                if (
                    block.state[index] == IN_FLIGHT
                    and block.owner[index] == share.id
                    and block.deadline[index] > deadline_ms
                ):
                    block.deadline[index] = deadline_ms
                    self.due(block, deadline_ms)

    # -- delivery ----------------------------------------------------------------------------------------

    def untouched(self, count: cython.longlong) -> cython.longlong:
        """Returns how many of the `count` messages from `next` on precede the first known one; if `next` itself is
        known, minus how many in a row are.
        """
        if self.ahead == 0:
            return count
        seq: cython.longlong = self.next
        end: cython.longlong = seq + count
        if self.blocks.is_known(seq):
            while self.blocks.is_known(seq):
                seq += 1
            return self.next - seq
        while seq < end and not self.blocks.is_known(seq):
            seq += 1
        return seq - self.next

    def take(self, share: Share, count: cython.longlong, now_ms: cython.longlong) -> None:
        """Puts the `count` messages from `next` on, all untouched, in flight to a consumer."""
        seq: cython.longlong = self.next
        end: cython.longlong = seq + count
        deadline: cython.longlong = now_ms + share.msg_timeout_ms
        block: Block
        slot: cython.int
        stop: cython.int
        while seq < end:
            block = self.blocks.open(seq >> BLOCK_BITS)
            slot = seq & SLOT_MASK
            stop = BLOCK_SLOTS if end - seq > BLOCK_SLOTS - slot else slot + (end - seq)
            seq += stop - slot
            block.active += stop - slot
            if slot < block.active_from:
                block.active_from = slot
            self.due(block, deadline)
            while slot < stop:
                block.state[slot] = IN_FLIGHT
                block.attempts[slot] = 1
                block.owner[slot] = share.id
                block.deadline[slot] = deadline
                block.delivered[slot] = now_ms
                slot += 1
        self.next = end
        self.in_flight += count
        share.in_flight += count
        share.message_count += count

    def skip(self, seq: cython.longlong) -> None:
        """Moves `next` forward to `seq` over messages that are known already, discarded, or do not exist."""
        at: cython.longlong
        end: cython.longlong
        number: cython.longlong
        first: cython.longlong = self.next >> BLOCK_BITS
        if self.ahead > 0:
            is_short: cython.bint = (seq >> BLOCK_BITS) - first < len(self.blocks.by_number)
            for number in range(first, (seq >> BLOCK_BITS) + 1) if is_short else self.blocks.by_number:
                at = max(self.next, number << BLOCK_BITS)
                end = min(seq, (number + 1) << BLOCK_BITS)
                while at < end:
                    if self.blocks.is_known(at):
                        self.ahead -= 1
                    at += 1
        if seq > self.next:
            self.next = seq

    def next_queued(self) -> cython.longlong:
        """Returns the message that is to be delivered again next, or -1 if there is none."""
        return self.sweep.next()

    def retake(self, share: Share, seq: cython.longlong, now_ms: cython.longlong) -> cython.int:
        """Puts a queued message in flight again; tells which attempt this is."""
        block: Block = self.blocks.by_number[seq >> BLOCK_BITS]
        index: cython.int = block.index(seq & SLOT_MASK)
        deadline: cython.longlong = now_ms + share.msg_timeout_ms
        block.state[index] = IN_FLIGHT
        block.attempts[index] = (block.attempts[index] + 1) & 0xFFFF
        block.owner[index] = share.id
        block.deadline[index] = deadline
        block.delivered[index] = now_ms
        self.sweep.unqueue(block, index)
        self.in_flight += 1
        share.in_flight += 1
        share.message_count += 1
        self.due(block, deadline)
        return block.attempts[index]

    def stamp(self, seq: cython.longlong, records: object) -> None:
        """Remembers the publish times of messages just taken, the first of which is `seq`, from their records."""
        self.blocks.stamp(seq, records)

    def discard(self, seq: cython.longlong) -> None:
        """Finishes a queued message that no consumer gets: it was sampled out, or its body is lost."""
        block: Block = self.blocks.by_number[seq >> BLOCK_BITS]
        index: cython.int = block.index(seq & SLOT_MASK)
        self.sweep.unqueue(block, index)
        self._finished(block, index, seq)

    # -- answers -----------------------------------------------------------------------------------------

    def finish(self, share: Share, seq: cython.longlong) -> cython.int:
        """Carries out FIN."""
        index: cython.int = self._index_in_flight(share, seq)
        if index < 0:
            return index
        block: Block = self.blocks.recent
        self.in_flight -= 1
        share.in_flight -= 1
        share.finish_count += 1
        if self.measure:
            self.finished_ns.append(block.published[index])
        self._finished(block, index, seq)
        return _DONE

    def requeue(
        self,
        share: Share,
        seq: cython.longlong,
        delay_ms: cython.longlong,
        now_ms: cython.longlong,
        counted: cython.bint = True,
    ) -> cython.int:
        """Carries out REQ; unless it is `counted`, the message has as many attempts as before this delivery."""
        index: cython.int = self._index_in_flight(share, seq)
        if index < 0:
            return index
        block: Block = self.blocks.recent
        if delay_ms > self.req_timeout_max_ms:
            delay_ms = self.req_timeout_max_ms
        share.in_flight -= 1
        share.requeue_count += 1
        self.in_flight -= 1
        self.requeue_count += 1
        if not counted:
            block.attempts[index] = (block.attempts[index] - 1) & 0xFFFF
        self.seen_ms = now_ms
        if delay_ms > 0:
            block.state[index] = DEFERRED
            block.deadline[index] = now_ms + delay_ms
            self.deferred += 1
            self.due(block, block.deadline[index])
        else:
            self.sweep.queue(block, index)
        self.note_waiting(block, index)
        return _DONE

    def touch(self, share: Share, seq: cython.longlong, now_ms: cython.longlong) -> cython.int:
        """Carries out TOUCH; no message stays in flight longer than --max-msg-timeout."""
        index: cython.int = self._index_in_flight(share, seq)
        if index < 0:
            return index
        block: Block = self.blocks.recent
        deadline: cython.longlong = now_ms + share.msg_timeout_ms
        if deadline > block.delivered[index] + self.msg_timeout_max_ms:
            deadline = block.delivered[index] + self.msg_timeout_max_ms
        block.deadline[index] = deadline
        self.due(block, deadline)
        return _DONE

    def _index_in_flight(self, share: Share, seq: cython.longlong) -> cython.int:
        """Returns the index in `blocks.recent` of a message in flight to this consumer, or why there is none."""
        block: Block = self.blocks.find(seq)
        index: cython.int = -1 if block is None else block.index(seq & SLOT_MASK)
        if index < 0 or block.state[index] != IN_FLIGHT:
            return _NOT_IN_FLIGHT
        if block.owner[index] != share.id:
            return _NOT_OWNER
        return index

    # -- time --------------------------------------------------------------------------------------------

    def expire(self, now_ms: cython.longlong) -> cython.longlong:
        """Queues what timed out and what was deferred until now; tells how many messages that is."""
        changed: cython.longlong = 0
        earliest: cython.longlong = NEVER
        block: Block
        if now_ms < self.earliest:
            return 0
        for block in self.blocks.by_number.values():
            if block.earliest <= now_ms:
                changed += self._expire_block(block, now_ms)
            if block.earliest < earliest:
                earliest = block.earliest
        self.earliest = earliest
        return changed

    def _expire_block(self, block: Block, now_ms: cython.longlong) -> cython.longlong:
        changed: cython.longlong = 0
        earliest: cython.longlong = NEVER
        index: cython.int
        owner: Share
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
                owner = self._shares.get(block.owner[index])
                if owner is not None:
                    owner.in_flight -= 1
                self.sweep.queue(block, index)
                self.note_waiting(block, index)
            else:
                self.deferred -= 1
                self.sweep.queue(block, index)
            changed += 1
        block.earliest = earliest
        return changed

    # -- the floor and parking ---------------------------------------------------------------------------

    def raise_floor(self) -> None:
        """Moves the floor up to the first message that is not finished, and lets go of finished blocks."""
        number: cython.longlong
        block: Block
        while self.blocks.order:
            number = self.blocks.order[0]
            block = self.blocks.get(number)
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
            self.blocks.order.popleft()
            if block is not None and block.active == 0:
                self.blocks.release(block)
        self.floor = self.next
        self.has_news = False
        self.whole.clear()

    @property
    def blocks_open(self) -> int:
        """Tells how many blocks keep the floor from rising."""
        first_ahead: cython.longlong = self.next >> BLOCK_BITS
        if self.ahead == 0:
            return len(self.blocks.order)
        return sum(number < first_ahead for number in self.blocks.order)

    def park(self, count: cython.longlong) -> list:
        """Notes what is unfinished in the `count` lowest blocks; once that is durable, `let_pass` them."""
        first_ahead: cython.longlong = self.next >> BLOCK_BITS
        lowest: list = list(self.blocks.order)[:count]
        numbers: list = [number for number in lowest if number in self.blocks.by_number and number < first_ahead]
        index: cython.int
        block: Block
        for number in numbers:
            block = self.blocks.by_number[number]
            block.noted = True
            for index in range(block.size):
                if block.is_active(index):
                    self.note_waiting(block, index)
        return numbers

    def let_pass(self, numbers: list) -> None:
        """Lets the floor pass these blocks: what is unfinished in them is durable in the journal."""
        block: Block
        for number in numbers:
            block = self.blocks.get(number)
            # A block that is not noted was made after the channel was emptied or moved back.
            if block is not None and block.active > 0 and block.noted:
                self.blocks.set_aside(block)
        self.raise_floor()

    def lowest(self) -> cython.longlong:
        """Returns the sequence number below which no message is needed any more."""
        if not self.blocks.parked:
            return self.floor
        lowest: cython.longlong = min(self.blocks.parked) << BLOCK_BITS
        return lowest if lowest < self.floor else self.floor

    @property
    def parked_count(self) -> int:
        """Tells how many messages are parked."""
        return self.blocks.parked_messages

    def unfinished_below(self, seq: cython.longlong) -> list:
        """Lists the messages below `seq` that are not finished, in order; below the floor these are the parked ones."""
        return self.blocks.active_below(seq)

    def count_below(self, seq: cython.longlong) -> tuple:
        """Counts the unfinished messages below `seq`, and those from `next` up to it that are known already."""
        return self.blocks.count_below(seq, self.next, self.ahead > 0)

    def waiting(
        self, in_flight: cython.bint, seq: cython.longlong, count: cython.longlong, slots_max: cython.longlong
    ) -> tuple:
        """Lists messages that are in flight, or to be delivered again: see `Blocks.waiting`."""
        return self.blocks.waiting(in_flight, seq, count, slots_max)

    def is_done(self, block: Block, slot: cython.int) -> cython.bint:
        """Tells whether a message was finished or passed over."""
        if block.state[slot] >= FINISHED:
            return True
        return block.state[slot] == FREE and (block.number << BLOCK_BITS) + slot < self.next

    def note_done(self, seq: cython.longlong, count: cython.longlong) -> cython.void:
        """Notes that `count` messages from `seq` on are finished."""
        self.journal += record(FINISHED_KIND, 0, seq, 0, count)

    def finish_ahead(self, seq: cython.longlong, count: cython.longlong) -> None:
        """Finishes untouched messages from `next` on that this channel is not to deliver."""
        at: cython.longlong
        block: Block
        for at in range(seq, seq + count):
            block = self.blocks.open(at >> BLOCK_BITS)
            if block.state[at & SLOT_MASK] == FREE:
                block.state[at & SLOT_MASK] = NOTED
                self.ahead += 1
        self.note_done(seq, count)

    def empty(self, seq: cython.longlong) -> None:
        """Drops everything, in flight too, and starts anew at `seq`."""
        share: Share
        for share in self._shares.values():
            share.in_flight = 0
        self._clear(seq)

    # -- inside ------------------------------------------------------------------------------------------

    def due(self, block: Block, deadline: cython.longlong) -> cython.void:
        """Keeps `earliest` of the block and of the ledger at or below a new deadline."""
        if deadline < block.earliest:
            block.earliest = deadline
            if deadline < self.earliest:
                self.earliest = deadline

    def _finished(self, block: Block, index: cython.int, seq: cython.longlong) -> cython.void:
        block.active -= 1
        if block.noted:
            block.state[index] = NOTED
            self.note_done(seq, 1)
        else:
            block.state[index] = FINISHED
            block.unnoted = True
            self.has_news = True
        if block.active == 0 and block.number < self.next >> BLOCK_BITS:
            if block.unnoted:
                self.whole.append(block.number)
            self.blocks.release(block)

    def note_waiting(self, block: Block, index: cython.int) -> cython.void:
        """Notes the attempts of a message that is not finished, and when it is due."""
        due_ms: cython.longlong = 0
        left_ms: cython.longlong = 0
        if block.state[index] == DEFERRED:
            due_ms = block.deadline[index] + self.wall_offset_ms
            left_ms = block.deadline[index] - self.seen_ms
        self.journal += record(
            PARKED_KIND if block.noted else REQUEUED_KIND,
            block.attempts[index],
            block.seq_of(index),
            due_ms,
            left_ms if left_ms > 0 else 0,
        )

    def _clear(self, seq: cython.longlong) -> cython.void:
        self.floor = seq
        self.next = seq
        self.in_flight = 0
        self.deferred = 0
        self.ahead = 0
        self.earliest = NEVER
        self.has_news = False
        self.blocks.clear()
        self.sweep.clear()
        self.whole = []
        self.mark = seq
