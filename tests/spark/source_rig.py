"""Has what the tests of the source share: publishing, reading, and running a query to the end of what there is."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import Nsqd, eventually, mpub_messages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

QUERY_TIMEOUT_S = 200
WORKER_WAS_LATE = "Python worker failed to connect back"
"""Spark gives a Python ten seconds to start, whatever else the machine has to do."""
STARTS_MAX = 3
SMALL_FILES = ("--max-bytes-per-file=20000",)


def address(daemon: Nsqd) -> str:
    return "{}:{}".format(*daemon.http)


def addresses(*daemons: Nsqd) -> str:
    return ",".join(map(address, daemons))


def on_fixed_port(daemon: Nsqd) -> Nsqd:
    """Lets it listen where it did when it is started again, as the nsqds of a cluster do."""
    daemon.keep_ports()
    return daemon


def bodies(low: int, high: int) -> list[bytes]:
    return [b"%06d" % number for number in range(low, high)]


def publish(daemon: Nsqd, topic: str, messages: Sequence[bytes]) -> None:
    reply = daemon.post("/mpub", mpub_messages(messages), topic=topic, binary="true")
    assert reply.status == 200, reply.text


def info(daemon: Nsqd, topic: str) -> dict[str, Any]:
    reply = daemon.get("/log/info", topic=topic)
    assert reply.status == 200, reply.text
    fields: dict[str, Any] = reply.json()
    return fields


def nsqd_id(daemon: Nsqd) -> str:
    return str(daemon.get("/log/info").json()["nsqd_id"])


def reader(spark: "SparkSession", where: Nsqd | str, topic: str | None = None, **options: Any) -> Any:
    return _with_options(spark.read, where, topic, options)


def stream_reader(spark: "SparkSession", where: Nsqd | str, topic: str | None = None, **options: Any) -> Any:
    return _with_options(spark.readStream, where, topic, options)


def _with_options(builder: Any, where: Nsqd | str, topic: str | None, options: dict[str, Any]) -> Any:
    builder = builder.format("nsq")
    if "lookupd" not in options:
        builder = builder.option("nsqd", where if isinstance(where, str) else address(where))
    if topic is not None:
        builder = builder.option("topic", topic)
    return builder.options(**options)


def read_bodies(frame: "DataFrame") -> list[bytes]:
    return sorted(bytes(row.body) for row in frame.select("body").collect())


def run_to_end(start: "Callable[[], StreamingQuery]") -> "StreamingQuery":
    """Runs a query that ends by itself; starts it again if Spark did not wait long enough for its worker."""
    for number in range(1, STARTS_MAX + 1):
        query = start()
        try:
            assert query.awaitTermination(QUERY_TIMEOUT_S), query.status
            break
        except Exception as error:
            if WORKER_WAS_LATE not in str(error) or number == STARTS_MAX:
                raise
    return query


class Stream:
    """Is a query into Parquet, on one checkpoint, which runs as often as the test likes."""

    def __init__(self, spark: "SparkSession", directory: Path):
        self.spark = spark
        self.output = directory / "output"
        self.checkpoint = directory / "checkpoint"

    def start(self, builder: Any, **trigger: Any) -> "StreamingQuery":
        writer = builder.load().writeStream.format("parquet").option("checkpointLocation", str(self.checkpoint))
        query: StreamingQuery = writer.trigger(**(trigger or {"processingTime": "0 seconds"})).start(str(self.output))
        return query

    def run(self, builder: Any) -> "StreamingQuery":
        """Reads all that is there now, and ends."""
        return run_to_end(lambda: self.start(builder, availableNow=True))

    def bodies(self) -> list[bytes]:
        if not self.output.exists():
            return []
        return read_bodies(self.spark.read.schema("body binary").parquet(str(self.output)))

    def await_bodies(self, query: "StreamingQuery", expected: list[bytes]) -> None:
        """Waits until a running query has written this; a query that fails raises its error at once."""

        def are_there() -> bool:
            raise_failure(query)
            return self.bodies() == expected

        eventually(are_there, QUERY_TIMEOUT_S, 0.3)


def raise_failure(query: "StreamingQuery") -> None:
    """Raises the error of a query that has failed; who waits for what it does would only say that it is late."""
    if (failure := query.exception()) is not None:
        raise failure


def rows_by_batch(query: "StreamingQuery") -> list[int]:
    return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]


def commit_position(daemon: Nsqd, topic: str, channel: str) -> int:
    """Returns how many messages the query's channel still holds."""
    return int(daemon.channel(topic, channel)["depth"])
