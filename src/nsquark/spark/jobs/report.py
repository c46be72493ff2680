"""This is `nsquark report`: it shows what went through topics in a time range, as a table, a picture and a page."""

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql import DataFrame

from nsquark.base.errors import UserError
from nsquark.base.printable import printable
from nsquark.spark.jobs.report_backlog import Backlog, ask_backlog
from nsquark.spark.jobs.report_measures import (
    GAP_EDGES,
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
from nsquark.spark.jobs.report_page import Figures, page
from nsquark.spark.jobs.report_words import SECOND_US, duration_text, rate_text, size_text, time_text
from nsquark.spark.jobs.session import (
    add_nsq_arguments,
    add_range_arguments,
    add_spark_arguments,
    check_source,
    read_messages,
    source_options,
    spark_session,
)
from nsquark.spark.options import OptionError, SourceOptions

HEADER = "topic|messages|bytes|size p50|p99|max|first|last|per s|peak/s|gap p50|p90|p99|max"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--html", type=Path, metavar="FILE.html", help="write a page with plots of rates, sizes, gaps and backlog"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw rates over time into this file")
    add_range_arguments(parser)
    add_nsq_arguments(parser)
    add_spark_arguments(parser)


def run(args: argparse.Namespace) -> int:
    _check_file(args.plot, "--plot", "PNG", (".png",))
    _check_file(args.html, "--html", "page", (".html", ".htm"))
    check_source(args)
    with spark_session(args, "report") as spark:
        backlog = None if args.archive or not args.html else _backlog(args)
        sizes = sizes_of(read_messages(spark, args)).persist()
        reports = measure(sizes)
        if not reports:
            print("no messages in this range")
            return 0
        print(table(reports))
        if args.plot:
            width_us = bucket_us(reports)
            draw(buckets(sizes, width_us), width_us, args.plot)
        if args.html:
            source = f"the archive {args.archive}" if args.archive else "the logs of nsqd"
            figures = figures_of(sizes, reports, backlog, source)
            args.html.write_text(page(figures), encoding="utf-8")
    return 0


def _check_file(path: Path | None, flag: str, kind: str, endings: tuple[str, ...]) -> None:
    """Raises if a file has a wrong ending or no directory, before Spark has counted for an hour."""
    if path is None:
        return
    if path.suffix.lower() not in endings:
        raise UserError(f"{flag} {path} is no {kind}: write a name that ends in {endings[0]}")
    if not path.resolve().parent.is_dir():
        raise UserError(f"{flag} {path}: there is no directory {path.resolve().parent}")


def _backlog(args: argparse.Namespace) -> Backlog:
    try:
        return ask_backlog(SourceOptions.parse(source_options(args)))
    except OptionError as error:
        raise UserError(str(error)) from None


def figures_of(sizes: DataFrame, reports: Sequence[TopicReport], backlog: Backlog | None, source: str) -> Figures:
    """Collects what the page shows, and counts what the table did not need."""
    topics = sorted(reports, key=lambda report: (-report.messages, report.topic))
    nsqds = measure_nsqds(sizes)
    width_us = bucket_us(reports)
    shown = [report.topic for report in topics[:SHOWN_MAX]]
    return Figures(
        topics=topics,
        nsqds=nsqds,
        width_us=width_us,
        by_topic=buckets(sizes, width_us, "topic", shown),
        by_nsqd=buckets(sizes, width_us, "nsqd", [nsqd.nsqd for nsqd in nsqds[:SHOWN_MAX]]),
        sizes=distribution(sizes, "size", SIZE_EDGES, shown),
        gaps=distribution(sizes, "gap", GAP_EDGES, shown),
        peak_per_s=peak_of_all(sizes),
        backlog=backlog,
        source=source,
        made=datetime.now(UTC),
    )


def table(reports: Sequence[TopicReport]) -> str:
    header = HEADER.split("|")
    rows = [
        (
            printable(report.topic),
            f"{report.messages:,}",
            *map(size_text, (report.bytes, report.size_p50, report.size_p99, report.size_max)),
            *map(time_text, (report.first_us, report.last_us)),
            rate_text(report.rate_per_s),
            f"{report.peak_per_s:,}",
            *map(duration_text, (report.gap_p50_us, report.gap_p90_us, report.gap_p99_us, report.gap_max_us)),
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


def draw(points: Sequence[Bucket], width_us: int, path: Path) -> None:
    """Draws messages and bytes per second, a line for each topic."""
    # Only a picture needs matplotlib, which takes half a second to load.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    per_s = SECOND_US / width_us
    for topic in dict.fromkeys(point.name for point in points):
        of_topic = [point for point in points if point.name == topic]
        filled = without_holes(of_topic, width_us, of_topic[0].start_us, of_topic[-1].start_us + width_us)
        times = [datetime.fromtimestamp(point.start_us / SECOND_US, UTC) for point in filled]
        upper.plot(times, [point.messages * per_s for point in filled], label=topic, drawstyle="steps-post")
        lower.plot(times, [point.bytes * per_s / 1024 for point in filled], label=topic, drawstyle="steps-post")
    upper.set_ylabel("messages per second")
    lower.set_ylabel("KiB per second")
    lower.set_xlabel("published (UTC)")
    upper.legend(loc="upper left")
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.autofmt_xdate()
    figure.savefig(path, dpi=110)
