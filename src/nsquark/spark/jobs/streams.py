"""Holds what the streaming jobs share: their flags, when their batches run, and how a query is followed and stopped."""

import argparse
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from nsquark.base.durations import Duration
from nsquark.base.errors import UserError
from nsquark.spark.jobs.progress import Progress, Terminal

POLL_S = 0.5
BATCH_WAIT_S = 30.0
"""A stop waits this long for the batch that is being written."""
BETWEEN_POLL_S = 0.01
BATCH_MESSAGES_DEFAULT = 1_000_000


def add_stream_arguments(parser: argparse.ArgumentParser, channel: str) -> None:
    parser.add_argument("--channel", default=channel, help=f"holds messages until written (default: {channel})")
    parser.add_argument("--continuous", action="store_true", help="go on until stopped, not only up to now")
    parser.add_argument("--every", default="60s", help="with --continuous: time between writes (default: 60s)")
    parser.add_argument(
        "--batch-messages",
        type=int,
        default=BATCH_MESSAGES_DEFAULT,
        metavar="N",
        help=f"the most that a batch takes (default: {BATCH_MESSAGES_DEFAULT:,})",
    )


def stream_options(args: argparse.Namespace) -> dict[str, str]:
    """Returns the options of the source that these arguments stand for."""
    if args.batch_messages < 1:
        raise UserError("--batch-messages is below 1: write how many messages a batch may have")
    return {"channel": args.channel, "maxMessagesPerTrigger": str(args.batch_messages)}


def every_ms_of(args: argparse.Namespace) -> int | None:
    """Returns the time between two batches, or None to read up to what is there now and no further."""
    if not args.continuous:
        return None
    try:
        return Duration.parse(args.every).ms
    except ValueError as error:
        raise UserError(f"--every: {error}: write a time like 60s") from None


def resolved(output: str) -> str:
    """Returns a directory as an absolute path, since Spark may work elsewhere, and a URL as it is."""
    return output if "://" in output else str(Path(output).resolve())


def triggered(writer: DataStreamWriter, every_ms: int | None) -> DataStreamWriter:
    if every_ms is None:
        return writer.trigger(availableNow=True)
    return writer.trigger(processingTime=f"{every_ms} milliseconds")


@dataclass
class Followed:
    """Counts what a query did while it was followed."""

    batch: int = -1
    batches: int = 0
    rows: int = 0
    late: int = 0
    """This many rows came after their window was closed."""
    seconds: float = 0.0

    def __str__(self) -> str:
        batches = "1 batch" if self.batches == 1 else f"{self.batches:,} batches"
        return f"{batches}, {self.seconds:,.1f} s"


def follow(query: StreamingQuery, stop: threading.Event) -> Followed:
    """Shows the batches of a query until it ends; when `stop` is set, ends it between two batches."""
    terminal, began, followed = Terminal(), time.monotonic(), Followed()
    while query.isActive and not stop.wait(POLL_S):
        _show(query, followed, terminal)
    if query.isActive:
        _wait_between_batches(query)
        query.stop()
    # This raises the error that ended the query, if one did.
    query.awaitTermination()
    _show(query, followed, terminal)
    followed.seconds = time.monotonic() - began
    return followed


def _wait_between_batches(query: StreamingQuery) -> None:
    """Waits until no batch runs. The next run would repeat one that is broken off, but its files would stay, for
    readers that do not use Spark's list.
    """
    deadline = time.monotonic() + BATCH_WAIT_S
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
        time.sleep(BETWEEN_POLL_S)


def _show(query: StreamingQuery, followed: Followed, terminal: Terminal) -> None:
    """Shows the batches that were not shown before."""
    for report in query.recentProgress:
        fields: dict[str, Any] = dict(report)
        progress = Progress.from_report(fields)
        if progress.batch <= followed.batch:
            continue
        followed.batch = progress.batch
        followed.late += sum(state["numRowsDroppedByWatermark"] for state in fields.get("stateOperators", ()))
        if progress.rows:
            followed.batches += 1
            followed.rows += progress.rows
            terminal.say(progress)
