# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Decides in which order messages that are queued again are delivered. The C types are in sweep.pxd."""

from heapq import heappop, heappush

import cython

if cython.compiled:
    from cython.cimports.nsquark.kernel.blocks import QUEUED, Block, Blocks
else:
    from nsquark.kernel.blocks import QUEUED, Block, Blocks


class Sweep:
    """Goes over what is queued by rising sequence number, up to the last block that had something when the sweep began.

    What is queued behind the sweep waits for the next one: so no message comes a third time before all that waited when
    it came first have come, and the log is read in its order. (A queue would cost memory for each message.)

    * `count` slots of all blocks are QUEUED.
    * A block with such a slot is `listed` in the sweep that is under way or `listed_later` in the next one, or in both.
    """

    def __init__(self, blocks: Blocks):
        self._blocks = blocks
        self.clear()

    def clear(self) -> cython.void:
        self.count = 0
        self._now = []
        self._at = -1
        self._end = -1
        self._later = []

    def queue(self, block: Block, index: cython.int) -> cython.void:
        """Puts a message among those that are to be delivered again."""
        block.state[index] = QUEUED
        self.count += 1
        if block.listed and index >= block.queued_from:
            return  # the sweep will come to it
        if self._at < block.number <= self._end:
            block.queued_from = index
            if not block.listed:
                heappush(self._now, block.number)
                block.listed = True
        elif not block.listed_later:
            self._later.append(block.number)
            block.listed_later = True
            block.later_from = index
        elif index < block.later_from:
            block.later_from = index

    def unqueue(self, block: Block, index: cython.int) -> cython.void:
        """Is told that a message is not QUEUED any more; the caller sets its new state."""
        self.count -= 1
        if index == block.queued_from:  # if it is queued again, that is behind the sweep
            block.queued_from = index + 1

    def next(self) -> cython.longlong:
        """Returns the message that is to be delivered again next, or -1 if there is none."""
        block: Block
        index: cython.int
        if not self._now:
            self._begin()
        while self._now:
            self._at = self._now[0]
            block = self._blocks.get(self._at)
            if block is not None and block.listed:
                index = block.queued_from
                while index < block.size and block.state[index] != QUEUED:
                    index += 1
                block.queued_from = index
                if index < block.size:
                    return block.seq_of(index)
                block.listed = False
            heappop(self._now)
            if not self._now:
                self._begin()
        return -1

    def _begin(self) -> cython.void:
        block: Block
        for number in sorted(self._later):
            block = self._blocks.get(number)
            if block is not None and block.listed_later:
                block.listed_later = False
                block.listed = True
                block.queued_from = block.later_from
                self._now.append(number)
        self._later = []
        self._at = -1
        self._end = self._now[len(self._now) - 1] if self._now else -1
