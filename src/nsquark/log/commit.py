"""A commit: what one write makes durable, and who waits for it."""

from typing import Protocol

from nsquark.kernel.arena import Chunk
from nsquark.log.batches import NO_TOKEN, Batch


class Waiter(Protocol):
    def committed(self, commit: "Commit") -> None:
        """The commit is settled: `commit.error` tells how."""


class Apart(Protocol):
    """Records that are made and written in a thread, from sequence numbers of their own: too many for one turn."""

    first_seq: int
    bytes_max: int
    """At most so many bytes of the file."""

    def write(self, fd: int, offset: int) -> list[Batch]:
        """Writes everything at `offset` and makes it durable, or leaves the file as it was and raises."""


class Commit:
    """The records of one write: open while messages are being added, then settled once, with an error or without.

    `slices` are parts of chunks, each from a record's index on; a commit that is made in a thread has `apart` instead.
    """

    __slots__ = (
        "apart",
        "bytes_added",
        "error",
        "flags",
        "is_settled",
        "slices",
        "time_max_ns",
        "time_min_ns",
        "token",
        "waiters",
    )

    def __init__(
        self, slices: list[tuple[Chunk, int]] | None = None, timestamp_ns: int = 0, apart: "Apart | None" = None
    ) -> None:
        self.waiters: list[Waiter] = []
        self.is_settled = False
        self.error: Exception | None = None
        self.slices = slices or []
        self.time_min_ns = self.time_max_ns = timestamp_ns
        self.bytes_added = 0
        self.flags = 0
        self.token = NO_TOKEN
        self.apart = apart

    def settle(self, error: Exception | None = None) -> None:
        self.is_settled = True
        self.error = error
        for waiter in self.waiters:
            waiter.committed(self)
