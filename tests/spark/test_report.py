"""Checks `nsquark report` on real nsqds: what it counts, and the page that shows it."""

import argparse
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness import Nsqd
from spark.report_pages import ReportPage
from spark.source_rig import address, addresses, publish

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

from nsquark.spark.jobs import report
from nsquark.spark.jobs.report_backlog import Backlog, ChannelBacklog, ask_backlog
from nsquark.spark.jobs.report_measures import (
    BUCKETS_MAX,
    GAP_EDGES,
    SECOND_US,
    SHOWN_MAX,
    SIZE_EDGES,
    Bucket,
    TopicReport,
    bucket_us,
    buckets,
    distribution,
    measure,
    measure_nsqds,
    peak_of_all,
    sizes_of,
    without_holes,
)
from nsquark.spark.jobs.report_page import page
from nsquark.spark.jobs.session import read_messages
from nsquark.spark.options import SourceOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TAGS = {"html", "head", "meta", "title", "style", "body", "main", "header", "section", "footer", "h1", "h2", "h3", "p"}
TAGS |= {"ul", "li", "b", "i", "span", "small", "div", "figure", "figcaption", "details", "summary"}
TAGS |= {"table", "caption", "thead", "tbody", "tr", "th", "td", "svg", "path", "rect", "line", "text"}
HOSTILE = "</title><script>alert(1)</script>\"'><img src=http://x/ onerror=alert(2)>\u202e\n&amp;"

pytestmark = [pytest.mark.timeout(900), pytest.mark.ours]


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return parser.parse_args(words)


def sizes_in(spark: "SparkSession", where: str, *topics: str) -> "DataFrame":
    words = ["--nsqd-http-address", where, *itertools.chain(*(("--topic", topic) for topic in topics))]
    return sizes_of(read_messages(spark, arguments(*words))).persist()


def test_report_counts_what_python_counts(
    spark: "SparkSession", nsqd: Nsqd, connect: Callable[..., Any], topic: str, tmp_path: Path
) -> None:
    quiet = f"{topic}_quiet"
    producer = connect(nsqd)
    for number in range(60):
        producer.publish(topic, b"x" * (number + 1))
        time.sleep(0.001 * (number % 5))
    connect(nsqd).publish(quiet, b"alone")
    sizes = sizes_in(spark, address(nsqd), topic, quiet)
    busy, alone = measure(sizes)

    logged = spark.read.format("nsq").options(nsqd=address(nsqd), topic=topic).load().collect()
    times_us = sorted(round(row.timestamp.timestamp() * 1e6) for row in logged)
    gaps = sorted(after - before for before, after in itertools.pairwise(times_us))
    assert (busy.topic, busy.messages, busy.bytes) == (topic, 60, sum(range(1, 61)))
    assert (busy.size_p50, busy.size_p99, busy.size_max) == (30, 60, 60)
    assert (busy.first_us, busy.last_us) == (times_us[0], times_us[-1])
    assert busy.gap_p50_us == gaps[len(gaps) // 2]
    assert busy.gap_max_us == gaps[-1]
    assert busy.peak_per_s == max(Counter(us // SECOND_US for us in times_us).values())
    assert busy.rate_per_s == pytest.approx(59e6 / (times_us[-1] - times_us[0]))
    assert (alone.messages, alone.gap_p50_us, alone.rate_per_s) == (1, None, None)

    header, first, second = report.table([busy, alone]).splitlines()
    assert header.startswith("topic")
    assert first.split()[:4] == [topic, "60", "1.8", "KiB"]
    assert second.split()[:2] == [quiet, "1"]

    width_us = bucket_us([busy, alone])
    points = buckets(sizes, width_us)
    assert sum(point.messages for point in points if point.name == topic) == 60
    assert sum(point.bytes for point in points) == busy.bytes + 5
    picture = tmp_path / "rates.png"
    report.draw(points, width_us, picture)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")

    found = distribution(sizes, "size", SIZE_EDGES, [topic])
    assert found[topic] == [1, 2, 4, 8, 16, 29] + [0] * (len(SIZE_EDGES) - 5), "1, 2 to 3, 4 to 7 … 32 to 60 bytes"
    assert found[""] == [0, 0, 1] + [0] * (len(SIZE_EDGES) - 2), "a topic that is not shown by itself"
    by_gap = distribution(sizes, "gap", GAP_EDGES, [topic, quiet])
    assert by_gap == {topic: _counted(gaps, GAP_EDGES)}, "a single message has no gap"


def _counted(values: Sequence[int], edges: Sequence[int]) -> list[int]:
    places = Counter(sum(value >= edge for edge in edges) for value in values)
    return [places[place] for place in range(len(edges) + 1)]


def test_a_picture_shows_times_without_messages_as_zero() -> None:
    points = [Bucket("t", 5 * SECOND_US, 3, 30), Bucket("t", 8 * SECOND_US, 1, 10)]
    filled = without_holes(points, SECOND_US, 4 * SECOND_US, 9 * SECOND_US)
    found = [(point.start_us // SECOND_US, point.messages) for point in filled]
    assert found == [(4, 0), (5, 3), (6, 0), (7, 0), (8, 1), (9, 0)]


@pytest.mark.parametrize("span_s", [0, 1, 240, 241, 86_400, 400 * 86_400])
def test_a_picture_has_few_points_of_a_usual_width(span_s: int) -> None:
    one = TopicReport("t", 2, 2, 1, 1, 1, 0, span_s * SECOND_US, 1, None, None, None, None)
    width_s = bucket_us([one]) // SECOND_US
    assert span_s / width_s <= BUCKETS_MAX
    assert 86_400 % width_s == 0 or width_s % 86_400 == 0, "days are made of it"


def test_the_page_has_the_numbers_of_two_nsqds_and_their_backlog(
    spark: "SparkSession", make_nsqd: Callable[..., Nsqd], tmp_path: Path
) -> None:
    pair = [make_nsqd(data_path=tmp_path / name) for name in ("one", "two")]
    for daemon, count in zip(pair, (30, 50), strict=True):
        daemon.post("/topic/create", topic="orders")
        daemon.post("/channel/create", topic="orders", channel="billing")
        publish(daemon, "orders", [b"x" * 100] * count)
        publish(daemon, "clicks", [b"y" * 10] * 4)
    options = SourceOptions.parse({"nsqd": addresses(*pair), "topic": "orders,clicks"})
    with pair[0].connect() as wire:
        wire.subscribe("orders", "billing", rdy=3)
        for _ in range(3):
            wire.read_message()
        backlog = ask_backlog(options)
    assert backlog.channels == [ChannelBacklog("orders", "billing", 77, 3, 0, 1)]
    sizes = sizes_in(spark, addresses(*pair), "orders", "clicks")
    figures = report.figures_of(sizes, measure(sizes), backlog, "the logs of nsqd")
    assert [nsqd.messages for nsqd in figures.nsqds] == [54, 34] == [n.messages for n in measure_nsqds(sizes)]
    assert figures.peak_per_s == peak_of_all(sizes) <= 88
    text = page(figures)
    shown = ReportPage(text)
    assert shown.column("Topics", "messages") == {"orders": "80", "clicks": "8"}
    assert shown.column("Topics", "data") == {"orders": "7.8 KiB", "clicks": "80 B"}
    assert shown.column("nsqds", "messages") == {address(pair[1]): "54", address(pair[0]): "34"}
    assert shown.column("Sizes: the numbers", "orders")["64 B to 128 B"] == "80"
    assert shown.column("Sizes: the numbers", "clicks")["8 B to 16 B"] == "8"
    gaps = shown.column("Time between messages: the numbers", "orders")
    assert sum(int(count.replace(",", "")) for count in gaps.values()) == 79
    assert shown.column("Backlog", "not finished") == {"orders / billing": "80"}
    assert shown.column("Backlog", "in flight") == {"orders / billing": "3"}
    for caption in ("Messages per second by topic", "Data per second by topic", "Messages per second by nsqd"):
        assert f"{caption}: the numbers" in shown.tables
    rates = shown.column("Messages per second by topic: the numbers", "orders")
    assert sum(float(rate.replace(",", "")) for rate in rates.values()) * figures.width_us / SECOND_US == 80
    assert "88" in shown.text and "in 1 channel" in shown.text
    assert_harmless(shown, text)


def test_many_topics_make_a_page_that_stays_small(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    names = [f"{topic}_{number:02}" for number in range(20)]
    for number, name in enumerate(names):
        publish(nsqd, name, [b"x"] * (number + 1))
    sizes = sizes_in(spark, address(nsqd), *names)
    figures = report.figures_of(sizes, measure(sizes), Backlog(unknown="it was not asked"), "the logs of nsqd")
    assert len({point.name for point in figures.by_topic}) == SHOWN_MAX + 1
    shown = ReportPage(page(figures))
    assert shown.column("Topics", "messages") == {name: str(number + 1) for number, name in enumerate(names)}
    assert shown.column("Sizes: the numbers", "12 other topics") == {"0 B to 2 B": str(sum(range(1, 13)))}
    assert "It could not be asked for: it was not asked" in shown.text


def test_names_that_strangers_chose_stay_text(spark: "SparkSession", tmp_path: Path) -> None:
    """An archive may have been written by anybody, and its directories are the names of topics."""
    moment = datetime(2026, 1, 31, 12, tzinfo=UTC)
    rows = [(HOSTILE, HOSTILE, number, moment, HOSTILE.encode(), moment.date(), "12") for number in range(7)]
    schema = "topic string, nsqd string, seq long, timestamp timestamp, body binary, date date, hour string"
    spark.createDataFrame(rows, schema).write.partitionBy("topic", "date", "hour").parquet(str(tmp_path / "lake"))
    sizes = sizes_of(read_messages(spark, arguments("--archive", str(tmp_path / "lake")))).persist()
    channels = [ChannelBacklog(HOSTILE, HOSTILE, 1, 2, 3, 4)]
    for backlog in (None, Backlog(channels, {HOSTILE: HOSTILE}), Backlog(unknown=HOSTILE)):
        text = page(report.figures_of(sizes, measure(sizes), backlog, HOSTILE))
        shown = ReportPage(text)
        assert_harmless(shown, text)
        [(name, count)] = shown.column("Topics", "messages").items()
        assert (name, count) == (HOSTILE.replace("\u202e", "\\u202e").replace("\n", "\\n"), "7")
        assert shown.column("Sizes: the numbers", name) == {"64 B to 128 B": "7"}


def assert_harmless(shown: ReportPage, text: str) -> None:
    assert {tag for tag, _ in shown.tags} <= TAGS
    for tag, attributes in shown.tags:
        for name in attributes:
            assert name not in ("href", "src", "style", "srcset") and not name.startswith("on"), (tag, attributes)
    assert re.search(r"default-src 'none'; style-src 'sha256-[\w+/=]+'", text)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style
