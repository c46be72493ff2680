"""Checks nsq_to_nsq as a process, between a real cluster and other nsqds."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import FaultProxy, Nsqd, eventually
from nsquark import sync
from tools.rig import Cluster, Tool, numbered_lines, unfinished

CHANNEL = "nsq_to_nsq"
QUICK = (
    "--consumer-opt=default_requeue_delay,50ms",
    "--consumer-opt=backoff_multiplier,20ms",
    "--consumer-opt=max_backoff_duration,40ms",
    "--consumer-opt=rdy_redistribute_interval,50ms",
    "--consumer-opt=low_rdy_idle_timeout,1s",
)
"""A failed message comes again soon."""
Start = Callable[..., Tool]
MakeNsqd = Callable[..., Nsqd]


@pytest.fixture
def make_steady_nsqd(make_nsqd: MakeNsqd, tmp_path: Path) -> MakeNsqd:
    """Runs an nsqd that, started again, listens where it did before, as who sends to it expects."""

    def make(name: str, *flags: str) -> Nsqd:
        nsqd = make_nsqd(*flags, data_path=tmp_path / name)
        nsqd.keep_ports()
        return nsqd

    return make


@pytest.fixture
def destinations(make_steady_nsqd: MakeNsqd) -> list[Nsqd]:
    return [make_steady_nsqd(name) for name in ("three", "four")]


def to(*nsqds: Nsqd) -> list[str]:
    return [f"--destination-nsqd-tcp-address={nsqd.tcp_address}" for nsqd in nsqds]


def bodies_at(nsqd: Nsqd, topic: str) -> list[bytes]:
    """Returns what an nsqd has of a topic that has no channel, copies included."""
    count = nsqd.topic(topic)["depth"]
    bodies: list[Any] = []
    with sync.Consumer(topic, "check", nsqd=nsqd.tcp_address, max_in_flight=1000) as consumer:
        while len(bodies) < count and (message := consumer.get(timeout=20)):
            bodies.append(message.body)
            message.finish()
    return bodies


def count_at(topic: str, *nsqds: Nsqd) -> int:
    return sum(nsqd.topic(topic)["depth"] for nsqd in nsqds if topic in nsqd.topic_names())


def test_ten_thousand_messages_arrive(cluster: Cluster, start: Start, topic: str, destinations: list[Nsqd]) -> None:
    lines = numbered_lines(10_000)
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, lines)
    tool = start("nsq_to_nsq", f"--topic={topic}", cluster.lookupd_flag, *to(*destinations))
    cluster.wait_until_finished(topic, CHANNEL)
    assert tool.stop() == 0, tool.log
    arrived = [bodies_at(nsqd, topic) for nsqd in destinations]
    assert sorted(arrived[0] + arrived[1]) == sorted(lines)
    assert [len(bodies) for bodies in arrived] == [5000, 5000], "a hostpool rotates"
    assert tool.log.count("[aggregate]: finished 250 - 99th: ") == 39
    for nsqd in destinations:
        assert tool.log.count(f"[{nsqd.tcp_address}]: finished 250 - 99th: ") == 19


def test_several_topics_into_one(cluster: Cluster, start: Start, topic: str, destinations: list[Nsqd]) -> None:
    for number in "12":
        cluster.create(topic + number, "mirror")
        cluster.publish(topic + number, [b"a" + number.encode(), b"b" + number.encode()])
    flags = (f"--topic={topic}1", f"--topic={topic}2", "--channel=mirror", f"--destination-topic={topic}")
    tool = start("nsq_to_nsq", *flags, *cluster.nsqd_flags, *to(destinations[0]))
    eventually(lambda: count_at(topic, destinations[0]) == 4)
    assert tool.stop() == 0, tool.log
    assert sorted(bodies_at(destinations[0], topic)) == [b"a1", b"a2", b"b1", b"b2"]
    assert destinations[0].topic_names() == {topic}


@pytest.mark.parametrize("mode", ["round-robin", "epsilon-greedy", "another word"])
def test_modes(cluster: Cluster, start: Start, topic: str, destinations: list[Nsqd], mode: str) -> None:
    lines = numbered_lines(1000)
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, lines)
    tool = start("nsq_to_nsq", f"--topic={topic}", *cluster.nsqd_flags, f"--mode={mode}", *to(*destinations))
    cluster.wait_until_finished(topic, CHANNEL)
    assert tool.stop() == 0, tool.log
    arrived = [bodies_at(nsqd, topic) for nsqd in destinations]
    assert sorted(arrived[0] + arrived[1]) == sorted(lines)
    if mode == "epsilon-greedy":
        assert all(arrived)
    else:
        assert [len(bodies) for bodies in arrived] == [500, 500]


def test_json_filters(cluster: Cluster, start: Start, topic: str, destinations: list[Nsqd]) -> None:
    bodies = [
        b'{"kind": "order", "id": 9007199254740993, "note": "<b>", "secret": 1}',
        b'{"kind": "order", "id": 2.0, "list": [1.0, 2.5]}',
        b'{"kind": "other", "id": 3}',
        b"no json\x1b[2J",
        b'["kind"]',
        b'{"id": 4}',
    ]
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, bodies)
    fields = [f"--whitelist-json-field={name}" for name in ("note", "id", "list")]
    flags = ("--require-json-field=kind", "--require-json-value=order", *fields, *QUICK)
    tool = start("nsq_to_nsq", f"--topic={topic}", *cluster.nsqd_flags, *to(destinations[0]), *flags)
    cluster.wait_until_finished(topic, CHANNEL)
    assert tool.stop() == 0, tool.log
    assert sorted(bodies_at(destinations[0], topic)) == [
        b'{"id":2,"list":[1,2.5]}',
        b'{"id":9007199254740993,"note":"\\u003cb\\u003e"}',
    ]
    assert "ERROR: Unable to decode json: no json" in tool.log
    assert "\x1b" not in tool.log
    assert 'ERROR: Unable to decode json: ["kind"]' in tool.log
    assert tool.log.count("missing field to check required value") == 5
    assert "was refused 5 times, giving up" in tool.log


def test_no_message_is_lost_to_a_dead_destination(
    cluster: Cluster, start: Start, topic: str, destinations: list[Nsqd]
) -> None:
    """It is down for longer than go-nsq's five attempts."""
    lines = numbered_lines(40)  # one after another, since the tool backs off
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, lines)
    destination = destinations[0]
    destination.kill()
    tool = start("nsq_to_nsq", f"--topic={topic}", *cluster.nsqd_flags, *to(destination), *QUICK)
    tool.wait_for_log("(attempt 7) was not taken - ")
    destination.start()
    cluster.wait_until_finished(topic, CHANNEL)
    assert tool.stop() == 0, tool.log
    assert set(bodies_at(destination, topic)) == set(lines)


@pytest.mark.ours  # NSQ's nsqd loses messages when it is killed
def test_no_message_is_lost_when_a_destination_dies(
    cluster: Cluster, start: Start, topic: str, destinations: list[Nsqd]
) -> None:
    lines = numbered_lines(20_000)
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, lines)
    tool = start("nsq_to_nsq", f"--topic={topic}", *cluster.nsqd_flags, *to(*destinations), *QUICK)
    eventually(lambda: count_at(topic, destinations[0]) > 0)
    destinations[0].kill()
    cluster.wait_until_finished(topic, CHANNEL)
    assert tool.stop() == 0, tool.log
    destinations[0].start()
    arrived = [bodies_at(nsqd, topic) for nsqd in destinations]
    assert set(arrived[0] + arrived[1]) == set(lines)


@pytest.mark.ours  # NSQ's nsqd loses messages when it is killed
def test_no_message_is_lost_when_a_source_dies(
    make_steady_nsqd: MakeNsqd, start: Start, topic: str, destinations: list[Nsqd]
) -> None:
    lines = numbered_lines(20_000)
    source = make_steady_nsqd("source", "--msg-timeout=2s")
    source.post("/topic/create", topic=topic)
    source.post("/channel/create", topic=topic, channel=CHANNEL)
    assert source.post("/mpub", b"\n".join(lines), topic=topic).status == 200
    flags = (f"--nsqd-tcp-address={source.tcp_address}", "--consumer-opt=lookupd_poll_interval,100ms")
    tool = start("nsq_to_nsq", f"--topic={topic}", *flags, *to(destinations[0]))
    eventually(lambda: count_at(topic, destinations[0]) > 0)
    source.restart(crash=True)
    eventually(lambda: count_at(topic, destinations[0]) >= 20_000, 60)
    eventually(lambda: unfinished(source, topic, CHANNEL) == 0, 60)
    assert tool.stop() == 0, tool.log
    assert set(bodies_at(destinations[0], topic)) == set(lines)


def test_a_message_that_is_too_big_holds_no_other_up(
    cluster: Cluster, start: Start, make_steady_nsqd: MakeNsqd, topic: str
) -> None:
    """The other messages of its MPUB arrive at once, and the large one is given up after five attempts, as by NSQ's."""
    small = make_steady_nsqd("small", "--max-msg-size=1000")
    lines = [*numbered_lines(100), b"x" * 2000, *(b"more %d" % number for number in range(100))]
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, lines)
    tool = start("nsq_to_nsq", f"--topic={topic}", *cluster.nsqd_flags, *to(small), *QUICK)
    cluster.wait_until_finished(topic, CHANNEL)
    assert tool.stop() == 0, tool.log
    assert sorted(bodies_at(small, topic)) == sorted(line for line in lines if len(line) < 2000)
    assert tool.log.count("was not taken") == 5
    assert tool.log.count("was refused 5 times, giving up") == 1


def test_a_slow_destination_gets_no_copies(
    cluster: Cluster, start: Start, topic: str, destinations: list[Nsqd]
) -> None:
    """Its answers take longer than the messages' timeout, which is long enough for a tool that stands still a while."""
    lines = numbered_lines(300)
    cluster.create(topic, CHANNEL)
    cluster.publish(topic, lines[:2])
    with FaultProxy(destinations[0].tcp) as proxy:
        flags = ("--consumer-opt=msg_timeout,9s", "--destination-nsqd-tcp-address={}:{}".format(*proxy.address))
        tool = start("nsq_to_nsq", f"--topic={topic}", *cluster.nsqd_flags, *flags)
        cluster.wait_until_finished(topic, CHANNEL)
        proxy.down.stalled = True
        cluster.publish(topic, lines[2:])
        eventually(lambda: count_at(topic, destinations[0]) > 2)
        time.sleep(9.5)
        proxy.resume()
        cluster.wait_until_finished(topic, CHANNEL)
        assert tool.stop() == 0, tool.log
    assert sorted(bodies_at(destinations[0], topic)) == sorted(lines)


@pytest.mark.ours  # in NSQ's nsqd messages on their way from topic to channel are in neither
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(
    cluster: Cluster, start: Start, topic: str, destinations: list[Nsqd], number: int
) -> None:
    """Each message is either at the destination, once, or still at the source."""
    cluster.create(topic, CHANNEL)
    for _ in range(4):
        cluster.publish(topic, numbered_lines(20_000))
    tool = start("nsq_to_nsq", f"--topic={topic}", *cluster.nsqd_flags, *to(destinations[0]))
    eventually(lambda: count_at(topic, destinations[0]) > 0)
    assert tool.stop(number) == 0
    # The nsqds may still have to read what the tool sent last.
    eventually(lambda: count_at(topic, destinations[0]) + cluster.depth(topic, CHANNEL) == 80_000)
