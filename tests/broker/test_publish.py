"""Checks what a consumer sees after PUB, MPUB and DPUB."""

import time
from collections.abc import Callable

import pytest

from harness import Nsqd, Wire

NSQD_FLAGS = ("--max-req-timeout=60s",)
LONG_MS = 60_000
"""Nothing that waits for so long is due within a test, however long it is held up."""


def test_message_as_delivered(client: Wire, topic: str) -> None:
    before_ns = time.time_ns()
    client.publish(topic, b"hello")
    after_ns = time.time_ns()
    client.subscribe(topic, rdy=1)
    message = client.read_message()
    assert message.body == b"hello"
    assert message.attempts == 1
    assert before_ns <= message.timestamp_ns <= after_ns
    assert len(message.id) == 16
    assert set(message.id) <= set(b"0123456789abcdef")


def test_any_bytes_are_a_body(client: Wire, topic: str) -> None:
    bodies = [bytes(range(256)), b"\n", b"\r\n", b" ", b"\0", b"PUB x\n\0\0\0\1y", b"\xff" * 1000]
    for body in bodies:
        client.publish(topic, body)
    client.subscribe(topic, rdy=100)
    assert {message.body for message in client.read_messages(len(bodies))} == set(bodies)


def test_ids_are_unique_and_rise(client: Wire, topic: str) -> None:
    client.publish(topic, *[b"x"] * 500)
    for _ in range(100):
        client.publish(topic, b"x")
    client.subscribe(topic, rdy=1000)
    ids = [message.id for message in client.read_messages(600)]
    assert len(set(ids)) == 600
    assert ids == sorted(ids)


def test_mpub_keeps_the_order_of_its_messages(client: Wire, topic: str) -> None:
    bodies = [b"%05d" % number for number in range(1000)]
    client.publish(topic, *bodies)
    client.subscribe(topic, rdy=2500)
    assert [message.body for message in client.read_messages(1000)] == bodies


def test_topic_is_made_by_the_first_publish(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(f"{topic}_pub", b"x")
    client.publish(f"{topic}_mpub", b"x", b"y")
    client.DPUB(f"{topic}_dpub", 1000, b"x")
    client.expect_ok()
    assert {f"{topic}_pub", f"{topic}_mpub", f"{topic}_dpub"} <= nsqd.topic_names()


@pytest.mark.parametrize(
    "name", ["a", ".", "..", "-", "_", "A.b-C_9", "x" * 64, "e#ephemeral", "x" * 54 + "#ephemeral"]
)
def test_valid_names(nsqd: Nsqd, client: Wire, name: str) -> None:
    client.publish(name, b"x")
    client.subscribe(name, name, rdy=1)
    message = client.read_message()
    assert message.body == b"x"
    client.FIN(message.id)
    assert name in nsqd.topic_names()


def test_counts_of_a_topic(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, b"12345")
    client.publish(topic, b"123", b"1", b"12")
    client.DPUB(topic, 1000, b"1234")
    client.expect_ok()
    shown = nsqd.topic(topic)
    assert (shown["message_count"], shown["message_bytes"]) == (5, 15)


def test_deferred_message_waits(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    consumer = connect().subscribe(topic, rdy=1)
    publisher = connect()
    start = time.monotonic()
    published_ns = time.time_ns()
    publisher.DPUB(topic, LONG_MS, b"much later")
    publisher.DPUB(topic, 1900, b"later")
    publisher.expect_ok(2)
    answered_ns = time.time_ns()
    message = consumer.read_message()
    assert time.monotonic() - start >= 1.895
    assert (message.body, message.attempts) == (b"later", 1)
    assert published_ns <= message.timestamp_ns <= answered_ns
    consumer.FIN(message.id)
    consumer.assert_usable()
    shown = nsqd.channel(topic)
    assert (shown["depth"], shown["in_flight_count"], shown["deferred_count"]) == (0, 0, 1)
    assert shown["message_count"] == 2


def test_deferred_message_published_before_there_is_a_channel(nsqd: Nsqd, client: Wire, topic: str) -> None:
    start = time.monotonic()
    client.DPUB(topic, 1900, b"later")
    client.expect_ok()
    client.publish(topic, b"now")
    client.subscribe(topic, rdy=5, output_buffer_timeout=25)
    # In any order, if this process is held up.
    assert {message.body for message in client.read_messages(2, finish=True)} == {b"now", b"later"}
    assert time.monotonic() - start >= 1.895
    client.assert_usable()
    shown = nsqd.channel(topic)
    assert (shown["depth"], shown["in_flight_count"], shown["deferred_count"]) == (0, 0, 0)
    assert shown["message_count"] == 2


def test_deferred_message_does_not_hold_up_others(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    consumer = connect().subscribe(topic, rdy=1)
    publisher = connect()
    publisher.DPUB(topic, LONG_MS, b"much later")
    publisher.DPUB(topic, 100, b"later")
    publisher.expect_ok(2)
    publisher.publish(topic, b"now")
    # In any order, if this process is held up.
    bodies = {message.body for message in consumer.read_messages(2, finish=True)}
    assert bodies == {b"now", b"later"}
    assert nsqd.channel(topic)["deferred_count"] == 1


def test_deferred_messages_come_when_each_is_due(connect: Callable[..., Wire], topic: str) -> None:
    consumer = connect().subscribe(topic, "warm", rdy=1)
    publisher = connect()
    publisher.DPUB(topic, 0, b"first")
    publisher.expect_ok()
    consumer.FIN(consumer.read_message().id)
    start = time.monotonic()
    for delay_ms in (900, 300, 600):
        publisher.DPUB(topic, delay_ms, b"%d" % delay_ms)
    publisher.expect_ok(3)
    consumer.RDY(3)
    for message in consumer.read_messages(3, finish=True):
        assert time.monotonic() - start >= int(message.body) / 1000 - 0.005


@pytest.mark.parametrize("delay", ["0", "", "00000"])
def test_no_delay_is_a_plain_publish(client: Wire, topic: str, delay: str) -> None:
    client.command(f"DPUB {topic} {delay}", b"x")
    client.expect_ok()
    client.subscribe(topic, rdy=1)
    assert client.read_message().body == b"x"


def test_longest_delay(client: Wire, topic: str) -> None:
    client.DPUB(topic, LONG_MS, b"x")
    client.expect_ok()
    client.DPUB(topic, LONG_MS + 1, b"x")
    client.expect_error(f"E_INVALID DPUB timeout {LONG_MS + 1} out of range 0-{LONG_MS}")


def test_every_channel_gets_a_deferred_message(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    consumers = [connect().subscribe(topic, f"ch{number}", rdy=1) for number in range(3)]
    publisher = connect()
    publisher.DPUB(topic, 100, b"x")
    publisher.expect_ok()
    ids = {consumer.read_message().id for consumer in consumers}
    assert len(ids) == 1


def test_publishing_to_a_deleted_topic_makes_it_again(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, b"old")
    assert nsqd.post("/topic/delete", topic=topic).status == 200
    client.publish(topic, b"new")
    client.subscribe(topic, rdy=1)
    message = client.read_message()
    assert message.body == b"new"
    client.FIN(message.id)
    client.expect_silence(0.1)


def test_two_publishers_at_once(connect: Callable[..., Wire], topic: str) -> None:
    publishers = [connect() for _ in range(4)]
    for number in range(50):
        for publisher in publishers:
            publisher.PUB(topic, b"%d" % number)
    for publisher in publishers:
        publisher.expect_ok(50)
    consumer = connect().subscribe(topic, rdy=1000)
    bodies = sorted(int(message.body) for message in consumer.read_messages(200, finish=True))
    assert bodies == sorted(list(range(50)) * 4)


def test_a_long_mpub_is_answered_once_and_what_follows_after_it(nsqd: Nsqd, client: Wire, topic: str) -> None:
    """It takes several turns, in which neither its own messages nor the commands behind it may be mixed up."""
    bodies = [b"%d" % number for number in range(70_000)]
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, rdy=2000, heartbeat_interval=60_000)  # none in between, however slow it is
        client.publish(topic, b"first")
        client.MPUB(topic, bodies)
        client.PUB(topic, b"last")
        client.NOP()
        client.expect_ok(2)
        client.assert_usable()
        received = [message.body for message in consumer.read_messages(70_002, finish=True)]
    assert received == [b"first", *bodies, b"last"]
