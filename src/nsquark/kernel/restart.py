# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Brings a ledger over a restart: notes what a crash must not lose, makes the snapshot of a stop, and reads both."""

import cython

from nsquark.kernel.journal import JOURNAL_FINISHED, JOURNAL_PARKED, JOURNAL_RECORD

if cython.compiled:
    from cython.cimports.nsquark.kernel.blocks import (
        BLOCK_BITS,
        BLOCK_SLOTS,
        DEFERRED,
        FINISHED,
        FREE,
        NOTED,
        QUEUED,
        SLOT_MASK,
        Block,
    )
    from cython.cimports.nsquark.kernel.bytes import little_u64
    from cython.cimports.nsquark.kernel.ledger import Ledger
else:
    from nsquark.kernel.blocks import (
        BLOCK_BITS,
        BLOCK_SLOTS,
        DEFERRED,
        FINISHED,
        FREE,
        NOTED,
        QUEUED,
        SLOT_MASK,
        Block,
    )
    from nsquark.kernel.bytes import little_u64
    from nsquark.kernel.ledger import Ledger

NEVER = cython.declare(cython.longlong, 1 << 62)
RECORD_BYTES = cython.declare(cython.int, JOURNAL_RECORD.size)
PARKED_KIND = cython.declare(cython.int, JOURNAL_PARKED)
FINISHED_KIND = cython.declare(cython.int, JOURNAL_FINISHED)

DENSE_BLOCKS_MAX = cython.declare(cython.int, 256)
"""While a journal is read, blocks below the floor are set aside whenever this many blocks have all slots."""


def note_finished(ledger: Ledger) -> None:
    """Notes what was finished above a message that has been unfinished since the last call: a crash repeats the rest.

    While messages are finished about as they came, the floor follows and nothing has to be noted.
    """
    block: Block
    number: cython.longlong
    if ledger.floor < ledger.mark:
        for number in ledger.whole:
            if (number + 1) << BLOCK_BITS > ledger.floor:
                ledger.note_done(number << BLOCK_BITS, BLOCK_SLOTS)
        ledger.whole.clear()
        for number in ledger.blocks.order:
            block = ledger.blocks.get(number)
            if block is not None and block.unnoted and not block.parked:
                _note_news(ledger, block)
        ledger.has_news = False
    else:
        ledger.whole = [number for number in ledger.whole if (number + 1) << BLOCK_BITS > ledger.floor]
    ledger.mark = ledger.next


@cython.cfunc
def _note_news(ledger: Ledger, block: Block):
    """Notes the runs of finished messages of a block that are not noted yet."""
    first: cython.longlong = block.number << BLOCK_BITS
    index: cython.int = ledger.floor - first if ledger.floor > first else 0
    run: cython.int
    end: cython.int = 0
    while index < block.size:
        if block.state[index] != FINISHED:
            index += 1
            continue
        run = index
        while run < block.size and ledger.is_done(block, run):
            if block.state[run] == FINISHED:
                block.state[run] = NOTED
                end = run + 1
            run += 1
        ledger.note_done(first + index, end - index)
        index = run
    block.unnoted = False


def snapshot(ledger: Ledger) -> bytes:
    """Makes the records of a journal that has everything worth keeping over a restart."""
    unwritten, ledger.journal = ledger.journal, bytearray()
    block: Block
    for number in sorted({*ledger.blocks.by_number, *ledger.blocks.order}):
        block = ledger.blocks.get(number)
        if block is not None:
            _note_block(ledger, block)
        elif number < ledger.next >> BLOCK_BITS:  # the block was finished as a whole, above the floor
            ledger.note_done(number << BLOCK_BITS, BLOCK_SLOTS)
    records, ledger.journal = bytes(ledger.journal), unwritten
    return records


@cython.cfunc
def _note_block(ledger: Ledger, block: Block):
    index: cython.int = 0
    run: cython.int
    if not block.parked and ledger.floor > block.number << BLOCK_BITS:
        index = ledger.floor - (block.number << BLOCK_BITS)
    while index < block.size:
        run = index + 1
        if block.is_active(index):
            ledger.note_waiting(block, index)
        elif not block.sparse and ledger.is_done(block, index):
            while run < block.size and ledger.is_done(block, run):
                run += 1
            ledger.note_done((block.number << BLOCK_BITS) + index, run - index)
        index = run


def restore(
    ledger: Ledger, records: object, now_ms: cython.longlong, ranges: object = None, outliving: object = ()
) -> cython.longlong:
    """Reads a journal's records, in order, into a ledger that has taken nothing yet.

    `ranges` are the messages that exist, as (first, count) in order; of others only those in `outliving` matter. None
    waits longer than it had left when it was noted; returns how many would have, since the clock was ahead then.
    """
    data: cython.uchar[::1] = memoryview(records if isinstance(records, bytearray) else bytearray(records))
    starts: cython.longlong[::1] = _column(ranges, False)
    ends: cython.longlong[::1] = _column(ranges, True)
    pos: cython.longlong = 0
    end: cython.longlong = data.shape[0] - RECORD_BYTES + 1
    at: cython.longlong
    stop: cython.longlong
    kind: cython.int
    due_ms: cython.longlong  # signed, as what it is compared with
    left_ms: cython.longlong
    brought_forward: cython.longlong = 0
    block: Block
    ledger.seen_ms = now_ms
    while pos < end:
        kind = data[pos + 4]
        at = little_u64(data, pos + 8)
        if kind == FINISHED_KIND:
            stop = at + little_u64(data, pos + 24)
            while at < stop:
                if at < ledger.floor and ledger.blocks.find(at) is None:
                    at = min(ledger.floor, ((at >> BLOCK_BITS) + 1) << BLOCK_BITS)
                    continue
                if at < ledger.floor or _exists(starts, ends, at):
                    _restore_finished(ledger, at)
                at += 1
        elif (at >= ledger.floor or kind == PARKED_KIND) and (_exists(starts, ends, at) or at in outliving):
            due_ms = little_u64(data, pos + 16)
            due_ms -= ledger.wall_offset_ms
            left_ms = little_u64(data, pos + 24)
            if due_ms - now_ms > left_ms:
                due_ms = now_ms + left_ms
                brought_forward += 1
            _restore_waiting(ledger, at, data[pos + 6] | (data[pos + 7] << 8), due_ms, now_ms)
            if kind == PARKED_KIND:
                block = ledger.blocks.find(at)
                block.noted = True
        pos += RECORD_BYTES
    ledger.blocks.set_parked_aside(ledger.floor)
    ledger.raise_floor()
    return brought_forward


@cython.cfunc
def _restore_finished(ledger: Ledger, seq: cython.longlong):
    block: Block = _dense(ledger, seq, seq >= ledger.floor)
    if block is None:
        return
    slot: cython.int = seq & SLOT_MASK
    if block.state[slot] == FREE and seq >= ledger.next:
        ledger.ahead += 1
    _restore_nothing(ledger, block, slot)
    if seq >= ledger.floor:
        block.state[slot] = NOTED


@cython.cfunc
def _restore_waiting(
    ledger: Ledger, seq: cython.longlong, attempts: cython.int, due_ms: cython.longlong, now_ms: cython.longlong
):
    block: Block = _dense(ledger, seq, True)
    slot: cython.int = seq & SLOT_MASK
    if block.state[slot] == FREE and seq >= ledger.next:
        ledger.ahead += 1
    _restore_nothing(ledger, block, slot)
    block.active += 1
    block.attempts[slot] = attempts
    if slot < block.active_from:
        block.active_from = slot
    if due_ms > now_ms:
        block.state[slot] = DEFERRED
        block.deadline[slot] = due_ms
        ledger.deferred += 1
        ledger.due(block, due_ms)
    else:
        ledger.sweep.queue(block, slot)


@cython.cfunc
def _restore_nothing(ledger: Ledger, block: Block, slot: cython.int):
    """Undoes what an earlier record said of a message."""
    if block.state[slot] == QUEUED:
        ledger.sweep.unqueue(block, slot)
        block.active -= 1
    elif block.state[slot] == DEFERRED:
        ledger.deferred -= 1
        block.active -= 1
    block.state[slot] = FREE


@cython.cfunc
def _dense(ledger: Ledger, seq: cython.longlong, make: cython.bint) -> Block:
    """Returns the block of a message with all its slots; below the floor only some blocks have them at a time."""
    block: Block = ledger.blocks.find(seq)
    if block is not None and not block.sparse:
        return block
    if block is None and not make:
        return None
    if len(ledger.blocks.order) >= DENSE_BLOCKS_MAX:
        ledger.blocks.set_parked_aside(ledger.floor)
        block = ledger.blocks.find(seq)
    if block is None:
        return ledger.blocks.open(seq >> BLOCK_BITS)
    return ledger.blocks.dense(block)


def _column(ranges: object, ends: bool) -> object:
    """Makes a C array of where the ranges start, or end; without ranges, of one range that has everything."""
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
