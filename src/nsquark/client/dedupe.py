"""Remembers which keys of enveloped messages were handled: in this process, or in a store that the user supplies.

A key counts as seen when its message is finished, not when it arrives: if the handler fails, a copy is still wanted.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable
from datetime import timedelta
from typing import Final, Literal, Protocol

from nsquark.base.durations import Duration
from nsquark.client.checks import check_count
from nsquark.client.documented import documented_like
from nsquark.client.errors import ConfigError
from nsquark.client.options import Span

KEYS_MAX: Final = 1_000_000
"""At most so many keys are remembered, about 200 MB when full."""
AGE_DEFAULT: Final = "1h"
CLAIM_AGE_DEFAULT: Final = "15m"
"""Is the longest time that nsqd lets a message be in flight, by default."""

Claim = Literal["new", "busy", "seen"]
"""Is what a store says of a key. new: handle it, then call `done` or `release`. busy: another copy is being handled,
requeue this. seen: drop it.
"""


class DedupeStore(Protocol):
    """This is what `Consumer(dedupe=...)` needs. Each method may be a coroutine.

    Keys begin with topic and channel, so that consumers of several channels can share a store.
    A store shared by several processes must let a claim end by itself after some time: its process may have died.
    """

    def claim(self, key: bytes) -> Claim | Awaitable[Claim]:
        """Says, in one step for all that share the store, whether a message is to be handled: of two copies that
        arrive at once only one is new.

        key: what all copies of a message have in common.
        """

    def done(self, key: bytes) -> Awaitable[None] | None:
        """Is told that the message of a claim was finished.

        key: as of `claim`.
        """

    def release(self, key: bytes) -> Awaitable[None] | None:
        """Is told that the message of a claim was requeued: the next copy is new.

        key: as of `claim`.
        """


@documented_like(DedupeStore)
class Dedupe:
    """Remembers keys in one process: it finds copies that reach the same process, within `age`, among the last
    `keys_max`.

    keys_max: so many keys are kept.
    age: for so long a finished message is remembered.
    claim_age: after so long a message that was neither finished nor requeued counts as never handled.

    Invariants: a key is in at most one of `_claimed` and `_seen`; both hold their keys in the order of their time.
    """

    def __init__(
        self,
        *,
        keys_max: int = KEYS_MAX,
        age: str | timedelta | Duration = AGE_DEFAULT,
        claim_age: str | timedelta | Duration = CLAIM_AGE_DEFAULT,
    ) -> None:
        check_count("keys_max", keys_max, 1)
        self._keys_max = keys_max
        self._age_ns = _positive("age", age)
        self._claim_age_ns = _positive("claim_age", claim_age)
        # A plain dict takes longer to find its oldest key the more it has lost.
        self._claimed: OrderedDict[bytes, int] = OrderedDict()
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._claimed) + len(self._seen)

    def claim(self, key: bytes) -> Claim:
        now_ns = time.monotonic_ns()
        _forget(self._seen, now_ns - self._age_ns)
        _forget(self._claimed, now_ns - self._claim_age_ns)
        if key in self._seen:
            return "seen"
        if key in self._claimed:
            return "busy"
        self._claimed[key] = now_ns
        self._keep_bound(self._claimed)
        return "new"

    def done(self, key: bytes) -> None:
        self._claimed.pop(key, None)
        self._seen.pop(key, None)
        self._seen[key] = time.monotonic_ns()
        self._keep_bound(self._seen)

    def release(self, key: bytes) -> None:
        self._claimed.pop(key, None)

    def _keep_bound(self, keys: OrderedDict[bytes, int]) -> None:
        if len(keys) > self._keys_max:
            keys.popitem(last=False)


def _forget(keys: OrderedDict[bytes, int], before_ns: int) -> None:
    while keys and keys[next(iter(keys))] <= before_ns:
        keys.popitem(last=False)


def _positive(name: str, value: str | timedelta | Duration) -> int:
    try:
        span = Span(None, None).typed(value)
    except ValueError as error:
        raise ConfigError(f"failed to coerce option {name} ({value}) - {error}") from None
    if span <= 0:
        raise ConfigError(f"invalid {name} ! {span} <= 0s")
    return span
