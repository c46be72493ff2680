"""`df.write.format("nsq")` and `df.writeStream.format("nsq")`: what arrives, and what is refused with which words."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness import AuthServer, Nsqd, eventually
from harness.lookupd import Nsqlookupd

pytest.importorskip("pyspark")

from pyspark.errors import AnalysisException, PySparkException

from .sink_rig import differences, http_address, log_bodies

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.ours

STREAM_TIMEOUT_S = 60


def write(df: "DataFrame", nsqd: Nsqd, **options: Any) -> None:
    writer = df.write.format("nsq").mode("append").option("nsqd", http_address(nsqd))
    writer.options(**options).save()


def numbers(spark: "SparkSession", count: int, partitions: int = 2) -> "DataFrame":
    return spark.range(0, count, 1, partitions).selectExpr("cast(id as string) AS body")


def bodies(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


# -- what arrives ------------------------------------------------------------------------------------------


def test_strings_and_binaries_arrive_byte_for_byte(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    texts = ["plain", "größer", "日本", " "]
    raw = [bytes(range(256)), b"\0", b"\xff\xfe"]
    write(spark.createDataFrame([(text,) for text in texts], "body string"), nsqd, topic=topic)
    write(spark.createDataFrame([(bytearray(item),) for item in raw], "body binary"), nsqd, topic=topic)
    assert differences([nsqd], topic, [text.encode() for text in texts] + raw) == (0, 0)


def test_rows_of_a_partition_keep_their_order(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    """Over several MPUBs: 30,000 rows are more than one may have."""
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
    assert nsqd.channel(topic)["deferred_count"] == 1


def test_several_nsqds_share_the_rows(spark: "SparkSession", make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> None:
    first, second = (make_nsqd(data_path=tmp_path / name) for name in "ab")
    write(
        numbers(spark, 2000),
        first,
        topic="t",
        nsqd=f"{http_address(first)},{http_address(second)}",
        maxRequestBytes=1024,
    )
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
        nsqd = make_nsqd(f"--auth-http-address={auth.address}")
        with pytest.raises(PySparkException, match="E_AUTH"):
            write(numbers(spark, 5), nsqd, topic=topic, writeTimeout="2s")
        write(numbers(spark, 5), nsqd, topic=topic, authSecret="open sesame")
        assert differences([nsqd], topic, bodies(5)) == (0, 0)


def test_an_nsqd_killed_and_restarted_in_the_middle_loses_nothing(
    spark: "SparkSession", make_nsqd: Callable[..., Nsqd], topic: str, tmp_path: Path
) -> None:
    """At least once: what had no answer when nsqd died is sent again."""
    ports = free_ports(2)
    nsqd = make_nsqd(f"--tcp-address=127.0.0.1:{ports[0]}", f"--http-address=127.0.0.1:{ports[1]}")
    go_on = tmp_path / "go on"

    def in_two_halves(batches: Any) -> Any:
        import time

        for number, batch in enumerate(batches):
            deadline = time.monotonic() + STREAM_TIMEOUT_S
            while number == 2 and not go_on.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            yield batch

    df = numbers(spark, 100_000, partitions=2).mapInArrow(in_two_halves, "body string")
    failures: list[BaseException] = []
    task = threading.Thread(target=_collecting(failures, lambda: write(df, nsqd, topic=topic)))
    task.start()
    eventually(lambda: len(log_bodies(nsqd, topic)) >= 20_000, STREAM_TIMEOUT_S)
    nsqd.kill()
    go_on.touch()
    nsqd.start()
    task.join()
    assert failures == []
    missing, _ = differences([nsqd], topic, bodies(100_000))
    assert missing == 0


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago: a restarted nsqd must be found where it was."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [entry.getsockname()[1] for entry in sockets]
    for entry in sockets:
        entry.close()
    return ports


def _collecting(failures: list[BaseException], work: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    return run


# -- once --------------------------------------------------------------------------------------------------


def test_a_repeated_batch_write_with_its_token_adds_nothing(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    for _ in range(2):
        write(numbers(spark, 1000), nsqd, topic=topic, idempotent="true", token="monday")
    assert differences([nsqd], topic, bodies(1000)) == (0, 0)
    write(numbers(spark, 1000), nsqd, topic=topic, idempotent="true", token="tuesday")
    assert differences([nsqd], topic, bodies(1000) * 2) == (0, 0)


def test_once_by_topic_on_several_nsqds(spark: "SparkSession", make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> None:
    nsqds = [make_nsqd(data_path=tmp_path / name) for name in "ab"]
    df = numbers(spark, 600).selectExpr("'t' || (cast(body AS int) % 3) AS topic", "body")
    for addresses in (nsqds, nsqds[::-1]):
        both = ",".join(http_address(nsqd) for nsqd in addresses)
        write(df, nsqds[0], nsqd=both, idempotent="true", token="x")
    assert all(nsqd.topic_names() for nsqd in nsqds)
    for part in range(3):
        assert differences(nsqds, f"t{part}", [b"%d" % number for number in range(part, 600, 3)]) == (0, 0)


def test_a_batch_write_without_a_name_cannot_be_repeated(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    with pytest.raises(PySparkException, match="needs a name for a batch write: give the option token"):
        write(numbers(spark, 5), nsqd, topic=topic, idempotent="true")
    assert topic not in nsqd.topic_names()


# -- streams -----------------------------------------------------------------------------------------------


def stream_of_files(spark: "SparkSession", tmp_path: Path, *contents: list[str]) -> "DataFrame":
    """A batch for each content."""
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


def test_a_stream_writes_updates_and_refuses_complete(
    spark: "SparkSession", nsqd: Nsqd, topic: str, tmp_path: Path
) -> None:
    counts = stream_of_files(spark, tmp_path, ["a", "a", "b"]).groupBy("body").count()
    df = counts.selectExpr("body || count AS body")
    run_stream(df, nsqd, tmp_path / "checkpoint", "update", topic=topic)
    assert sorted(log_bodies(nsqd, topic)) == [b"a2", b"b1"]
    with pytest.raises(PySparkException, match="complete would publish all results again in each batch"):
        run_stream(df, nsqd, tmp_path / "other checkpoint", "complete", topic=topic)


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


# -- what is refused ---------------------------------------------------------------------------------------


def test_overwriting_is_refused(spark: "SparkSession", nsqd: Nsqd) -> None:
    with pytest.raises(AnalysisException, match=r"a topic cannot be overwritten: write .mode\('append'\)"):
        numbers(spark, 1).write.format("nsq").mode("overwrite").options(nsqd=http_address(nsqd), topic="t").save()


@pytest.mark.parametrize(
    ("sql", "sentence"),
    [
        ("SELECT 'a' AS text", "the nsq sink writes the column body"),
        ("SELECT 'a' AS body, 1 AS defer", "the nsq sink has no column defer: select only body, topic, defer_ms"),
        ("SELECT 1 AS body", "column body has type int: cast it to string or binary"),
        ("SELECT 'a' AS body, 1 AS topic", "column topic has type int: cast it to string"),
        ("SELECT 'a' AS body, '1s' AS defer_ms", "column defer_ms has type string: cast it to"),
        ("SELECT 'a' AS body", "no topic to write to: give the option topic, or a column topic"),
    ],
)
def test_columns_are_checked_before_anything_runs(spark: "SparkSession", nsqd: Nsqd, sql: str, sentence: str) -> None:
    with pytest.raises(AnalysisException, match=sentence):
        write(spark.sql(sql), nsqd)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("('t', NULL, 0)", r"row 2 of partition 0 cannot be written: its body is null: filter"),
        ("('t', '', 0)", r"row 2 of partition 0 cannot be written: its body is empty"),
        ("('t', repeat('x', 1048577), 0)", r"row 2 of partition 0 .* its body has 1048577 bytes, more than 1048576"),
        ("(NULL, 'a', 0)", r"row 2 of partition 0 cannot be written: its topic is null: fill it in"),
        ("('no topic!', 'a', 0)", r"row 2 of partition 0 cannot be written: 'no topic!' is not a topic"),
        ("('t', 'a', -1)", r"row 2 of partition 0 cannot be written: its defer_ms is negative"),
    ],
)
def test_a_bad_row_is_named(spark: "SparkSession", nsqd: Nsqd, row: str, sentence: str) -> None:
    df = spark.sql(f"SELECT * FROM VALUES ('t', 'a', 0), ('t', 'b', 0), {row} AS rows(topic, body, defer_ms)")
    with pytest.raises(PySparkException, match=sentence):
        write(df.coalesce(1), nsqd)


def test_bigger_messages_are_an_option(spark: "SparkSession", make_nsqd: Callable[..., Nsqd], topic: str) -> None:
    df = spark.sql("SELECT repeat('x', 2000000) AS body")
    nsqd = make_nsqd("--max-msg-size=2500000")
    write(df, nsqd, topic=topic, maxMessageBytes=2_500_000)
    assert [len(body) for body in log_bodies(nsqd, topic)] == [2_000_000]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"nsqd": ""}, "nsqd is empty"),
        ({"nsqd": "127.0.0.1"}, "no address: write host:port"),
        ({"lookupd": "127.0.0.1:4161"}, "not both"),
        ({"topic": "a b"}, "no name of a topic"),
        ({"topic": "a,b"}, "no name of a topic: write one name"),
        ({"startingOffsets": "earliest"}, "startingOffsets is for reading: leave it out of a write"),
        ({"token": "x"}, "token means nothing without idempotent=true"),
        ({"idempotent": "yes"}, "write true or false"),
        ({"idempotent": "true", "token": ""}, "token has 0 characters"),
        ({"idempotent": "true", "token": "x", "topic": "t#ephemeral"}, "ephemeral, and has no log to append to"),
        ({"maxMessageBytes": "0"}, "maxMessageBytes='0': write a whole number"),
        ({"maxRequestBytes": "1 MB"}, "maxRequestBytes='1 MB': write a whole number"),
        ({"writeTimeout": "60"}, "writeTimeout='60': write a time with its unit"),
        ({"tlsCertFile": "/x"}, "tlsCertFile and tlsKeyFile belong together"),
    ],
)
def test_options_are_checked(options: dict[str, str], sentence: str) -> None:
    from nsquark.spark.options import OptionError
    from nsquark.spark.sink_options import SinkOptions

    with pytest.raises(OptionError, match=sentence):
        SinkOptions.parse({"nsqd": "127.0.0.1:4151", "topic": "t"} | options)


def test_once_needs_a_fixed_list_of_nsqds() -> None:
    from nsquark.spark.options import OptionError
    from nsquark.spark.sink_options import SinkOptions

    with pytest.raises(OptionError, match="write nsqd instead of lookupd"):
        SinkOptions.parse({"lookupd": "127.0.0.1:4161", "topic": "t", "idempotent": "true"})
    with pytest.raises(OptionError, match="write where to publish: either nsqd"):
        SinkOptions.parse({"topic": "t"})


def test_once_cannot_defer(spark: "SparkSession", nsqd: Nsqd) -> None:
    with pytest.raises(AnalysisException, match="idempotent=true cannot defer messages"):
        write(spark.sql("SELECT 'a' AS body, 5 AS defer_ms"), nsqd, topic="t", idempotent="true", token="x")


def test_a_tcp_port_given_by_mistake_is_recognised(spark: "SparkSession", nsqd: Nsqd) -> None:
    host, port = nsqd.tcp
    with pytest.raises(PySparkException, match="is the TCP port of an nsqd"):
        write(numbers(spark, 1), nsqd, nsqd=f"{host}:{port}", topic="t")


def test_an_nsqd_that_is_not_there_is_named(spark: "SparkSession", nsqd: Nsqd) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(PySparkException, match=rf"no nsqd to publish to within 0.5 s: {address} does not answer"):
        write(numbers(spark, 1), nsqd, nsqd=address, topic="t", writeTimeout="500ms")
