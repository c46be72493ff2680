"""Checks how long a consumer holds back."""

import pytest

from nsquark.client.backoff import Backoff, Exponential, FullJitter
from nsquark.client.config import Config


def levels_and_waits(backoff: Backoff, failures: int) -> list[tuple[int, float]]:
    seen = []
    for _ in range(failures):
        backoff.failed()
        seen.append((backoff.level, backoff.duration_s))
    return seen


def test_defaults_as_in_nsq() -> None:
    waits = [(1, 2.0), (2, 4.0), (3, 8.0), (4, 16.0), (5, 32.0), (6, 64.0), (6, 64.0), (6, 64.0)]
    assert levels_and_waits(Backoff(Config()), 8) == waits


def test_success_takes_one_level_back() -> None:
    backoff = Backoff(Config())
    for _ in range(3):
        backoff.failed()
    seen = []
    for _ in range(4):
        backoff.succeeded()
        seen.append(backoff.level)
    assert seen == [2, 1, 0, 0]


def test_a_cap_of_0_means_no_backoff() -> None:
    assert levels_and_waits(Backoff(Config(max_backoff_duration="0s")), 2) == [(0, 0.0), (0, 0.0)]


def test_a_cap_below_the_first_step_means_no_backoff_either() -> None:
    assert levels_and_waits(Backoff(Config(max_backoff_duration="1s")), 1)[0][0] == 0


def test_a_multiplier_of_0_never_waits() -> None:
    backoff = Backoff(Config(backoff_multiplier="0s"))
    for _ in range(2000):
        backoff.failed()
    assert backoff.duration_s == 0


@pytest.mark.parametrize("attempt", [1, 3, 5000])
def test_full_jitter_stays_below_the_exponential(attempt: int) -> None:
    waits = [FullJitter(0.5).calculate(attempt) for _ in range(200)]
    assert all(0 <= wait <= Exponential(0.5).calculate(attempt) for wait in waits)
    assert len(set(waits)) > 100


def test_full_jitter_by_name() -> None:
    backoff = Backoff(Config(backoff_strategy="full_jitter"))
    backoff.failed()
    assert len({backoff.duration_s for _ in range(50)}) > 10


def test_an_own_strategy() -> None:
    class Linear:
        def calculate(self, attempt: int) -> float:
            return 0.5 * attempt

    config = Config(backoff_strategy=Linear(), max_backoff_duration="1s")
    assert levels_and_waits(Backoff(config), 3) == [(1, 0.5), (2, 1.0), (2, 1.0)]
