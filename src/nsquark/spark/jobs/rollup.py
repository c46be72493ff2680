"""This is `nsquark rollup`: it counts and sums messages by window of time and by key, into Parquet and back to a topic.

A window is written once, when it is closed. Each batch of the stream has a directory of its own in the output, and its
messages have a token, both named by the batch: a batch that Spark runs again replaces its file by an equal one, and
appends nothing.
"""

import argparse
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import DataType, StringType, StructField, StructType

from nsquark.base.errors import UserError
from nsquark.spark.jobs.checkpoints import check_not_older, last_number, read_lines
from nsquark.spark.jobs.layout import CHECKPOINT
from nsquark.spark.jobs.rollup_spec import RollupSpec, column_of, read_spec
from nsquark.spark.jobs.session import (
    add_nsq_arguments,
    add_spark_arguments,
    add_target_arguments,
    source_options,
    spark_session,
    stop_requested,
    target_options,
)
from nsquark.spark.jobs.streams import (
    add_stream_arguments,
    every_ms_of,
    follow,
    resolved,
    stream_options,
    triggered,
)
from nsquark.spark.sink.options import SinkOptions

IDENTITY = "_rollup"
"""This entry of the output directory says what is computed there."""
WRITTEN_BATCH = r"/batch=(\d+)/"
NUMBER = "decimal(28, 9)"
"""Numbers are added as this type. Sums of floating point depend on their order, which a batch that is run again does
not keep: its rows would be taken for other rows, and published twice.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", type=Path, metavar="FILE.toml", help="what to compute, and where to")
    add_stream_arguments(parser, "rollup")
    add_target_arguments(parser)
    add_nsq_arguments(parser, topics=False)
    add_spark_arguments(parser)
    parser.epilog = (
        "Example: nsquark rollup orders.toml --nsqd-http-address 127.0.0.1:4151, where orders.toml has the lines"
        ' topics = ["orders"], window = "1m", keys = ["country"], sum = ["amount"], [output],'
        ' parquet = "/var/lib/rollup", topic = "orders.per_minute". Started again, it goes on where it was.'
    )


def run(args: argparse.Namespace) -> int:
    spec = read_spec(args.spec)
    args.topic = list(spec.topics)
    options = {**stream_options(args), **source_options(args)}
    target = _target(args, spec)
    every_ms = every_ms_of(args)
    output = resolved(spec.parquet)
    with spark_session(args, "rollup") as spark, stop_requested() as stop:
        check_identity(spark, spec, output)
        query = start(spark, spec, options, output, target, every_ms)
        done = follow(query, stop)
    late = f", {done.late:,} too late" if done.late else ""
    where = output if spec.topic is None else f"{output} and topic {spec.topic}"
    print(f"{done.rows:,} messages rolled up in {done}{late}: {where}")
    return 0


def _target(args: argparse.Namespace, spec: RollupSpec) -> dict[str, str] | None:
    if spec.topic is None:
        return None
    target = target_options(args)
    if "lookupd" in target:
        raise UserError("output.topic needs a fixed list of nsqds: say it with --to-nsqd-http-address")
    target |= {"topic": spec.topic, "idempotent": "true"}
    SinkOptions.parse(target)
    return target


def start(
    spark: SparkSession,
    spec: RollupSpec,
    options: dict[str, str],
    output: str,
    target: dict[str, str] | None,
    every_ms: int | None,
) -> StreamingQuery:
    """Starts the query; with `every_ms=None` it reads up to what is there now."""
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    messages = spark.readStream.format("nsq").options(**options).option("startingOffsets", "earliest").load()
    writer = rolled_up(messages, spec).writeStream.queryName("rollup").outputMode("append")
    writer = writer.option("checkpointLocation", f"{output}/{CHECKPOINT}")
    return triggered(writer.foreachBatch(RollupWriter(spec, output, target)), every_ms).start()


def rolled_up(messages: DataFrame, spec: RollupSpec) -> DataFrame:
    """Computes the closed windows. A message that is no JSON, or lacks a field, has null for what is missing."""
    body = f.from_json(f.col("body").cast("string"), _schema(spec.fields))
    values = messages.select("topic", "timestamp", body.alias("body"))
    keys = [f.col(f"body.{_quoted(key)}").alias(column_of(key)) for key in spec.keys]
    numbers = {field: f.col(f"body.{_quoted(field)}").try_cast(NUMBER) for field in spec.fields}
    measures = [
        _measure(name, numbers[field]).alias(f"{name}_{column_of(field)}")
        for name, fields in spec.measures.items()
        for field in fields
    ]
    watermarked = values.withColumn("at", _time(spec)).withWatermark("at", f"{spec.watermark_ms} milliseconds")
    window = f.window("at", f"{spec.window_ms} milliseconds").alias("window_start")
    grouped = watermarked.groupBy(window, "topic", *keys).agg(f.count("*").alias("count"), *measures)
    return grouped.select(
        f.col("window_start.start").alias("window_start"),
        f.col("window_start.end").alias("window_end"),
        "topic",
        *(f.col(column_of(key)) for key in spec.keys),
        "count",
        *(f.col(name) for name in grouped.columns[len(spec.keys) + 3 :]),
    )


def _time(spec: RollupSpec) -> Column:
    """Returns the time that a message counts for: the one in its body or, if that is missing, not readable or later,
    when it was published. A time in the future would close every window before it.
    """
    published = f.col("timestamp")
    if spec.time is None:
        return published
    return f.least(f.coalesce(f.col(f"body.{_quoted(spec.time)}").try_cast("timestamp"), published), published)


def _measure(name: str, number: Column) -> Column:
    computed: dict[str, Column] = {
        "sum": f.sum(number).cast("double"),
        "min": f.min(number).cast("double"),
        "max": f.max(number).cast("double"),
        "avg": f.sum(number).cast("double") / f.count(number),
    }
    return computed[name]


def _quoted(field: str) -> str:
    return ".".join(f"`{part}`" for part in field.split("."))


def _schema(fields: list[str]) -> StructType:
    """Returns a schema with all values as text: a number stays as it was written, and a key may be of any type."""
    tree: dict[str, Any] = {}
    for field in fields:
        branch = tree
        *above, last = field.split(".")
        for part in above:
            branch = branch.setdefault(part, {})
        branch[last] = None
    # Spark reads JSON only with a schema of at least one field.
    return _struct(tree or {"_": None})


def _struct(tree: dict[str, Any]) -> StructType:
    def kind(branch: dict[str, Any] | None) -> DataType:
        return StringType() if branch is None else _struct(branch)

    return StructType([StructField(name, kind(branch)) for name, branch in tree.items()])


class RollupWriter:
    """Writes the closed windows of a batch, for `foreachBatch`: to Parquet first, then to the topic."""

    def __init__(self, spec: RollupSpec, output: str, target: dict[str, str] | None) -> None:
        self._identity = spec.identity
        self._output = output
        self._target = target
        self._is_stored = False

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        if not self._is_stored:
            # This is not done before the query starts, since the identity belongs to the checkpoint, which is there
            # from here on.
            store_identity(batch.sparkSession, self._identity, self._output)
            self._is_stored = True
        # The windows are computed once for both outputs. They are in one partition, so that there is one file, and one
        # token that depends on nothing but the rows.
        windows = batch.repartition(1).persist()
        try:
            if windows.isEmpty():
                return
            windows.write.mode("overwrite").parquet(f"{self._output}/batch={batch_id}")
            if self._target is not None:
                bodies = windows.select(f.to_json(f.struct("*")).alias("body"))
                bodies.write.format("nsq").mode("append").options(**self._target).save()
        finally:
            windows.unpersist()


def check_identity(spark: SparkSession, spec: RollupSpec, output: str) -> None:
    stored = _stored_identity(spark, output)
    if stored is not None and stored != spec.identity:
        raise UserError(
            f"{output} has the results of another rollup ({stored}): open windows cannot be computed otherwise from "
            "now on. Write another output.parquet, with another --channel, or the settings as they were"
        )
    checkpoint = f"{output}/{CHECKPOINT}"
    if stored is not None and not read_lines(spark, f"{checkpoint}/metadata"):
        raise UserError(
            f"{output} has results, and its {CHECKPOINT} is gone: batches would begin at 0 again, over these. "
            "Write another output.parquet, or remove the directory"
        )
    check_not_older(spark, checkpoint, output, last_number(spark, output, WRITTEN_BATCH))


def store_identity(spark: SparkSession, identity: str, output: str) -> None:
    if _stored_identity(spark, output) is None:
        rows = spark.createDataFrame([(identity,)], "value string").coalesce(1)
        rows.write.mode("overwrite").text(f"{output}/{IDENTITY}")


def _stored_identity(spark: SparkSession, output: str) -> str | None:
    lines = read_lines(spark, f"{output}/{IDENTITY}")
    return lines[0] if lines else None
