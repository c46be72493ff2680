"""Runs the short form of failing_calls.py; `make torture KINDS=calls,descriptors` runs the long one."""

from errno import EIO, EMFILE, ENOSPC
from pathlib import Path

import pytest

from faults.failing_calls import Case, Run, check_descriptors
from faults.shim import KILL, SHORT_WRITE, NoCompiler, library

pytestmark = pytest.mark.ours

CASES = [
    Case("sync", 3, 1, EIO, ending="power", pattern="*.log"),
    Case("sync", 0, 2, EIO, ending="kill -9", pattern="*/t.fresh.*.log"),
    Case("sync", 0, 1, EIO, ending="power", pattern="*.deferred"),
    Case("sync", 2, 2, EIO, ending="kill -9", pattern="*/t.orders/*", flags=("--sync-every=1",)),
    Case("write", 4, 2, ENOSPC, ending="kill -9"),
    Case("write", 9, 1, SHORT_WRITE, ending="power"),
    Case("rename", 0, 2, EIO),
    Case("open", 2, 20, EMFILE),
    Case("write", 0, 2, ENOSPC, phase="start"),
    Case("sync", 0, 2, EIO, phase="stop"),
    Case("rename", 1, 1, KILL, ending="kill -9"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_that_fails_costs_nothing_that_was_acknowledged(tmp_path: Path, case: Case) -> None:
    try:
        library()
    except NoCompiler as reason:
        pytest.skip(str(reason))
    run = Run(tmp_path, case, seed=5)
    tally = run.run()
    assert tally.is_good, tally
    assert run.fired, "no such call was made"
    assert tally.acknowledged > 50, "hardly anything was published"


def test_no_descriptor_left() -> None:
    tally = check_descriptors(seed=2, kill=False)
    assert tally.is_good, tally
