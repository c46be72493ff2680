"""`nsquark report`: what went through topics in a time range, as a table and as a picture."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql import DataFrame, Row, Window
from pyspark.sql import functions as spark_functions
from pyspark.sql.functions import col, expr

from nsquark.base.errors import UserError
from nsquark.base.printable import printable
from nsquark.spark.jobs.session import (
    add_nsq_arguments,
    add_range_arguments,
    add_spark_arguments,
    check_source,
    read_messages,
    spark_session,
)

#: Points of a line in the picture.
BUCKETS_MAX = 240
SECOND_US = 1_000_000
#: Of Spark's approximate percentiles: an error of one in this many ranks.
PERCENTILE_ACCURACY = 10_000
HEADER = "topic|messages|bytes|size p50|p99|max|first|last|per s|peak/s|gap p50|p90|p99|max"


@dataclass(frozen=True)
class TopicReport:
    """Sizes in bytes, times in microseconds; gaps are the times between one message and the next."""

    topic: str
    messages: int
    bytes: int
    size_p50: int
    size_p99: int
    size_max: int
    first_us: int
    last_us: int
    peak_per_s: int
    """In the busiest second of the clock."""
    gap_p50_us: int | None
    gap_p90_us: int | None
    gap_p99_us: int | None
    gap_max_us: int | None
    """None for a single message."""

    @property
    def rate_per_s(self) -> float | None:
        span_us = self.last_us - self.first_us
        return (self.messages - 1) * SECOND_US / span_us if span_us else None


@dataclass(frozen=True)
class Bucket:
    topic: str
    start_us: int
    messages: int
    bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw rates over time into this file")
    add_range_arguments(parser)
    add_nsq_arguments(parser)
    add_spark_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.plot and args.plot.suffix.lower() != ".png":
        raise UserError(f"--plot {args.plot} is no PNG: write a name that ends in .png")
    check_source(args)
    with spark_session(args, "report") as spark:
        sizes = sizes_of(read_messages(spark, args)).persist()
        reports = measure(sizes)
        if not reports:
            print("no messages in this range")
            return 0
        print(table(reports))
        if args.plot:
            width_us = bucket_us(reports)
            draw(buckets(sizes, width_us), width_us, args.plot)
    return 0


def sizes_of(messages: DataFrame) -> DataFrame:
    """All that a report needs of a message."""
    return messages.selectExpr("topic", "unix_micros(timestamp) AS us", "octet_length(body) AS size")


def measure(sizes: DataFrame) -> list[TopicReport]:
    """By topic. The messages of a topic are brought into one order for the gaps, which one task does per topic."""
    in_order = Window.partitionBy("topic").orderBy("us")
    gaps = sizes.withColumn("gap", col("us") - spark_functions.lag("us").over(in_order))
    totals = gaps.groupBy("topic").agg(
        expr("count(*) AS messages"),
        expr("sum(size) AS bytes"),
        expr(f"percentile_approx(size, array(0.5, 0.99, 1.0), {PERCENTILE_ACCURACY}) AS sizes"),
        expr("min(us) AS first_us"),
        expr("max(us) AS last_us"),
        expr(f"percentile_approx(gap, array(0.5, 0.9, 0.99, 1.0), {PERCENTILE_ACCURACY}) AS gaps"),
    )
    seconds = sizes.groupBy("topic", expr(f"us DIV {SECOND_US} AS second")).count()
    peaks = seconds.groupBy("topic").agg(expr("max(count) AS peak"))
    rows = totals.join(peaks, "topic").orderBy("topic").collect()
    return [_report(row) for row in rows]


def _report(row: Row) -> TopicReport:
    size_p50, size_p99, size_max = row.sizes
    gap_p50, gap_p90, gap_p99, gap_max = row.gaps or (None,) * 4
    return TopicReport(
        topic=row.topic,
        messages=row.messages,
        bytes=row.bytes,
        size_p50=size_p50,
        size_p99=size_p99,
        size_max=size_max,
        first_us=row.first_us,
        last_us=row.last_us,
        peak_per_s=row.peak,
        gap_p50_us=gap_p50,
        gap_p90_us=gap_p90,
        gap_p99_us=gap_p99,
        gap_max_us=gap_max,
    )


def bucket_us(reports: Sequence[TopicReport]) -> int:
    """How long a point of the picture is: whole seconds, few enough to draw."""
    span_us = max(report.last_us for report in reports) - min(report.first_us for report in reports)
    return max(1, -(-span_us // (BUCKETS_MAX * SECOND_US))) * SECOND_US


def buckets(sizes: DataFrame, width_us: int) -> list[Bucket]:
    start = expr(f"us DIV {width_us} * {width_us} AS start_us")
    counted = sizes.groupBy("topic", start).agg(expr("count(*) AS messages"), expr("sum(size) AS bytes"))
    return [Bucket(*row) for row in counted.orderBy("topic", "start_us").collect()]


def table(reports: Sequence[TopicReport]) -> str:
    header = HEADER.split("|")
    rows = [
        (
            printable(report.topic),
            f"{report.messages:,}",
            *map(_bytes, (report.bytes, report.size_p50, report.size_p99, report.size_max)),
            *map(_time, (report.first_us, report.last_us)),
            "-" if report.rate_per_s is None else f"{report.rate_per_s:,.1f}",
            f"{report.peak_per_s:,}",
            *map(_gap, (report.gap_p50_us, report.gap_p90_us, report.gap_p99_us, report.gap_max_us)),
        )
        for report in reports
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(_line(row, widths) for row in (header, *rows))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    name, *numbers = (
        cell.ljust(width) if place == 0 else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join((name, *numbers)).rstrip()


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def _time(us: int) -> str:
    return datetime.fromtimestamp(us / SECOND_US, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _gap(us: int | None) -> str:
    if us is None:
        return "-"
    if us < 1000:
        return f"{us} us"
    return f"{us / 1000:.1f} ms" if us < SECOND_US else f"{us / SECOND_US:,.1f} s"


def draw(points: Sequence[Bucket], width_us: int, path: Path) -> None:
    """Messages and bytes per second, a line for each topic."""
    # Only a picture needs it, and it takes half a second to load.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    per_s = SECOND_US / width_us
    for topic in dict.fromkeys(point.topic for point in points):
        of_topic = _without_holes([point for point in points if point.topic == topic], width_us)
        times = [datetime.fromtimestamp(point.start_us / SECOND_US, UTC) for point in of_topic]
        upper.plot(times, [point.messages * per_s for point in of_topic], label=topic, drawstyle="steps-post")
        lower.plot(times, [point.bytes * per_s / 1024 for point in of_topic], label=topic, drawstyle="steps-post")
    upper.set_ylabel("messages per second")
    lower.set_ylabel("KiB per second")
    lower.set_xlabel("published (UTC)")
    upper.legend(loc="upper left")
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.autofmt_xdate()
    figure.savefig(path, dpi=110)


def _without_holes(points: Sequence[Bucket], width_us: int) -> list[Bucket]:
    """Times without messages as zero: a line across them would show messages that were not there."""
    by_start = {point.start_us: point for point in points}
    starts = range(points[0].start_us, points[-1].start_us + 2 * width_us, width_us)
    return [by_start.get(start, Bucket(points[0].topic, start, 0, 0)) for start in starts]
