"""Checks that a log remembers how far its messages were removed."""

from pathlib import Path

import pytest

from nsquark.log.removal_mark import Removed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "removed"


def loaded(path: Path, base_left: int, reports: list[str]) -> int:
    removed = Removed(path, reports.append)
    removed.load(base_left)
    return removed.to


def test_what_was_removed_is_remembered(path: Path) -> None:
    reports: list[str] = []
    assert loaded(path, 500, reports) == 0, "nothing was ever removed"
    Removed(path, reports.append).store(480, 500)
    assert loaded(path, 500, reports) == 480
    assert not reports


def test_a_crash_before_the_segment_went_counts_all_below_as_removed(path: Path) -> None:
    reports: list[str] = []
    Removed(path, reports.append).store(480, 500)
    assert loaded(path, 900, reports) == 900
    assert not reports


@pytest.mark.parametrize("damage", ["torn", "flipped", "zeroed", "empty"])
def test_in_doubt_everything_below_the_log_counts_as_removed_and_it_is_told(path: Path, damage: str) -> None:
    reports: list[str] = []
    Removed(path, reports.append).store(480, 500)
    raw = path.read_bytes()
    damaged = {"torn": raw[:-1], "flipped": bytes([raw[0] ^ 1]) + raw[1:], "zeroed": bytes(len(raw)), "empty": b""}
    path.write_bytes(damaged[damage])
    assert loaded(path, 500, reports) == 500
    assert str(path) in reports[0]
    reports.clear()
    assert loaded(path, 500, reports) == 500
    assert not reports
