"""What of a topic's log goes: what nobody needs, and what is held for long only after it was set aside."""

from pathlib import Path

from harness import until
from nsquark.broker.topic import Topic
from nsquark.wire.record import message_id
from unit.nsqd_parts import command, consumer, in_flight, opened, publish

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


async def test_a_held_message_is_set_aside_and_its_file_goes(tmp_path: Path) -> None:
    async with opened(tmp_path, SMALL_SEGMENTS) as nsqd:
        topic = nsqd.topic("t")
        session, client = consumer(nsqd, "t", "ch", rdy=1)
        channel, first = topic.channels["ch"], topic.log.head
        publish(topic, b"held")
        assert client.bodies() == [b"held"]
        (held,) = channel.ledger.unfinished_below(topic.log.head)
        assert held >= first
        while topic.log.head < held + 2 * BLOCK:
            publish(topic, *[b"x"] * 1000)
        channel.ledger.skip(topic.log.head)
        channel.ledger.let_pass(channel.ledger.park(1))  # as a channel does when much lies above a held message
        channel.persist()
        before = files(topic)
        topic.collect()
        await until(lambda: held in topic.retention.kept)
        topic.collect()
        assert files(topic) < before
        assert not topic.log.extents.between(held, held + 1)
        command(session, b"REQ %s 0\n" % message_id(nsqd.options.node_id, held))
        assert client.bodies() == [b"held"]
        assert client.attempts == [2]


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
