"""Remembers which appends of deferred messages a log has: so messages that still wait are told from those that came."""

from collections.abc import Iterable


class Appends:
    """Knows the numbers of appends: all up to `durable` are in the log, and of those above just the ones in `later`.

    The highest number alone would not do: pages of a file reach the disk in any order, so after a power cut an append
    can be there and the one before it not.
    """

    def __init__(self, durable: int = 0, later: Iterable[int] = ()) -> None:
        self.durable = durable
        self.later = {number for number in later if number > durable}

    @property
    def last(self) -> int:
        return max(self.later, default=self.durable)

    def happened(self, number: int) -> bool:
        return number <= self.durable or number in self.later

    def add(self, number: int) -> None:
        self.later.add(number)

    def add_durable(self, number: int) -> None:
        """Is told that all appends up to this one are on the disk."""
        if number > self.durable:
            self.durable = number
            self.later = {later for later in self.later if later > number}

    def token(self, number: int) -> bytes:
        """Makes the token that a batch with the append carries: its number, and which appends were durable by then."""
        return number.to_bytes(8, "little") + self.durable.to_bytes(8, "little")

    def add_token(self, token: bytes) -> None:
        """Is told that a batch with this token is in the log."""
        self.add(int.from_bytes(token[:8], "little"))
        self.add_durable(int.from_bytes(token[8:], "little"))

    def add_all(self, others: "Appends") -> None:
        self.later |= others.later
        self.add_durable(others.durable)
