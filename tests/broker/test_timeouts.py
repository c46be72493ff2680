"""Messages that are not finished in time come again, and TOUCH gives them more time."""

import time
from collections.abc import Callable

import pytest

from harness import Frame, Message, Nsqd, Wire, eventually
from harness.wire import ERROR, MESSAGE, RESPONSE

MSG_TIMEOUT_S = 2.0
MAX_MSG_TIMEOUT_S = 4.0
NSQD_FLAGS = ("--msg-timeout=2s", "--max-msg-timeout=60s")
PATIENT_MS = 60_000
"""With this timeout of its own a consumer answers in time, however long this process is held up."""

CLOCK_SLACK_S = 0.01
TRIES = 10
"""Machines that hold this process up for longer than a message may be held do so now and then, but not always."""


def frames_until_ok(client: Wire) -> list[Frame]:
    """Publishes elsewhere, and returns what came before the OK: nsqd has then read all that was sent before."""
    client.PUB("still_usable#ephemeral", b"x")
    frames = []
    while (frame := client.read_frame()) != Frame(RESPONSE, b"OK"):
        frames.append(frame)
    return frames


def finish(client: Wire, messages: list[Message]) -> int:
    """Finishes messages, those that time out before nsqd reads it once more; returns how often they timed out."""
    attempts = {message.id: message.attempts for message in messages}
    unfinished = set(attempts)
    while unfinished:
        for message_id in unfinished:
            client.FIN(message_id)
        refused = set()
        for frame in frames_until_ok(client):
            if frame.kind == MESSAGE:
                again = Message.parse(frame.data)
                attempts[again.id] = again.attempts
            else:
                _, _, message_id, reason = frame.data.split(b" ", 3)
                assert (frame.kind, reason) == (ERROR, b"failed ID not in flight"), frame
                refused.add(message_id)
        unfinished = refused
    return sum(attempts.values()) - len(attempts)


def test_unfinished_message_comes_again(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, b"x")
    start = time.monotonic()
    client.subscribe(topic, rdy=1)
    first = client.read_message()
    second = client.read_message()
    assert time.monotonic() - start >= MSG_TIMEOUT_S - CLOCK_SLACK_S
    assert (second.id, second.attempts, second.timestamp_ns) == (first.id, 2, first.timestamp_ns)
    timeouts = finish(client, [second])
    shown = nsqd.channel(topic)
    assert (shown["timeout_count"], shown["requeue_count"], shown["in_flight_count"]) == (timeouts, 0, 0)


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
    return timed_out(nsqd, client, topic, message)


def timed_out(nsqd: Nsqd, client: Wire, topic: str, message: Message) -> Message:
    """Waits until a message that nobody may have any more has timed out; returns it as it was delivered last, which may
    be again if this process was held up.
    """
    before = frames_until_ok(client)
    eventually(lambda: (shown := nsqd.channel(topic))["depth"] == 1 and shown["in_flight_count"] == 0)
    for frame in [*before, *frames_until_ok(client)]:
        assert frame.kind == MESSAGE, frame
        message = Message.parse(frame.data)
    assert nsqd.channel(topic)["timeout_count"] == message.attempts
    return message


def test_late_fin_is_refused(nsqd: Nsqd, client: Wire, topic: str) -> None:
    message = let_time_out(nsqd, client, topic)
    client.FIN(message.id)
    client.expect_error(f"E_FIN_FAILED FIN {message.id.decode()} failed ID not in flight", fatal=False)
    assert nsqd.channel(topic)["depth"] == 1
    client.RDY(1)
    assert client.read_message().attempts == message.attempts + 1


def test_late_fin_after_redelivery_to_another(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    slow = connect()
    message = let_time_out(nsqd, slow, topic)
    quick = connect().subscribe(topic, rdy=1, msg_timeout=PATIENT_MS)
    assert quick.read_message().attempts == message.attempts + 1
    slow.FIN(message.id)
    slow.expect_error(f"E_FIN_FAILED FIN {message.id.decode()} failed client does not own message", fatal=False)
    quick.FIN(message.id)
    quick.assert_usable()


def test_messages_of_a_client_that_left_wait_for_their_timeout(
    nsqd: Nsqd, connect: Callable[..., Wire], topic: str
) -> None:
    leaver = connect().subscribe(topic, rdy=3)
    start = time.monotonic()
    connect().publish(topic, b"a", b"b", b"c")
    leaver.read_messages(3)
    leaver.close()
    other = connect().subscribe(topic, rdy=10, msg_timeout=PATIENT_MS)
    messages = other.read_messages(3, finish=True)
    assert time.monotonic() - start >= MSG_TIMEOUT_S - CLOCK_SLACK_S
    assert {message.body for message in messages} == {b"a", b"b", b"c"}
    timeouts = [message.attempts - 1 for message in messages]  # one each, more if this process was held up
    assert min(timeouts) >= 1
    assert nsqd.channel(topic)["timeout_count"] == sum(timeouts)


def test_timeout_asked_for_in_identify(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, b"x")
    start = time.monotonic()
    client.subscribe(topic, rdy=1, msg_timeout=1000)
    client.read_message()
    assert client.read_message().attempts == 2
    assert time.monotonic() - start >= 1 - CLOCK_SLACK_S


def touch(client: Wire, message: Message, duration_s: float, interval_s: float) -> tuple[Frame | None, float]:
    """Touches a message for so long; returns the first frame that comes meanwhile, and how long ago nsqd surely knew of
    the last TOUCH.
    """
    start = held_since = time.monotonic()
    while time.monotonic() - start < duration_s:
        try:
            return client.read_frame(interval_s), time.monotonic() - held_since
        except TimeoutError:
            sent = time.monotonic()
        client.TOUCH(message.id)
        frames = frames_until_ok(client)
        if frames:
            return frames[0], time.monotonic() - held_since
        held_since = sent
    return None, 0.0


def test_touch_keeps_a_message(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    for number in range(TRIES):
        client, name = connect(), f"{topic}_{number}"
        client.publish(name, b"x")
        client.subscribe(name, rdy=1)
        message = client.read_message()
        frame, untouched_s = touch(client, message, MSG_TIMEOUT_S * 1.5, 0.5)
        if frame is None:
            break
        assert untouched_s >= MSG_TIMEOUT_S - CLOCK_SLACK_S, frame  # else it was touched in time
    else:
        pytest.fail("held up each time")
    finish(client, [message])
    shown = nsqd.channel(name)
    assert (shown["in_flight_count"], shown["depth"]) == (0, 0)


def test_touch_cannot_go_beyond_the_longest_timeout(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]
) -> None:
    daemon = make_nsqd("--msg-timeout=2s", f"--max-msg-timeout={MAX_MSG_TIMEOUT_S:g}s")
    for number in range(TRIES):
        client, name = connect(daemon), f"topic_{number}"
        client.publish(name, b"x")
        start = time.monotonic()
        client.subscribe(name, rdy=1)
        frame, untouched_s = touch(client, client.read_message(), 30, 0.1)
        held_s = time.monotonic() - start
        assert frame is not None and (frame.kind == MESSAGE or frame.data.startswith(b"E_TOUCH_FAILED")), frame
        if held_s >= MAX_MSG_TIMEOUT_S - CLOCK_SLACK_S:
            break
        assert untouched_s >= MSG_TIMEOUT_S - CLOCK_SLACK_S, frame  # else it was touched in time
    else:
        pytest.fail("held up each time")
    eventually(lambda: daemon.channel(name)["timeout_count"] >= 1)


def test_touch_after_the_timeout_is_refused(nsqd: Nsqd, client: Wire, topic: str) -> None:
    message = let_time_out(nsqd, client, topic)
    client.TOUCH(message.id)
    client.expect_error(f"E_TOUCH_FAILED TOUCH {message.id.decode()} failed ID not in flight", fatal=False)
    client.assert_usable()


def test_many_messages_time_out_at_once(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, *[b"x"] * 500)
    client.subscribe(topic, rdy=500)
    client.read_messages(500)
    again: dict[bytes, Message] = {}
    while len(again) < 500:
        message = client.read_message()
        if message.attempts > 1:
            again[message.id] = message
    timeouts = finish(client, list(again.values()))
    assert timeouts >= 500
    assert nsqd.channel(topic)["timeout_count"] == timeouts
    assert nsqd.channel(topic)["depth"] == 0


def test_paused_channel_still_times_out(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.publish(topic, b"x")
    client.subscribe(topic, rdy=1)
    message = client.read_message()
    nsqd.post("/channel/pause", topic=topic, channel="ch")
    message = timed_out(nsqd, client, topic, message)
    client.expect_silence(0.2)
    assert nsqd.channel(topic)["depth"] == 1
    nsqd.post("/channel/unpause", topic=topic, channel="ch")
    assert client.read_message().attempts == message.attempts + 1
