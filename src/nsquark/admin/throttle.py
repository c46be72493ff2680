"""Limits how often a password may be tried: after some failures, each further one doubles the wait for the next try."""

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

FREE_FAILURES: Final = 5
"""This many failures of one user from one network cost no waiting."""
FREE_FAILURES_SHARED: Final = 50
"""This many failures cost no waiting if they are counted for a network and any user, since the network may be a proxy
with many users, or for a user and any network.
"""
WAIT_S_MAX: Final = 300.0
SHARED_WAIT_S_MAX: Final = 30.0
"""This is the longest wait for those shared counts. A longer one would let strangers keep out a user, or everybody
behind the same proxy, by guessing.
"""
FORGET_S: Final = 900.0
COUNTS_MAX: Final = 20_000


class _Rule(NamedTuple):
    key: tuple[str, str]
    free: int
    wait_s_max: float


class _Count(NamedTuple):
    failures: int
    seen_s: float
    next_s: float


class LoginThrottle:
    """Counts failed logins by network and user. There are never more than `counts_max` counts, the latest ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, counts_max: int = COUNTS_MAX) -> None:
        self._counts_max = counts_max
        self._clock = clock
        self._counts: OrderedDict[tuple[str, str], _Count] = OrderedDict()

    def wait_s(self, address: str, user: str) -> float:
        """Returns for how long this user cannot be tried from this address; 0 means that it can be tried now."""
        now = self._clock()
        return max(0.0, *(self._count(rule.key, now).next_s - now for rule in _rules(address, user)))

    def failed(self, address: str, user: str) -> None:
        """Counts a failure. It is called before the password is checked, and `succeeded` afterwards, so that many at
        once count as many.
        """
        now = self._clock()
        for rule in _rules(address, user):
            failures = self._count(rule.key, now).failures + 1
            beyond = failures - rule.free
            wait_s = min(rule.wait_s_max, 2.0 ** min(beyond, 20)) if beyond >= 0 else 0.0
            self._counts[rule.key] = _Count(failures, now, now + wait_s)
            self._counts.move_to_end(rule.key)
        while len(self._counts) > self._counts_max:
            self._counts.popitem(last=False)

    def succeeded(self, address: str, user: str) -> None:
        """Forgets this user's failures from this network, and in the shared counts only the one that was no failure."""
        own, *shared = _rules(address, user)
        self._counts.pop(own.key, None)
        for rule in shared:
            count = self._counts.get(rule.key)
            if count is not None:
                self._counts[rule.key] = count._replace(failures=max(0, count.failures - 1), next_s=0.0)

    def _count(self, key: tuple[str, str], now: float) -> _Count:
        count = self._counts.get(key)
        return count if count is not None and now - count.seen_s < FORGET_S else _Count(0, now, 0.0)


def _rules(address: str, user: str) -> tuple[_Rule, _Rule, _Rule]:
    place, user = _place(address), user[:64]
    return (
        _Rule((place, user), FREE_FAILURES, WAIT_S_MAX),
        _Rule((place, "\0"), FREE_FAILURES_SHARED, SHARED_WAIT_S_MAX),
        _Rule(("", user), FREE_FAILURES_SHARED, SHARED_WAIT_S_MAX),
    )


def _place(address: str) -> str:
    """Returns the network of an address, since one customer of a provider has a whole IPv6 network of 64 bits."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        mapped = parsed.ipv4_mapped
        return str(mapped) if mapped else str(ipaddress.ip_network((int(parsed), 64), strict=False))
    return str(parsed)
