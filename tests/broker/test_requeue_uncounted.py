"""Checks `REQ <id> <ms> uncounted`: a delivery that reached no handler does not count, for clients that asked in
IDENTIFY.
"""

from collections.abc import Callable
from typing import Any

import pytest

from harness import Nsqd, Wire
from harness.wire import ERROR

ASK: dict[str, Any] = {"requeue_uncounted": True}


def give_back(wire: Wire, message_id: bytes, delay_ms: int = 0) -> None:
    wire.send(b"REQ %b %d uncounted\n" % (message_id, delay_ms))


@pytest.mark.ours
def test_only_who_asks_is_told(connect: Callable[..., Wire]) -> None:
    assert connect().identify(**ASK)["requeue_uncounted"] is True
    assert "requeue_uncounted" not in connect().identify(requeue_uncounted=False)
    assert "requeue_uncounted" not in connect().identify()


@pytest.mark.ours
def test_the_attempt_is_taken_back(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.subscribe(topic, rdy=1, **ASK)
    with nsqd.connect() as publisher:
        publisher.publish(topic, b"x")
    for _ in range(3):
        message = client.read_message()
        assert message.attempts == 1
        give_back(client, message.id)
    counted = client.read_message()
    client.REQ(counted.id, 0)
    again = client.read_message()
    assert again.attempts == 2
    give_back(client, again.id, 20)
    late = client.read_message()
    assert (late.attempts, late.body, late.id) == (2, b"x", message.id)
    client.FIN(late.id)
    client.assert_usable()
    assert nsqd.channel(topic)["requeue_count"] == 5


def test_who_did_not_ask_is_counted_as_by_nsq(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.subscribe(topic, rdy=1)
    with nsqd.connect() as publisher:
        publisher.publish(topic, b"x")
    give_back(client, client.read_message().id)
    again = client.read_message()
    assert again.attempts == 2
    client.FIN(again.id)


@pytest.mark.ours
def test_other_words_are_counted(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.subscribe(topic, rdy=1, **ASK)
    with nsqd.connect() as publisher:
        publisher.publish(topic, b"x")
    for attempt, words in enumerate((b"Uncounted", b"uncounted twice", b""), start=1):
        message = client.read_message()
        assert message.attempts == attempt
        client.send(b"REQ %b 0 %b\n" % (message.id, words))
    client.FIN(client.read_message().id)


@pytest.mark.ours
@pytest.mark.parametrize("crash", [False, True])
def test_it_holds_over_a_restart(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], crash: bool) -> None:
    daemon = make_nsqd()
    wire = connect(daemon).subscribe("t", rdy=3, **ASK)
    with daemon.connect() as publisher:
        publisher.publish("t", b"1", b"2", b"3")
    messages = wire.read_messages(3)
    wire.RDY(0)
    for message in messages:
        give_back(wire, message.id)
    wire.TOUCH(message.id)  # its error tells that what was given back before it is noted
    assert wire.read_frame().kind == ERROR
    daemon.restart(crash=crash)
    again = connect(daemon).subscribe("t", rdy=3, **ASK).read_messages(3)
    assert [message.attempts for message in again] == [1, 1, 1]
