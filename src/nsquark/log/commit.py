"""A commit: what one write makes durable, and who waits for it."""

from dataclasses import dataclass, field
from typing import Protocol

from nsquark.kernel.arena import Chunk
from nsquark.log.batches import Batch


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


class Apart(Protocol):
    """Records that are made and written in a thread, from sequence numbers of their own: too many for one turn."""

    first_seq: int
    bytes_max: int
    """At most so many bytes of the file."""

    def write(self, fd: int, offset: int) -> list[Batch]:
        """Writes everything at `offset` and makes it durable, or leaves the file as it was and raises."""


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
    apart: Apart | None = None
    """Instead of slices."""
