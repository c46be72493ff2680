"""Measures Spark's micro-batches: what a small one takes and where, and whether many small topics cost more than
one.
"""

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.beside import beside
from benchmarks.report import Table
from benchmarks.spark_cpu import Cpu, CpuMeter
from benchmarks.spark_session import Filler, fill
from benchmarks.wire import LoadError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RATE = 500
FEED_S = 0.1
WARM_BATCHES = 5
"""The first batches of a query compile."""
BATCHES = 20
WAIT_S_MAX = 120.0
OVERHEAD_TARGET_MS = 50
OVERHEAD_BATCHES = 50
SMALL_TOPICS = 1000
MANY_TOPICS_BATCHES = 4
MANY_TOPICS_TURNS = 2
MANY_TOPICS_TARGET = 2.0

ADVISED = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    )
}
"""docs/spark.md advises these for a checkpoint on a local disk."""
STEPS = ("latestOffset", "queryPlanning", "addBatch", "walCommit", "commitOffsets", "triggerExecution")
"""Spark's progress reports name the steps of a micro-batch so; the last is the whole."""


@dataclass(frozen=True)
class Batches:
    """Has the median milliseconds of each step, and the CPU seconds of a batch."""

    title: str
    steps_ms: dict[str, float]
    cpu: Cpu


@dataclass(frozen=True)
class BatchMeasurement:
    small: list[Batches]
    many_topics_ms: float
    one_topic_ms: float
    overhead_ms: float
    """Is what the source takes in a micro-batch: offsets, planning and report together, without Spark; the median."""

    @property
    def many_topics_ratio(self) -> float:
        return self.many_topics_ms / self.one_topic_ms


def run(session: "SparkSession", nsqd: str, meter: CpuMeter, directory: Path) -> BatchMeasurement:
    small: list[Batches] = []
    with _feeding(nsqd, "slow"):
        for settings, how in (({}, "as Spark is"), (ADVISED, "as advised")):
            with _set(session, settings):
                topic = session.readStream.format("nsq").options(nsqd=nsqd, topic="slow").load()
                memory = session.readStream.format("memory_arrow").options(rate=RATE).load()
                small.append(_small(topic, f"topic, {how}", meter, directory))
                small.append(_small(memory, f"memory, {how}", meter, directory))
    many, one = _many_topics(session, nsqd, directory)
    return BatchMeasurement(small, many, one, _overhead_ms(nsqd))


@contextmanager
def _set(session: "SparkSession", settings: dict[str, str]) -> Iterator[None]:
    for name, value in settings.items():
        session.conf.set(name, value)
    try:
        yield
    finally:
        for name in settings:
            session.conf.unset(name)


@contextmanager
def _feeding(nsqd: str, topic: str) -> Iterator[None]:
    """Publishes RATE messages a second, as long as the block runs."""
    filler = Filler(nsqd)
    filler.publish(topic, 1)

    def feed(ended: threading.Event) -> None:
        due = time.monotonic()
        while not ended.wait(max(due - time.monotonic(), 0)):
            filler.publish(topic, int(RATE * FEED_S))
            due += FEED_S

    try:
        with beside(feed):
            yield
    finally:
        filler.close()


def _small(frame: "DataFrame", title: str, meter: CpuMeter, directory: Path) -> Batches:
    """Runs batch after batch, each as soon as the last is done."""
    checkpoint = tempfile.mkdtemp(dir=directory)
    query = frame.writeStream.format("noop").option("checkpointLocation", checkpoint).start()
    try:
        first = len(_progress(query, WARM_BATCHES))
        before = meter.read()
        found = _progress(query, first + BATCHES)[first:]
        cpu = meter.read().since(before)
    finally:
        query.stop()
    steps = {step: statistics.median(one.durationMs.get(step, 0) for one in found) for step in STEPS}
    return Batches(title, steps, Cpu(*(seconds / len(found) for seconds in cpu)))


def _progress(query: Any, batches: int) -> list[Any]:
    """Returns the reports of the batches that had rows, when there are enough of them."""
    deadline = time.monotonic() + WAIT_S_MAX
    while len(found := [one for one in query.recentProgress if one.numInputRows]) < batches:
        if query.exception() is not None:
            raise LoadError(f"the query failed: {query.exception()}")
        if time.monotonic() > deadline:
            raise LoadError(f"{len(found)} micro-batches in {WAIT_S_MAX:g} s")
        time.sleep(0.05)
    return found


def _many_topics(session: "SparkSession", nsqd: str, directory: Path) -> tuple[float, float]:
    """Returns the median ms of a batch of SMALL_TOPICS topics with a message each, and of as many in one topic, in
    turn.
    """
    many: list[float] = []
    one: list[float] = []
    for turn in range(MANY_TOPICS_TURNS):
        small = {f"small{turn}_{number}": 1 for number in range(SMALL_TOPICS)}
        many += _batches_ms(session, nsqd, directory, small, {"topicPattern": f"small{turn}_.*"})
        one += _batches_ms(session, nsqd, directory, {f"one{turn}": SMALL_TOPICS}, {"topic": f"one{turn}"})
    return statistics.median(many), statistics.median(one)


def _batches_ms(
    session: "SparkSession", nsqd: str, directory: Path, topics: dict[str, int], which: dict[str, str]
) -> list[float]:
    """Returns what batches take that have so many messages of each topic."""
    filler = Filler(nsqd)

    def publish() -> None:
        for topic, messages in topics.items():
            filler.publish(topic, messages)

    publish()
    # A batch begins when all its messages are there.
    whole = {"minMessagesPerTrigger": str(sum(topics.values())), "maxTriggerDelay": f"{WAIT_S_MAX:.0f}s"}
    reader = session.readStream.format("nsq").options(nsqd=nsqd, startingOffsets="earliest", **which, **whole)
    writer = reader.load().writeStream.format("noop").option("checkpointLocation", tempfile.mkdtemp(dir=directory))
    query = writer.start()
    try:
        for done in range(1, MANY_TOPICS_BATCHES + 1):
            _progress(query, done)
            publish()
        found = _progress(query, MANY_TOPICS_BATCHES + 1)
    finally:
        query.stop()
        filler.close()
    return [one.durationMs["triggerExecution"] for one in found[1:]]


def _overhead_ms(nsqd: str) -> float:
    """Does all that Spark asks of the source for a micro-batch, as Spark asks it, but without Spark."""
    from nsquark.spark.source.datasource import NsqDataSource

    source = NsqDataSource({"nsqd": nsqd, "topic": "overhead", "channel": "spark", "maxMessagesPerTrigger": "100000"})
    reader = source.streamReader(source.schema())
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


def tables(measured: BatchMeasurement) -> list[Table]:
    steps = [
        [one.title, *(f"{one.steps_ms[step]:.0f}" for step in STEPS), *(f"{part * 1e3:.0f}" for part in one.cpu)]
        for one in measured.small
    ]
    header = ["source", *STEPS, "CPU: nsqd", "Python", "JVM"]
    ratio, overhead_ms = measured.many_topics_ratio, measured.overhead_ms
    others = [
        [
            f"a micro-batch of {SMALL_TOPICS:,} topics with a message each, beside one topic with {SMALL_TOPICS:,}",
            f"{measured.many_topics_ms:.0f} and {measured.one_topic_ms:.0f} ms: {ratio:.2f} times",
            f"<= {MANY_TOPICS_TARGET:g} {'met' if ratio <= MANY_TOPICS_TARGET else 'MISSED'}",
        ],
        [
            "the source's part of a micro-batch, without Spark",
            f"{overhead_ms:.1f} ms",
            f"<= {OVERHEAD_TARGET_MS} ms {'met' if overhead_ms <= OVERHEAD_TARGET_MS else 'MISSED'}",
        ],
    ]
    return [
        Table(f"A micro-batch at {RATE} messages a second, median ms of its steps", header, steps),
        Table("Micro-batches", ["", "seen", "target"], others),
    ]


def as_json(measured: BatchMeasurement) -> dict[str, Any]:
    return {
        "micro_batches": {one.title: {"ms": one.steps_ms, "cpu_seconds": one.cpu._asdict()} for one in measured.small},
        "many_topics_ms": measured.many_topics_ms,
        "one_topic_ms": measured.one_topic_ms,
        "overhead_ms": measured.overhead_ms,
    }
