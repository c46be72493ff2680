"""Keeps the chunks of all logs within one budget of memory for the whole nsqd; the least recently used goes first."""

from collections import OrderedDict
from typing import Protocol

from nsquark.kernel.records import Chunk

CHUNK_BYTES_MIN = 16 << 10
CHUNK_BYTES_MAX = 1 << 20
RECORD_BYTES_EXPECTED = 64
"""A chunk has as many offsets as it has room for records of this size; smaller records fill it earlier."""


def chunk_records(size: int) -> int:
    """Returns how many records a chunk of `size` bytes has offsets for."""
    return size // RECORD_BYTES_EXPECTED + 16


class ChunkOwner(Protocol):
    def evict(self, chunk: Chunk) -> bool:
        """Lets go of a chunk; returns False if it must stay for now."""


class ChunkCache:
    """Keeps chunks in order of last use; `add` keeps the sum of their sizes within the budget if their
    owners allow it.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._chunks: OrderedDict[Chunk, ChunkOwner] = OrderedDict()

    def add(self, chunk: Chunk, owner: ChunkOwner) -> None:
        self._chunks[chunk] = owner
        self.used_bytes += len(chunk.view)
        if self.used_bytes > self.budget_bytes:
            self._shrink()

    def touch(self, chunk: Chunk) -> None:
        if chunk in self._chunks:
            self._chunks.move_to_end(chunk)

    def remove(self, chunk: Chunk) -> None:
        if self._chunks.pop(chunk, None) is not None:
            self.used_bytes -= len(chunk.view)

    def _shrink(self) -> None:
        """Evicts chunks, looking at each at most once: the one just added stays, however large, so it can be read."""
        for _ in range(len(self._chunks) - 1):
            if self.used_bytes <= self.budget_bytes:
                return
            chunk, owner = next(iter(self._chunks.items()))
            if owner.evict(chunk):
                self.remove(chunk)
            else:
                self._chunks.move_to_end(chunk)
