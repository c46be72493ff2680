"""`nsquark replay`: a time range of a topic, from its log or from the archive, to a topic again, at a bounded rate."""

import argparse
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
from pyspark.sql import DataFrame

from nsquark.cli.errors import UserError
from nsquark.spark.jobs.progress import Terminal
from nsquark.spark.jobs.session import (
    add_nsq_arguments,
    add_range_arguments,
    add_spark_arguments,
    nsq_options,
    read_messages,
    spark_session,
)

RATE_DEFAULT = 1000
#: A burst is what the rate allows in this time.
BURST_S = 0.1
#: Rows that Spark hands on at once where the rate would allow more.
BURST_ROWS_MAX = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to-topic", required=True, help="the topic to publish to")
    parser.add_argument(
        "--rate", type=int, default=RATE_DEFAULT, metavar="N", help=f"messages per second (default: {RATE_DEFAULT})"
    )
    parser.add_argument(
        "--to-nsqd-http-address",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="an nsqd to publish to (repeat; default: those read from)",
    )
    add_range_arguments(parser)
    add_nsq_arguments(parser)
    add_spark_arguments(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    target = {"nsqd": ",".join(args.to_nsqd_http_address)} if args.to_nsqd_http_address else nsq_options(args)
    terminal = Terminal()
    with spark_session(args, "replay") as spark:
        messages = read_messages(spark, args)
        if terminal.is_shown:
            count = messages.count()
            terminal.say(f"{count:,} messages at {args.rate:,} per second: about {count / args.rate:,.0f} s")
        began = time.monotonic()
        publish(messages, {**target, "topic": args.to_topic}, args.rate)
        terminal.say(f"done in {time.monotonic() - began:,.1f} s")
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.rate < 1:
        raise UserError("--rate is below 1: write how many messages per second may be published")
    if not args.archive and not args.topic:
        raise UserError("say what to replay: --topic, or --archive for all topics of an archive")
    if not args.archive and args.until is None and args.to_topic in args.topic:
        raise UserError("this would read what it writes: give --until, or another --to-topic")


def publish(messages: DataFrame, options: dict[str, str], rate: int) -> None:
    """Oldest first, through one task: the rate is one number, and several tasks would need to share it."""
    burst = max(1, min(BURST_ROWS_MAX, int(rate * BURST_S)))
    # Spark gathers rows before it hands them to the writer; without this they would go out in lumps of ten thousand.
    messages.sparkSession.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(burst))
    ordered = messages.orderBy("timestamp", "nsqd", "seq").select("body").coalesce(1)
    paced = ordered.mapInArrow(pace(rate, burst), "body binary")
    paced.write.format("nsq").options(**options).mode("append").save()


def pace(rate: int, burst: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Lets rows through no faster than `rate` per second, `burst` at a time."""

    def paced(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        began = time.monotonic()
        passed = 0
        for batch in batches:
            for first in range(0, batch.num_rows, burst):
                piece = batch.slice(first, burst)
                time.sleep(max(0.0, began + passed / rate - time.monotonic()))
                passed += piece.num_rows
                yield piece

    return paced
