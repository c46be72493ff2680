"""Creates, deletes, empties and pauses topics and channels over HTTP."""

from collections.abc import Callable

import pytest

from harness import HttpReply, Nsqd, Wire, eventually


def assert_error(reply: HttpReply, status: int, code: str) -> None:
    assert (reply.status, reply.body) == (status, b'{"message":"%s"}' % code.encode())
    assert reply.headers["Content-Type"] == "application/json; charset=utf-8"
    assert reply.headers["X-NSQ-Content-Type"] == "nsq; version=1.0"


def assert_done(reply: HttpReply) -> None:
    assert (reply.status, reply.body) == (200, b"")


TOPIC_VERBS = ["create", "delete", "empty", "pause", "unpause"]
CHANNEL_VERBS = ["create", "delete", "empty", "pause", "unpause"]
NAME_IS_CHECKED = ["create", "empty"]
BAD_NAMES = ["", "a$b", "x" * 65, "#ephemeral", "a b"]


@pytest.mark.parametrize("verb", TOPIC_VERBS)
def test_topic_argument(nsqd: Nsqd, topic: str, verb: str) -> None:
    assert_error(nsqd.post(f"/topic/{verb}"), 400, "MISSING_ARG_TOPIC")
    for name in BAD_NAMES:
        if verb in NAME_IS_CHECKED:
            assert_error(nsqd.post(f"/topic/{verb}", topic=name), 400, "INVALID_TOPIC")
        else:
            assert_error(nsqd.post(f"/topic/{verb}", topic=name), 404, "TOPIC_NOT_FOUND")
    if verb != "create":
        assert_error(nsqd.post(f"/topic/{verb}", topic=topic), 404, "TOPIC_NOT_FOUND")


@pytest.mark.parametrize("verb", CHANNEL_VERBS)
def test_channel_arguments(nsqd: Nsqd, topic: str, verb: str) -> None:
    path = f"/channel/{verb}"
    assert_error(nsqd.post(path), 400, "MISSING_ARG_TOPIC")
    assert_error(nsqd.post(path, channel="c"), 400, "MISSING_ARG_TOPIC")
    assert_error(nsqd.post(path, topic=topic), 400, "MISSING_ARG_CHANNEL")
    for name in BAD_NAMES:
        assert_error(nsqd.post(path, topic=name, channel="c"), 400, "INVALID_ARG_TOPIC")
        assert_error(nsqd.post(path, topic=topic, channel=name), 400, "INVALID_ARG_CHANNEL")
    assert_error(nsqd.post(path, topic=topic, channel="c"), 404, "TOPIC_NOT_FOUND")
    assert_done(nsqd.post("/topic/create", topic=topic))
    if verb == "create":
        assert_done(nsqd.post(path, topic=topic, channel="c"))
    else:
        assert_error(nsqd.post(path, topic=topic, channel="c"), 404, "CHANNEL_NOT_FOUND")


def test_create_and_delete(nsqd: Nsqd, topic: str) -> None:
    for _ in range(2):
        assert_done(nsqd.post("/topic/create", topic=topic))
        assert_done(nsqd.post("/channel/create", topic=topic, channel="c"))
    shown = nsqd.topic(topic)
    assert [channel["channel_name"] for channel in shown["channels"]] == ["c"]
    assert_done(nsqd.post("/channel/delete", topic=topic, channel="c"))
    assert nsqd.topic(topic)["channels"] == []
    assert_error(nsqd.post("/channel/delete", topic=topic, channel="c"), 404, "CHANNEL_NOT_FOUND")
    assert_done(nsqd.post("/topic/delete", topic=topic))
    assert topic not in nsqd.topic_names()
    assert_error(nsqd.post("/topic/delete", topic=topic), 404, "TOPIC_NOT_FOUND")


def test_deleted_channel_starts_anew(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    nsqd.post("/topic/create", topic=topic)
    nsqd.post("/channel/create", topic=topic, channel="ch")
    nsqd.post("/channel/create", topic=topic, channel="other")
    connect().publish(topic, b"old")
    eventually(lambda: nsqd.channel(topic)["depth"] == 1)
    nsqd.post("/channel/delete", topic=topic, channel="ch")
    consumer = connect().subscribe(topic, rdy=1)
    consumer.expect_silence(0.15)
    connect().publish(topic, b"new")
    assert consumer.read_message().body == b"new"


def test_topic_pause_holds_messages_back(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    consumer = connect().subscribe(topic, rdy=10)
    publisher = connect()
    assert_done(nsqd.post("/topic/pause", topic=topic))
    assert nsqd.topic(topic)["paused"] is True
    publisher.publish(topic, b"one", b"two")
    consumer.expect_silence(0.15)
    shown = nsqd.topic(topic)
    assert (shown["depth"], shown["channels"][0]["depth"], shown["channels"][0]["message_count"]) == (2, 0, 0)
    assert_done(nsqd.post("/topic/pause", topic=topic))
    assert_done(nsqd.post("/topic/unpause", topic=topic))
    assert {message.body for message in consumer.read_messages(2)} == {b"one", b"two"}
    assert nsqd.topic(topic)["paused"] is False
    assert nsqd.topic(topic)["depth"] == 0
    assert_done(nsqd.post("/topic/unpause", topic=topic))


def test_channel_delivers_what_it_has_while_its_topic_is_paused(
    nsqd: Nsqd, connect: Callable[..., Wire], topic: str
) -> None:
    publisher = connect()
    nsqd.post("/topic/create", topic=topic)
    nsqd.post("/channel/create", topic=topic, channel="ch")
    publisher.publish(topic, b"before")
    eventually(lambda: nsqd.channel(topic)["depth"] == 1)
    nsqd.post("/topic/pause", topic=topic)
    publisher.publish(topic, b"during")
    consumer = connect().subscribe(topic, rdy=10)
    assert consumer.read_message().body == b"before"
    consumer.expect_silence(0.1)


def test_channel_made_during_a_pause_gets_what_was_held_back(
    nsqd: Nsqd, connect: Callable[..., Wire], topic: str
) -> None:
    old = connect().subscribe(topic, "old", rdy=10)
    publisher = connect()
    nsqd.post("/topic/pause", topic=topic)
    publisher.publish(topic, b"held")
    new = connect().subscribe(topic, "new", rdy=10)
    new.expect_silence(0.1)
    nsqd.post("/topic/unpause", topic=topic)
    assert old.read_message().body == b"held"
    assert new.read_message().body == b"held"


def test_channel_pause(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    paused, other = connect().subscribe(topic, "paused", rdy=10), connect().subscribe(topic, "other", rdy=10)
    publisher = connect()
    publisher.publish(topic, b"before")
    message = paused.read_message()
    other.read_message()
    assert_done(nsqd.post("/channel/pause", topic=topic, channel="paused"))
    assert nsqd.channel(topic, "paused")["paused"] is True
    assert nsqd.channel(topic, "other")["paused"] is False
    publisher.publish(topic, b"during")
    assert other.read_message().body == b"during"
    paused.expect_silence(0.15)
    paused.FIN(message.id)
    paused.assert_usable()
    shown = nsqd.channel(topic, "paused")
    assert (shown["depth"], shown["in_flight_count"]) == (1, 0)
    assert_done(nsqd.post("/channel/unpause", topic=topic, channel="paused"))
    assert paused.read_message().body == b"during"


def test_requeue_on_a_paused_channel_waits(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    consumer = connect().subscribe(topic, rdy=1)
    connect().publish(topic, b"x")
    message = consumer.read_message()
    nsqd.post("/channel/pause", topic=topic, channel="ch")
    consumer.REQ(message.id, 0)
    consumer.expect_silence(0.15)
    nsqd.post("/channel/unpause", topic=topic, channel="ch")
    assert consumer.read_message().attempts == 2


def test_topic_empty(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    publisher = connect()
    publisher.publish(topic, b"old", b"older")
    assert nsqd.topic(topic)["depth"] == 2
    assert_done(nsqd.post("/topic/empty", topic=topic))
    assert nsqd.topic(topic)["depth"] == 0
    consumer = connect().subscribe(topic, rdy=1)
    consumer.expect_silence(0.1)
    publisher.publish(topic, b"new")
    assert consumer.read_message().body == b"new"


def test_topic_empty_leaves_the_channels_alone(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    nsqd.post("/topic/create", topic=topic)
    nsqd.post("/channel/create", topic=topic, channel="ch")
    publisher = connect()
    publisher.publish(topic, b"kept")
    eventually(lambda: nsqd.channel(topic)["depth"] == 1)
    nsqd.post("/topic/pause", topic=topic)
    publisher.publish(topic, b"dropped", b"dropped")
    assert_done(nsqd.post("/topic/empty", topic=topic))
    nsqd.post("/topic/unpause", topic=topic)
    publisher.publish(topic, b"next")
    consumer = connect().subscribe(topic, rdy=10)
    assert {message.body for message in consumer.read_messages(2)} == {b"kept", b"next"}
    consumer.expect_silence(0.1)


def test_channel_empty(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    """Queued, in flight and deferred messages all go."""
    consumer = connect().subscribe(topic, rdy=2)
    publisher = connect()
    publisher.publish(topic, *[b"x"] * 10)
    messages = consumer.read_messages(2)
    consumer.RDY(0)
    consumer.REQ(messages[0].id, 60_000)
    eventually(lambda: nsqd.channel(topic)["deferred_count"] == 1)
    assert_done(nsqd.post("/channel/empty", topic=topic, channel="ch"))
    shown = nsqd.channel(topic)
    assert (shown["depth"], shown["in_flight_count"], shown["deferred_count"]) == (0, 0, 0)
    consumer.RDY(10)
    consumer.expect_silence(0.1)
    publisher.publish(topic, b"new")
    assert consumer.read_message().body == b"new"


@pytest.mark.parametrize("held", [0, 1, 3])
@pytest.mark.parametrize("verb", ["topic", "channel"])
def test_empty_leaves_an_ephemeral_channel_alone(
    nsqd: Nsqd, connect: Callable[..., Wire], topic: str, verb: str, held: int
) -> None:
    """What waits there, is in flight or waits for its delay is still delivered, though no other channel needs it."""
    lasting = connect().subscribe(topic, "c", rdy=3, output_buffer_size=-1)
    fleeting = connect().subscribe(topic, "c#ephemeral", rdy=held, output_buffer_size=-1)
    connect().publish(topic, b"1", b"2", b"3")
    in_flight = fleeting.read_messages(held)
    if verb == "topic":
        lasting.read_messages(3, finish=True)
        lasting.assert_usable()
        assert_done(nsqd.post("/topic/empty", topic=topic))
    else:
        assert_done(nsqd.post("/channel/empty", topic=topic, channel="c"))
    for message in in_flight:
        fleeting.REQ(message.id, 0)
    fleeting.RDY(3)
    assert sorted(message.body for message in fleeting.read_messages(3)) == [b"1", b"2", b"3"]


def test_channel_empty_leaves_other_channels_alone(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    nsqd.post("/topic/create", topic=topic)
    for channel in ("one", "two"):
        nsqd.post("/channel/create", topic=topic, channel=channel)
    connect().publish(topic, b"x")
    eventually(lambda: nsqd.channel(topic, "two")["depth"] == 1)
    nsqd.post("/channel/empty", topic=topic, channel="one")
    assert nsqd.channel(topic, "one")["depth"] == 0
    assert connect().subscribe(topic, "two", rdy=1).read_message().body == b"x"


def test_deleting_a_topic_drops_its_messages(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    publisher = connect()
    publisher.publish(topic, b"old")
    nsqd.post("/channel/create", topic=topic, channel="ch")
    assert_done(nsqd.post("/topic/delete", topic=topic))
    consumer = connect().subscribe(topic, rdy=1)
    consumer.expect_silence(0.15)
    assert nsqd.topic(topic)["message_count"] == 0
