"""Figures read alike whether nsqadmin wrote them or the browser did: format.py and format.js follow the same rules."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from browser.conftest import Tabs
from harness.nsqadmin import Nsqadmin
from nsquark.admin import format as figures

TIES = [0.005, 0.125, 0.375, 1.005, 1.115, 2.5, 9.995, 9.999, 12.25, 12.35, 99.95, 99.99, 100.5, 101.5, 999.5, 999.96]
"""A figure of these lies between two that could be written: both must choose the same one."""
BOUNDS = [0, 1, 10, 59, 60, 100, 119, 120, 1000, 1023, 1024, 3599, 3600, 7199, 7200, 9000, 86399, 86400, 172_800, 9e5]
UNITS = [step**power for step, powers in ((10.0, range(-9, 16)), (1024.0, range(6))) for power in powers]


def values() -> list[float]:
    chosen = random.Random(7)
    anywhere = [10 ** chosen.uniform(-9, 15) for _ in range(2000)]
    near = [value * factor for value in [*BOUNDS, *UNITS] for factor in (0.999, 0.9999999, 1, 1.0000001, 1.5)]
    return [*TIES, *BOUNDS, *UNITS, *near, *anywhere]


@pytest.mark.parametrize("name", ["compact", "size", "seconds", "duration", "exact"])
def test_the_browser_writes_figures_as_the_server_does(tabs: Tabs, name: str) -> None:
    write: Callable[[float], str] = figures.count if name == "exact" else getattr(figures, name)
    wanted = [float(round(value)) for value in values()] if name == "exact" else values()
    with Nsqadmin("--nsqd-http-address=127.0.0.1:1") as admin:
        page = tabs.open(f"{admin.url}/ping")
        in_browser = f"async values => values.map((await import('/static/format.js')).{name})"
        drawn = dict(zip(wanted, page.evaluate(in_browser, wanted), strict=True))
        tabs.close()
    assert drawn == {value: write(value) for value in wanted}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (25e-6, "25 µs"), (0.0125, "12.5 ms"), (90, "90 s"), (150, "2.5 min"), (7200, "2 h"), (259_200, "3 d")],
)
def test_seconds_are_written_in_one_unit(seconds: float, text: str) -> None:
    assert figures.seconds(seconds) == figures.latency(seconds * 1e9) == text
