"""Decides how long a consumer holds back after failures."""

from __future__ import annotations

import random
from typing import Final

from nsquark.client.config import Config
from nsquark.client.options import BackoffStrategy

EXPONENT_MAX: Final = 62


class Exponential:
    def __init__(self, multiplier_s: float) -> None:
        self._multiplier_s = multiplier_s

    def calculate(self, attempt: int) -> float:
        return self._multiplier_s * 2.0 ** min(attempt, EXPONENT_MAX)


class FullJitter(Exponential):
    """Waits for a random time, so that consumers that failed together do not come back together."""

    def calculate(self, attempt: int) -> float:
        return random.uniform(0, super().calculate(attempt))


def strategy_of(config: Config) -> BackoffStrategy:
    strategy = config.backoff_strategy
    if not isinstance(strategy, str):
        return strategy
    kind = FullJitter if strategy == "full_jitter" else Exponential
    return kind(config.backoff_multiplier.seconds)


class Backoff:
    """Keeps the level, and knows how each outcome of a message moves it; 0 is normal work."""

    def __init__(self, config: Config) -> None:
        self._strategy = strategy_of(config)
        self._duration_max_s = config.max_backoff_duration.seconds
        self.level = 0

    def failed(self) -> None:
        """Goes one level up, until the next would exceed max_backoff_duration; 0 for that means no backoff at all."""
        if self._duration_max_s > 0 and self._strategy.calculate(self.level + 1) <= self._duration_max_s:
            self.level += 1

    def succeeded(self) -> None:
        if self.level > 0:
            self.level -= 1

    @property
    def duration_s(self) -> float:
        return min(self._strategy.calculate(self.level), self._duration_max_s)


def retry_delay_s(failures: int, least_s: float, most_s: float) -> float:
    """Returns a delay that doubles after each failure in a row, and is random within its upper half: those that lost a
    peer together must not all come back at the same moment.
    """
    longest_s = min(most_s, least_s * 2.0 ** min(failures - 1, EXPONENT_MAX))
    return longest_s * random.uniform(0.5, 1.0)
