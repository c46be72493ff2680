"""Checks what NSQ promises beyond single commands: backlog, ephemeral things, restarts."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Nsqd, StartError, Wire, eventually


def test_backlog_goes_to_the_first_channel_only(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    publisher = connect()
    publisher.publish(topic, b"one", b"two")
    assert nsqd.topic(topic)["depth"] == 2
    first = connect().subscribe(topic, "first", rdy=10)
    assert {message.body for message in first.read_messages(2)} == {b"one", b"two"}
    second = connect().subscribe(topic, "second", rdy=10)
    publisher.publish(topic, b"three")
    assert second.read_message().body == b"three"
    assert first.read_message().body == b"three"
    second.expect_silence(0.1)
    assert nsqd.channel(topic, "second")["message_count"] == 1


def test_channel_without_consumers_keeps_messages(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    nsqd.post("/topic/create", topic=topic)
    nsqd.post("/channel/create", topic=topic, channel="ch")
    connect().publish(topic, b"x", b"y")
    eventually(lambda: nsqd.channel(topic)["depth"] == 2)
    assert nsqd.topic(topic)["depth"] == 0
    assert len(connect().subscribe(topic, rdy=2).read_messages(2)) == 2


def test_ephemeral_channel_goes_with_its_last_client(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    first, second = (connect().subscribe(topic, "c#ephemeral") for _ in range(2))
    first.close()
    eventually(lambda: nsqd.channel(topic, "c#ephemeral")["client_count"] == 1)
    second.close()
    eventually(lambda: nsqd.topic(topic)["channels"] == [])
    assert topic in nsqd.topic_names()


def test_ephemeral_channel_made_over_http_waits_for_its_first_client(
    nsqd: Nsqd, connect: Callable[..., Wire], topic: str
) -> None:
    nsqd.post("/topic/create", topic=topic)
    nsqd.post("/channel/create", topic=topic, channel="c#ephemeral")
    assert nsqd.channel(topic, "c#ephemeral")["client_count"] == 0
    connect().subscribe(topic, "c#ephemeral").close()
    eventually(lambda: nsqd.topic(topic)["channels"] == [])


def test_ephemeral_topic_goes_with_its_last_channel(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    name = f"{topic}#ephemeral"
    connect().publish(name, b"x")
    assert name in nsqd.topic_names()
    consumer = connect().subscribe(name, "c#ephemeral", rdy=1)
    assert consumer.read_message().body == b"x"
    consumer.close()
    eventually(lambda: name not in nsqd.topic_names())


def test_ephemeral_topic_stays_with_a_lasting_channel(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    name = f"{topic}#ephemeral"
    lasting, fleeting = connect().subscribe(name, "lasting"), connect().subscribe(name, "c#ephemeral")
    fleeting.close()
    lasting.close()
    eventually(lambda: [entry["channel_name"] for entry in nsqd.topic(name)["channels"]] == ["lasting"])
    nsqd.post("/channel/delete", topic=name, channel="lasting")
    eventually(lambda: name not in nsqd.topic_names())


@pytest.mark.ours
def test_subscribing_again_right_after_leaving_an_ephemeral_channel(
    nsqd: Nsqd, connect: Callable[..., Wire], topic: str
) -> None:
    """NSQ may give the new client the channel that is just being deleted, and close it."""
    for number in range(20):
        consumer = connect().subscribe(f"{topic}#ephemeral", "c#ephemeral", rdy=1)
        body = b"%d" % number
        connect().publish(f"{topic}#ephemeral", body)
        message = consumer.read_message()
        consumer.FIN(message.id)
        consumer.close()


def test_ephemeral_topic_overflow_is_acknowledged_and_bounded(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]
) -> None:
    daemon = make_nsqd("--mem-queue-size=10")
    publisher = connect(daemon)
    publisher.publish("t#ephemeral", *[b"%03d" % number for number in range(100)])
    shown = daemon.topic("t#ephemeral")
    assert shown["message_count"] == 100
    assert shown["depth"] == 10
    consumer = connect(daemon).subscribe("t#ephemeral", "c#ephemeral", rdy=100, output_buffer_timeout=25)
    assert len(consumer.read_messages(10)) == 10
    consumer.expect_silence(0.1)


@pytest.mark.parametrize("size", [0, 1, 10])
def test_small_memory_loses_nothing(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], size: int) -> None:
    daemon = make_nsqd(f"--mem-queue-size={size}")
    publisher = connect(daemon)
    consumers = [connect(daemon).subscribe("t", channel, rdy=200) for channel in ("a", "b")]
    for start in range(0, 1000, 100):
        publisher.publish("t", *[b"%04d" % number for number in range(start, start + 100)])
    for consumer in consumers:
        bodies = {message.body for message in consumer.read_messages(1000, finish=True)}
        assert len(bodies) == 1000


def test_restart_keeps_topics_channels_and_pauses(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    for name in ("plain", "paused", "gone#ephemeral", "nochan"):
        daemon.post("/topic/create", topic=name)
    for name in ("plain", "paused", "gone#ephemeral"):
        for channel in ("one", "two", "gone#ephemeral"):
            daemon.post("/channel/create", topic=name, channel=channel)
    daemon.post("/topic/pause", topic="paused")
    daemon.post("/channel/pause", topic="plain", channel="two")
    daemon.post("/topic/create", topic="deleted")
    daemon.post("/topic/delete", topic="deleted")
    daemon.restart()
    shown = {
        topic["topic_name"]: (topic["paused"], [(c["channel_name"], c["paused"]) for c in topic["channels"]])
        for topic in daemon.stats()["topics"]
    }
    assert shown == {
        "plain": (False, [("one", False), ("two", True)]),
        "paused": (True, [("one", False), ("two", False)]),
        "nochan": (False, []),
    }


def test_metadata_file(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    daemon.post("/topic/create", topic="t")
    daemon.post("/topic/create", topic="e#ephemeral")
    daemon.post("/topic/create", topic="nochan")
    for channel in ("c", "c#ephemeral"):
        daemon.post("/channel/create", topic="t", channel=channel)
    daemon.post("/channel/pause", topic="t", channel="c")
    daemon.post("/topic/pause", topic="nochan")
    stored = json.loads((daemon.data_path / "nsqd.dat").read_text())
    assert list(stored)[:2] == ["topics", "version"]
    assert stored["version"] == "1.3.0"
    topics = sorted(stored["topics"], key=lambda topic: topic["name"])
    assert [(topic["name"], topic["paused"]) for topic in topics] == [("nochan", True), ("t", False)]
    assert not topics[0]["channels"]
    assert topics[1]["channels"] == [{"name": "c", "paused": True}]
    assert (daemon.data_path / "nsqd.dat").stat().st_mode & 0o777 == 0o600


def test_metadata_of_another_nsqd_is_read(make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "nsqd.dat").write_text(
        '{"topics":[{"name":"t","paused":false,"channels":[{"name":"c","paused":true},{"name":"b$d"}]},'
        '{"name":"n","paused":true,"channels":null},{"name":"b$d","paused":true}],"version":"1.3.0"}'
    )
    daemon = make_nsqd()
    assert daemon.topic_names() == {"t", "n"}
    assert [(c["channel_name"], c["paused"]) for c in daemon.topic("t")["channels"]] == [("c", True)]
    assert daemon.topic("n")["paused"] is True


@pytest.mark.parametrize("content", [b"", b"{", b"nonsense", b"\0\0\0"])
def test_broken_metadata_is_fatal(make_nsqd: Callable[..., Nsqd], tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "nsqd.dat").write_bytes(content)
    with pytest.raises(StartError) as caught:
        make_nsqd()
    assert caught.value.exit_code == 1
    assert "failed to load metadata - " in caught.value.log


def test_messages_survive_a_stop(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    """Messages queued in a topic or a channel, in flight and deferred all come again after a restart."""
    daemon = make_nsqd()
    publisher = connect(daemon)
    publisher.publish("backlog", b"b1", b"b2")
    consumer = connect(daemon).subscribe("t", rdy=2)
    publisher.publish("t", b"1", b"2", b"3", b"4")
    messages = consumer.read_messages(2)
    consumer.RDY(0)
    consumer.FIN(messages[0].id)
    publisher.DPUB("t", 5000, b"deferred")
    publisher.expect_ok()
    # Deferred or, if this process is held up, due already.
    eventually(lambda: (shown := daemon.channel("t"))["depth"] + shown["deferred_count"] == 3)
    daemon.restart()
    assert daemon.topic("backlog")["depth"] == 2
    consumer = connect(daemon).subscribe("t", rdy=10)
    again = {message.body: message for message in consumer.read_messages(4, finish=True)}
    expected = {b"1", b"2", b"3", b"4", b"deferred"} - {messages[0].body}
    assert set(again) == expected
    assert again[messages[1].body].attempts == 2
    assert again[messages[1].body].id == messages[1].id
    assert again[messages[1].body].timestamp_ns == messages[1].timestamp_ns
    assert again[b"deferred"].attempts == 1
    consumer.expect_silence(0.1)
    backlog = connect(daemon).subscribe("backlog", rdy=10)
    assert {message.body for message in backlog.read_messages(2)} == {b"b1", b"b2"}


def test_counters_start_at_zero_after_a_restart(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    daemon = make_nsqd()
    daemon.post("/topic/create", topic="t")
    daemon.post("/channel/create", topic="t", channel="ch")
    connect(daemon).publish("t", b"x", b"y", b"z")
    eventually(lambda: daemon.channel("t")["depth"] == 3)
    daemon.restart()
    shown = daemon.channel("t")
    assert (shown["depth"], shown["message_count"], shown["requeue_count"]) == (3, 0, 0)
    assert (daemon.topic("t")["message_count"], daemon.topic("t")["message_bytes"]) == (0, 0)


def test_paused_topic_keeps_its_messages_over_a_restart(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]
) -> None:
    daemon = make_nsqd()
    daemon.post("/topic/create", topic="t")
    daemon.post("/channel/create", topic="t", channel="ch")
    daemon.post("/topic/pause", topic="t")
    connect(daemon).publish("t", b"x")
    daemon.restart()
    assert (daemon.topic("t")["depth"], daemon.channel("t")["depth"]) == (1, 0)
    consumer = connect(daemon).subscribe("t", rdy=1)
    consumer.expect_silence(0.1)
    daemon.post("/topic/unpause", topic="t")
    assert consumer.read_message().body == b"x"


def test_stop_closes_connections(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    daemon = make_nsqd()
    consumer, idle = connect(daemon).subscribe("t", rdy=1), connect(daemon)
    idle.assert_usable()
    assert daemon.stop() == 0
    consumer.expect_closed()
    idle.expect_closed()


def test_data_path_is_locked(make_nsqd: Callable[..., Nsqd]) -> None:
    first = make_nsqd()
    with pytest.raises(StartError) as caught:
        make_nsqd()
    assert caught.value.exit_code == 1
    assert "failed to lock data-path" in caught.value.log
    assert "possibly in use by another instance of nsqd" in caught.value.log
    assert first.get("/ping").body == b"OK"
    first.kill()
    make_nsqd()


def test_emptied_messages_stay_gone_after_a_restart(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]
) -> None:
    daemon = make_nsqd()
    daemon.post("/topic/create", topic="t")
    daemon.post("/channel/create", topic="t", channel="ch")
    publisher = connect(daemon)
    publisher.publish("t", b"x", b"y")
    publisher.publish("nochan", b"x", b"y")
    eventually(lambda: daemon.channel("t")["depth"] == 2)
    daemon.post("/channel/empty", topic="t", channel="ch")
    daemon.post("/topic/empty", topic="nochan")
    daemon.restart()
    assert (daemon.channel("t")["depth"], daemon.topic("nochan")["depth"]) == (0, 0)


def test_deleted_topic_made_again_after_a_restart_is_empty(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]
) -> None:
    daemon = make_nsqd()
    connect(daemon).publish("t", b"x")
    daemon.post("/topic/delete", topic="t")
    daemon.restart()
    assert daemon.topic_names() == set()
    consumer = connect(daemon).subscribe("t", rdy=1)
    consumer.expect_silence(0.1)


def test_requeued_with_delay_comes_back_after_a_restart(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]
) -> None:
    daemon = make_nsqd()
    consumer = connect(daemon).subscribe("t", rdy=1)
    connect(daemon).publish("t", b"x")
    message = consumer.read_message()
    consumer.RDY(0)  # it must not come again here, though this process be held up
    consumer.REQ(message.id, 4000)
    eventually(lambda: daemon.channel("t")["requeue_count"] == 1)
    daemon.restart()
    again = connect(daemon).subscribe("t", rdy=1).read_message()
    assert (again.id, again.attempts, again.body) == (message.id, 2, b"x")


def test_many_topics_at_once(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    client = connect()
    names = [f"{topic}_{number}" for number in range(100)]
    for name in names:
        client.PUB(name, name.encode())
    client.expect_ok(100)
    for name in names:
        consumer = connect().subscribe(name, rdy=1)
        assert consumer.read_message().body == name.encode()
        consumer.close()


def test_publish_timestamp_survives_requeue_and_restart(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]
) -> None:
    daemon = make_nsqd()
    consumer = connect(daemon).subscribe("t", rdy=1)
    connect(daemon).publish("t", b"x")
    first = consumer.read_message()
    time.sleep(0.02)  # so that a fresh timestamp would differ
    consumer.REQ(first.id, 0)
    assert consumer.read_message().timestamp_ns == first.timestamp_ns
    daemon.restart()
    third = connect(daemon).subscribe("t", rdy=1).read_message()
    assert (third.timestamp_ns, third.attempts) == (first.timestamp_ns, 3)
