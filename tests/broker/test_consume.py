"""Checks SUB, RDY, FIN, REQ, CLS and how messages are shared out."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from harness import Message, Nsqd, Wire, eventually

NSQD_FLAGS = ("--max-req-timeout=2s",)

UNBUFFERED: dict[str, Any] = {"output_buffer_size": -1}


def _in_flight(nsqd: Nsqd, topic: str) -> dict[int, int]:
    """Returns how many messages each consumer has, by its local port, when nsqd has none left to send."""

    def shared_out() -> dict[str, Any] | None:
        channel = nsqd.channel(topic)
        return None if nsqd.topic(topic)["depth"] or channel["depth"] else channel

    clients = eventually(shared_out)["clients"]
    return {int(entry["remote_address"].rpartition(":")[2]): entry["in_flight_count"] for entry in clients}


def test_nothing_flows_before_rdy(connect: Callable[..., Wire], topic: str) -> None:
    consumer = connect().subscribe(topic)
    connect().publish(topic, b"x")
    consumer.expect_silence(0.2)
    consumer.RDY(1)
    assert consumer.read_message().body == b"x"


@pytest.mark.parametrize("line", ["RDY", "RDY 1", "RDY 01"])
def test_rdy_without_a_number_is_one(connect: Callable[..., Wire], topic: str, line: str) -> None:
    consumer = connect().subscribe(topic)
    consumer.command(line)
    connect().publish(topic, b"x", b"y")
    consumer.read_message()
    consumer.expect_silence(0.1)


def test_empty_number_is_zero(connect: Callable[..., Wire], topic: str) -> None:
    consumer = connect().subscribe(topic, rdy=1)
    consumer.command("RDY ")
    consumer.assert_usable()
    connect().publish(topic, b"x")
    consumer.expect_silence(0.2)


def test_rdy_is_a_window(connect: Callable[..., Wire], topic: str) -> None:
    """RDY is no credit: each FIN or REQ lets the next message through, without another RDY."""
    connect().publish(topic, *[b"%d" % number for number in range(20)])
    consumer = connect().subscribe(topic, rdy=5, **UNBUFFERED)
    messages = consumer.read_messages(5)
    consumer.expect_silence(0.1)
    consumer.FIN(messages[0].id)
    consumer.FIN(messages[1].id)
    messages += consumer.read_messages(2)
    consumer.expect_silence(0.1)
    for message in messages[2:]:
        consumer.FIN(message.id)
    consumer.read_messages(5)
    consumer.expect_silence(0.1)


def test_raising_and_lowering_rdy(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    connect().publish(topic, *[b"x"] * 20)
    consumer = connect().subscribe(topic, rdy=2, **UNBUFFERED)
    messages = consumer.read_messages(2)
    consumer.RDY(4)
    messages += consumer.read_messages(2)
    consumer.RDY(1)
    for message in messages[:3]:
        consumer.FIN(message.id)
    consumer.expect_silence(0.1)
    consumer.FIN(messages[3].id)
    last = consumer.read_message()
    consumer.RDY(0)
    consumer.FIN(last.id)
    consumer.expect_silence(0.1)
    consumer.assert_usable()
    shown = nsqd.channel(topic)
    assert (shown["depth"], shown["in_flight_count"]) == (15, 0)
    assert shown["clients"][0]["ready_count"] == 0


def test_fin_is_silent_and_final(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, b"x")
    client.subscribe(topic, rdy=1)
    message = client.read_message()
    client.FIN(message.id)
    client.assert_usable()
    client.FIN(message.id)
    client.expect_error(f"E_FIN_FAILED FIN {message.id.decode()} failed ID not in flight", fatal=False)
    client.assert_usable()
    shown = nsqd.channel(topic)
    assert (shown["depth"], shown["in_flight_count"], shown["clients"][0]["finish_count"]) == (0, 0, 1)


def test_finishing_out_of_order(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, *[b"%d" % number for number in range(100)])
    client.subscribe(topic, rdy=100)
    for message in reversed(client.read_messages(100)):
        client.FIN(message.id)
    client.assert_usable()
    shown = nsqd.channel(topic)
    assert (shown["depth"], shown["in_flight_count"], shown["message_count"]) == (0, 0, 100)


def test_requeue_at_once(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, b"x")
    client.subscribe(topic, rdy=1)
    first = client.read_message()
    for attempts in (2, 3, 4):
        client.REQ(first.id, 0)
        again = client.read_message()
        assert again == Message(first.timestamp_ns, attempts, first.id, b"x")
    client.FIN(first.id)
    client.assert_usable()
    shown = nsqd.channel(topic)
    assert (shown["requeue_count"], shown["message_count"], shown["timeout_count"]) == (3, 1, 0)
    assert shown["clients"][0]["requeue_count"] == 3
    assert shown["clients"][0]["message_count"] == 4
    assert shown["clients"][0]["finish_count"] == 1


def test_requeue_with_delay(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, b"x")
    client.subscribe(topic, rdy=1)
    message = client.read_message()
    start = time.monotonic()
    client.REQ(message.id, 1900)
    shown = eventually(lambda: found if (found := nsqd.channel(topic))["requeue_count"] else None)
    if time.monotonic() - start < 1.9:  # else this process was held up until the message was due
        assert (shown["deferred_count"], shown["depth"]) == (1, 0)
    again = client.read_message()
    assert time.monotonic() - start >= 1.895
    assert again.attempts == 2


def test_requeued_message_may_go_to_another_consumer(connect: Callable[..., Wire], topic: str) -> None:
    first = connect().subscribe(topic, rdy=1)
    connect().publish(topic, b"x")
    message = first.read_message()
    second = connect().subscribe(topic, rdy=1)
    first.RDY(0)
    first.REQ(message.id, 0)
    again = second.read_message()
    assert (again.id, again.attempts) == (message.id, 2)
    first.FIN(message.id)
    first.expect_error(f"E_FIN_FAILED FIN {message.id.decode()} failed client does not own message", fatal=False)
    second.FIN(message.id)
    second.assert_usable()


@pytest.mark.parametrize("delay", [b"99999999", b"2001", b"18446744073709551615"])
def test_requeue_delay_is_clamped(nsqd: Nsqd, client: Wire, topic: str, delay: bytes) -> None:
    client.publish(topic, b"x")
    client.subscribe(topic, rdy=1)
    message = client.read_message()
    client.send(b"REQ " + message.id + b" " + delay + b"\n")
    assert client.read_message().attempts == 2


def test_requeue_delay_that_is_not_clamped_away(client: Wire, topic: str) -> None:
    client.publish(topic, b"x")
    client.subscribe(topic, rdy=1)
    start = time.monotonic()
    client.REQ(client.read_message().id, 10_000)
    client.read_message()
    assert time.monotonic() - start >= 1.99


def test_close_wait(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    consumer = connect().subscribe(topic, rdy=1)
    publisher = connect()
    publisher.publish(topic, b"one", b"two", b"three")
    message = consumer.read_message()
    consumer.CLS()
    consumer.expect("CLOSE_WAIT")
    shown = nsqd.channel(topic)["clients"][0]
    assert (shown["state"], shown["ready_count"], shown["in_flight_count"]) == (4, 0, 1)
    consumer.RDY(10)
    consumer.command("RDY nonsense")
    consumer.TOUCH(message.id)
    consumer.FIN(message.id)
    consumer.expect_silence(0.2)
    consumer.assert_usable()
    assert nsqd.channel(topic)["in_flight_count"] == 0
    consumer.CLS()
    consumer.expect_error("E_INVALID cannot CLS in current state")


def test_requeue_while_closing(connect: Callable[..., Wire], topic: str) -> None:
    consumer = connect().subscribe(topic, rdy=1)
    connect().publish(topic, b"x")
    message = consumer.read_message()
    consumer.CLS()
    consumer.expect("CLOSE_WAIT")
    consumer.REQ(message.id, 0)
    consumer.expect_silence(0.1)
    assert connect().subscribe(topic, rdy=1).read_message().attempts == 2


def test_states_shown_in_stats(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, b"x")
    producer = next(
        entry for entry in nsqd.stats()["producers"] if entry["remote_address"].endswith(f":{client.local_port}")
    )
    assert producer["state"] == 0
    client.subscribe(topic)
    assert nsqd.channel(topic)["clients"][0]["state"] == 3


def test_consumers_of_a_channel_share_its_messages(connect: Callable[..., Wire], topic: str) -> None:
    consumers = [connect().subscribe(topic, rdy=1) for _ in range(4)]
    connect().publish(topic, b"a", b"b", b"c", b"d")
    bodies = {consumer.read_message().body for consumer in consumers}
    assert bodies == {b"a", b"b", b"c", b"d"}


def test_every_channel_gets_every_message(connect: Callable[..., Wire], topic: str) -> None:
    consumers = [connect().subscribe(topic, f"ch{number}", rdy=10) for number in range(3)]
    connect().publish(topic, b"a", b"b", b"c")
    seen = [sorted((m.body, m.id, m.timestamp_ns) for m in consumer.read_messages(3)) for consumer in consumers]
    assert seen[0] == seen[1] == seen[2]
    assert [entry[0] for entry in seen[0]] == [b"a", b"b", b"c"]


def test_channels_count_attempts_apart(connect: Callable[..., Wire], topic: str) -> None:
    one, two = connect().subscribe(topic, "one", rdy=1), connect().subscribe(topic, "two", rdy=1)
    connect().publish(topic, b"x")
    one.REQ(one.read_message().id, 0)
    assert one.read_message().attempts == 2
    assert two.read_message().attempts == 1


@pytest.mark.parametrize("rate", [99, 50, 1])
def test_sample_rate(nsqd: Nsqd, connect: Callable[..., Wire], topic: str, rate: int) -> None:
    """A rate of r delivers (r + 1) in a hundred, and what is left out is gone for the whole channel."""
    count = 20_000 if rate == 1 else 2000  # of a few only, chance might bring half as many again
    connect().publish(topic, *[b"x"] * count)
    consumer = connect().subscribe(topic, rdy=2500, sample_rate=rate, output_buffer_timeout=25)
    delivered = _in_flight(nsqd, topic)[consumer.local_port]
    consumer.read_messages(delivered)
    consumer.expect_silence(0.1)
    expected = count * (rate + 1) / 100
    if rate == 99:
        assert delivered == count
    else:
        assert expected * 0.5 < delivered < expected * 1.5
    shown = nsqd.channel(topic)
    assert (shown["depth"], shown["in_flight_count"], shown["timeout_count"]) == (0, delivered, 0)


def test_buffered_messages_leave_within_the_buffer_timeout(connect: Callable[..., Wire], topic: str) -> None:
    consumer = connect().subscribe(topic, rdy=100, output_buffer_timeout=50)
    connect().publish(topic, b"x")
    assert consumer.read_message().body == b"x"


def test_reply_pushes_out_what_is_buffered(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    """Without a timer a message may wait in the buffer, but never behind a later response."""
    consumer = connect().subscribe(topic, rdy=100, output_buffer_timeout=-1)
    connect().publish(topic, b"x")
    eventually(lambda: nsqd.channel(topic)["in_flight_count"] == 1)  # by now it is in the buffer, if there is one
    consumer.PUB(f"{topic}_other", b"y")
    assert consumer.read_message().body == b"x"
    consumer.expect_ok()


def test_disconnect_leaves_messages_in_flight(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    gone = connect().subscribe(topic, rdy=1)
    connect().publish(topic, b"x")
    gone.read_message()
    gone.close()
    eventually(lambda: nsqd.channel(topic)["client_count"] == 0)
    other = connect().subscribe(topic, rdy=1)
    other.expect_silence(0.3)
    assert nsqd.channel(topic)["in_flight_count"] == 1


def test_deleting_the_channel_closes_its_consumers_without_a_frame(
    nsqd: Nsqd, connect: Callable[..., Wire], topic: str
) -> None:
    on_channel, on_other = (
        connect().subscribe(topic, "gone", rdy=1),
        connect().subscribe(topic, "stays", rdy=1),
    )
    assert nsqd.post("/channel/delete", topic=topic, channel="gone").status == 200
    on_channel.expect_closed()
    on_other.assert_usable()
    assert nsqd.post("/topic/delete", topic=topic).status == 200
    on_other.expect_closed()


def test_channel_empty_forgets_what_is_in_flight(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, *[b"x"] * 10)
    client.subscribe(topic, rdy=2)
    messages = client.read_messages(2)
    assert nsqd.post("/channel/empty", topic=topic, channel="ch").status == 200
    shown = nsqd.channel(topic)
    assert (shown["depth"], shown["in_flight_count"], shown["clients"][0]["in_flight_count"]) == (0, 0, 0)
    client.FIN(messages[0].id)
    client.expect_error(f"E_FIN_FAILED FIN {messages[0].id.decode()} failed ID not in flight", fatal=False)
    client.PUB(topic, b"after")
    client.PUB(topic, b"after")
    frames = [client.read_frame() for _ in range(4)]
    assert sorted(frame.kind for frame in frames) == [0, 0, 2, 2]


@pytest.mark.ours
def test_a_burst_reaches_every_idle_consumer(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    consumers = [connect().subscribe(topic, rdy=2500, output_buffer_timeout=25) for _ in range(10)]
    eventually(lambda: [client["ready_count"] for client in nsqd.channel(topic)["clients"]] == [2500] * 10)
    connect().publish(topic, *[b"x"] * 200)
    shares = _in_flight(nsqd, topic)
    assert sum(shares.values()) == 200
    for consumer in consumers:
        assert shares[consumer.local_port] > 0, shares
        consumer.read_messages(shares[consumer.local_port])


def test_consuming_a_long_backlog(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    publisher = connect()
    for start in range(0, 20_000, 1000):
        publisher.publish(topic, *[b"%06d" % number for number in range(start, start + 1000)])
    consumer = connect().subscribe(topic, rdy=2500)
    bodies = {message.body for message in consumer.read_messages(20_000, finish=True)}
    assert len(bodies) == 20_000
    eventually(lambda: nsqd.channel(topic)["in_flight_count"] == 0)
    assert nsqd.channel(topic)["depth"] == 0
