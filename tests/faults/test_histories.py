"""Runs the short form of histories.py; `make torture` runs the long one."""

from pathlib import Path

import pytest

from faults.histories import History, Plan, summary

pytestmark = pytest.mark.ours


@pytest.mark.parametrize(
    ("plan", "rounds"),
    [(Plan(), 2), (Plan(freezes=True, sets_clock=True, round_s=(0.4, 1.0)), 1)],
    ids=["killed", "frozen and with the clock set"],
)
def test_nothing_that_was_acknowledged_is_lost_under_load(tmp_path: Path, plan: Plan, rounds: int) -> None:
    history = History(tmp_path, 20, plan)
    tally = history.run(rounds)
    print(summary(history))
    assert tally.is_good, summary(history)
    assert tally.acknowledged > 500, "hardly anything was published"
