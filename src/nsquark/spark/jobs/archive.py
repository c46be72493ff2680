"""`nsquark archive`: topics into Parquet files by topic, date and hour, each message exactly once."""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.functions import date_format, to_date
from pyspark.sql.streaming.query import StreamingQuery

from nsquark.base.durations import Duration
from nsquark.base.errors import UserError
from nsquark.spark.jobs.progress import Progress, Terminal
from nsquark.spark.jobs.session import (
    add_nsq_arguments,
    add_spark_arguments,
    source_options,
    spark_session,
    stop_requested,
)

POLL_S = 0.5
#: How long a stop waits for the batch that is being written.
BATCH_WAIT_S = 30.0
BETWEEN_POLL_S = 0.01
BATCH_MESSAGES_DEFAULT = 1_000_000
#: In the output directory. Readers of Parquet pass over names that begin with an underscore.
CHECKPOINT = "_checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="DIR", help="where to write: a directory, or a URL that Spark can write to")
    parser.add_argument("--channel", default="archive", help="holds messages until archived (default: archive)")
    parser.add_argument("--continuous", action="store_true", help="go on until stopped, not only up to now")
    parser.add_argument("--every", default="60s", help="with --continuous: time between writes (default: 60s)")
    parser.add_argument(
        "--batch-messages",
        type=int,
        default=BATCH_MESSAGES_DEFAULT,
        metavar="N",
        help=f"the most that a batch takes (default: {BATCH_MESSAGES_DEFAULT:,})",
    )
    parser.add_argument(
        "--checkpoint", metavar="DIR", help=f"where the position is kept (default: {CHECKPOINT} in the output)"
    )
    add_nsq_arguments(parser)
    add_spark_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.batch_messages < 1:
        raise UserError("--batch-messages is below 1: write how many messages a batch may have")
    options = {
        "channel": args.channel,
        "maxMessagesPerTrigger": str(args.batch_messages),
        **source_options(args),
    }
    every_ms = _every_ms(args.every) if args.continuous else None
    output = args.output if "://" in args.output else str(Path(args.output).resolve())
    terminal, began = Terminal(), time.monotonic()
    with spark_session(args, "archive") as spark, stop_requested() as stop:
        query = start(spark, options, output, args.checkpoint or f"{output}/{CHECKPOINT}", every_ms)
        shown = _Shown()
        while query.isActive and not stop.wait(POLL_S):
            _show(query, shown, terminal)
        if query.isActive:
            _wait_between_batches(query)
            query.stop()
        # Says what ended it, if anything did.
        query.awaitTermination()
        _show(query, shown, terminal)
    print(f"{shown.rows:,} messages archived in {shown.batches} batches, {time.monotonic() - began:,.1f} s: {output}")
    return 0


def start(
    spark: SparkSession, options: dict[str, str], output: str, checkpoint: str, every_ms: int | None
) -> StreamingQuery:
    """The query itself. `every_ms=None`: up to what is there now."""
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    # Spark's default is a form of its own that other readers take for times without a zone.
    spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    messages = spark.readStream.format("nsq").options(**options).option("startingOffsets", "earliest").load()
    dated = messages.withColumns({"date": to_date("timestamp"), "hour": date_format("timestamp", "HH")})
    writer = (
        dated.writeStream.format("parquet")
        .queryName("archive")
        .partitionBy("topic", "date", "hour")
        .option("checkpointLocation", checkpoint)
    )
    if every_ms is None:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=f"{every_ms} milliseconds")
    return writer.start(output)


def _wait_between_batches(query: StreamingQuery) -> None:
    """A batch that is broken off is only repeated by the next run, but its files stay for readers that do not know."""
    deadline = time.monotonic() + BATCH_WAIT_S
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
        time.sleep(BETWEEN_POLL_S)


def _every_ms(text: str) -> int:
    try:
        return Duration.parse(text).ms
    except ValueError as error:
        raise UserError(f"--every: {error}: write a time like 60s") from None


@dataclass
class _Shown:
    """What was said of the query so far."""

    batch: int = -1
    batches: int = 0
    rows: int = 0


def _show(query: StreamingQuery, shown: _Shown, terminal: Terminal) -> None:
    """Shows the batches that came since."""
    for report in query.recentProgress:
        progress = Progress.from_report(dict(report))
        if progress.batch > shown.batch:
            shown.batch = progress.batch
            if progress.rows:
                shown.batches += 1
                shown.rows += progress.rows
                terminal.say(progress)
