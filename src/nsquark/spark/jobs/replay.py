"""This is `nsquark replay`: it publishes a time range of topics again, from the log or the archive, at a bounded rate.

The messages come to this process in their order and are published from here, so that there is one rate, and one
position that says how far the replay has come.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as f

from nsquark.base.errors import EXIT_INTERRUPTED, UserError
from nsquark.base.logs import library_log
from nsquark.spark.endpoint import NsqdError
from nsquark.spark.jobs.progress import Terminal
from nsquark.spark.jobs.replay_state import PendingReplay, ReplayKey, ReplayState
from nsquark.spark.jobs.session import (
    add_nsq_arguments,
    add_range_arguments,
    add_spark_arguments,
    add_target_arguments,
    check_source,
    nsq_options,
    read_messages,
    spark_session,
    stop_requested,
    target_options,
)
from nsquark.spark.nsq_arguments import settings_of
from nsquark.spark.options import OptionError, read_flag
from nsquark.spark.sink.append import Appenders, AppendFailed, choose_nsqd
from nsquark.spark.sink.options import SinkOptions
from nsquark.spark.sink.publisher import Publisher, PublishFailed
from nsquark.spark.sink.rows import Bodies
from nsquark.spark.sink.writer import REQUEST_MESSAGES_MAX
from nsquark.wire.record import COUNT_BYTES, SIZE_BYTES

log = library_log("nsquark.spark")

T = TypeVar("T")

RATE_DEFAULT = 1000
BURST_S = 0.1
"""Messages are published in bursts of what the rate allows in this time."""
PARTITION_BYTES = 32 << 20
"""Spark hands over one partition at a time, so this much is in memory here, and a few times as much in Spark's."""
ROW_BYTES = 200
"""A row takes about this many bytes beside its body."""
SHOWN_EVERY_S = 2.0
ORDER = ("at_us", "nsqd", "topic", "seq")
"""A replay is in the order of these columns, in which no two messages are equal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to-topic", required=True, help="the topic to publish to")
    parser.add_argument(
        "--rate", type=int, default=RATE_DEFAULT, metavar="N", help=f"messages per second (default: {RATE_DEFAULT})"
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="keep the position here, and go on from it when started again"
    )
    add_target_arguments(parser)
    add_range_arguments(parser)
    add_nsq_arguments(parser)
    add_spark_arguments(parser)
    parser.epilog = (
        "Example: nsquark replay --topic orders --since 2h --until 1h --to-topic orders.again"
        " --checkpoint /var/lib/replay --nsqd-http-address 127.0.0.1:4151. Killed and started again with the same"
        " words, it publishes what is left, and nothing twice."
    )


def run(args: argparse.Namespace) -> int:
    _check(args)
    options = SinkOptions.parse(_target(args))
    with ExitStack() as stack:
        state = None
        if args.checkpoint is not None:
            state = stack.enter_context(ReplayState.opened(args.checkpoint, identity(args, options), *_range(args)))
            if state.is_done:
                print(f"{state.messages:,} messages were published to {args.to_topic} before: nothing is left")
                return 0
            args.since, args.until = state.since, state.until
        spark = stack.enter_context(spark_session(args, "replay"))
        stop = stack.enter_context(stop_requested())
        try:
            messages = read_messages(spark, args)
            done = publish(messages, options, args.rate, state, stop.is_set, fails_on_loss=_fails_on_loss(args))
        except (NsqdError, AppendFailed, PublishFailed, OptionError) as error:
            raise UserError(str(error)) from None
    before = f" (after {done.before:,} before)" if done.before else ""
    print(f"{done.messages:,} messages published to {args.to_topic}{before} in {done.seconds:,.1f} s")
    return EXIT_INTERRUPTED if done.is_stopped else 0


def _fails_on_loss(args: argparse.Namespace) -> bool:
    given = {name.lower(): value for name, value in settings_of(args.option, "--option").items()}
    return read_flag({"failOnDataLoss": given.get("failondataloss", "true")}, "failOnDataLoss", True)


def _target(args: argparse.Namespace) -> dict[str, str]:
    target = {**target_options(args), "topic": args.to_topic}
    if args.checkpoint is not None and "lookupd" in target:
        raise UserError("--checkpoint needs a fixed list of nsqds to publish to: say it with --to-nsqd-http-address")
    # With a checkpoint, messages are appended under tokens, which ephemeral topics do not have.
    return {**target, "idempotent": "true"} if args.checkpoint is not None else target


def _check(args: argparse.Namespace) -> None:
    if args.rate < 1:
        raise UserError("--rate is below 1: write how many messages per second may be published")
    check_source(args)
    if not args.archive and args.until is None and args.to_topic in args.topic:
        raise UserError("this would read what it writes: give --until, or another --to-topic")


def identity(args: argparse.Namespace, options: SinkOptions) -> dict[str, str]:
    """Returns what two runs of one replay have in common, by flag: what is published and where to, not how fast."""
    words = {
        "--archive": str(Path(args.archive).resolve()) if args.archive else "",
        "--topic": ",".join(sorted(args.topic)),
        "--since": args.since.text if args.since else "",
        "--until": args.until.text if args.until else "",
        "--to-topic": args.to_topic,
        "--to-nsqd-http-address": ",".join(sorted(options.nsqd)),
    }
    if not args.archive:
        # It says how to go on, not what is published.
        options_given = [option for option in args.option if not option.lower().startswith("failondataloss=")]
        words["--option"] = ",".join(sorted(options_given))
        where = nsq_options(args)
        words["where NSQ is"] = ",".join(sorted((where.get("nsqd") or where["lookupd"]).split(",")))
    return words


def _range(args: argparse.Namespace) -> tuple[datetime | None, datetime]:
    """Returns the time range. A replay that can be continued has an end: what is published later is not part of it."""
    return args.since, args.until or datetime.now(UTC)


@dataclass
class ReplayDone:
    """Counts what a run of a replay has done."""

    messages: int = 0
    before: int = 0
    """Earlier runs published this many messages."""
    seconds: float = 0.0
    is_stopped: bool = False


def publish(
    messages: DataFrame,
    options: SinkOptions,
    rate: int,
    state: ReplayState | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    fails_on_loss: bool = True,
) -> ReplayDone:
    """Publishes messages, the oldest first; with a state, those after its position. If some of these are gone since it
    was last counted how many they are, raises UserError, or warns if it is not to fail on that.
    """
    terminal, began = Terminal(), time.monotonic()
    done = ReplayDone()
    with _Publishing(options) if state is None else _Appending(options, state) as writer:
        keyed = after(messages, state.position if state is not None else None)
        counted = count_left(keyed, state.ends if state is not None else {})
        total = counted.messages
        if state is not None:
            _check_left(state, counted, fails=fails_on_loss)
            done.before = state.messages
        rows = ordered(keyed, counted)
        terminal.say(f"{total:,} messages at {rate:,} per second: about {total / rate:,.0f} s")
        shown_at = time.monotonic()
        for piece in pace(cut(rows, max(1, int(rate * BURST_S)), options.request_bytes_max), rate):
            if is_stopped():
                done.is_stopped = True
                break
            writer.write(piece)
            done.messages += len(piece)
            if time.monotonic() - shown_at >= SHOWN_EVERY_S:
                shown_at = time.monotonic()
                terminal.say(f"{done.messages:,} of {total:,} messages, {done.messages / total:.0%}")
    if state is not None and not done.is_stopped:
        state.finish()
    done.seconds = time.monotonic() - began
    return done


def after(messages: DataFrame, position: ReplayKey | None) -> DataFrame:
    """Returns the messages after a position, with the columns of ORDER."""
    keyed = messages.withColumn("at_us", f.unix_micros("timestamp"))
    if position is None:
        return keyed
    return keyed.where(f.struct(*ORDER) > f.struct(*(f.lit(value) for value in position)))


@dataclass(frozen=True)
class Left:
    """Says what is left to publish."""

    messages: int
    body_bytes: int
    known: int
    """So many of the messages were there when an earlier run counted them."""
    ends: dict[str, int]
    """By topic and nsqd, this has the highest sequence number."""


def count_left(keyed: DataFrame, ends: Mapping[str, int]) -> Left:
    """Counts messages. `ends` tells those that an earlier run counted from deferred ones that came into the log since,
    with the times at which they were published.
    """
    key = f.concat("topic", f.lit("@"), "nsqd")
    known_ends = f.from_json(f.lit(json.dumps(ends)), "map<string, bigint>")
    counted = (
        keyed.groupBy(key.alias("key"))
        .agg(
            f.count("*").alias("messages"),
            f.sum(f.length("body")).alias("bytes"),
            f.count_if(f.col("seq") <= known_ends[key]).alias("known"),
            f.max("seq").alias("end"),
        )
        .collect()
    )
    return Left(
        sum(row.messages for row in counted),
        sum(row.bytes for row in counted),
        sum(row.known for row in counted),
        {row.key: row.end for row in counted},
    )


def _check_left(state: ReplayState, left: Left, *, fails: bool) -> None:
    if gone := state.gone(left.known):
        text = f"{gone:,} messages that were left to publish when this replay was stopped are gone"
        if fails:
            raise UserError(
                f"{text}: retention removed them, or their topic or archive was changed; nothing was published now. "
                "To publish the others, write --option failOnDataLoss=false"
            )
        log.warning("%s; going on without them (failOnDataLoss=false)", text)
    state.expect(left.messages, left.ends)


def ordered(keyed: DataFrame, left: Left) -> Iterator[Row]:
    """Returns the messages, the oldest first."""
    partitions = 1 + (left.body_bytes + ROW_BYTES * left.messages) // PARTITION_BYTES
    cut_up = keyed.select(*ORDER, "body").repartitionByRange(partitions, *ORDER).sortWithinPartitions(*ORDER)
    return cut_up.toLocalIterator()


def cut(rows: Iterable[Row], messages_max: int, bytes_max: int) -> Iterator[list[Row]]:
    """Cuts rows into pieces within both limits, each for one request; a body above the limit is alone in its piece."""
    piece: list[Row] = []
    piece_bytes = COUNT_BYTES
    for row in rows:
        row_bytes = SIZE_BYTES + len(row.body)
        if piece and (len(piece) == messages_max or piece_bytes + row_bytes > bytes_max):
            yield piece
            piece, piece_bytes = [], COUNT_BYTES
        piece.append(row)
        piece_bytes += row_bytes
    if piece:
        yield piece


def pace(pieces: Iterable[list[T]], rate: int) -> Iterator[list[T]]:
    """Yields pieces no faster than `rate` rows per second. Time that was lost is not made up for: after a pause the
    rows would come in a lump, which is what the rate is there to prevent.
    """
    due = time.monotonic()
    for piece in pieces:
        time.sleep(max(0.0, due - time.monotonic()))
        due = time.monotonic() + len(piece) / rate
        yield piece


class _Publishing:
    """Publishes to any nsqd, at least once. Each piece is answered before the next is sent, so that pieces do not pile
    up before a slow nsqd.
    """

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._publisher = Publisher(options)
        self._messages = 0

    def __enter__(self) -> Self:
        self._publisher.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._publisher.__exit__(kind, error, trace)

    def write(self, piece: list[Row]) -> None:
        self._messages += len(piece)
        bodies = _bodies(self._options, piece)
        for messages in bodies.mpub_bodies(self._options.request_bytes_max, REQUEST_MESSAGES_MAX):
            self._publisher.publish(bodies.topic, messages, f"up to message {self._messages} of the range")
        self._publisher.flush()


class _Appending:
    """Appends each piece under a token of its own, which is stored first. The run that goes on asks nsqd about the last
    token, and knows that all pieces before it are done.
    """

    def __init__(self, options: SinkOptions, state: ReplayState) -> None:
        self._options = options
        self._state = state
        self._appenders = Appenders(options)

    def __enter__(self) -> Self:
        pending = self._state.pending
        if pending is not None:
            assert self._options.topic is not None
            appender = self._appenders.of(pending.nsqd)
            if appender.was_appended(pending.token, self._options.topic, pending.messages):
                self._state.piece_published()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._appenders.__exit__(kind, error, trace)

    def write(self, piece: list[Row]) -> None:
        bodies = _bodies(self._options, piece)
        last = ReplayKey(*(piece[-1][name] for name in ORDER))
        token = self._state.token_of(last, len(piece))
        address = choose_nsqd(self._options.nsqd, token, bodies.topic)
        self._state.intend(PendingReplay(token, address, last, len(piece)))
        self._appenders.of(address).append(token, bodies)
        self._state.piece_published()


def _bodies(options: SinkOptions, piece: list[Row]) -> Bodies:
    assert options.topic is not None
    return Bodies(options.topic, pa.array([row.body for row in piece], pa.binary()))
