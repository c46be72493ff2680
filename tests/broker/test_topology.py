"""Checks topology-aware consumption: who is near is served first, and everybody is served."""

from collections.abc import Callable
from typing import Any

import pytest

from harness import Nsqd, Wire, eventually

pytestmark = pytest.mark.ours

AWARE = "--enable-experiment=topology-aware-consumption"
NSQD_FLAGS = (AWARE, "--topology-region=europe", "--topology-zone=europe-1")

ZONE = {"topology_zone": "europe-1", "topology_region": "europe"}
REGION = {"topology_zone": "europe-2", "topology_region": "europe"}
ELSEWHERE = {"topology_zone": "asia-1", "topology_region": "asia"}
COUNTS = ("zone_local_msg_count", "region_local_msg_count", "global_msg_count")


def counts(channel: dict[str, Any]) -> tuple[int, int, int]:
    zone, region, elsewhere = (channel.get(key, 0) for key in COUNTS)
    return zone, region, elsewhere


def consumers(connect: Callable[..., Wire], topic: str, *rdys: int) -> list[Wire]:
    """Subscribes consumers elsewhere first, so that the order in which they came is not the one in which they are
    served.
    """
    wires = [connect() for _ in rdys]
    for wire, place, rdy in reversed(list(zip(wires, (ZONE, REGION, ELSEWHERE), rdys, strict=True))):
        wire.subscribe(topic, rdy=rdy, client_id=place["topology_zone"], **place)
    return wires


def ready(daemon: Nsqd, topic: str, *rdys: int) -> bool:
    return sorted(client["ready_count"] for client in daemon.channel(topic)["clients"]) == sorted(rdys)


def test_the_near_are_served_first(nsqd: Nsqd, topic: str, connect: Callable[..., Wire]) -> None:
    zone, region, elsewhere = consumers(connect, topic, 3, 4, 5)
    eventually(lambda: ready(nsqd, topic, 3, 4, 5))
    connect().publish(topic, *[b"%d" % number for number in range(9)])
    assert [message.body for message in zone.read_messages(3)] == [b"0", b"1", b"2"]
    assert [message.body for message in region.read_messages(4)] == [b"3", b"4", b"5", b"6"]
    assert [message.body for message in elsewhere.read_messages(2)] == [b"7", b"8"]
    assert counts(nsqd.channel(topic)) == (3, 4, 2)


def test_while_the_near_keep_up_the_far_get_nothing(nsqd: Nsqd, topic: str, connect: Callable[..., Wire]) -> None:
    zone, _, elsewhere = consumers(connect, topic, 100, 100, 100)
    eventually(lambda: ready(nsqd, topic, 100, 100, 100))
    producer = connect()
    for _ in range(5):
        producer.publish(topic, *[b"x"] * 80)
        zone.read_messages(80, finish=True)
        eventually(lambda: nsqd.channel(topic)["in_flight_count"] == 0)
    assert counts(nsqd.channel(topic)) == (400, 0, 0)
    elsewhere.expect_silence(0.1)


def test_two_of_a_zone_share_until_both_are_full(nsqd: Nsqd, topic: str, connect: Callable[..., Wire]) -> None:
    small, large, far = connect(), connect(), connect()
    small.subscribe(topic, rdy=1, **ZONE)
    large.subscribe(topic, rdy=20, **ZONE)
    far.subscribe(topic, rdy=20, **ELSEWHERE)
    eventually(lambda: ready(nsqd, topic, 1, 20, 20))
    connect().publish(topic, *[b"x"] * 16)
    small.read_messages(1)
    large.read_messages(15)
    assert counts(nsqd.channel(topic)) == (16, 0, 0)


def test_a_region_is_near_without_its_zone(nsqd: Nsqd, topic: str, connect: Callable[..., Wire]) -> None:
    near, far = connect(), connect()
    far.subscribe(topic, rdy=5, **ELSEWHERE)
    near.subscribe(topic, rdy=5, topology_region="europe")
    eventually(lambda: ready(nsqd, topic, 5, 5))
    connect().publish(topic, *[b"x"] * 6)
    near.read_messages(5)
    far.read_messages(1)
    assert counts(nsqd.channel(topic)) == (0, 5, 1)


def test_who_says_nothing_of_itself_is_far(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    """This holds for an nsqd, too, that says nothing of itself."""
    daemon = make_nsqd(AWARE)
    client = connect(daemon)
    client.subscribe("t", rdy=1)
    client.publish("t", b"x")
    eventually(lambda: counts(daemon.channel("t")) == (0, 0, 1))


def test_redeliveries_prefer_the_near_too(nsqd: Nsqd, topic: str, connect: Callable[..., Wire]) -> None:
    far = connect()
    far.subscribe(topic, rdy=1, **ELSEWHERE)
    connect().publish(topic, b"x")
    message = far.read_message()
    near = connect()
    near.subscribe(topic, rdy=1, **ZONE)
    eventually(lambda: ready(nsqd, topic, 1, 1))
    far.REQ(message.id, 0)
    assert near.read_message().attempts == 2
    assert counts(nsqd.channel(topic)) == (1, 0, 1)


def test_counts_are_left_out_while_they_are_zero(nsqd: Nsqd, topic: str, connect: Callable[..., Wire]) -> None:
    client = connect()
    client.subscribe(topic, rdy=1, **ZONE)
    assert not set(COUNTS) & set(nsqd.channel(topic))
    connect().publish(topic, b"x")
    client.read_message()
    keys = list(nsqd.channel(topic))
    assert keys[keys.index("message_count") + 1 : keys.index("requeue_count")] == ["zone_local_msg_count"]


def test_it_is_told_to_clients_and_shown(nsqd: Nsqd, topic: str, connect: Callable[..., Wire]) -> None:
    client = connect()
    answer = client.identify(**REGION)
    assert (answer["topology_region"], answer["topology_zone"]) == ("europe", "europe-1")
    client.subscribe(topic)
    info = nsqd.get("/info").json()
    assert list(info)[-2:] == ["topology_zone", "topology_region"]
    assert (info["topology_zone"], info["topology_region"]) == ("europe-1", "europe")
    shown = nsqd.channel(topic)["clients"][0]
    assert (shown["topology_zone"], shown["topology_region"]) == ("europe-2", "europe")
    keys = list(shown)
    assert keys[keys.index("user_agent") + 1 : keys.index("tls")] == ["topology_zone", "topology_region"]


def test_without_the_flags_nothing_is_shown(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    daemon = make_nsqd()
    client = connect(daemon)
    assert not any("topology" in key for key in client.identify(**ZONE))
    client.subscribe("t", rdy=1)
    client.publish("t", b"x")
    eventually(lambda: daemon.channel("t")["in_flight_count"] == 1)
    assert "topology" not in daemon.get("/info").text
    assert "topology" not in daemon.get("/stats", format="json").text
    assert not set(COUNTS) & set(daemon.channel("t"))


def test_without_the_experiment_the_far_have_their_share(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]
) -> None:
    daemon = make_nsqd("--topology-zone=europe-1", "--topology-region=europe")
    near, far = connect(daemon), connect(daemon)
    near.subscribe("t", rdy=10, **ZONE)
    far.subscribe("t", rdy=10, **ELSEWHERE)
    eventually(lambda: ready(daemon, "t", 10, 10))
    connect(daemon).publish("t", *[b"x"] * 10)
    near.read_messages(5)
    far.read_messages(5)
    assert "topology_zone" in daemon.get("/info").json()
    assert not set(COUNTS) & set(daemon.channel("t"))
