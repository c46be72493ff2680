"""`python -m benchmarks.spark`: how fast Spark reads and writes topics, beside a source that is only memory.

The source in memory gives the same columns in Arrow batches of the same size, made once: what it takes is what Spark
itself takes. Everything runs on local[2] in one session, so both sides see the machine in the same mood.
"""

import argparse
import http.client
import json
import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.broker import Broker
from benchmarks.report import Table, machine
from benchmarks.wire import LoadError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MESSAGES_DEFAULT = 2_000_000
BODY_BYTES = 200
MPUB_MESSAGES = 2000
ROWS_PER_BATCH = 8192
PARTITIONS = 14
"""As many as 2 million messages are split into."""
ROUNDS = 3
"""The best counts: the others paid for compiling, or for what else the machine did."""
TOPIC = "bench"
READ_TARGET = 0.6
WRITE_TARGET = 0.5
OVERHEAD_TARGET_MS = 50
OVERHEAD_BATCHES = 50
COLUMNS = "topic string, nsqd string, seq bigint, id string, timestamp timestamp, body binary"
EVENT = "id bigint, user string, amount bigint"


@dataclass(frozen=True)
class Row:
    """What was done with how many messages in which time; `memory_seconds` for the same from memory."""

    name: str
    title: str
    messages: int
    seconds: float
    memory_seconds: float | None = None
    target: float | None = None

    @property
    def rate(self) -> float:
        return self.messages / self.seconds

    @property
    def ratio(self) -> float | None:
        return self.memory_seconds / self.seconds if self.memory_seconds else None


@dataclass(frozen=True)
class Measurement:
    rows: list[Row]
    overhead_ms: float
    """Of the source in a micro-batch: offsets, planning and report together, the median."""


def body(number: int) -> bytes:
    event = b'{"id":%d,"user":"u%d","amount":%d,"pad":"' % (number, number % 100, number % 1000)
    return event.ljust(BODY_BYTES - 2, b"x") + b'"}'


def memory_source(messages: int) -> type:
    """The same rows, from memory. A function, because pyspark is only there if Spark is."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    class MemoryReader(DataSourceReader):
        def partitions(self) -> list[InputPartition]:
            return [InputPartition(number) for number in range(PARTITIONS)]

        def read(self, partition: InputPartition) -> Iterator[Any]:
            import pyarrow as pa

            rows = ROWS_PER_BATCH
            times = pa.array(range(rows), pa.int64()).cast(pa.timestamp("us", "UTC"))
            columns = [
                pa.array([TOPIC] * rows),
                pa.array(["d0aa3256-ae2c-4018-8bb5-f07743d0d5b2"] * rows),
                pa.array(range(rows), pa.int64()),
                pa.array(["4d219dcc98801000"] * rows),
                times,
                pa.array([body(number) for number in range(rows)]),
            ]
            batch = pa.record_batch(columns, names=[column.split()[0] for column in COLUMNS.split(", ")])
            left = messages // PARTITIONS + (partition.value < messages % PARTITIONS)
            while left > 0:
                yield batch.slice(0, left)
                left -= rows

    class MemorySource(DataSource):
        @classmethod
        def name(cls) -> str:
            return "memory_arrow"

        def schema(self) -> str:
            return COLUMNS

        def reader(self, schema: Any) -> MemoryReader:
            return MemoryReader()

    return MemorySource


def dropping_sink() -> type:
    """Takes Arrow batches and drops them: what Spark itself takes to hand rows to any Arrow sink in Python."""
    from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

    class DroppingWriter(DataSourceArrowWriter):
        def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
            for _ in iterator:
                pass
            return WriterCommitMessage()

    class DroppingSink(DataSource):
        @classmethod
        def name(cls) -> str:
            return "dropping_arrow"

        def writer(self, schema: Any, overwrite: bool) -> DroppingWriter:
            return DroppingWriter()

    return DroppingSink


def fill(address: str, topic: str, messages: int) -> None:
    connection = http.client.HTTPConnection(address)
    for low in range(0, messages, MPUB_MESSAGES):
        bodies = [body(number) for number in range(low, min(low + MPUB_MESSAGES, messages))]
        data = struct.pack(">i", len(bodies)) + b"".join(struct.pack(">i", len(one)) + one for one in bodies)
        connection.request("POST", f"/mpub?topic={topic}&binary=true", data)
        answer = connection.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise LoadError(f"nsqd refused /mpub: {said.decode(errors='replace')}")
    connection.close()


class Spark:
    """A session and what is done with it."""

    def __init__(self, nsqd: str, messages: int, directory: Path):
        from pyspark.sql import SparkSession

        from nsquark.spark.java import spark_environment

        os.environ.update(spark_environment())
        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.sql.shuffle.partitions", "2")
        self.session: SparkSession = builder.config("spark.driver.memory", "2g").getOrCreate()
        self.session.sparkContext.setLogLevel("ERROR")
        self.session.dataSource.register(memory_source(messages))
        self.session.dataSource.register(dropping_sink())
        self.nsqd = nsqd
        self.messages = messages
        self._directory = directory
        self._serial = 0

    def topic(self) -> "DataFrame":
        return self.session.read.format("nsq").options(nsqd=self.nsqd, topic=TOPIC).load()

    def memory(self) -> "DataFrame":
        return self.session.read.format("memory_arrow").load()

    def path(self) -> str:
        self._serial += 1
        return str(self._directory / str(self._serial))

    def to_noop(self, frame: "DataFrame") -> None:
        frame.write.format("noop").mode("overwrite").save()

    def to_parquet(self, frame: "DataFrame") -> None:
        frame.write.parquet(self.path())

    def bodies(self) -> "DataFrame":
        """What is written, from memory."""
        return self.memory().select("body")

    def to_topic(self, frame: "DataFrame") -> None:
        self._serial += 1
        written = frame.write.format("nsq").mode("append")
        written.options(nsqd=self.nsqd, topic=f"written_{self._serial}").save()

    def to_dropping_sink(self, frame: "DataFrame") -> None:
        frame.write.format("dropping_arrow").mode("append").save()

    def stream(self) -> None:
        self._run(self._streamed().writeStream.format("noop"))

    def stream_windows(self) -> None:
        events = self._streamed().selectExpr("timestamp", f"from_json(cast(body as string), '{EVENT}') as event")
        windows = events.withWatermark("timestamp", "1 minute").groupBy(_window(), "event.user").sum("event.amount")
        self._run(windows.writeStream.format("noop").outputMode("update"))

    def _streamed(self) -> "DataFrame":
        reader = self.session.readStream.format("nsq").options(nsqd=self.nsqd, topic=TOPIC)
        return reader.option("startingOffsets", "earliest").load()

    def _run(self, writer: Any) -> None:
        query = writer.option("checkpointLocation", self.path()).trigger(availableNow=True).start()
        query.awaitTermination()
        rows = sum(progress.numInputRows for progress in query.recentProgress)
        if rows != self.messages:
            raise LoadError(f"the query read {rows} messages instead of {self.messages}")


def _window() -> Any:
    from pyspark.sql.functions import window

    return window("timestamp", "10 seconds")


def seconds_of(action: Callable[[], None], rounds: int = ROUNDS) -> float:
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        action()
        taken.append(time.perf_counter() - started)
    return min(taken)


def overhead_ms(nsqd: str) -> float:
    """All that Spark asks of the source for a micro-batch, as Spark asks it, but without Spark."""
    from nsquark.spark.source.datasource import NsqDataSource
    from nsquark.spark.source.range_rows import SCHEMA

    source = NsqDataSource({"nsqd": nsqd, "topic": "overhead", "channel": "spark", "maxMessagesPerTrigger": "100000"})
    reader = source.streamReader(schema=SCHEMA)
    limit = reader.getDefaultReadLimit()
    fill(nsqd, "overhead", 1000)
    start = json.dumps(reader.latestOffset(reader.initialOffset(), limit))
    taken = []
    for _ in range(OVERHEAD_BATCHES):
        fill(nsqd, "overhead", 1000)
        began = time.perf_counter()
        end = json.dumps(reader.latestOffset(json.loads(start), limit))
        reader.partitions(json.loads(start), json.loads(end))
        reader.reportLatestOffset()
        taken.append((time.perf_counter() - began) * 1e3)
        start = end
    reader.stop()
    return statistics.median(taken)


def run(program: Path, messages: int = MESSAGES_DEFAULT, with_write: bool = True) -> Measurement:
    with Broker(program) as broker, tempfile.TemporaryDirectory(prefix="spark-bench-") as directory:
        nsqd = "{}:{}".format(*broker.http)
        fill(nsqd, TOPIC, messages)
        overhead = overhead_ms(nsqd)
        spark = Spark(nsqd, messages, Path(directory))
        try:
            return Measurement(_rows(spark, with_write), overhead)
        finally:
            spark.session.stop()


def _rows(spark: Spark, with_write: bool) -> list[Row]:
    messages = spark.messages
    spark.to_noop(spark.memory())
    memory_noop = seconds_of(lambda: spark.to_noop(spark.memory()))
    read = seconds_of(lambda: spark.to_noop(spark.topic()))
    rows = [
        Row("read_noop", "batch read to noop", messages, read, memory_noop, READ_TARGET),
        Row(
            "read_parquet",
            "batch read to Parquet",
            messages,
            seconds_of(lambda: spark.to_parquet(spark.topic()), 1),
            seconds_of(lambda: spark.to_parquet(spark.memory()), 1),
        ),
        Row("stream_noop", "stream, AvailableNow, to noop", messages, seconds_of(spark.stream, 1), memory_noop),
        Row("stream_windows", "stream, JSON and windows", messages, seconds_of(spark.stream_windows, 1)),
    ]
    if with_write:
        bodies_noop = seconds_of(lambda: spark.to_noop(spark.bodies()))
        dropped = seconds_of(lambda: spark.to_dropping_sink(spark.bodies()))
        written = seconds_of(lambda: spark.to_topic(spark.bodies()))
        rows.append(Row("write", "batch write", messages, written, bodies_noop, WRITE_TARGET))
        rows.append(Row("drop", "... a sink that drops its Arrow batches", messages, dropped, bodies_noop))
    return rows


def table(measured: Measurement) -> Table:
    rows = [
        [
            row.title,
            f"{row.rate:,.0f}",
            f"{row.messages / row.memory_seconds:,.0f}" if row.memory_seconds else "-",
            f"{row.ratio:.2f}" if row.ratio else "-",
            _judged(row.ratio, row.target),
        ]
        for row in measured.rows
    ]
    verdict = "met" if measured.overhead_ms <= OVERHEAD_TARGET_MS else "MISSED"
    overhead = f"{measured.overhead_ms:.1f} ms"
    rows.append(["source's part of a micro-batch", overhead, "-", "-", f"<= {OVERHEAD_TARGET_MS} ms {verdict}"])
    title = f"Spark on local[2], {measured.rows[0].messages:,} messages of {BODY_BYTES} B on one nsqd"
    return Table(title, ["", "rows/s", "from memory", "ratio", "target"], rows)


def _judged(ratio: float | None, target: float | None) -> str:
    if ratio is None or target is None:
        return "-"
    return f">= {target:g} {'met' if ratio >= target else 'MISSED'}"


def as_json(measured: Measurement) -> dict[str, Any]:
    figures: dict[str, Any] = {
        row.name: {"seconds": row.seconds, "rows_per_second": row.rate, "ratio_to_memory": row.ratio}
        for row in measured.rows
    }
    return {**figures, "overhead_ms": measured.overhead_ms}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark", description=__doc__)
    parser.add_argument("--nsqd", type=Path, default=Path(sys.executable).with_name("nsqd"))
    parser.add_argument("--messages", type=int, default=MESSAGES_DEFAULT)
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    options = parser.parse_args()
    try:
        measured = run(options.nsqd, options.messages)
    except LoadError as error:
        print(error, file=sys.stderr)
        return 1
    made = table(measured)
    print(f"{machine()}\n\n{made.markdown() if options.markdown else made.plain()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
