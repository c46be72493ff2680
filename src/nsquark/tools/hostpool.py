"""Chooses the next of several destinations for nsq_to_http and nsq_to_nsq, as NSQ's tools do.

`choose` returns a destination, and `mark` takes how it went. The clock and the random numbers are arguments, so that
tests can give their own.
"""

import random
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

RETRY_S_MIN: Final = 30.0
RETRY_S_MAX: Final = 900.0
"""A destination that failed is left out for RETRY_S_MIN, then twice as long after each retry, up to RETRY_S_MAX."""

EXPLORING_AT_FIRST: Final = 0.3
EXPLORING_DECAY: Final = 0.9
EXPLORING_MIN: Final = 0.01
"""A share of the choices ignores response times, so that a destination which became quick is noticed; the share decays
to EXPLORING_MIN.
"""
BUCKETS: Final = 120
BUCKET_S: Final = 300.0 / BUCKETS
"""Response times of the last five minutes count, and new ones count more than old ones."""


class Pool(Protocol):
    def choose(self) -> str: ...

    def mark(self, host: str, is_good: bool, seconds: float = 0.0, count: int = 1) -> None: ...


def make_pool(mode: str, hosts: Sequence[str]) -> Pool:
    """Makes the pool of a `--mode`; an unknown mode means strict rotation."""
    if mode == "hostpool":
        return HostPool(hosts)
    if mode == "epsilon-greedy":
        return EpsilonGreedy(hosts)
    return RoundRobin(hosts)


class RoundRobin:
    """Chooses one after the other, failing ones included. Like NSQ's tools, it begins with the second."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = list(hosts)
        self._count = 0

    def choose(self) -> str:
        self._count += 1
        return self._hosts[self._count % len(self._hosts)]

    def mark(self, host: str, is_good: bool, seconds: float = 0.0, count: int = 1) -> None:
        """Does nothing, since a strict rotation ignores how it went."""


class _Host:
    """Describes a destination. It `is_dead` from a failure until a success, and is not tried before `retry_at_s`."""

    __slots__ = ("bucket", "counts", "is_dead", "name", "retry_at_s", "retry_s", "sums_s")

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.retry_s = RETRY_S_MIN
        self.retry_at_s = 0.0
        self.bucket = 0
        self.counts = [0] * BUCKETS
        self.sums_s = [0.0] * BUCKETS

    def may_be_tried(self, now_s: float) -> bool:
        return not self.is_dead or self.retry_at_s < now_s

    def fail(self, now_s: float) -> None:
        """Handles a failure. The failure of a retry changes nothing, since its pause began with the retry."""
        if not self.is_dead:
            self.is_dead = True
            self.retry_s = RETRY_S_MIN
            self.retry_at_s = now_s + self.retry_s

    def try_it(self, now_s: float) -> None:
        if self.is_dead:
            self.retry_s = min(self.retry_s * 2, RETRY_S_MAX)
            self.retry_at_s = now_s + self.retry_s

    def measured(self, seconds: float, count: int) -> None:
        self.counts[self.bucket] += count
        self.sums_s[self.bucket] += seconds * count

    def grow_older(self, buckets: int) -> None:
        for _ in range(min(buckets, BUCKETS)):
            self.bucket = (self.bucket + 1) % BUCKETS
            self.counts[self.bucket] = 0
            self.sums_s[self.bucket] = 0.0

    def weighted_response_s(self) -> float:
        """Returns the sum of the averages of all buckets, weighted by age; an empty one counts like the one before."""
        total_s = average_s = 0.0
        for age in range(1, BUCKETS + 1):
            place = (self.bucket + age) % BUCKETS
            if self.counts[place]:
                average_s = self.sums_s[place] / self.counts[place]
            total_s += average_s * age / BUCKETS
        return total_s


class HostPool:
    """Rotates over the destinations that are not dead. When all are, all are revived, since one has to be tried."""

    def __init__(self, hosts: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._hosts = [_Host(name) for name in hosts]
        self._by_name = {host.name: host for host in self._hosts}
        self._clock = clock
        self._next = 0

    def choose(self) -> str:
        now_s = self._clock()
        for step in range(len(self._hosts)):
            place = (self._next + step) % len(self._hosts)
            host = self._hosts[place]
            if host.may_be_tried(now_s):
                host.try_it(now_s)
                self._next = place + 1
                return host.name
        for host in self._hosts:
            host.is_dead = False
        self._next = 0
        return self._hosts[0].name

    def mark(self, host: str, is_good: bool, seconds: float = 0.0, count: int = 1) -> None:
        if is_good:
            self._by_name[host].is_dead = False
        else:
            self._by_name[host].fail(self._clock())


class EpsilonGreedy(HostPool):
    """Prefers destinations that answer quickly: each has a probability in proportion to 1 / its response time.

    Now and then, ever more rarely, it rotates as a `HostPool` does; it also does so while nothing is measured.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(hosts, clock)
        self._chance = chance
        self._exploring = EXPLORING_AT_FIRST
        self._bucket_began_s = clock()
        self._weights: list[tuple[_Host, float]] | None = None
        """These are the weights of all destinations that were measured, or None if they must be computed again."""

    def choose(self) -> str:
        if self._chance() < self._exploring:
            self._exploring = max(self._exploring * EXPLORING_DECAY, EXPLORING_MIN)
            return super().choose()
        now_s = self._clock()
        self._grow_older(now_s)
        possible = [(host, weight) for host, weight in self._weighted() if host.may_be_tried(now_s)]
        left = self._chance() * sum(weight for _, weight in possible)
        for host, weight in possible:
            left -= weight
            if left <= 0:
                host.try_it(now_s)
                return host.name
        return super().choose()

    def mark(self, host: str, is_good: bool, seconds: float = 0.0, count: int = 1) -> None:
        super().mark(host, is_good)
        if is_good:
            self._grow_older(self._clock())
            self._by_name[host].measured(seconds, count)
            self._weights = None

    def _grow_older(self, now_s: float) -> None:
        passed = int((now_s - self._bucket_began_s) / BUCKET_S)
        if passed > 0:
            self._bucket_began_s += passed * BUCKET_S
            self._weights = None
            for host in self._hosts:
                host.grow_older(passed)

    def _weighted(self) -> list[tuple[_Host, float]]:
        if self._weights is None:
            times = [(host, host.weighted_response_s()) for host in self._hosts]
            self._weights = [(host, 1 / seconds) for host, seconds in times if seconds > 0]
        return self._weights
