"""`nsquark replay`: a time range of a topic, from its log or from the archive, to a topic again, at a bounded rate."""

import argparse
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
from pyspark.sql import DataFrame

from nsquark.base.errors import UserError
from nsquark.spark.jobs.progress import Terminal
from nsquark.spark.jobs.session import (
    access_options,
    add_nsq_arguments,
    add_range_arguments,
    add_spark_arguments,
    check_source,
    nsq_options,
    read_messages,
    spark_session,
)
from nsquark.spark.sink.options import SinkOptions
from nsquark.spark.sink.publisher import Publisher
from nsquark.spark.sink.rows import RowReader
from nsquark.spark.sink.writer import REQUEST_MESSAGES_MAX

RATE_DEFAULT = 1000
#: A burst is what the rate allows in this time.
BURST_S = 0.1


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


def _target(args: argparse.Namespace) -> dict[str, str]:
    if not args.to_nsqd_http_address:
        return nsq_options(args)
    return {"nsqd": ",".join(args.to_nsqd_http_address), **access_options(args)}


def run(args: argparse.Namespace) -> int:
    _check(args)
    target = _target(args)
    terminal = Terminal()
    with spark_session(args, "replay") as spark:
        messages = read_messages(spark, args)
        if terminal.is_shown:
            count = messages.count()
            terminal.say(f"{count:,} messages at {args.rate:,} per second: about {count / args.rate:,.0f} s")
        began = time.monotonic()
        count = publish(messages, {**target, "topic": args.to_topic}, args.rate)
        print(f"{count:,} messages published to {args.to_topic} in {time.monotonic() - began:,.1f} s")
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.rate < 1:
        raise UserError("--rate is below 1: write how many messages per second may be published")
    check_source(args)
    if not args.archive and args.until is None and args.to_topic in args.topic:
        raise UserError("this would read what it writes: give --until, or another --to-topic")


def publish(messages: DataFrame, options: dict[str, str], rate: int) -> int:
    """Oldest first, through one task: the rate is one number, and several tasks would need to share it. How many."""
    ordered = messages.orderBy("timestamp", "nsqd", "seq").select("body").coalesce(1)
    sent = ordered.mapInArrow(_paced_writer(SinkOptions.parse(options), rate), "messages long").collect()
    return sum(row.messages for row in sent)


def _paced_writer(options: SinkOptions, rate: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Publishes here and not by `.write`: on the way there Spark would gather what was let through, and hand it on in
    lumps. Each burst is answered before the next is let through, so that none wait together for a slow nsqd.
    """
    burst = max(1, int(rate * BURST_S))

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reader = RowReader(0, options.topic, options.message_bytes_max)
        with Publisher(options) as publisher:
            for piece in pace(batches, rate, burst):
                groups, _ = reader.read(piece)
                for bodies in groups:
                    for messages in bodies.chunks(options.request_bytes_max, REQUEST_MESSAGES_MAX):
                        publisher.publish(bodies.topic, messages, f"up to message {reader.row} of the range")
                publisher.flush()
        yield pa.record_batch({"messages": [reader.row]})

    return write


def pace(batches: Iterator[pa.RecordBatch], rate: int, burst: int) -> Iterator[pa.RecordBatch]:
    """Lets rows through no faster than `rate` per second, `burst` at a time. Time that was lost is not made up for:
    after a pause the rows would come in a lump, which is what the rate is there to prevent.
    """
    due = time.monotonic()
    for batch in batches:
        for first in range(0, batch.num_rows, burst):
            piece = batch.slice(first, burst)
            time.sleep(max(0.0, due - time.monotonic()))
            due = time.monotonic() + piece.num_rows / rate
            yield piece
