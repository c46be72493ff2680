"""A commit that is made in a thread, of too many records for one turn."""

from typing import Protocol

from nsquark.kernel.tail import Commit
from nsquark.log.batches import Batch


class Apart(Protocol):
    """Records that are made and written in a thread, from sequence numbers of their own."""

    first_seq: int
    bytes_max: int
    """At most so many bytes of the file."""

    def write(self, fd: int, offset: int) -> list[Batch]:
        """Writes everything at `offset` and makes it durable, or leaves the file as it was and raises."""


class UnitCommit(Commit):
    """It has no slices: its records are `apart`."""

    def __init__(self, timestamp_ns: int, apart: Apart) -> None:
        super().__init__(timestamp_ns)
        self.apart = apart
