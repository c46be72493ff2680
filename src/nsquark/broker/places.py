"""Gives a bounded number of places, in all and for each peer, to long requests; nobody keeps one by being slow."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable


class NoPlace(Exception):
    """Says that all places are occupied; the text says whose."""


class Place:
    """Is a place that is occupied. Whoever has it says when it gets on, and gives it back."""

    def __init__(self, places: Places, peer: str, leave: Callable[[], object]) -> None:
        self.peer = peer
        self.leave = leave
        self.used_s = time.monotonic()
        self._places = places

    def got_on(self) -> None:
        self.used_s = time.monotonic()
        self._places.got_on(self)

    def free(self) -> None:
        self._places.free(self)


class Places:
    """Gives out places. When all are occupied, the one that got on longest ago has to leave, if that was at least
    `patience_s` ago.

    Always: `_occupied` is in the order of `used_s`, the slowest first.
    """

    def __init__(self, total: int, per_peer: int, patience_s: float) -> None:
        self._total = total
        self._per_peer = per_peer
        self._patience_s = patience_s
        self._occupied: dict[Place, None] = {}
        self._by_peer: Counter[str] = Counter()

    def check(self, peer: str) -> None:
        """Raises NoPlace if there is no place for this peer, and none can be made."""
        if self._by_peer[peer] >= self._per_peer:
            raise NoPlace(f"{peer} has {self._per_peer} at once already")
        if len(self._occupied) >= self._total:
            slowest = next(iter(self._occupied))
            if time.monotonic() - slowest.used_s < self._patience_s:
                raise NoPlace(f"there are {self._total} at once already")

    def occupy(self, peer: str, leave: Callable[[], object]) -> Place:
        """Gives a peer a place; `leave` is called when it is needed for another."""
        self.check(peer)
        if len(self._occupied) >= self._total:
            slowest = next(iter(self._occupied))
            self.free(slowest)
            slowest.leave()
        place = Place(self, peer, leave)
        self._occupied[place] = None
        self._by_peer[peer] += 1
        return place

    def got_on(self, place: Place) -> None:
        if place in self._occupied:
            del self._occupied[place]
            self._occupied[place] = None

    def free(self, place: Place) -> None:
        if place in self._occupied:
            del self._occupied[place]
            self._by_peer[place.peer] -= 1
            if not self._by_peer[place.peer]:
                del self._by_peer[place.peer]
