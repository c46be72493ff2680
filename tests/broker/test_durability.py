"""Checks what OK means here: the message survives whatever happens to the process."""

import contextlib
import time
from collections.abc import Callable

import pytest

from faults.data_files import cursor_slots
from harness import ClosedError, Nsqd, Wire, body_of, eventually
from nsquark.kernel.answers import sequence_of

pytestmark = pytest.mark.ours


def _bodies(wire: Wire, count: int) -> set[bytes]:
    return {message.body for message in wire.read_messages(count, finish=True)}


def test_acknowledged_messages_survive_a_crash(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    daemon = make_nsqd()
    publisher = connect(daemon)
    publisher.publish("t", b"single")
    publisher.publish("t", b"multi 1", b"multi 2")
    assert daemon.post("/pub", b"http", topic="t").body == b"OK"
    assert daemon.post("/mpub", b"line 1\nline 2", topic="t").body == b"OK"
    daemon.restart(crash=True)
    assert daemon.topic("t")["depth"] == 6
    consumer = connect(daemon).subscribe("t", rdy=10)
    assert _bodies(consumer, 6) == {b"single", b"multi 1", b"multi 2", b"http", b"line 1", b"line 2"}
    consumer.expect_silence(0.1)


def test_crash_in_the_middle_of_publishing_loses_no_ok(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]
) -> None:
    daemon = make_nsqd()
    for round_number in range(3):
        publisher = connect(daemon)
        topic = f"t{round_number}"
        publisher.send(b"".join(f"PUB {topic}\n".encode() + body_of(b"%d" % number) for number in range(2000)))
        acknowledged = 50 * (round_number + 1)
        publisher.expect_ok(acknowledged)
        daemon.kill()
        with contextlib.suppress(ClosedError):
            while True:
                publisher.expect_ok()
                acknowledged += 1
        daemon.start()
        depth = daemon.topic(topic)["depth"]
        assert depth >= acknowledged
        consumer = connect(daemon).subscribe(topic, rdy=2500)
        assert {b"%d" % number for number in range(acknowledged)} <= _bodies(consumer, depth)


def test_channels_and_their_positions_survive_a_crash(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]
) -> None:
    daemon = make_nsqd()
    one = connect(daemon).subscribe("t", "one", rdy=10)
    connect(daemon).subscribe("t", "two")
    connect(daemon).publish("t", *[b"%d" % number for number in range(10)])
    for message in one.read_messages(10):
        if int(message.body) < 6:
            one.FIN(message.id)
    one.assert_usable()
    daemon.restart(crash=True)
    again = connect(daemon).subscribe("t", "one", rdy=10)
    assert _bodies(again, 4) == {b"6", b"7", b"8", b"9"}
    assert daemon.channel("t", "one")["depth"] == 0, "more than what was not finished comes again"
    assert len(_bodies(connect(daemon).subscribe("t", "two", rdy=10), 10)) == 10


def test_finished_messages_do_not_come_again_after_a_crash(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]
) -> None:
    daemon = make_nsqd()
    consumer = connect(daemon).subscribe("t", rdy=100)
    connect(daemon).publish("t", *[b"%d" % number for number in range(100)])
    assert len(_bodies(consumer, 100)) == 100
    consumer.assert_usable()
    daemon.restart(crash=True)
    assert daemon.channel("t")["depth"] == 0
    connect(daemon).subscribe("t", rdy=10).expect_silence(0.15)


def test_deferred_message_keeps_its_delay_over_a_restart(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]
) -> None:
    daemon = make_nsqd()
    connect(daemon).subscribe("t")
    publisher = connect(daemon)
    start = time.monotonic()
    for delay_ms, body in ((1500, b"later"), (600_000, b"much later")):
        publisher.DPUB("t", delay_ms, body)
        publisher.expect_ok()
    daemon.restart()
    assert connect(daemon).subscribe("t", rdy=1).read_message().body == b"later"
    assert time.monotonic() - start >= 1.49
    eventually(lambda: daemon.channel("t")["deferred_count"] == 1)


def test_deferred_message_survives_a_crash(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    daemon = make_nsqd()
    connect(daemon).subscribe("t")
    publisher = connect(daemon)
    publisher.DPUB("t", 800, b"later")
    publisher.expect_ok()
    daemon.restart(crash=True)
    assert connect(daemon).subscribe("t", rdy=1).read_message().body == b"later"


def test_pause_survives_a_crash(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    daemon = make_nsqd()
    connect(daemon).subscribe("t", "c")
    daemon.post("/topic/pause", topic="t")
    daemon.post("/channel/pause", topic="t", channel="c")
    daemon.restart(crash=True)
    assert daemon.topic("t")["paused"] is True
    assert daemon.channel("t", "c")["paused"] is True


def test_ids_are_not_used_twice_after_a_crash(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    daemon = make_nsqd()
    ids: set[bytes] = set()
    for _ in range(3):
        connect(daemon).publish("t", *[b"x"] * 100)
        consumer = connect(daemon).subscribe("t", rdy=100)
        ids |= {message.id for message in consumer.read_messages(100, finish=True)}
        consumer.assert_usable()
        daemon.restart(crash=True)
    assert len(ids) == 300


def test_new_channel_times_out_without_delay(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    """NSQ may need five seconds to notice a new channel, in which one that it knows lets many messages time out."""
    daemon = make_nsqd("--msg-timeout=50ms")

    def timeouts() -> dict[str, int]:
        topics = daemon.stats()["topics"]
        return {topic["topic_name"]: topic["channels"][0]["timeout_count"] for topic in topics if topic["channels"]}

    for name in ("known", "new"):
        consumer = connect(daemon).subscribe(name, rdy=1)
        with daemon.connect() as publisher:
            publisher.publish(name, b"x")
        consumer.read_message()
        eventually(lambda: timeouts()["known"])
    before = timeouts()["known"]
    # Counted by what else has happened in nsqd, for any of us may be held up.
    assert eventually(lambda: found if (found := timeouts())["known"] >= before + 10 else None)["new"] > 0


def test_torn_tail_is_cut_and_the_rest_served(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    """Bytes of a write that never finished, at the end of the topic's newest file."""
    daemon = make_nsqd()
    bodies = {b"a body to look for, %d" % number for number in range(50)}
    connect(daemon).publish("torn", *sorted(bodies))
    daemon.kill()
    last = max(bodies)
    files = [path for path in daemon.data_path.rglob("*") if path.is_file() and path.read_bytes().endswith(last)]
    assert files, "no file ends with the last message"
    for path in files:
        with path.open("ab") as file:
            file.write(b"\x00\x00\x01\x00half a record")
    daemon.start()
    publisher = connect(daemon)
    publisher.publish("torn", b"after")
    consumer = connect(daemon).subscribe("torn", rdy=100)
    assert _bodies(consumer, 51) == bodies | {b"after"}


MANY = 280_000
"""The broker keeps individual state for fewer than these: what is held longer must be set aside and remembered."""


def test_messages_held_back_while_very_many_pass(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    daemon = make_nsqd("--msg-timeout=10m")
    publisher = connect(daemon)
    publisher.identify(heartbeat_interval=-1)  # this may take longer than until the first one
    consumer = connect(daemon).subscribe("t", rdy=2500, heartbeat_interval=60_000)
    publisher.publish("t", b"held", b"requeued")
    held, requeued = sorted(consumer.read_messages(2), key=lambda message: message.body)
    consumer.REQ(requeued.id, 3_600_000)
    for sent in range(0, MANY, 1000):
        publisher.publish("t", *[b"%d" % number for number in range(sent, sent + 1000)])
        ids = [message.id for message in consumer.read_messages(1000)]
        consumer.send(b"".join(b"FIN " + message_id + b"\n" for message_id in ids))
    consumer.TOUCH(held.id)
    consumer.assert_usable()
    shown = daemon.channel("t")
    assert (shown["depth"], shown["in_flight_count"], shown["deferred_count"]) == (0, 1, 1)
    # Passing by what is held needs a sync; before it is done, a crash would repeat what was finished.
    eventually(lambda: cursor_slots(daemon.data_path, "t")[1].position > sequence_of(ids[-1]), timeout_s=60)
    daemon.restart(crash=True)
    again = connect(daemon).subscribe("t", rdy=10)
    message = again.read_message()
    assert (message.body, message.id) == (b"held", held.id)
    again.FIN(message.id)
    again.expect_silence(0.2)
    again.assert_usable()
    shown = daemon.channel("t")
    assert (shown["depth"], shown["in_flight_count"], shown["deferred_count"]) == (0, 0, 1)


@pytest.mark.parametrize(
    ("name", "beginning"),
    [
        ("nsqd.dat", b'{"x":'),
        ("nsquark/node.json", b'{"x":'),
        ("nsquark/runs", b'[{"x":'),
        ("nsquark/clock", b'{"x":'),
    ],
)
def test_a_document_that_is_nested_too_deeply_stops_nothing(
    make_nsqd: Callable[..., Nsqd], name: str, beginning: bytes
) -> None:
    daemon = make_nsqd()
    daemon.post("/pub", b"one", topic="t")
    assert daemon.stop() == 0
    (daemon.data_path / name).write_bytes(beginning + b"[" * 100_000)
    daemon.start()
    assert daemon.topic("t")["depth"] == 1
    assert "Traceback" not in daemon.log
