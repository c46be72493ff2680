"""Checks `df.write.format("nsq")` and `df.writeStream.format("nsq")`: what arrives, and what is refused with which
words.
"""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness import AuthServer, Nsqd, eventually
from harness.lookupd import Nsqlookupd

pytest.importorskip("pyspark")

from pyspark.errors import AnalysisException, PySparkException

from .sink_rig import differences, http_address, log_bodies
from .source_rig import on_fixed_port

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.ours, pytest.mark.timeout(300)]
"""The first test of a session waits for its JVM."""

STREAM_TIMEOUT_S = 180


def write(df: "DataFrame", nsqd: Nsqd | str, **options: Any) -> None:
    address = nsqd if isinstance(nsqd, str) else http_address(nsqd)
    df.write.format("nsq").mode("append").option("nsqd", address).options(**options).save()


def numbers(spark: "SparkSession", count: int, partitions: int = 2) -> "DataFrame":
    return spark.range(0, count, 1, partitions).selectExpr("cast(id as string) AS body")


def bodies(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


# -- what arrives ----------------------------------------------------------------------------------------


def test_strings_and_binaries_arrive_byte_for_byte(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    texts = ["plain", "größer", "日本", " "]
    raw = [bytes(range(256)), b"\0", b"\xff\xfe"]
    write(spark.createDataFrame([(text,) for text in texts], "body string"), nsqd, topic=topic)
    write(spark.createDataFrame([(bytearray(item),) for item in raw], "body binary"), nsqd, topic=topic)
    assert differences([nsqd], topic, [text.encode() for text in texts] + raw) == (0, 0)


def test_rows_of_a_partition_keep_their_order(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    """The rows go in several MPUBs: 30,000 are more than one may have."""
    write(numbers(spark, 30_000, partitions=1), nsqd, topic=topic)
    assert log_bodies(nsqd, topic) == bodies(30_000)


def test_requests_are_bounded_by_bytes(spark: "SparkSession", make_nsqd: Callable[..., Nsqd], topic: str) -> None:
    nsqd = make_nsqd("--max-body-size=5000", "--max-msg-size=4000")
    big = [b"%04d" % number + b"x" * 396 for number in range(100)]
    df = spark.createDataFrame([(bytearray(body),) for body in big], "body binary")
    with pytest.raises(PySparkException, match=r"among rows 0 to \d+ of partition \d.*E_BAD_BODY"):
        write(df, nsqd, topic=topic)
    write(df, nsqd, topic=topic, maxRequestBytes=4500)
    assert differences([nsqd], topic, big) == (0, 0)


def test_a_column_says_the_topic_of_each_row(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    rows = [(f"{topic}_{number % 3}", f"{number}") for number in range(100)]
    write(spark.createDataFrame(rows, "topic string, body string").coalesce(1), nsqd)
    for part in range(3):
        assert log_bodies(nsqd, f"{topic}_{part}") == [b"%d" % number for number in range(part, 100, 3)]


def test_the_option_overrides_the_column_as_for_kafka(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    df = spark.createDataFrame([(f"{topic}_not", "a"), (None, "b")], "topic string, body string")
    write(df, nsqd, topic=topic)
    assert sorted(log_bodies(nsqd, topic)) == [b"a", b"b"]
    assert f"{topic}_not" not in nsqd.topic_names()


def test_columns_of_the_source_are_left_out(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    df = spark.sql("SELECT 'n' AS nsqd, 1L AS seq, 'i' AS id, now() AS timestamp, 'b' AS body")
    write(df, nsqd, topic=topic)
    assert log_bodies(nsqd, topic) == [b"b"]


def test_deferred_rows_wait_and_others_do_not(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    nsqd.post("/topic/create", topic=topic)
    nsqd.post("/channel/create", topic=topic, channel="ch")
    schema = "topic string, body string, defer_ms int"
    rows = [(topic, "now", 0), (topic, "soon", 700), (topic, "at once", None), (topic, "later", 3_500_000)]
    write(spark.createDataFrame(rows, schema).coalesce(1), nsqd)
    assert log_bodies(nsqd, topic)[:2] == [b"now", b"at once"]
    eventually(lambda: b"soon" in log_bodies(nsqd, topic))
    assert len(log_bodies(nsqd, topic)) == 3
    eventually(lambda: nsqd.channel(topic)["deferred_count"] == 1)


def test_several_nsqds_share_the_rows(spark: "SparkSession", make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> None:
    first, second = (make_nsqd(data_path=tmp_path / name) for name in "ab")
    both = f"{http_address(first)},{http_address(second)}"
    write(numbers(spark, 2000), both, topic="t", maxRequestBytes=1024)
    assert log_bodies(first, "t") and log_bodies(second, "t")
    assert differences([first, second], "t", bodies(2000)) == (0, 0)


def test_nsqds_are_found_through_lookupd(spark: "SparkSession", make_nsqd: Callable[..., Nsqd], topic: str) -> None:
    with Nsqlookupd() as lookupd:
        nsqd = make_nsqd(f"--lookupd-tcp-address={lookupd.tcp[0]}:{lookupd.tcp[1]}")
        eventually(lambda: lookupd.get("/nodes").json()["producers"])
        host, port = lookupd.http
        numbers(spark, 50).write.format("nsq").mode("append").options(lookupd=f"{host}:{port}", topic=topic).save()
        assert differences([nsqd], topic, bodies(50)) == (0, 0)


def test_a_secret_is_sent_to_an_nsqd_that_asks(
    spark: "SparkSession", make_nsqd: Callable[..., Nsqd], topic: str
) -> None:
    with AuthServer() as auth:
        nsqd = make_nsqd(f"--auth-http-address={auth.address}", "--http-auth=off")  # so that the rig may look
        with pytest.raises(PySparkException, match=r"Auth Required.*Give the option authSecret"):
            write(numbers(spark, 5), nsqd, topic=topic)
        write(numbers(spark, 5), nsqd, topic=topic, authSecret="open sesame")
        assert differences([nsqd], topic, bodies(5)) == (0, 0)


def test_an_nsqd_killed_and_restarted_in_the_middle_loses_nothing(
    spark: "SparkSession", make_nsqd: Callable[..., Nsqd], topic: str, tmp_path: Path
) -> None:
    """Messages arrive at least once: what had no answer when nsqd died is sent again."""
    nsqd = on_fixed_port(make_nsqd())
    go_on = tmp_path / "go on"

    def in_two_halves(batches: Any) -> Any:
        """Waits in the middle of the rows; what Spark's buffers hold back is less than those before."""
        import time

        rows = 0
        deadline = time.monotonic() + STREAM_TIMEOUT_S
        for batch in batches:
            while rows >= 30_000 and not go_on.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            rows += batch.num_rows
            yield batch

    sized = numbers(spark, 60_000, partitions=1).selectExpr("lpad(body, 200, '0') AS body")
    df = sized.mapInArrow(in_two_halves, "body string")

    def crash_and_restart() -> None:
        try:
            eventually(lambda: log_bodies(nsqd, topic), STREAM_TIMEOUT_S)
            nsqd.kill()
        finally:
            go_on.touch()
        nsqd.start()

    with ThreadPoolExecutor(1) as crashing:
        crash = crashing.submit(crash_and_restart)
        write(df, nsqd, topic=topic)
        crash.result()
    missing, _ = differences([nsqd], topic, [b"%0200d" % number for number in range(60_000)])
    assert missing == 0


# -- once ------------------------------------------------------------------------------------------------


def test_a_repeated_batch_write_with_its_token_adds_nothing(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    for _ in range(2):
        write(numbers(spark, 1000), nsqd, topic=topic, idempotent="true", token="monday")
    assert differences([nsqd], topic, bodies(1000)) == (0, 0)
    write(numbers(spark, 1000), nsqd, topic=topic, idempotent="true", token="tuesday")
    assert differences([nsqd], topic, bodies(1000) * 2) == (0, 0)


def test_once_by_topic_on_several_nsqds(spark: "SparkSession", make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> None:
    nsqds = [make_nsqd(data_path=tmp_path / name) for name in "ab"]
    topics = 20  # so many that chance puts them all on one nsqd once in half a million runs at most
    df = numbers(spark, 600).selectExpr(f"'t' || (cast(body AS int) % {topics}) AS topic", "body")
    for addresses in (nsqds, nsqds[::-1]):
        both = ",".join(http_address(nsqd) for nsqd in addresses)
        write(df, both, idempotent="true", token="x")
    assert all(nsqd.topic_names() for nsqd in nsqds)
    for part in range(topics):
        assert differences(nsqds, f"t{part}", [b"%d" % number for number in range(part, 600, topics)]) == (0, 0)


def test_a_batch_write_without_a_name_cannot_be_repeated(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    with pytest.raises(PySparkException, match="needs a name for a batch write: give the option token"):
        write(numbers(spark, 5), nsqd, topic=topic, idempotent="true")
    assert topic not in nsqd.topic_names()


# -- streams ---------------------------------------------------------------------------------------------


def stream_of_files(spark: "SparkSession", tmp_path: Path, *contents: list[str]) -> "DataFrame":
    """Makes a stream that has a batch for each content."""
    directory = tmp_path / "in"
    directory.mkdir(exist_ok=True)
    for number, lines in enumerate(contents):
        (directory / f"{number}.txt").write_text("\n".join(lines) + "\n")
    return spark.readStream.option("maxFilesPerTrigger", 1).text(str(directory)).withColumnRenamed("value", "body")


def run_stream(df: "DataFrame", nsqd: Nsqd, checkpoint: Path, mode: str = "append", **options: Any) -> None:
    writer = df.writeStream.format("nsq").outputMode(mode).option("checkpointLocation", str(checkpoint))
    query = writer.options(nsqd=http_address(nsqd), **options).trigger(availableNow=True).start()
    assert query.awaitTermination(STREAM_TIMEOUT_S)


@pytest.mark.parametrize("idempotent", ["false", "true"])
def test_a_stream_arrives(spark: "SparkSession", nsqd: Nsqd, topic: str, tmp_path: Path, idempotent: str) -> None:
    df = stream_of_files(spark, tmp_path, ["a", "b"], ["a", "c"])
    run_stream(df, nsqd, tmp_path / "checkpoint", topic=topic, idempotent=idempotent)
    assert sorted(log_bodies(nsqd, topic)) == [b"a", b"a", b"b", b"c"]


def test_a_stream_refuses_complete(spark: "SparkSession", nsqd: Nsqd, topic: str, tmp_path: Path) -> None:
    df = stream_of_files(spark, tmp_path, ["a", "a", "b"]).groupBy("body").count().select("body")
    with pytest.raises(PySparkException, match="complete would publish all results again in each batch: use append"):
        run_stream(df, nsqd, tmp_path / "checkpoint", "complete", topic=topic)


def test_a_stream_takes_no_token(spark: "SparkSession", nsqd: Nsqd, topic: str, tmp_path: Path) -> None:
    df = stream_of_files(spark, tmp_path, ["a"])
    with pytest.raises(PySparkException, match="token is for batch writes"):
        run_stream(df, nsqd, tmp_path / "checkpoint", topic=topic, idempotent="true", token="x")


def test_foreach_batch_needs_no_token(spark: "SparkSession", nsqd: Nsqd, topic: str, tmp_path: Path) -> None:
    """Spark tells the tasks of such a write which query and batch they belong to."""

    def twice(df: "DataFrame", batch_id: int) -> None:
        for _ in range(2):
            write(df, nsqd, topic=topic, idempotent="true")

    df = stream_of_files(spark, tmp_path, ["a", "b"], ["a", "c"])
    writer = df.writeStream.foreachBatch(twice).option("checkpointLocation", str(tmp_path / "checkpoint"))
    assert writer.trigger(availableNow=True).start().awaitTermination(STREAM_TIMEOUT_S)
    assert sorted(log_bodies(nsqd, topic)) == [b"a", b"a", b"b", b"c"]


# -- what is refused -------------------------------------------------------------------------------------


def test_overwriting_is_refused(spark: "SparkSession", nsqd: Nsqd) -> None:
    with pytest.raises(AnalysisException, match=r"a topic cannot be overwritten: write .mode\('append'\)"):
        numbers(spark, 1).write.format("nsq").mode("overwrite").options(nsqd=http_address(nsqd), topic="t").save()


def test_columns_are_checked_before_anything_runs(spark: "SparkSession", nsqd: Nsqd) -> None:
    with pytest.raises(AnalysisException, match="no topic to write to: give the option topic, or a column topic"):
        write(numbers(spark, 1), nsqd)


def test_a_bad_row_is_named(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    with pytest.raises(PySparkException, match="row 17 of partition 0 cannot be written: its body is null"):
        write(numbers(spark, 100).selectExpr("nullif(body, '17') AS body"), nsqd, topic=topic)


def test_bigger_messages_are_an_option(spark: "SparkSession", make_nsqd: Callable[..., Nsqd], topic: str) -> None:
    df = spark.sql("SELECT repeat('x', 2000000) AS body")
    nsqd = make_nsqd("--max-msg-size=2500000")
    write(df, nsqd, topic=topic, maxMessageBytes=2_500_000)
    assert [len(body) for body in log_bodies(nsqd, topic)] == [2_000_000]


def test_a_tcp_port_given_by_mistake_is_recognised(spark: "SparkSession", nsqd: Nsqd) -> None:
    host, port = nsqd.tcp
    with pytest.raises(PySparkException, match="is the TCP port of an nsqd"):
        write(numbers(spark, 1), f"{host}:{port}", topic="t")


def test_an_nsqd_that_is_not_there_is_named(spark: "SparkSession") -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody else can listen there
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(PySparkException, match=rf"no nsqd to publish to within 0.5 s: {address} does not answer"):
            write(numbers(spark, 1), address, topic="t", writeTimeout="500ms")
