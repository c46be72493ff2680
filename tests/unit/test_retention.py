"""Checks what of a topic's log goes: what nobody needs, and what is held for long only after it was copied."""

from pathlib import Path

import pytest

from harness import until
from nsquark.broker.export import NsqExport
from nsquark.broker.nsqd import Nsqd
from nsquark.broker.tcp.session import Session
from nsquark.broker.topic import Topic
from nsquark.log.nsq_import.diskqueue import find_queues
from nsquark.wire.record import message_id
from unit.nsqd_parts import RawTransport, command, consumer, in_flight, opened, publish

SMALL_SEGMENTS = "--max-bytes-per-file=20000"
BLOCK = 4096


def files(topic: Topic) -> int:
    assert topic.directory is not None
    return len(list(topic.directory.glob("*.log")))


async def test_files_go_when_every_channel_has_passed_them(tmp_path: Path) -> None:
    async with opened(tmp_path, SMALL_SEGMENTS) as nsqd:
        topic = nsqd.topic("t")
        fast, slow = topic.channel("fast"), topic.channel("slow")
        for _ in range(5):
            publish(topic, b"x" * 15_000)
        assert files(topic) == 5
        fast.empty()
        topic.collect()
        assert files(topic) == 5
        slow.empty()
        topic.collect()
        assert files(topic) == 1  # the newest, which is written to
        topic.collect(newest_too=True)
        assert files(topic) == 0


async def test_what_is_the_topics_own_stays(tmp_path: Path) -> None:
    async with opened(tmp_path, SMALL_SEGMENTS) as nsqd:
        topic = nsqd.topic("t")
        for _ in range(3):
            publish(topic, b"x" * 15_000)
        topic.collect(newest_too=True)
        assert (files(topic), topic.retention.floor) == (3, topic.pump)


async def test_at_the_limit_a_finished_newest_file_makes_room_for_the_next_message_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path, "--max-disk-bytes=50000") as nsqd:
        topic = nsqd.topic("t")
        channel = topic.channel("ch")
        for body in (b"x" * 40_000, b"y" * 40_000):
            commit = topic.publish(body, 0, len(body))
            nsqd.turn.run()
            assert (commit.error, files(topic), channel.depth) == (None, 1, 1)
            channel.empty()


async def test_what_was_emptied_is_not_kept_for_readers_by_range(tmp_path: Path) -> None:
    async with opened(tmp_path, "--retention-time=1h") as nsqd:
        topic = nsqd.topic("t")
        publish(topic, b"one", b"two")
        topic.empty()
        assert (files(topic), topic.log.extents.count) == (0, 0)
        channel = topic.channel("ch", start=0)
        publish(topic, b"three")
        assert channel.depth == 1


async def hold_for_long(nsqd: Nsqd, *, newest_too: bool) -> tuple[int, Session, RawTransport]:
    """Lets a message be delivered and held until its file is gone; returns its number and who holds it."""
    topic = nsqd.topic("t")
    session, client = consumer(nsqd, "t", "ch", rdy=1)
    channel = topic.channels["ch"]
    publish(topic, b"held")
    assert client.bodies() == [b"held"]
    (held,) = channel.ledger.unfinished_below(topic.log.head)
    while topic.log.head < held + 2 * BLOCK:
        publish(topic, *[b"x"] * 1000)
    channel.ledger.skip(topic.log.head)
    channel.ledger.let_pass(channel.ledger.park(1))  # as a channel does when much lies above a held message
    channel.persist()
    before = files(topic)
    topic.collect(newest_too=newest_too)
    await until(lambda: held in topic.retention.kept)
    topic.collect(newest_too=newest_too)
    assert files(topic) < before
    assert not topic.log.extents.between(held, held + 1)
    return held, session, client


@pytest.mark.parametrize("newest_too", [False, True], ids=["an older file", "the newest file"])
async def test_a_held_message_is_set_aside_and_its_file_goes(tmp_path: Path, newest_too: bool) -> None:
    async with opened(tmp_path, *([] if newest_too else [SMALL_SEGMENTS])) as nsqd:
        held, session, client = await hold_for_long(nsqd, newest_too=newest_too)
        command(session, b"REQ %s 0\n" % message_id(nsqd.options.node_id, held))
        assert client.bodies() == [b"held"]
        assert client.attempts == [2]


async def test_what_is_set_aside_is_exported_to_nsq_with_the_rest(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as nsqd:
        await hold_for_long(nsqd, newest_too=True)
        publish(nsqd.topics["t"], b"new")
        assert NsqExport(nsqd, tmp_path / "nsq").run().queues == {"t:ch": 2, "t": 0}
    (queue,) = find_queues(tmp_path / "nsq").values()
    found = [
        (bytes(piece.data[pos : pos + size]), attempts)
        for piece in queue.pieces()
        for pos, size, _, attempts in piece.records
    ]
    assert found == [(b"held", 1), (b"new", 0)]


async def test_without_files_what_was_delivered_is_copied_and_the_rest_forgotten(tmp_path: Path) -> None:
    async with opened(tmp_path) as nsqd:
        topic = nsqd.topic("t#ephemeral")
        session, client = consumer(nsqd, "t#ephemeral", "ch", rdy=1)
        publish(topic, b"held")
        (held,) = topic.channels["ch"].ledger.unfinished_below(topic.log.head)
        assert client.bodies() == [b"held"]
        topic.collect()
        assert held in topic.retention.kept
        command(session, b"REQ %s 0\n" % message_id(nsqd.options.node_id, held))
        assert client.bodies() == [b"held"]
        command(session, b"FIN %s\n" % in_flight(topic, "ch")[0])
        topic.collect()
        assert held not in topic.retention.kept
