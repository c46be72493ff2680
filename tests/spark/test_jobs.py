"""Checks the ready jobs on a real nsqd: what they write, what they publish and what they print."""

import argparse
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness import Nsqd, eventually

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

import pyarrow as pa
import pyarrow.dataset
from pyspark.sql import Row

from nsquark.base.errors import UserError
from nsquark.spark.jobs import archive, replay, report
from nsquark.spark.jobs.layout import CHECKPOINT
from nsquark.spark.jobs.session import moment, read_messages, reason_of
from nsquark.spark.sink.options import SinkOptions
from spark.source_rig import raise_failure

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMMAND = str(Path(sys.executable).with_name("nsquark"))
START_TIMEOUT_S = 240.0

pytestmark = pytest.mark.timeout(300)


def address(nsqd: Nsqd) -> str:
    return f"127.0.0.1:{nsqd.http[1]}"


def arguments(job: Any, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    job.add_arguments(parser)
    return parser.parse_args(words)


def archived(directory: Path, topic: str) -> list[dict[str, Any]]:
    """Reads the Parquet files as a program without Spark does."""
    files = pyarrow.dataset.dataset(directory, format="parquet", partitioning="hive")
    return [row for row in files.to_table().to_pylist() if row["topic"] == topic]


def in_log(spark: "SparkSession", nsqd: Nsqd, topic: str) -> list[Any]:
    rows = spark.read.format("nsq").options(nsqd=address(nsqd), topic=topic).load().orderBy("seq").collect()
    return list(rows)


def test_archive_resumes_and_has_each_message_once(
    spark: "SparkSession", nsqd: Nsqd, connect: Callable[..., Any], topic: str, tmp_path: Path
) -> None:
    other = f"{topic}_other"
    output = tmp_path / "lake"

    def update() -> None:
        options = {"nsqd": address(nsqd), "topic": f"{topic},{other}", "channel": "archive"}
        archive.start(spark, options, str(output), str(output / CHECKPOINT), None).awaitTermination()

    bodies = [f"one {number}".encode() for number in range(500)]
    connect(nsqd).publish(topic, *bodies)
    connect(nsqd).publish(other, b"\x00\xff", b"x" * 100_000)
    update()
    assert nsqd.channel(topic, "archive")["depth"] == 0, "the archive's channel is committed"
    more = [f"two {number}".encode() for number in range(300)]
    connect(nsqd).publish(topic, *more)
    update()

    rows = archived(output, topic)
    assert Counter(row["body"] for row in rows) == Counter(bodies + more)
    assert [row["body"] for row in sorted(archived(output, other), key=lambda row: row["seq"])] == [
        b"\x00\xff",
        b"x" * 100_000,
    ]
    for row in rows:
        assert row["timestamp"].tzinfo is not None, "other readers know the zone"
        assert (str(row["date"]), int(row["hour"])) == (f"{row['timestamp']:%Y-%m-%d}", row["timestamp"].hour)
    files = [path.relative_to(output).parts for path in output.rglob("*.parquet")]
    assert {parts[0] for parts in files} == {f"topic={topic}", f"topic={other}"}
    assert all(parts[1].startswith("date=20") and parts[2].startswith("hour=") and len(parts) == 4 for parts in files)


def test_replay_of_a_range_from_the_log_and_from_the_archive(
    spark: "SparkSession", nsqd: Nsqd, connect: Callable[..., Any], topic: str, tmp_path: Path
) -> None:
    connect(nsqd).publish(topic, b"too early")
    since = _after_now()
    wanted = [f"message {number}".encode() for number in range(400)]
    connect(nsqd).publish(topic, *wanted)
    until = _after_now()
    connect(nsqd).publish(topic, b"too late")
    lake = tmp_path / "lake"
    options = {"nsqd": address(nsqd), "topic": topic}
    archive.start(spark, options, str(lake), str(lake / CHECKPOINT), None).awaitTermination()

    words = ["--since", since.isoformat(), "--until", until.isoformat(), "--to-topic", "unused"]
    sources = {
        "log": ["--nsqd-http-address", address(nsqd), "--topic", topic],
        "archive": ["--archive", str(lake)],
    }
    rate = 200
    for name, source in sources.items():
        target = f"{topic}_{name}"
        messages = read_messages(spark, arguments(replay, *words, *source))
        sink = SinkOptions.parse({"nsqd": address(nsqd), "topic": target})
        assert replay.publish(messages, sink, rate).messages == len(wanted)
        got = in_log(spark, nsqd, target)
        assert [row.body for row in got] == wanted, f"from the {name}, oldest first"
        times = [row.timestamp.timestamp() for row in got]
        # The first burst is sent at once, the last one when all before it had their time.
        assert times[-1] - times[0] >= (len(wanted) - 2 * rate * replay.BURST_S) / rate * 0.9


def _after_now() -> datetime:
    """Returns a time that is later than what was published, and earlier than what will be."""
    time.sleep(0.005)
    now = datetime.now(UTC)
    time.sleep(0.005)
    return now


def test_pace_lets_through_no_more_than_the_rate_also_after_a_pause() -> None:
    seen: list[int] = []
    resumed_s = 0.0
    pieces = [list(range(first, first + 10)) for first in range(0, 200, 10)]
    for piece in replay.pace(pieces, rate=1000):
        seen += piece
        last_s, last_rows = time.monotonic(), len(piece)
        if len(seen) == 50:
            time.sleep(0.1)  # whoever takes the rows is slow for a moment
            resumed_s = time.monotonic()
    assert seen == list(range(200))
    assert last_s - resumed_s >= (150 - last_rows) / 1000, "lost time is not made up for"


def test_a_replay_is_cut_into_what_one_request_takes() -> None:
    rows = [Row(body=b"x" * size) for size in (10, 10, 10, 500, 90, 90, 1, 1, 1)]
    sizes = [[len(row.body) for row in piece] for piece in replay.cut(rows, messages_max=3, bytes_max=200)]
    assert sizes == [[10, 10, 10], [500], [90, 90, 1], [1, 1]]


def test_points_in_time_are_given_with_a_zone_or_as_how_long_ago() -> None:
    assert moment("2026-01-31T12:00:00+02:00") == datetime(2026, 1, 31, 10, tzinfo=UTC)
    ago = datetime.now(UTC) - moment("90m")
    assert abs(ago - timedelta(minutes=90)) < timedelta(minutes=1)
    for wrong in ("yesterday", "2026-01-31T12:00:00", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="write a time with its zone"):
            moment(wrong)


def test_mistakes_are_told_before_spark_starts(tmp_path: Path) -> None:
    nsqd = ["--nsqd-http-address", "127.0.0.1:4151"]
    cases: list[tuple[Any, list[str], str]] = [
        (archive, [str(tmp_path), *nsqd], "say what to read: either --topic or --option topicPattern"),
        (archive, [str(tmp_path), "--topic", "t"], "say where NSQ is"),
        (archive, [str(tmp_path), "--topic", "t", *nsqd, "--option", "x"], "--option 'x' is not NAME=VALUE"),
        (archive, [str(tmp_path), "--topic", "t", *nsqd, "--batch-messages", "0"], "--batch-messages is below 1"),
        (archive, [str(tmp_path), "--topic", "t", *nsqd, "--continuous", "--every", "soon"], "write a time like 60s"),
        (replay, ["--to-topic", "t", *nsqd], "say what to read"),
        (replay, ["--to-topic", "t", "--topic", "t", *nsqd], "this would read what it writes"),
        (replay, ["--to-topic", "t", "--topic", "u", "--rate", "0", *nsqd], "--rate is below 1"),
        (report, ["--topic", "t", *nsqd, "--plot", "x.pdf"], "is no PNG"),
        (report, ["--topic", "t", *nsqd, "--html", "x.pdf"], "is no page: write a name that ends in .html"),
        (report, ["--topic", "t", *nsqd, "--html", "/nosuch/x.html"], "there is no directory /nosuch"),
        (report, ["--topic", "t"], "say where NSQ is"),
    ]
    for job, words, message in cases:
        with pytest.raises(UserError, match=message):
            job.run(arguments(job, *words))


def test_errors_of_the_connector_are_found_in_those_of_spark(spark: "SparkSession") -> None:
    with pytest.raises(Exception, match="topic") as caught:
        spark.read.format("nsq").options(nsqd="127.0.0.1:4151").load()
    assert reason_of(caught.value) == "write what to read: either topic or topicPattern"


def test_what_ended_a_stream_is_told_and_not_its_name() -> None:
    text = (
        "[STREAM_FAILED] Query [id = 1ce9, runId = c0ed] terminated with exception: Python worker failed to connect"
        " back. SQLSTATE: XXKST\n=== Streaming Query ===\nIdentifier: rollup [id = 1ce9]\nCurrent State: ACTIVE"
    )
    assert reason_of(Exception(text)) == "Python worker failed to connect back"


def test_the_sentence_of_the_connector_is_found_in_a_stream_that_failed(
    spark: "SparkSession", nsqd: Nsqd, topic: str, connect: Callable[..., Any], tmp_path: Path
) -> None:
    connect(nsqd).publish(topic, *(b"%d" % number for number in range(20)))
    options = {"nsqd": address(nsqd), "topic": topic, "channel": "archive", "maxMessagesPerTrigger": "5"}
    checkpoint = str(tmp_path / "checkpoint")
    archive.start(spark, options, str(tmp_path), checkpoint, None).awaitTermination()
    connect(nsqd).publish(topic, *(b"%d" % number for number in range(20, 27)))
    nsqd.post("/topic/delete", topic=topic)
    connect(nsqd).publish(topic, b"new")
    query = archive.start(spark, options, str(tmp_path), checkpoint, None)
    with pytest.raises(Exception, match="made again") as caught:
        query.awaitTermination()
    reason = reason_of(caught.value)
    assert reason.startswith(f"topic {topic} on nsqd ") and "with 7 messages" in reason, reason
    assert reason.endswith("give the query a channel")


def test_a_table_is_refused_with_what_to_write_and_a_view_works(
    spark: "SparkSession", nsqd: Nsqd, topic: str, connect: Callable[..., Any]
) -> None:
    connect(nsqd).publish(topic, *(b"%d" % number for number in range(20)))
    options = f"OPTIONS (nsqd '{address(nsqd)}', topic '{topic}')"
    with pytest.raises(Exception, match="CREATE TEMPORARY VIEW") as caught:
        spark.sql(f"CREATE TABLE {topic} USING nsq {options}")
    assert reason_of(caught.value).startswith("format nsq makes no tables. Spark does not hand the options")
    spark.sql(f"CREATE TABLE {topic}_2 (body binary) USING nsq {options}")
    with pytest.raises(Exception, match="CREATE TEMPORARY VIEW"):
        spark.sql(f"SELECT * FROM {topic}_2").collect()
    spark.sql(f"DROP TABLE {topic}_2")
    spark.sql(f"CREATE TEMPORARY VIEW {topic} USING nsq {options}")
    assert spark.sql(f"SELECT count(*) FROM {topic}").first()[0] == 20  # type: ignore[index]


def test_the_archive_command_goes_on_until_it_is_stopped(
    nsqd: Nsqd, connect: Callable[..., Any], topic: str, tmp_path: Path
) -> None:
    """This test alone starts the real command, which is one line in a pipe, and ends it by Ctrl-C with everything
    written.
    """
    connect(nsqd).publish(topic, b"before")
    output = tmp_path / "lake"
    command = [COMMAND, "archive", str(output), "--topic", topic, "--nsqd-http-address", address(nsqd), "--continuous"]
    command += ["--every", "200ms", "--master", "local[2]"]
    command += ["--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:

        def has(count: int) -> bool:
            assert process.stderr is not None
            if process.poll() is not None:
                pytest.fail(process.stderr.read())  # at once: this test can tell that Spark's worker was late
            return _count(output, topic) == count

        try:
            eventually(lambda: has(1), START_TIMEOUT_S)
            connect(nsqd).publish(topic, b"after")
            eventually(lambda: has(2), START_TIMEOUT_S)
            os.kill(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=START_TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert (out.startswith("2 messages archived in "), err) == (True, ""), (out, err)
    assert sorted(row["body"] for row in archived(output, topic)) == [b"after", b"before"]


def _count(output: Path, topic: str) -> int:
    try:
        return len(archived(output, topic))
    except (OSError, pa.ArrowInvalid, KeyError):
        return 0  # not there yet, or a file is just being written


def test_the_continuous_example_counts_each_order_once(
    spark: "SparkSession", nsqd: Nsqd, connect: Callable[..., Any], topic: str, tmp_path: Path
) -> None:
    path = Path(__file__).parents[2] / "examples" / "streaming.py"
    streaming: Any = runpy.run_path(str(path))
    start = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=5)

    def order(number: int, second: float, amount: float) -> bytes:
        time = (start + timedelta(seconds=second)).isoformat()
        return json.dumps({"id": f"o{number}", "time": time, "user": "u", "kind": "order", "amount": amount}).encode()

    first = [order(1, 1, 2.5), order(2, 9, 1.5), order(1, 1, 2.5), b"not JSON", b'{"kind": "click", "id": "c"}']
    connect(nsqd).publish(topic, *first)
    target = f"{topic}.live"
    query = streaming["start"](spark, address(nsqd), topic, target, str(tmp_path / "checkpoint"))

    def did(what: Any) -> bool:
        raise_failure(query)
        return bool(what)

    try:
        eventually(lambda: did(any(report["numInputRows"] for report in query.recentProgress)), START_TIMEOUT_S)
        # Past the end of the first window and the delay: it is closed and published, the second is not.
        connect(nsqd).publish(topic, order(3, 16, 4.0))
        eventually(lambda: did(target in nsqd.topic_names() and in_log(spark, nsqd, target)), START_TIMEOUT_S)
    finally:
        query.stop()
    (row,) = in_log(spark, nsqd, target)
    result = json.loads(row.body)
    assert (datetime.fromisoformat(result["start"]), result["orders"], result["amount"]) == (start, 2, 4.0)
