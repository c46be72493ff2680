"""Runs the short form of failing_calls.py; `make torture KINDS=calls,descriptors` runs the long one."""

from errno import EIO, EMFILE, ENOSPC
from pathlib import Path

import pytest

from faults.failing_calls import CallCase, Run, check_descriptors
from faults.shim import KILL, SHORT_WRITE

pytestmark = pytest.mark.ours

PATIENCE_S = 30.0
"""Calls that nsqd makes by the clock come after more steps on a busy machine."""
CASES = [
    CallCase("sync", 3, 1, EIO, ending="power", pattern="*.log"),
    CallCase("sync", 0, 2, EIO, ending="kill -9", pattern="*/t.fresh.*.log"),
    CallCase("sync", 0, 1, EIO, ending="power", pattern="*.deferred"),
    CallCase("sync", 2, 2, EIO, ending="kill -9", pattern="*/t.orders/*", flags=("--sync-every=1",)),
    CallCase("write", 4, 2, ENOSPC, ending="kill -9"),
    CallCase("write", 9, 1, SHORT_WRITE, ending="power"),
    CallCase("rename", 0, 2, EIO),
    CallCase("open", 2, 20, EMFILE),
    CallCase("write", 0, 2, ENOSPC, phase="start"),
    CallCase("sync", 0, 2, EIO, phase="stop"),
    CallCase("rename", 1, 1, KILL, ending="kill -9"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_that_fails_costs_nothing_that_was_acknowledged(tmp_path: Path, case: CallCase) -> None:
    run = Run(tmp_path, case, seed=5, patience_s=PATIENCE_S)
    tally = run.run()
    assert tally.is_good, tally
    assert run.fired, "no such call was made"
    assert tally.acknowledged > 50, "hardly anything was published"


def test_no_descriptor_left() -> None:
    tally = check_descriptors(seed=2, kill=False)
    assert tally.is_good, tally
