"""This is `nsquark archive`: it writes topics into Parquet files or a Delta table by topic, date and hour, each message
exactly once.
"""

import argparse
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import date_format, to_date
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from nsquark.base.errors import UserError
from nsquark.spark.jobs.checkpoints import check_listed
from nsquark.spark.jobs.layout import CHECKPOINT, DELTA_LOG, LIST_EVERY_BATCHES, SPARK_LOG
from nsquark.spark.jobs.session import (
    add_nsq_arguments,
    add_spark_arguments,
    source_options,
    spark_session,
    stop_requested,
)
from nsquark.spark.jobs.streams import (
    add_stream_arguments,
    every_ms_of,
    follow,
    resolved,
    stream_options,
    triggered,
)

PARTITIONS = ("topic", "date", "hour")
FORMATS = {"parquet": SPARK_LOG, "delta": DELTA_LOG}
"""Each format has a directory in an archive that only it has."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="DIR", help="where to write: a directory, or a URL that Spark can write to")
    parser.add_argument("--format", choices=tuple(FORMATS), default="parquet", help="of the archive (default: parquet)")
    parser.add_argument(
        "--checkpoint", metavar="DIR", help=f"where the position is kept (default: {CHECKPOINT} in the output)"
    )
    add_stream_arguments(parser, "archive")
    add_nsq_arguments(parser)
    add_spark_arguments(parser)
    parser.epilog = (
        "Example: nsquark archive /var/lib/archive --topic orders --nsqd-http-address 127.0.0.1:4151."
        " Started again, it goes on where it was. `nsquark compact-archive` makes few files of many."
    )


def run(args: argparse.Namespace) -> int:
    options = {**stream_options(args), **source_options(args)}
    every_ms = every_ms_of(args)
    output = resolved(args.output)
    check_format(output, args.format)
    with spark_session(args, "archive") as spark, stop_requested() as stop:
        checkpoint = resolved(args.checkpoint or f"{output}/{CHECKPOINT}")
        query = start(spark, options, output, checkpoint, every_ms, args.format)
        done = follow(query, stop)
    print(f"{done.rows:,} messages archived in {done}: {output}")
    return 0


def check_format(output: str, wanted: str) -> None:
    """Raises if the archive has another format, since readers would then miss files, or if Delta cannot be used."""
    for name, mark in FORMATS.items():
        if name != wanted and Path(output, mark).is_dir():
            raise UserError(f"{output} is an archive in the format {name}: write --format {name}, or another directory")
    if wanted == "delta":
        if "://" in output:
            raise UserError("--format delta writes to a directory that Spark's machines share: write its path")
        try:
            import deltalake  # noqa: F401
        except ModuleNotFoundError:
            raise UserError("--format delta needs deltalake: pip install 'nsquark[delta]'") from None


def start(
    spark: SparkSession,
    options: dict[str, str],
    output: str,
    checkpoint: str,
    every_ms: int | None,
    format_name: str = "parquet",
) -> StreamingQuery:
    """Starts the query; with `every_ms=None` it reads up to what is there now."""
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    # Spark's default is a form of its own that other readers take for times without a zone.
    spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    # `nsquark compact-archive` counts on this interval.
    spark.conf.set("spark.sql.streaming.fileSink.log.compactInterval", str(LIST_EVERY_BATCHES))
    if format_name == "parquet":
        check_listed(spark, checkpoint, output)
    messages = spark.readStream.format("nsq").options(**options).option("startingOffsets", "earliest").load()
    dated = messages.withColumns({"date": to_date("timestamp"), "hour": date_format("timestamp", "HH")})
    writer = _writer(dated, output, checkpoint, format_name).queryName("archive")
    writer = writer.option("checkpointLocation", checkpoint)
    return triggered(writer, every_ms).start()


def _writer(messages: DataFrame, output: str, checkpoint: str, format_name: str) -> DataStreamWriter:
    if format_name == "delta":
        from nsquark.spark.jobs.delta import DeltaWriter

        return messages.writeStream.foreachBatch(DeltaWriter(output, PARTITIONS, checkpoint))
    return messages.writeStream.format("parquet").partitionBy(*PARTITIONS).option("path", output)
