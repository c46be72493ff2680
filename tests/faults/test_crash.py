"""The short form of crash_rounds.py; `make crash` runs the long one."""

from pathlib import Path

import pytest

from faults.crash_rounds import CrashRun, summary

pytestmark = pytest.mark.ours

ROUNDS = 3


def test_kill_under_load_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    run = CrashRun(tmp_path, seed=20)
    verdict = run.run(ROUNDS)
    print(summary(run))
    assert verdict.lost == 0
    assert not verdict.faults, summary(run)
    assert len(verdict.acknowledged) > 1000, "hardly anything was published"
