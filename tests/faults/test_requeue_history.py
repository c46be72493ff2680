"""Runs the short form of requeue_history.py."""

from collections.abc import Callable

import pytest

from faults.requeue_history import RequeueHistory
from harness import Nsqd

pytestmark = pytest.mark.ours

ROUNDS = 3


@pytest.mark.parametrize("seed", [3, 6])
def test_attempts_grow_and_delays_hold_over_kills(make_nsqd: Callable[..., Nsqd], seed: int) -> None:
    history = RequeueHistory(make_nsqd(), seed)
    history.run(ROUNDS)
    assert not history.faults, "\n".join(history.faults[:5])
    assert history.confirmed > 100, "hardly anything was confirmed"
