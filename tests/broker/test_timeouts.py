"""Messages that are not finished in time come again, and TOUCH gives them more time."""

import time
from collections.abc import Callable

from harness import Message, Nsqd, Wire, eventually

MSG_TIMEOUT_S = 2.0
MAX_MSG_TIMEOUT_S = 5.0
NSQD_FLAGS = ("--msg-timeout=2s", "--max-msg-timeout=5s")

CLOCK_SLACK_S = 0.01


def test_unfinished_message_comes_again(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, b"x")
    start = time.monotonic()
    client.subscribe(topic, rdy=1)
    first = client.read_message()
    second = client.read_message()
    assert time.monotonic() - start >= MSG_TIMEOUT_S - CLOCK_SLACK_S
    assert (second.id, second.attempts, second.timestamp_ns) == (first.id, 2, first.timestamp_ns)
    client.FIN(second.id)
    client.assert_usable()
    shown = nsqd.channel(topic)
    assert (shown["timeout_count"], shown["requeue_count"], shown["in_flight_count"]) == (1, 0, 0)


def test_timeout_frees_the_window(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, b"one", b"two")
    client.subscribe(topic, rdy=1)
    client.read_message()
    assert client.read_message() is not None
    assert nsqd.channel(topic)["clients"][0]["in_flight_count"] == 1


def let_time_out(nsqd: Nsqd, client: Wire, topic: str) -> Message:
    """Returns a message that its consumer has held for too long, and does not get again before its next RDY."""
    client.publish(topic, b"x")
    client.subscribe(topic, rdy=1)
    message = client.read_message()
    client.RDY(0)
    eventually(lambda: nsqd.channel(topic)["timeout_count"] == 1)
    return message


def test_late_fin_is_refused(nsqd: Nsqd, client: Wire, topic: str) -> None:
    message = let_time_out(nsqd, client, topic)
    client.FIN(message.id)
    client.expect_error(f"E_FIN_FAILED FIN {message.id.decode()} failed ID not in flight", fatal=False)
    assert nsqd.channel(topic)["depth"] == 1
    client.RDY(1)
    assert client.read_message().attempts == 2


def test_late_fin_after_redelivery_to_another(connect: Callable[..., Wire], topic: str) -> None:
    slow = connect().subscribe(topic, rdy=1)
    connect().publish(topic, b"x")
    message = slow.read_message()
    slow.RDY(0)
    quick = connect().subscribe(topic, rdy=1, msg_timeout=5000)
    assert quick.read_message().attempts == 2
    slow.FIN(message.id)
    slow.expect_error(f"E_FIN_FAILED FIN {message.id.decode()} failed client does not own message", fatal=False)
    quick.FIN(message.id)
    quick.assert_usable()


def test_messages_of_a_client_that_left_wait_for_their_timeout(
    nsqd: Nsqd, connect: Callable[..., Wire], topic: str
) -> None:
    leaver = connect().subscribe(topic, rdy=3)
    connect().publish(topic, b"a", b"b", b"c")
    start = time.monotonic()
    leaver.read_messages(3)
    leaver.close()
    other = connect().subscribe(topic, rdy=10)
    messages = other.read_messages(3, finish=True)
    assert time.monotonic() - start >= MSG_TIMEOUT_S - CLOCK_SLACK_S
    assert [message.attempts for message in messages] == [2, 2, 2]


def test_timeout_asked_for_in_identify(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, b"x")
    start = time.monotonic()
    client.subscribe(topic, rdy=1, msg_timeout=1000)
    client.read_message()
    assert client.read_message().attempts == 2
    assert time.monotonic() - start >= 1 - CLOCK_SLACK_S


def test_touch_keeps_a_message(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, b"x")
    client.subscribe(topic, rdy=1)
    message = client.read_message()
    for _ in range(6):
        client.expect_silence(0.5)
        client.TOUCH(message.id)
    client.FIN(message.id)
    client.assert_usable()
    shown = nsqd.channel(topic)
    assert (shown["timeout_count"], shown["in_flight_count"], shown["depth"]) == (0, 0, 0)


def test_touch_cannot_go_beyond_the_longest_timeout(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, b"x")
    start = time.monotonic()
    client.subscribe(topic, rdy=1)
    message = client.read_message()
    while True:
        client.TOUCH(message.id)
        try:
            frame = client.read_frame(0.1)
            break
        except TimeoutError:
            assert time.monotonic() - start < 30
    assert time.monotonic() - start >= MAX_MSG_TIMEOUT_S - CLOCK_SLACK_S
    assert frame.kind == 2 or frame.data.startswith(b"E_TOUCH_FAILED")
    eventually(lambda: nsqd.channel(topic)["timeout_count"] >= 1)


def test_touch_after_the_timeout_is_refused(nsqd: Nsqd, client: Wire, topic: str) -> None:
    message = let_time_out(nsqd, client, topic)
    client.TOUCH(message.id)
    client.expect_error(f"E_TOUCH_FAILED TOUCH {message.id.decode()} failed ID not in flight", fatal=False)
    client.assert_usable()


def test_many_messages_time_out_at_once(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, *[b"x"] * 500)
    client.subscribe(topic, rdy=500)
    client.read_messages(500)
    again = client.read_messages(500, finish=True)
    assert {message.attempts for message in again} == {2}
    client.assert_usable()
    assert nsqd.channel(topic)["timeout_count"] == 500
    assert nsqd.channel(topic)["depth"] == 0


def test_paused_channel_still_times_out(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, b"x")
    client.subscribe(topic, rdy=1)
    client.read_message()
    nsqd.post("/channel/pause", topic=topic, channel="ch")
    eventually(lambda: nsqd.channel(topic)["timeout_count"] == 1)
    client.expect_silence(0.2)
    assert nsqd.channel(topic)["depth"] == 1
    nsqd.post("/channel/unpause", topic=topic, channel="ch")
    assert client.read_message().attempts == 2
