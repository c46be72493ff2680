"""Looks into a channel: what is in flight and requeued, and what a seek would do."""

from collections.abc import Callable
from typing import Any

import pytest

from broker.logs import answer, read_all, refusal
from harness import Nsqd, Wire, eventually

pytestmark = pytest.mark.ours

MSG_TIMEOUT_MS = 60_000


def held(daemon: Nsqd, topic: str, state: str, **query: Any) -> dict[str, Any]:
    return answer(daemon, "GET", "/channel/messages", topic=topic, channel="ch", state=state, **query)


def preview(daemon: Nsqd, topic: str, to: str | int) -> tuple[int, int]:
    found = answer(daemon, "GET", "/channel/seek", topic=topic, channel="ch", to=to)
    return found["come_again"], found["passed_over"]


def publish(daemon: Nsqd, topic: str, count: int) -> None:
    with daemon.connect() as wire:
        wire.publish(topic, *[b"%d" % number for number in range(count)])


# -- in flight and requeued ------------------------------------------------------------------------------


def test_what_is_in_flight_and_with_whom(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    consumer = connect().subscribe(topic, rdy=3, client_id="worker 7")
    publish(nsqd, topic, 5)
    messages = consumer.read_messages(3)
    found = held(nsqd, topic, "in_flight")
    assert (found["count"], found["from"]) == (3, None)
    assert [each["id"].encode() for each in found["messages"]] == [message.id for message in messages]
    assert [each["seq"] for each in found["messages"]] == [record.seq for record in read_all(nsqd, topic)][:3]
    for each in found["messages"]:
        assert (each["attempts"], each["client_id"]) == (1, "worker 7")
        assert each["client"] == f"127.0.0.1:{consumer.local_port}"
        assert 0 <= each["for_ms"] < MSG_TIMEOUT_MS
        assert MSG_TIMEOUT_MS - each["for_ms"] - each["timeout_ms"] in (-1, 0, 1)
    assert held(nsqd, topic, "requeued")["messages"] == []


def test_what_is_requeued_and_until_when(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    consumer = connect().subscribe(topic, rdy=3)
    publish(nsqd, topic, 3)
    at_once, later, kept = consumer.read_messages(3)
    consumer.RDY(0)
    consumer.REQ(at_once.id, 0)
    consumer.REQ(later.id, 30_000)
    eventually(lambda: held(nsqd, topic, "requeued")["count"] == 2)
    waiting = {each["id"].encode(): each for each in held(nsqd, topic, "requeued")["messages"]}
    assert set(waiting) == {at_once.id, later.id}
    assert waiting[at_once.id]["due_ms"] == 0
    assert 0 < waiting[later.id]["due_ms"] <= 30_000
    assert [each["id"].encode() for each in held(nsqd, topic, "in_flight")["messages"]] == [kept.id]
    consumer.RDY(3)
    assert consumer.read_message().attempts == 2
    eventually(lambda: [each["attempts"] for each in held(nsqd, topic, "in_flight")["messages"]] == [2, 1])


def test_who_left_is_not_named(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    consumer = connect().subscribe(topic, rdy=1)
    publish(nsqd, topic, 1)
    consumer.read_message()
    consumer.close()
    eventually(lambda: nsqd.channel(topic)["client_count"] == 0)
    assert [each["client"] for each in held(nsqd, topic, "in_flight")["messages"]] == [""]


def test_many_come_in_pages(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    consumer = connect().subscribe(topic, rdy=2500)
    publish(nsqd, topic, 2500)
    consumer.read_messages(2500)
    seqs, start = [], 0
    while start is not None:
        page = held(nsqd, topic, "in_flight", limit=1000, **{"from": start})
        assert page["count"] == 2500
        seqs += [each["seq"] for each in page["messages"]]
        start = page["from"]
    assert seqs == [record.seq for record in read_all(nsqd, topic)]


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ({"topic": "nowhere", "channel": "ch", "state": "requeued"}, 404, "TOPIC_NOT_FOUND"),
        ({"topic": "TOPIC", "channel": "nowhere", "state": "requeued"}, 404, "CHANNEL_NOT_FOUND"),
        ({"topic": "TOPIC", "state": "requeued"}, 400, "MISSING_ARG_CHANNEL"),
        ({"topic": "TOPIC", "channel": "ch"}, 400, "MISSING_ARG_STATE"),
        ({"topic": "TOPIC", "channel": "ch", "state": "finished"}, 400, "INVALID_ARG_STATE"),
        ({"topic": "TOPIC", "channel": "ch", "state": "requeued", "limit": 1001}, 400, "INVALID_ARG_LIMIT"),
        ({"topic": "TOPIC", "channel": "ch", "state": "requeued", "from": -1}, 400, "INVALID_ARG_FROM"),
    ],
)
def test_what_is_refused(nsqd: Nsqd, topic: str, query: dict[str, Any], status: int, code: str) -> None:
    nsqd.post("/topic/create", topic=topic)
    nsqd.post("/channel/create", topic=topic, channel="ch")
    arguments = {name: topic if value == "TOPIC" else value for name, value in query.items()}
    refused, fields = refusal(nsqd, "GET", "/channel/messages", **arguments)
    assert (refused, fields["message"]) == (status, code)


# -- what a seek would do --------------------------------------------------------------------------------


def test_a_preview_says_what_the_seek_does(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    """Of 20 messages, 0 to 4 are finished but for 2, which is requeued for long; 5 and 6 are in flight, the rest is
    new.
    """
    consumer = connect().subscribe(topic, rdy=7)
    publish(nsqd, topic, 20)
    messages = consumer.read_messages(7)
    consumer.RDY(0)
    for message in messages[:5]:
        if message is not messages[2]:
            consumer.FIN(message.id)
    consumer.REQ(messages[2].id, 3_600_000)
    eventually(lambda: nsqd.channel(topic)["deferred_count"] == 1 and nsqd.channel(topic)["in_flight_count"] == 2)
    seqs = [record.seq for record in read_all(nsqd, topic)]
    for to, expected in (
        ("oldest", (4, 0)),
        (seqs[2], (2, 0)),
        (seqs[3], (2, 1)),
        (seqs[6], (0, 2)),
        (seqs[10], (0, 6)),
        ("newest", (0, 16)),
        ("time:0", (4, 0)),
    ):
        assert preview(nsqd, topic, to) == expected, to
    before = nsqd.channel(topic)
    assert (before["depth"], before["in_flight_count"], before["deferred_count"]) == (13, 2, 1)
    answer(nsqd, "POST", "/channel/seek", topic=topic, channel="ch", to=seqs[3])
    consumer.RDY(100)
    again = consumer.read_messages(17, finish=True)
    assert sorted(int(message.body) for message in again) == list(range(3, 20))
    eventually(lambda: preview(nsqd, topic, seqs[3]) == (17, 0))


def test_a_preview_counts_publishes_that_are_deferred_and_what_a_pause_holds_back(
    nsqd: Nsqd, connect: Callable[..., Wire], topic: str
) -> None:
    consumer = connect().subscribe(topic)
    consumer.DPUB(topic, 3_600_000, b"later")
    consumer.expect_ok()
    nsqd.post("/topic/pause", topic=topic)
    publish(nsqd, topic, 4)
    assert preview(nsqd, topic, "newest") == (0, 5)


def test_a_preview_after_a_restart_knows_what_was_finished_out_of_order(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]
) -> None:
    daemon = make_nsqd()
    consumer = connect(daemon).subscribe("t", rdy=10)
    publish(daemon, "t", 10)
    messages = consumer.read_messages(10)
    for message in messages[5:8]:
        consumer.FIN(message.id)
    eventually(lambda: daemon.channel("t")["in_flight_count"] == 7)
    daemon.restart()
    seqs = [record.seq for record in read_all(daemon, "t")]
    assert preview(daemon, "t", "oldest") == (3, 0)
    assert preview(daemon, "t", seqs[6]) == (2, 5)
    assert preview(daemon, "t", "newest") == (0, 7)


def test_a_preview_names_the_owner_whom_a_seek_would_disturb(nsqd: Nsqd, topic: str) -> None:
    nsqd.post("/pub", b"x", topic=topic)
    answer(nsqd, "POST", "/channel/commit", topic=topic, channel="ch", owner="query", seq=0)
    found = answer(nsqd, "GET", "/channel/seek", topic=topic, channel="ch", to="newest")
    assert (found["owner"], found["passed_over"]) == ("query", 1)
