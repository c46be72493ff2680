"""Checks /stats, as JSON and as text: the shape to the letter, the numbers by what was done."""

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness import Nsqd, Wire, eventually

NSQD_FLAGS = ("--msg-timeout=10m",)
"""The tests share messages that are in flight all the time."""
TOP_KEYS = ["version", "health", "start_time", "topics", "memory", "producers"]
TOPIC_KEYS = [
    "topic_name",
    "channels",
    "depth",
    "backend_depth",
    "message_count",
    "message_bytes",
    "paused",
    "e2e_processing_latency",
]
CHANNEL_KEYS = [
    "channel_name",
    "depth",
    "backend_depth",
    "in_flight_count",
    "deferred_count",
    "message_count",
    "requeue_count",
    "timeout_count",
    "client_count",
    "clients",
    "paused",
    "e2e_processing_latency",
]
CLIENT_KEYS = [
    "client_id",
    "hostname",
    "version",
    "remote_address",
    "state",
    "ready_count",
    "in_flight_count",
    "message_count",
    "finish_count",
    "requeue_count",
    "connect_ts",
    "sample_rate",
    "deflate",
    "snappy",
    "user_agent",
    "pub_counts",
    "tls",
    "tls_cipher_suite",
    "tls_version",
    "tls_negotiated_protocol",
    "tls_negotiated_protocol_is_mutual",
]
MEMORY_KEYS = [
    "heap_objects",
    "heap_idle_bytes",
    "heap_in_use_bytes",
    "heap_released_bytes",
    "gc_pause_usec_100",
    "gc_pause_usec_99",
    "gc_pause_usec_95",
    "next_gc_bytes",
    "gc_total_runs",
]


@pytest.fixture
def fresh(make_nsqd: Callable[..., Nsqd]) -> Nsqd:
    return make_nsqd()


@pytest.fixture(scope="module")
def busy(nsqd: Nsqd) -> Iterator[dict[str, Wire]]:
    """Makes two topics, a consumer with two messages in flight, and a producer."""
    with nsqd.connect() as producer, nsqd.connect() as consumer:
        producer.publish("alpha", b"1", b"22", b"333")
        producer.publish("beta", b"x")
        consumer.subscribe("alpha", "ch", rdy=2, client_id="me", hostname="host.example", user_agent="ua/1")
        consumer.read_messages(2)
        nsqd.post("/channel/create", topic="alpha", channel="archive")
        yield {"producer": producer, "consumer": consumer}


def test_empty(fresh: Nsqd) -> None:
    stats = fresh.stats()
    assert list(stats) == TOP_KEYS
    assert (stats["version"], stats["health"]) == ("1.3.0", "OK")
    assert abs(stats["start_time"] - time.time()) < 60
    assert stats["topics"] == []
    assert stats["producers"] is None
    assert list(stats["memory"]) == MEMORY_KEYS
    assert all(isinstance(value, int) for value in stats["memory"].values())


def test_headers(nsqd: Nsqd) -> None:
    assert nsqd.get("/stats", format="json").headers["Content-Type"] == "application/json; charset=utf-8"
    assert nsqd.get("/stats").headers["Content-Type"] == "text/plain; charset=utf-8"
    assert nsqd.get("/stats").headers["X-NSQ-Content-Type"] == "nsq; version=1.0"


@pytest.mark.parametrize("switch", ["false", "0"])
def test_without_memory(nsqd: Nsqd, switch: str) -> None:
    assert "memory" not in nsqd.stats(include_mem=switch)


@pytest.mark.parametrize("switch", ["true", "1", "", "perhaps", "FALSE"])
def test_switches_that_mean_yes(nsqd: Nsqd, busy: dict[str, Wire], switch: str) -> None:
    stats = nsqd.stats(include_mem=switch, include_clients=switch, topic="alpha")
    assert "memory" in stats
    assert stats["producers"]
    assert stats["topics"][0]["channels"][1]["clients"]


@pytest.mark.parametrize("switch", ["false", "0"])
def test_without_clients(nsqd: Nsqd, busy: dict[str, Wire], switch: str) -> None:
    stats = nsqd.stats(include_clients=switch, topic="alpha")
    assert stats["producers"] is None
    channel = stats["topics"][0]["channels"][1]
    assert channel["clients"] is None
    assert channel["client_count"] == 1


def test_topic_and_channel(nsqd: Nsqd, busy: dict[str, Wire]) -> None:
    topic = nsqd.topic("alpha")
    assert list(topic) == TOPIC_KEYS
    assert [channel["channel_name"] for channel in topic["channels"]] == ["archive", "ch"]
    assert (topic["depth"], topic["message_count"], topic["message_bytes"], topic["paused"]) == (
        0,
        3,
        6,
        False,
    )
    assert topic["e2e_processing_latency"] == {"count": 0, "percentiles": None}
    channel = topic["channels"][1]
    assert list(channel) == CHANNEL_KEYS
    assert (channel["depth"], channel["in_flight_count"], channel["deferred_count"]) == (1, 2, 0)
    assert (channel["message_count"], channel["requeue_count"], channel["timeout_count"]) == (3, 0, 0)
    assert (channel["client_count"], channel["paused"]) == (1, False)
    assert channel["e2e_processing_latency"] == {"count": 0, "percentiles": None}
    assert topic["channels"][0]["clients"] == []


def test_topics_are_sorted(nsqd: Nsqd, busy: dict[str, Wire]) -> None:
    names = [topic["topic_name"] for topic in nsqd.stats()["topics"]]
    assert names == sorted(names)
    assert {"alpha", "beta"} <= set(names)


def test_topic_without_channels(nsqd: Nsqd, busy: dict[str, Wire]) -> None:
    topic = nsqd.topic("beta")
    assert (topic["channels"], topic["depth"]) == ([], 1)


def test_consumer(nsqd: Nsqd, busy: dict[str, Wire]) -> None:
    client = nsqd.channel("alpha")["clients"][0]
    assert list(client) == [key for key in CLIENT_KEYS if key != "pub_counts"]
    assert abs(client.pop("connect_ts") - time.time()) < 120
    assert client == {
        "client_id": "me",
        "hostname": "host.example",
        "version": "V2",
        "remote_address": f"127.0.0.1:{busy['consumer'].local_port}",
        "state": 3,
        "ready_count": 2,
        "in_flight_count": 2,
        "message_count": 2,
        "finish_count": 0,
        "requeue_count": 0,
        "sample_rate": 0,
        "deflate": False,
        "snappy": False,
        "user_agent": "ua/1",
        "tls": False,
        "tls_cipher_suite": "",
        "tls_version": "",
        "tls_negotiated_protocol": "",
        "tls_negotiated_protocol_is_mutual": False,
    }


def _producer(stats: dict[str, Any], wire: Wire) -> dict[str, Any]:
    return next(entry for entry in stats["producers"] if entry["remote_address"].endswith(f":{wire.local_port}"))


def test_producer(nsqd: Nsqd, busy: dict[str, Wire]) -> None:
    producer = _producer(nsqd.stats(topic="alpha"), busy["producer"])
    assert list(producer) == CLIENT_KEYS
    assert producer["pub_counts"] == [{"topic": "alpha", "count": 3}]
    assert producer["state"] == 0
    assert _producer(nsqd.stats(topic="beta"), busy["producer"])["pub_counts"] == [{"topic": "beta", "count": 1}]
    counts = _producer(nsqd.stats(), busy["producer"])["pub_counts"]
    assert len(counts) == 1
    assert counts[0] in ({"topic": "alpha", "count": 3}, {"topic": "beta", "count": 1})


def test_producer_of_another_topic_is_listed_without_counts(nsqd: Nsqd, busy: dict[str, Wire]) -> None:
    nsqd.post("/topic/create", topic="gamma")
    assert "pub_counts" not in _producer(nsqd.stats(topic="gamma"), busy["producer"])


def test_only_publishers_are_producers(fresh: Nsqd) -> None:
    with fresh.connect() as idle, fresh.connect() as publisher:
        idle.identify(client_id="idle")
        publisher.publish("t", b"x")
        assert len(fresh.stats()["producers"]) == 1
    eventually(lambda: fresh.stats()["producers"] is None)


def test_filters(nsqd: Nsqd, busy: dict[str, Wire]) -> None:
    assert [topic["topic_name"] for topic in nsqd.stats(topic="alpha")["topics"]] == ["alpha"]
    unknown = nsqd.stats(topic="unknown")
    assert (unknown["topics"], unknown["producers"]) == (None, None)
    by_channel = nsqd.stats(channel="archive")
    assert [topic["topic_name"] for topic in by_channel["topics"]] == ["alpha"]
    assert [channel["channel_name"] for channel in by_channel["topics"][0]["channels"]] == ["archive"]
    assert by_channel["producers"]
    assert not nsqd.stats(topic="alpha", channel="unknown")["topics"]


def test_bad_query(nsqd: Nsqd) -> None:
    reply = nsqd.request("GET", "/stats?format=%zz")
    assert (reply.status, reply.body) == (400, b'{"message":"INVALID_REQUEST"}')


def test_text_of_an_empty_nsqd(fresh: Nsqd) -> None:
    lines = fresh.get("/stats").text.split("\n")
    assert re.fullmatch(r"nsqd v1\.3\.0 \(built w/[a-z0-9.-]+\)", lines[0])
    assert re.fullmatch(r"start_time \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", lines[1])
    assert re.fullmatch(r"uptime [0-9.hmnsµ]+", lines[2])
    assert lines[3:7] == ["", "Health: OK", "", "Memory:"]
    for line, key in zip(lines[7:16], MEMORY_KEYS, strict=True):
        assert re.fullmatch(rf"   {key:<25}\t\d+", line)
    assert lines[16:] == ["", "Topics: None", "", "Producers: None", ""]


def test_text_without_memory(fresh: Nsqd) -> None:
    text = fresh.get("/stats", include_mem="false").text
    assert text.endswith("\n\nHealth: OK\n\nTopics: None\n\nProducers: None\n")


def test_text(nsqd: Nsqd, busy: dict[str, Wire]) -> None:
    text = nsqd.get("/stats", topic="alpha", include_mem="false").text
    body = text[text.index("Topics:") :]
    host = f"host.example:{busy['consumer'].local_port} ua/1"
    producer = f"127.0.0.1:{busy['producer'].local_port}"
    body = re.sub(r"be-depth: \d+ *", "be-depth: ", body)
    body = re.sub(r"connected: [0-9ms]+", "connected: AGE", body)
    assert body == (
        "Topics:\n"
        "   [alpha          ] depth: 0     be-depth: msgs: 3        e2e%: \n"
        "      [archive                  ] depth: 0     be-depth: inflt: 0    "
        "def: 0    re-q: 0     timeout: 0     msgs: 0        e2e%: \n"
        "      [ch                       ] depth: 1     be-depth: inflt: 2    "
        "def: 0    re-q: 0     timeout: 0     msgs: 3        e2e%: \n"
        f"        [V2 {host:<21}] state: 3 inflt: 2    rdy: 2    fin: 0        re-q: 0        msgs: 2        "
        "connected: AGE\n"
        "\nProducers:\n"
        f"   [V2 {producer:<21}] msgs: 3        topics: alpha=3 connected: AGE\n"
    )


def test_text_marks_what_is_paused_and_parts_topics_by_a_blank_line(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    for topic in ("one", "two"):
        daemon.post("/topic/create", topic=topic)
        daemon.post("/channel/create", topic=topic, channel="c")
        daemon.post("/channel/pause", topic=topic, channel="c")
        daemon.post("/topic/pause", topic=topic)
    text = daemon.get("/stats").text
    assert "\n\nTopics:\n*P [one            ] depth: 0 " in text
    assert "\n   *P [c                        ] depth: 0 " in text
    assert "\n\n*P [two            ] depth: 0 " in text


def test_latency_percentiles(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd("--e2e-processing-latency-percentile=0.5,0.99", "--e2e-processing-latency-percentile=1.0")
    with daemon.connect() as client:
        client.publish("t", *[b"x"] * 20)
        client.subscribe("t", rdy=20)
        messages = client.read_messages(20)
        time.sleep(0.05)  # so that the latency has a least value worth asserting
        for message in messages:
            client.FIN(message.id)
        client.assert_usable()
        for shown in (daemon.topic("t"), daemon.channel("t")):
            latency = shown["e2e_processing_latency"]
            assert list(latency) == ["count", "percentiles"]
            assert latency["count"] == 20
            assert [entry["quantile"] for entry in latency["percentiles"]] == [1.0, 0.99, 0.5]
            assert all(40e6 < entry["value"] < 30e9 for entry in latency["percentiles"])
        text = daemon.get("/stats", topic="t", include_mem="false").text
        assert re.search(r"msgs: 20       e2e%: \d+\.\dm?s, \d+\.\dm?s, \d+\.\dm?s\n", text)
