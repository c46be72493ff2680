"""Runs the short form of damage.py; `make torture KINDS=damage` runs the long one, with kept messages too."""

import random
from pathlib import Path

import pytest

from faults.damage import KINDS, DamageCase, Sample, check

pytestmark = pytest.mark.ours

LONGER_THAN_A_PAGE = ("segment", "index", "cursors", "journal", "deferred")
CASES = [(kind, damage) for kind in KINDS if kind != "kept" for damage in ("flip", "EIO")]
CASES += [(kind, "page") for kind in LONGER_THAN_A_PAGE]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample(Path(tmp_path_factory.mktemp("sample")), seed=1, parked=False)


@pytest.mark.parametrize(("kind", "damage"), CASES)
def test_damage_costs_what_is_damaged_and_no_more(sample: Sample, kind: str, damage: str) -> None:
    tally = check(sample, DamageCase(kind, damage), random.Random(f"{kind}/{damage}"))
    assert tally is not None, f"the sample has no {kind}"
    assert tally.is_good, tally
