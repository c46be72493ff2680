"""Counts what a report shows, in Spark: by topic, by nsqd, over time, and how sizes and gaps are distributed."""

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as spark_functions
from pyspark.sql.functions import col, expr, lit, when

from nsquark.spark.jobs.report_words import SECOND_US

BUCKETS_MAX = 240
"""A line in a picture has about this many points at most."""
DAY_S = 86_400
WIDTHS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, DAY_S)
PERCENTILE_ACCURACY = 10_000
"""Spark's approximate percentiles are wrong by at most one in this many ranks."""
SHOWN_MAX = 8
"""This many topics and nsqds have a line of their own on the page; the rest are drawn as one."""
REST = ""
"""This stands for all that have no line of their own; no topic and no nsqd has this name."""

SIZE_EDGES = tuple(2**power for power in range(1, 25))
"""These are the edges, in bytes, of the bars for sizes; a bar has what is below its edge and not below the last one."""
GAP_EDGES = (1, *(digit * 10**power for power in range(10) for digit in (2, 5, 10)))
"""These are the edges, in microseconds from 1 us to 10,000 s, of the bars that show gaps."""


@dataclass(frozen=True)
class TopicReport:
    """Holds the figures of a topic, with sizes in bytes and times in microseconds; a gap is the time from one message
    to the next.
    """

    topic: str
    messages: int
    bytes: int
    size_p50: int
    size_p99: int
    size_max: int
    first_us: int
    last_us: int
    peak_per_s: int
    """This many messages were published in the busiest second of the clock."""
    gap_p50_us: int | None
    gap_p90_us: int | None
    gap_p99_us: int | None
    gap_max_us: int | None
    """All gaps are None if there is a single message."""

    @property
    def rate_per_s(self) -> float | None:
        span_us = self.last_us - self.first_us
        return (self.messages - 1) * SECOND_US / span_us if span_us else None


@dataclass(frozen=True)
class Bucket:
    """Counts what was published in a piece of time to a topic or, in a line by nsqd, to an nsqd."""

    name: str
    start_us: int
    messages: int
    bytes: int


@dataclass(frozen=True)
class NsqdReport:
    """Holds the figures of an nsqd."""

    nsqd: str
    topics: int
    messages: int
    bytes: int
    first_us: int
    last_us: int


Counts = dict[str, list[int]]
"""By topic, this has how many messages lie below each edge and not below the one before, and last those above all."""


def sizes_of(messages: DataFrame) -> DataFrame:
    """Returns what a report needs of each message. For the gaps, one task per topic brings its messages into order."""
    in_order = Window.partitionBy("topic").orderBy("us")
    sizes = messages.selectExpr("topic", "nsqd", "unix_micros(timestamp) AS us", "octet_length(body) AS size")
    return sizes.withColumn("gap", col("us") - spark_functions.lag("us").over(in_order))


def measure(sizes: DataFrame) -> list[TopicReport]:
    """Returns the figures of each topic, by name."""
    totals = sizes.groupBy("topic").agg(
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


def measure_nsqds(sizes: DataFrame) -> list[NsqdReport]:
    """Returns the figures of each nsqd, the one with the most messages first."""
    totals = sizes.groupBy("nsqd").agg(
        expr("count(DISTINCT topic) AS topics"),
        expr("count(*) AS messages"),
        expr("sum(size) AS bytes"),
        expr("min(us) AS first_us"),
        expr("max(us) AS last_us"),
    )
    return [NsqdReport(*row) for row in totals.orderBy(col("messages").desc(), "nsqd").collect()]


def peak_of_all(sizes: DataFrame) -> int:
    """Returns how many messages all topics together had in the busiest second of the clock."""
    seconds = sizes.groupBy(expr(f"us DIV {SECOND_US} AS second")).count()
    found = seconds.agg(expr("max(count) AS peak")).first()
    return int(found.peak or 0) if found is not None else 0


def bucket_us(reports: Sequence[TopicReport]) -> int:
    """Returns how long a point of a picture is: a usual time, or whole days, long enough that there are few to draw."""
    span_us = max(report.last_us for report in reports) - min(report.first_us for report in reports)
    least_s = -(-span_us // (BUCKETS_MAX * SECOND_US))
    usual_s = next((width_s for width_s in WIDTHS_S if width_s >= least_s), -(-least_s // DAY_S) * DAY_S)
    return usual_s * SECOND_US


def buckets(sizes: DataFrame, width_us: int, by: str = "topic", shown: Sequence[str] | None = None) -> list[Bucket]:
    """Counts messages and bytes over time, by topic or by nsqd; those not in `shown`, if given, count as REST."""
    name = _shown(by, shown).alias("name")
    start = expr(f"us DIV {width_us} * {width_us} AS start_us")
    counted = sizes.groupBy(name, start).agg(expr("count(*) AS messages"), expr("sum(size) AS bytes"))
    return [Bucket(*row) for row in counted.orderBy("name", "start_us").collect()]


def distribution(sizes: DataFrame, column: str, edges: Sequence[int], shown: Sequence[str]) -> Counts:
    """Counts the messages of each topic by size or gap; those that have none are left out."""
    below = " ".join(f"WHEN {column} < {edge} THEN {number}" for number, edge in enumerate(edges))
    place = expr(f"CASE {below} ELSE {len(edges)} END AS place")
    known = sizes.where(col(column).isNotNull())
    counted = known.groupBy(_shown("topic", shown).alias("name"), place).count().collect()
    found: Counts = {}
    for name, number, count in counted:
        found.setdefault(name, [0] * (len(edges) + 1))[number] = count
    return found


def _shown(by: str, shown: Sequence[str] | None) -> Column:
    return col(by) if shown is None else when(col(by).isin(list(shown)), col(by)).otherwise(lit(REST))


def without_holes(points: Sequence[Bucket], width_us: int, low_us: int, high_us: int) -> list[Bucket]:
    """Returns one name's points from `low_us` up to `high_us`, both included, with zero for times without messages: a
    line across them would show messages that were not there.
    """
    by_start = {point.start_us: point for point in points}
    starts = range(low_us, high_us + width_us, width_us)
    return [by_start.get(start, Bucket(points[0].name, start, 0, 0)) for start in starts]
