"""Holds what the jobs share: their Spark session, the messages they read, and how they are stopped."""

import argparse
import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, lit
from pyspark.sql.types import StringType, StructField, StructType

from nsquark.base.durations import Duration
from nsquark.base.errors import UserError
from nsquark.spark.java import spark_environment
from nsquark.spark.jobs.layout import DELTA_LOG
from nsquark.spark.nsq_arguments import add_where_arguments, settings_of

LOCAL_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "8",
    # Errors come as exceptions; what Spark logs besides is stack traces, even of a stop that was asked for.
    "spark.log.level": "FATAL",
}
"""A local Spark session has these settings, unless a user's --conf says otherwise."""


NOISE = (
    b"WARNING: Using incubator modules",
    b"Using Spark's default log4j profile",
    b"Setting default log level",
    b"To adjust logging level",
    b"Setting Spark log level",
    b"NativeCodeLoader",
)
"""Java and Spark print these lines on every start."""


def add_spark_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Spark")
    group.add_argument("--remote", metavar="sc://HOST:PORT", help="use this Spark Connect server")
    group.add_argument("--master", help="where Spark runs (default: local[*], all cores of this machine)")
    group.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE", help="a setting of Spark (repeat)")


def add_nsq_arguments(parser: argparse.ArgumentParser, *, topics: bool = True) -> None:
    group = add_where_arguments(
        parser,
        nsqd_help="an nsqd (repeat)",
        option_help="an option of the source, like topicPattern, lostNsqds or failOnDataLoss (docs/spark.md; repeat)",
    )
    if topics:
        group.add_argument("--topic", action="append", default=[], help="a topic to read (repeat)")


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--to-nsqd-http-address",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="an nsqd to publish to (repeat; default: those read from)",
    )


def add_range_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--archive", metavar="DIR", help="read what `nsquark archive` wrote there, not the logs")
    text = "a time with its zone like 2026-01-31T12:00:00Z, or how long ago, like 90m"
    parser.add_argument("--since", type=moment, metavar="TIME", help=f"from here on: {text} (default: all there is)")
    parser.add_argument("--until", type=moment, metavar="TIME", help="up to here, exclusive (default: now)")


class Moment(datetime):
    """Holds a point in time, and how it was written."""

    text: str


def moment(text: str) -> Moment:
    """Reads a point in time, or a duration before now, for argparse."""
    point = _point(text)
    if point is None:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write a time with its zone like 2026-01-31T12:00:00Z, or 90m, or 24h"
        )
    found = Moment.fromisoformat(point.astimezone(UTC).isoformat())
    found.text = text
    return found


def _point(text: str) -> datetime | None:
    with contextlib.suppress(ValueError):
        return datetime.now(UTC) - timedelta(microseconds=Duration.parse(text) // 1000)
    with contextlib.suppress(ValueError):
        point = datetime.fromisoformat(text)
        return point if point.tzinfo is not None else None
    return None


@contextlib.contextmanager
def spark_session(args: argparse.Namespace, name: str) -> Iterator[SparkSession]:
    """Yields the Spark session that the arguments ask for, a local one by default; it is stopped at the end."""
    builder: SparkSession.Builder = SparkSession.builder
    if args.remote:
        builder = builder.remote(args.remote)
        settings = settings_of(args.conf, "--conf")
    else:
        environment = spark_environment()
        if args.master and not args.master.startswith("local"):
            # Workers elsewhere have to reach the driver.
            environment.pop("SPARK_LOCAL_IP")
        os.environ.update(environment)
        builder = builder.master(args.master or "local[*]").appName(f"nsquark {name}")
        settings = {**LOCAL_SETTINGS, **settings_of(args.conf, "--conf")}
    for key, value in settings.items():
        builder = builder.config(key, value)
    with contextlib.nullcontext() if args.remote else _without_noise():
        session = builder.getOrCreate()
    try:
        with _short_errors():
            yield session
    finally:
        session.stop()


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """Passes on what a Java that starts now, and its Python workers, write to stderr, but for the NOISE."""
    reading, writing = os.pipe()
    ours = os.dup(2)
    os.dup2(writing, 2)
    os.close(writing)
    threading.Thread(target=_pass_on, args=(reading, ours), daemon=True).start()
    try:
        yield
    finally:
        os.dup2(ours, 2)


def _pass_on(reading: int, ours: int) -> None:
    """Passes lines on until Java, and whatever it started, has ended."""
    with os.fdopen(reading, "rb") as said, os.fdopen(ours, "wb", buffering=0) as stderr:
        for line in said:
            if not any(noise in line for noise in NOISE):
                stderr.write(line)


@contextlib.contextmanager
def _short_errors() -> Iterator[None]:
    """Shortens Spark's errors, which carry two stack traces: what helps is the connector's own sentence inside."""
    try:
        yield
    except PySparkException as error:
        raise UserError(reason_of(error)) from error


def reason_of(error: Exception) -> str:
    """Finds the connector's own sentence in an error of Spark's, else the last error that it wraps."""
    text = str(error)
    ours = re.findall(r"(?:^|\s)nsquark(?:\.\w+)+: (.+)$", text, re.MULTILINE)
    # After this line Spark describes the query, in lines that look like those of errors.
    text = text.partition("=== Streaming Query ===")[0]
    wrapped = re.findall(r"^(?:\w+\.)*(?!SQLSTATE\b)(?:\w*Error|\w*Exception|[A-Z]\w+): (.+)$", text, re.MULTILINE)
    lines = ours or [line for line in wrapped if not line.startswith("[") and " at " not in line[:40]]
    found = (lines[-1] if lines else text.strip().partition("\n")[0]).strip()
    found = re.sub(r"^\[STREAM_FAILED\] .*? terminated with exception: ", "", found)
    return re.sub(r"\.? SQLSTATE: \w{5}$", "", found)


def nsq_options(args: argparse.Namespace) -> dict[str, str]:
    """Returns the options that say where NSQ is."""
    if bool(args.nsqd_http_address) == bool(args.lookupd_http_address):
        raise UserError("say where NSQ is: either --nsqd-http-address or --lookupd-http-address")
    if args.nsqd_http_address:
        return {"nsqd": ",".join(args.nsqd_http_address), **access_options(args)}
    return {"lookupd": ",".join(args.lookupd_http_address), **access_options(args)}


def target_options(args: argparse.Namespace) -> dict[str, str]:
    """Returns the options that say where to publish: the nsqds named for it, else those that are read from."""
    if not args.to_nsqd_http_address:
        return nsq_options(args)
    return {"nsqd": ",".join(args.to_nsqd_http_address), **access_options(args)}


def source_options(args: argparse.Namespace) -> dict[str, str]:
    """Returns all options of the source: where NSQ is, what to read, and what --option adds or says otherwise."""
    given = settings_of(args.option, "--option")
    has_pattern = any(name.lower() == "topicpattern" for name in given)
    if bool(args.topic) == has_pattern:
        raise UserError("say what to read: either --topic or --option topicPattern=REGEX")
    topic = {"topic": ",".join(args.topic)} if args.topic else {}
    return {**nsq_options(args), **topic, **given}


def access_options(args: argparse.Namespace) -> dict[str, str]:
    """Returns the options for AUTH and TLS, which readers and writers have in common."""
    given = settings_of(args.option, "--option")
    access = {name: value for name, value in given.items() if name.lower().startswith(("auth", "tls"))}
    return {**({"authSecretFile": args.auth_secret_file} if args.auth_secret_file else {}), **access}


def check_source(args: argparse.Namespace) -> None:
    """Raises if a flag is missing, before Spark is started, which takes seconds."""
    if not args.archive:
        if not args.topic and not args.option:
            raise UserError("say what to read: --topic, or --archive for all topics of an archive")
        source_options(args)


def read_messages(spark: SparkSession, args: argparse.Namespace) -> DataFrame:
    """Reads the messages of the topics in the time range, from the log or from the archive."""
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    if args.archive:
        messages = read_archive(spark, args.archive)
        if args.topic:
            messages = messages.where(col("topic").isin(args.topic))
        # These conditions are on `date`, so that Spark opens the directories of these days only.
        if args.since:
            messages = messages.where(col("date") >= lit(args.since.date()))
        if args.until:
            messages = messages.where(col("date") <= lit(args.until.date()))
    else:
        options: dict[str, Any] = dict(source_options(args))
        if args.since:
            options["startingTimestamp"] = args.since.isoformat()
        messages = spark.read.format("nsq").options(**options).load()
    # The log is in the order of arrival, and a deferred message keeps the time at which it was published: so each
    # message is checked.
    if args.since:
        messages = messages.where(col("timestamp") >= lit(args.since))
    if args.until:
        messages = messages.where(col("timestamp") < lit(args.until))
    return messages.select("topic", "nsqd", "seq", "timestamp", "body")


def read_archive(spark: SparkSession, directory: str) -> DataFrame:
    """Reads what `nsquark archive` wrote. Left alone, Spark would take topics like `007` for numbers."""
    if Path(directory, DELTA_LOG).is_dir():
        directory = str(Path(directory).resolve())
        files = _files_of_table(directory)
    else:
        files = [directory]
    reader = spark.read.option("basePath", directory)
    found = reader.parquet(*files).schema
    fields = [StructField(field.name, StringType()) if field.name == "topic" else field for field in found]
    return reader.schema(StructType(fields)).parquet(*files)


def _files_of_table(directory: str) -> list[str]:
    try:
        from nsquark.spark.jobs.delta import files_of_table
    except ModuleNotFoundError as error:
        raise UserError(f"{directory} is a Delta table and needs {error.name}: pip install 'nsquark[delta]'") from None
    return files_of_table(directory)


@contextlib.contextmanager
def stop_requested() -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C and SIGTERM set. An exception instead, in the middle of a call, would leave Spark's
    client in a state that cannot be stopped cleanly. Enter it after Spark is started, which sets a handler of its own.
    """
    event = threading.Event()

    def request(_signal: int, _frame: FrameType | None) -> None:
        event.set()

    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
