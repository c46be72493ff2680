"""Does for a few seconds what `make fuzz` does for long, after all that it found before."""

from pathlib import Path

import pytest

from fuzz.running import INPUTS_MIN, run

pytestmark = pytest.mark.ours

SECONDS = 5.0
SEED = 20_261_116


def test_hostile_bytes_harm_nobody(tmp_path: Path) -> None:
    report = run(SECONDS, SEED, tmp_path)
    assert report.is_clean, str(report)
    assert all(row.inputs >= INPUTS_MIN for row in report.rows), str(report)
