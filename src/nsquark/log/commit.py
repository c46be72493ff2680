"""A commit: what one write makes durable, and who waits for it."""

from dataclasses import dataclass, field
from typing import Protocol

from nsquark.kernel.arena import Chunk


class Waiter(Protocol):
    def committed(self, commit: "Commit") -> None:
        """The commit is settled: `commit.error` tells how."""


class Commit:
    """Open while messages are being added, then settled once, with an error or without."""

    __slots__ = ("error", "is_settled", "waiters")

    def __init__(self) -> None:
        self.waiters: list[Waiter] = []
        self.is_settled = False
        self.error: Exception | None = None

    def settle(self, error: Exception | None = None) -> None:
        self.is_settled = True
        self.error = error
        for waiter in self.waiters:
            waiter.committed(self)


@dataclass(slots=True)
class Unit:
    """The records of one commit: slices of chunks, each from a record's index on, and the times they span."""

    commit: Commit
    slices: list[tuple[Chunk, int]]
    time_min_ns: int
    time_max_ns: int
    bytes_added: int = 0
    flags: int = 0
    token: bytes = field(default=bytes(16))
