"""Checks the clock for due times."""

import time
from pathlib import Path

import pytest

from nsquark.broker import steady_clock


def test_losing_the_cpu_between_two_clocks_does_not_move_delays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steady = steady_clock.SteadyClock(tmp_path / "clock")
    undisturbed = steady.offset_ms()
    since_boot_ms, pauses = steady_clock._since_boot_ms, [0.05, 0.03]

    def interrupted() -> int:
        value = since_boot_ms()
        if pauses:
            time.sleep(pauses.pop())
        return value

    monkeypatch.setattr(steady_clock, "_since_boot_ms", interrupted)
    assert abs(steady.offset_ms() - undisturbed) <= 2
    assert not pauses
