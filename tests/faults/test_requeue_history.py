"""Runs the short form of requeue_history.py."""

from collections.abc import Callable

import pytest

from faults.requeue_history import RequeueHistory
from harness import Nsqd

pytestmark = pytest.mark.ours

ROUNDS = 3
CONFIRMED_MIN = 100
TRIES = 5
"""A round is short, and a busy machine may get little done in it: so often the rounds are gone through, at most."""


@pytest.mark.parametrize("seed", [3, 6])
def test_attempts_grow_and_delays_hold_over_kills(make_nsqd: Callable[..., Nsqd], seed: int) -> None:
    history = RequeueHistory(make_nsqd(), seed)
    for _ in range(TRIES):
        history.run(ROUNDS)
        if history.confirmed > CONFIRMED_MIN:
            break
    assert not history.faults, "\n".join(history.faults[:5])
    assert history.confirmed > CONFIRMED_MIN, "hardly anything was confirmed"
