"""Runs the short form of rebuilt_disks.py; `make torture KINDS=power` runs the long one."""

import random
from pathlib import Path

import pytest

from faults.crash_states import MODELS
from faults.fates import Tally
from faults.rebuilt_disks import MODES, check_cuts, record

pytestmark = pytest.mark.ours

STEPS = 80
CUTS = 1


@pytest.mark.parametrize("mode", MODES)
def test_a_power_cut_costs_no_more_than_is_promised(tmp_path: Path, mode: str) -> None:
    recording = record(tmp_path, mode, seed=5, takeover=mode == "default", steps=STEPS)
    cuts = recording.cuts(random.Random(5), CUTS)
    total = Tally()
    for tally in check_cuts(recording, cuts, MODELS, seed=5):
        total += tally
    assert total.is_good, total
    assert total.rounds == (CUTS + 1) * len(MODELS)
    assert total.acknowledged > 300, "hardly anything was published"
