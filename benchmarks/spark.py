"""Measures how fast Spark reads and writes topics, beside sources and sinks that are only memory: `python -m
benchmarks.spark`.

What a source in memory takes is what Spark itself takes, for a batch and for a stream. Everything runs on local[2] in
one session, ours and the other in turn, so that all see the machine in the same mood. CPU time is that of nsqd, of
Spark's Python workers and of its JVM, which share the machine.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import spark_batches
from benchmarks.broker import Broker
from benchmarks.report import Table, machine
from benchmarks.spark_cpu import Cpu, CpuMeter
from benchmarks.spark_memory import BODY_BYTES, TOPIC
from benchmarks.spark_session import fill, make_session
from benchmarks.wire import LoadError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MESSAGES_DEFAULT = 2_000_000
ROUNDS = 3
"""The best counts: the others paid for compiling, or for what else the machine did."""
EVENT = "id bigint, user string, amount bigint"
READ, PARQUET, STREAM, WINDOWS, WRITE, BATCHES = "read", "parquet", "stream", "windows", "write", "batches"
PARTS = (READ, PARQUET, STREAM, WINDOWS, WRITE, BATCHES)


class Taken(NamedTuple):
    """Holds what one run took."""

    seconds: float
    cpu: Cpu


@dataclass(frozen=True)
class SparkRow:
    """Says what was done with how many messages; `beside` is the same with a source or sink that is only memory."""

    name: str
    title: str
    messages: int
    ours: Taken
    beside: Taken | None = None
    target: float | None = None

    @property
    def rate(self) -> float:
        return self.messages / self.ours.seconds

    @property
    def ratio(self) -> float | None:
        return self.beside.seconds / self.ours.seconds if self.beside else None

    def us_per_row(self, taken: Taken) -> Cpu:
        return Cpu(*(seconds * 1e6 / self.messages for seconds in taken.cpu))


@dataclass(frozen=True)
class SparkMeasurement:
    rows: list[SparkRow]
    batches: spark_batches.BatchMeasurement | None


class Jobs:
    """Does things with messages, from a topic and from memory."""

    def __init__(self, session: "SparkSession", nsqd: str, messages: int, directory: Path):
        self._session = session
        self._nsqd = nsqd
        self._messages = messages
        self._directory = directory
        self._serial = 0

    def topic(self) -> "DataFrame":
        return self._session.read.format("nsq").options(nsqd=self._nsqd, topic=TOPIC).load()

    def memory(self) -> "DataFrame":
        return self._session.read.format("memory_arrow").options(messages=self._messages).load()

    def topic_stream(self) -> "DataFrame":
        reader = self._session.readStream.format("nsq").options(nsqd=self._nsqd, topic=TOPIC)
        return reader.option("startingOffsets", "earliest").load()

    def memory_stream(self) -> "DataFrame":
        return self._session.readStream.format("memory_arrow").options(messages=self._messages).load()

    def bodies(self) -> "DataFrame":
        """Makes what is written, from memory."""
        return self.memory().select("body")

    def to_noop(self, frame: "DataFrame") -> None:
        frame.write.format("noop").mode("overwrite").save()

    def to_parquet(self, frame: "DataFrame") -> None:
        frame.write.parquet(self._path())

    def to_topic(self, frame: "DataFrame") -> None:
        self._serial += 1
        written = frame.write.format("nsq").mode("append")
        written.options(nsqd=self._nsqd, topic=f"written_{self._serial}").save()

    def to_dropping_sink(self, frame: "DataFrame") -> None:
        frame.write.format("dropping_arrow").mode("append").save()

    def stream_to_noop(self, frame: "DataFrame") -> None:
        self._run(frame.writeStream.format("noop"))

    def stream_windows(self, frame: "DataFrame") -> None:
        from pyspark.sql.functions import window

        events = frame.selectExpr("timestamp", f"from_json(cast(body as string), '{EVENT}') as event")
        marked = events.withWatermark("timestamp", "1 minute")
        sums = marked.groupBy(window("timestamp", "10 seconds"), "event.user").sum("event.amount")
        self._run(sums.writeStream.format("noop").outputMode("update"))

    def _path(self) -> str:
        self._serial += 1
        return str(self._directory / str(self._serial))

    def _run(self, writer: Any) -> None:
        query = writer.option("checkpointLocation", self._path()).trigger(availableNow=True).start()
        query.awaitTermination()
        rows = sum(progress.numInputRows for progress in query.recentProgress)
        if rows != self._messages:
            raise LoadError(f"the query read {rows} messages instead of {self._messages}")


class SparkBench:
    """Takes the time of jobs, in turn."""

    def __init__(self, jobs: Jobs, meter: CpuMeter, messages: int, rounds: int):
        self._jobs = jobs
        self._meter = meter
        self._messages = messages
        self._rounds = rounds

    def _best(self, *actions: Callable[[], None]) -> list[Taken]:
        taken: list[list[Taken]] = [[] for _ in actions]
        for _ in range(self._rounds):
            for action, runs in zip(actions, taken, strict=True):
                before, began = self._meter.read(), time.perf_counter()
                action()
                seconds = time.perf_counter() - began
                runs.append(Taken(seconds, self._meter.read().since(before)))
        return [min(runs, key=lambda run: run.seconds) for runs in taken]

    def parts(self) -> dict[str, Callable[[], list[SparkRow]]]:
        return {
            READ: self.read,
            PARQUET: self.parquet,
            STREAM: self.stream,
            WINDOWS: self.windows,
            WRITE: self.write,
        }

    def warm_up(self) -> None:
        """Runs a first job, since that one starts Python workers and compiles."""
        self._jobs.to_noop(self._jobs.memory())

    def read(self) -> list[SparkRow]:
        jobs = self._jobs
        ours, memory = self._best(lambda: jobs.to_noop(jobs.topic()), lambda: jobs.to_noop(jobs.memory()))
        return [SparkRow("read_noop", "batch read to noop", self._messages, ours, memory, 0.6)]

    def parquet(self) -> list[SparkRow]:
        jobs = self._jobs
        ours, memory = self._best(lambda: jobs.to_parquet(jobs.topic()), lambda: jobs.to_parquet(jobs.memory()))
        return [SparkRow("read_parquet", "batch read to Parquet", self._messages, ours, memory, 0.7)]

    def stream(self) -> list[SparkRow]:
        jobs = self._jobs
        ours, memory_stream, memory = self._best(
            lambda: jobs.stream_to_noop(jobs.topic_stream()),
            lambda: jobs.stream_to_noop(jobs.memory_stream()),
            lambda: jobs.to_noop(jobs.memory()),
        )
        title = "stream, AvailableNow, to noop"
        return [
            SparkRow("stream_noop", f"{title}, beside a stream from memory", self._messages, ours, memory_stream, 0.7),
            SparkRow("stream_noop_batch", "... beside a batch from memory", self._messages, ours, memory, 0.7),
        ]

    def windows(self) -> list[SparkRow]:
        jobs = self._jobs
        ours, memory = self._best(
            lambda: jobs.stream_windows(jobs.topic_stream()), lambda: jobs.stream_windows(jobs.memory_stream())
        )
        return [SparkRow("stream_windows", "stream, JSON and windows", self._messages, ours, memory)]

    def write(self) -> list[SparkRow]:
        jobs = self._jobs
        ours, dropped, noop = self._best(
            lambda: jobs.to_topic(jobs.bodies()),
            lambda: jobs.to_dropping_sink(jobs.bodies()),
            lambda: jobs.to_noop(jobs.bodies()),
        )
        return [
            SparkRow("write", "batch write, beside noop", self._messages, ours, noop, 0.5),
            SparkRow("write_dropped", "... beside a sink that drops its Arrow batches", self._messages, ours, dropped),
        ]


def run(
    program: Path, messages: int = MESSAGES_DEFAULT, rounds: int = ROUNDS, parts: tuple[str, ...] = PARTS
) -> SparkMeasurement:
    with Broker(program) as broker, tempfile.TemporaryDirectory(prefix="spark-bench-") as directory:
        nsqd = "{}:{}".format(*broker.http)
        fill(nsqd, TOPIC, messages)
        session = make_session()
        try:
            with CpuMeter(broker) as meter:
                bench = SparkBench(Jobs(session, nsqd, messages, Path(directory)), meter, messages, rounds)
                bench.warm_up()
                rows = [row for part, measure in bench.parts().items() if part in parts for row in measure()]
                batches = spark_batches.run(session, nsqd, meter, Path(directory)) if BATCHES in parts else None
                return SparkMeasurement(rows, batches)
        finally:
            session.stop()


def tables(measured: SparkMeasurement) -> list[Table]:
    made = [_throughput(measured.rows)] if measured.rows else []
    return made + (spark_batches.tables(measured.batches) if measured.batches else [])


def _throughput(rows: list[SparkRow]) -> Table:
    title = f"Spark on local[2], {rows[0].messages:,} messages of {BODY_BYTES} B on one nsqd; CPU in us per row"
    header = ["", "rows/s", "beside", "ratio", "target", "nsqd", "Python", "JVM", "beside: Python", "JVM"]
    return Table(title, header, [_cells(row) for row in rows])


def _cells(row: SparkRow) -> list[str]:
    cpu = row.us_per_row(row.ours)
    beside = row.us_per_row(row.beside) if row.beside else None
    return [
        row.title,
        f"{row.rate:,.0f}",
        f"{row.messages / row.beside.seconds:,.0f}" if row.beside else "-",
        f"{row.ratio:.2f}" if row.ratio else "-",
        _judged(row.ratio, row.target),
        f"{cpu.nsqd:.2f}",
        f"{cpu.python:.2f}",
        f"{cpu.jvm:.2f}",
        f"{beside.python:.2f}" if beside else "-",
        f"{beside.jvm:.2f}" if beside else "-",
    ]


def _judged(ratio: float | None, target: float | None) -> str:
    if ratio is None or target is None:
        return "-"
    return f">= {target:g} {'met' if ratio >= target else 'MISSED'}"


def as_json(measured: SparkMeasurement) -> dict[str, Any]:
    figures: dict[str, Any] = {
        row.name: {
            "seconds": row.ours.seconds,
            "rows_per_second": row.rate,
            "ratio": row.ratio,
            "target": row.target,
            "cpu_us_per_row": row.us_per_row(row.ours)._asdict(),
            "beside_cpu_us_per_row": row.us_per_row(row.beside)._asdict() if row.beside else None,
        }
        for row in measured.rows
    }
    return figures | (spark_batches.as_json(measured.batches) if measured.batches else {})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark", description=__doc__)
    parser.add_argument("--nsqd", type=Path, default=Path(sys.executable).with_name("nsqd"))
    parser.add_argument("--messages", type=int, default=MESSAGES_DEFAULT)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="the best of them counts (default: %(default)s)")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    options = parser.parse_args()
    parts = tuple(options.only.split(","))
    if not set(parts) <= set(PARTS):
        parser.error(f"--only takes some of {', '.join(PARTS)}")
    try:
        measured = run(options.nsqd, options.messages, options.rounds, parts)
    except LoadError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{machine()}\n")
    for table in tables(measured):
        print(table.markdown() if options.markdown else table.plain(), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
