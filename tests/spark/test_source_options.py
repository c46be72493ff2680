"""Checks that impossible options are refused before anything is read, with a sentence that says what to write."""

from typing import TYPE_CHECKING, Any

import pytest

from harness import Nsqd
from spark.source_rig import address, nsqd_id, publish, read_bodies, reader, stream_reader

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

from pyspark.errors import PySparkException

from nsquark.spark.options import OptionError, SourceOptions
from nsquark.spark.source.datasource import NsqDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.ours

GOOD = {"nsqd": "127.0.0.1:4151", "topic": "orders"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"topic": "t"}, "either nsqd, the HTTP addresses"),
        ({**GOOD, "lookupd": "127.0.0.1:4161"}, "not both"),
        ({"nsqd": "127.0.0.1:4151"}, "either topic or topicPattern"),
        ({**GOOD, "topicPattern": "t.*"}, "not both"),
        ({**GOOD, "nsqd": ""}, "is empty: write one or more addresses like 127.0.0.1:4151"),
        ({**GOOD, "nsqd": "localhost"}, "write host:port"),
        ({**GOOD, "nsqd": "localhost:99999"}, "write host:port"),
        ({**GOOD, "topic": " "}, "topic is empty"),
        ({**GOOD, "topic": "a b"}, "no name of a topic"),
        ({**GOOD, "topic": "t#ephemeral"}, "is ephemeral"),
        ({"nsqd": "h:1", "topicPattern": "("}, "no regular expression"),
        ({**GOOD, "channel": "c#ephemeral"}, "no name of a kept channel"),
        ({**GOOD, "channelTtl": "1h"}, "means nothing without channel"),
        ({**GOOD, "channel": "c", "channelTtl": "1s"}, "write 10s or more"),
        ({**GOOD, "startingOffsets": "oldest"}, "write earliest, latest or a JSON object"),
        ({**GOOD, "endingOffsets": "earliest"}, "write latest or a JSON object"),
        ({**GOOD, "startingOffsets": "{"}, "is no JSON"),
        ({**GOOD, "startingOffsets": '{"orders": 5}'}, 'write "<topic>@<nsqd id>"'),
        ({**GOOD, "startingOffsets": '{"orders@x": -5}'}, 'write "<topic>@<nsqd id>"'),
        ({**GOOD, "startingOffsets": '{"orders@x": true}'}, 'write "<topic>@<nsqd id>"'),
        ({**GOOD, "startingOffsets": "earliest", "startingTimestamp": "5"}, "not both"),
        ({**GOOD, "endingOffsets": "latest", "endingTimestamp": "5"}, "not both"),
        ({**GOOD, "startingTimestamp": "yesterday"}, "milliseconds since 1970"),
        ({**GOOD, "startingTimestamp": "2026-01-31T12:00:00"}, "with its zone"),
        ({**GOOD, "startingTimestamp": "1960-01-31T12:00:00Z"}, "before 1970"),
        ({**GOOD, "maxMessagesPerTrigger": "0"}, "whole number of 1 or more"),
        ({**GOOD, "maxBytesPerTrigger": "64m"}, "whole number of 1 or more"),
        ({**GOOD, "minMessagesPerTrigger": "9", "maxMessagesPerTrigger": "5"}, "write a smaller minimum"),
        ({**GOOD, "maxTriggerDelay": "5s"}, "means nothing without minMessagesPerTrigger"),
        ({**GOOD, "minPartitions": "5000"}, "at most 4096"),
        ({**GOOD, "failOnDataLoss": "yes"}, "write true or false"),
        ({**GOOD, "headers": "all"}, "write true or false"),
        ({**GOOD, "onForeignNsqd": "no"}, "write fail or skip"),
        ({}, "CREATE TEMPORARY VIEW"),
        ({**GOOD, "readTimeout": "60"}, "with its unit"),
        ({**GOOD, "readTimeout": "0s"}, "with its unit"),
        ({**GOOD, "tlsCertFile": "c.pem"}, "means nothing without tlsKeyFile"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(OptionError) as refused:
        SourceOptions.parse(given)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("subscribe", "write topic"),
        ("maxOffsetsPerTrigger", "write maxMessagesPerTrigger"),
        ("kafka.bootstrap.servers", "write nsqd or lookupd"),
        ("startingOffset", "write startingOffsets"),
        ("minpartition", "write minPartitions"),
        ("path", "load() takes no argument"),
        ("provider", "CREATE TEMPORARY VIEW"),
        ("zzz", "the options are authSecret, authSecretFile, channel"),
    ],
)
def test_an_unknown_option_is_answered_with_the_one_that_was_meant(name: str, says: str) -> None:
    with pytest.raises(OptionError) as refused:
        NsqDataSource({**GOOD, name: "x"})
    assert says in str(refused.value)


def test_options_of_writing_are_refused_in_a_read_and_not_in_a_write() -> None:
    source = NsqDataSource({**GOOD, "idempotent": "true", "checkpointlocation": "/somewhere"})
    with pytest.raises(OptionError, match="idempotent is for writing"):
        source.schema()


def test_names_count_without_regard_to_case_and_values_are_understood() -> None:
    options = SourceOptions.parse(
        {
            "NSQD": "http://a:4151, https://b:4152/,a:4151,[::1]:4151",
            "Topic": "one,two",
            "MINPARTITIONS": "7",
            "startingtimestamp": "2026-01-31T12:00:00+01:00",
            "endingOffsets": '{"one@x": {"from": 1, "next": 9}, "two@x": "latest", "v": 1, "q": "u", "t": 5}',
            "readTimeout": "1m30s",
            "lostNsqds": "x, y",
        }
    )
    assert options.nsqd == ("a:4151", "https://b:4152", "[::1]:4151")
    assert options.topics == ("one", "two")
    assert options.partitions_min == 7
    assert options.starting is not None
    assert options.starting.time_ns == 1769857200000_000_000
    assert options.ending.places == (("one@x", 9), ("two@x", "latest"))
    assert options.read_timeout_s == 90
    assert options.lost_nsqds == {"x", "y"}


# -- as a user of Spark sees it --------------------------------------------------------------------------


def failure(action: Any) -> str:
    with pytest.raises(PySparkException) as failed:
        action()
    return str(failed.value)


def test_a_wrong_option_fails_at_load(spark: "SparkSession", nsqd: Nsqd) -> None:
    assert "write topic" in failure(lambda: reader(spark, nsqd, subscribe="t").load())
    assert "either topic or topicPattern" in failure(lambda: reader(spark, nsqd).load())
    assert "either topic or topicPattern" in failure(lambda: stream_reader(spark, nsqd).load())
    assert "is for writing" in failure(lambda: reader(spark, nsqd, "t", idempotent="true").load())


def test_a_wrong_option_fails_with_a_schema_too(spark: "SparkSession", nsqd: Nsqd) -> None:
    schema = "seq bigint, body binary"
    assert "write topic" in failure(lambda: reader(spark, nsqd, subscribe="t").schema(schema).load().collect())
    assert "either topic" in failure(lambda: reader(spark, nsqd).schema(schema).load().collect())

    def run_stream(**options: str) -> str:
        frame = stream_reader(spark, nsqd, **options).schema(schema).load()
        return failure(lambda: frame.writeStream.format("noop").start().awaitTermination(60))

    assert "either topic or topicPattern" in run_stream()
    assert "write topic" in run_stream(subscribe="t")
    assert "endingOffsets is for batch reads" in run_stream(topic="t", endingOffsets="latest")


def test_options_of_the_other_kind_of_read_are_refused(spark: "SparkSession", nsqd: Nsqd) -> None:
    assert "channel is for streams" in failure(lambda: reader(spark, nsqd, "t", channel="c").load().collect())
    assert "startingOffsets=latest" in failure(
        lambda: reader(spark, nsqd, "t", startingOffsets="latest").load().collect()
    )


def test_a_schema_that_the_source_does_not_have_is_refused(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, [b"x"])
    for schema, says in (("seq bigint, value binary", "no column 'value'"), ("body string", "cast it in a select")):
        assert says in failure(lambda schema=schema: reader(spark, nsqd, topic).schema(schema).load().collect())


def test_wrong_addresses_are_recognised(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, [b"x"])
    tcp = "{}:{}".format(*nsqd.tcp)
    says = failure(lambda: reader(spark, tcp, topic).load().collect())
    assert f"{tcp} is the TCP port of an nsqd" in says and "write its HTTP port" in says
    says = failure(lambda: reader(spark, "", topic, lookupd=address(nsqd)).load().collect())
    assert "is not an nsqlookupd" in says
    says = failure(lambda: reader(spark, "127.0.0.1:9", topic).load().collect())
    assert "127.0.0.1:9 does not answer" in says
    assert "there is no topic nosuch" in failure(lambda: reader(spark, nsqd, "nosuch").load().collect())


def test_positions_beyond_the_log_are_refused(spark: "SparkSession", nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, [b"x"])
    beyond = f'{{"{topic}@{nsqd_id(nsqd)}": {2**60}}}'
    assert "is beyond the end" in failure(lambda: reader(spark, nsqd, topic, startingOffsets=beyond).load().collect())
    assert read_bodies(reader(spark, nsqd, topic).load()) == [b"x"]
