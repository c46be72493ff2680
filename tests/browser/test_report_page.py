"""Checks the page of `nsquark report` in a real browser: nothing is asked for, nothing runs, and it fits a phone."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from browser.conftest import Tabs

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

from nsquark.spark.jobs.report_backlog import Backlog, ChannelBacklog
from nsquark.spark.jobs.report_measures import (
    GAP_EDGES,
    REST,
    SECOND_US,
    SIZE_EDGES,
    Bucket,
    NsqdReport,
    TopicReport,
)
from nsquark.spark.jobs.report_page import Figures, page

START_US = 1_769_850_000 * SECOND_US
POINTS = 200
HOSTILE = "<script>document.title='run'</script><img src=http://127.0.0.1:9/x>"
NAMES = ("orders", HOSTILE, "a" * 64, REST)


def figures() -> Figures:
    def topic(name: str, count: int) -> TopicReport:
        return TopicReport(name, count, count * 90, 90, 400, 900, START_US, START_US + 199 * SECOND_US, 9, 5, 6, 7, 8)

    def points(names: tuple[str, ...]) -> list[Bucket]:
        return [
            Bucket(name, START_US + step * SECOND_US, (step + place) % 17, 90 * step)
            for place, name in enumerate(names)
            for step in range(POINTS)
        ]

    return Figures(
        topics=[topic(name, 1000 - place) for place, name in enumerate((*NAMES[:3], "x", "y"))],
        nsqds=[NsqdReport(HOSTILE, 3, 900, 90_000, START_US, START_US + SECOND_US)],
        width_us=SECOND_US,
        by_topic=points(NAMES),
        by_nsqd=points((HOSTILE,)),
        sizes={name: [place % 9 for place in range(len(SIZE_EDGES) + 1)] for name in NAMES},
        gaps={name: [place % 7 for place in range(len(GAP_EDGES) + 1)] for name in NAMES},
        peak_per_s=33,
        backlog=Backlog(
            [ChannelBacklog("orders", HOSTILE, 5, 6, 7, 8), ChannelBacklog("orders", "idle", 0, 0, 0, 0)],
            {HOSTILE: "10.0.0.1:4151"},
        ),
        source="the logs of nsqd",
        made=datetime(2026, 1, 31, tzinfo=UTC),
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_is_read_anywhere_and_asks_for_nothing(tabs: Tabs, tmp_path: Path, width: int, scheme: str) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(figures()), encoding="utf-8")
    shown = tabs.open(
        "about:blank", viewport={"width": width, "height": 800}, color_scheme=scheme, java_script_enabled=True
    )
    asked: list[str] = []
    shown.on("request", lambda request: asked.append(request.url))
    shown.goto(file.as_uri(), wait_until="load")
    assert asked == [file.as_uri()]
    assert tabs.errors == [], "its own policy allows all that it needs"
    assert shown.title().startswith("orders, <script>"), "no script ran"
    assert shown.locator("script, img, link, iframe, [onerror]").count() == 0
    root = "document.documentElement"
    assert shown.evaluate(f"{root}.scrollWidth") <= width, "only tables scroll sideways"
    ground = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(14, 16, 21)") == (scheme == "dark")
    plots = shown.locator("svg[role=img]")
    assert plots.count() == 3 + 2 * len(NAMES)
    for number in range(plots.count()):
        box = plots.nth(number).bounding_box()
        assert box is not None and 100 < box["width"] <= width and box["height"] >= 100
        assert plots.nth(number).get_attribute("aria-label")
    assert shown.locator(".tick").first.evaluate("text => getComputedStyle(text).fontSize") == "11.5px"
    behind = shown.get_by_role("region", name="Backlog").locator("tbody td:last-child").all_inner_texts()
    assert behind == ["3.6 s", "-"], "18 messages at 999 in 199 s; and nothing"
    numbers = shown.locator("details").first
    assert not numbers.locator("table").is_visible()
    numbers.locator("summary").click()
    assert numbers.locator("table").is_visible()
