"""Checks the deferred messages of a topic: whose they are, and that they enter the log when they are due."""

from pathlib import Path
from typing import Any

from harness import until
from nsquark.broker.nsqd import Nsqd
from nsquark.broker.topic import Topic
from nsquark.log.deferred import DUE_MESSAGES_MAX
from nsquark.wire.record import BODY_AT
from unit.nsqd_parts import START_MS, opened


async def pass_time(nsqd: Nsqd, topic: Topic, ms: int, expected: int) -> None:
    """Lets the clock go on, until what is due is in the log."""
    clock: Any = nsqd.clock
    clock.ms += ms
    topic.deferrals.tick()
    await until(lambda: topic.log.extents.between(0, topic.log.head) == expected)
    assert topic.deferrals.appending is None


async def test_a_message_enters_the_log_when_it_is_due_and_not_before(tmp_path: Path) -> None:
    async with opened(tmp_path) as nsqd:
        topic = nsqd.topic("t")
        channel = topic.channel("ch")
        topic.publish_deferred(b"late", 2_000)
        topic.publish_deferred(b"soon", 1_000)
        assert (topic.message_count, topic.deferrals.count, channel.deferred.count) == (2, 2, 2)
        await pass_time(nsqd, topic, 999, expected=0)
        await pass_time(nsqd, topic, 1, expected=1)
        assert (channel.depth, channel.deferred.count, channel.message_count) == (1, 1, 2)
        await pass_time(nsqd, topic, 1_000, expected=2)
        assert (channel.depth, channel.deferred.count, channel.message_count) == (2, 0, 2)
        assert topic.message_count == 2  # counted once


async def test_between_two_portions_of_what_is_due_the_event_loop_turns(tmp_path: Path) -> None:
    """All others are served meanwhile, however much is due at once."""
    async with opened(tmp_path) as nsqd:
        topic = nsqd.topic("t")
        topic.channel("ch")
        count = 5 * DUE_MESSAGES_MAX
        for number in range(count):
            topic.publish_deferred(b"%d" % number, 1_000)
        turns = 0
        portions: list[tuple[int, int]] = []
        committed = topic.log.tail.on_committed

        def turn() -> None:
            nonlocal turns
            turns += 1
            nsqd.loop.call_soon(turn)

        def note(messages: int, body_bytes: int) -> None:
            portions.append((turns, messages))
            committed(messages, body_bytes)

        topic.log.tail.on_committed = note
        turn()
        await pass_time(nsqd, topic, 1_000, expected=count)
        assert [messages for _, messages in portions] == [DUE_MESSAGES_MAX] * 5
        assert len({at for at, _ in portions}) == 5


async def test_nsqd_looks_after_a_topic_as_long_as_something_waits(tmp_path: Path) -> None:
    async with opened(tmp_path, "--sync-timeout=1ms") as nsqd:
        topic = nsqd.topic("t")
        topic.channel("ch")
        assert not topic.deferrals.tick()
        topic.publish_deferred(b"m", 1_000)
        assert topic in nsqd.deferring
        assert topic.deferrals.tick()
        await pass_time(nsqd, topic, 1_000, expected=1)
        clock: Any = nsqd.clock
        clock.ms += 120_000

        def is_file_gone() -> bool:
            nsqd.logs.syncer.tick()  # it stays until the log is durable
            return not topic.deferrals.tick()

        await until(is_file_gone)


async def test_what_comes_while_the_pump_stands_still_is_for_the_next_channel_too(tmp_path: Path) -> None:
    async with opened(tmp_path) as nsqd:
        topic = nsqd.topic("t")
        old = topic.channel("old")
        topic.publish_deferred(b"before", 1_000)
        assert topic.deferrals.own.count == 0
        topic.set_paused(True)
        topic.publish_deferred(b"paused", 1_000)
        assert topic.deferrals.own.count == 1
        new = topic.channel("new")
        assert (old.deferred.count, new.deferred.count) == (2, 1)
        topic.set_paused(False)
        assert topic.deferrals.own.count == 0
        assert topic.channel("late").deferred.count == 0
        await pass_time(nsqd, topic, 1_000, expected=2)
        assert [channel.depth for channel in topic.channels.values()] == [2, 1, 0]
        assert [channel.deferred.count for channel in topic.channels.values()] == [0, 0, 0]


async def test_emptying_a_topic_drops_its_own_and_leaves_the_channels(tmp_path: Path) -> None:
    async with opened(tmp_path) as nsqd:
        topic = nsqd.topic("t")
        channel = topic.channel("ch")
        topic.publish_deferred(b"of the channel", 1_000)
        topic.set_paused(True)
        topic.publish_deferred(b"of the topic", 1_000)
        topic.empty()
        topic.publish_deferred(b"after", 1_000)
        assert topic.deferrals.own.count == 1
        assert [body for _, _, body in topic.deferrals.waiting()] == [b"of the channel", b"after"]
        await pass_time(nsqd, topic, 1_000, expected=2)
        assert [record[BODY_AT:] for record in map(topic.log.record, channel_seqs(topic)) if record] == [
            b"of the channel",
            b"after",
        ]
        assert channel.topic.deferrals.own.count == 0


async def test_what_was_dropped_is_not_counted_as_deferred(tmp_path: Path) -> None:
    async with opened(tmp_path) as nsqd:
        topic = nsqd.topic("t")
        topic.channel("old")
        topic.publish_deferred(b"of the channel", 1_000)
        topic.set_paused(True)
        topic.publish_deferred(b"of the topic", 1_000)
        topic.channel("new")
        topic.channel("emptied").empty()
        topic.publish_deferred(b"of the topic", 1_000)
        topic.empty()
        assert deferred_counts(topic) == {"old": 1, "new": 0, "emptied": 0}
    async with opened(tmp_path) as nsqd:
        topic = nsqd.topics["t"]
        assert deferred_counts(topic) == {"old": 1, "new": 0, "emptied": 0}
        topic.set_paused(False)
        await pass_time(nsqd, topic, 1_000, expected=1)
        assert deferred_counts(topic) == {"old": 0, "new": 0, "emptied": 0}


def deferred_counts(topic: Topic) -> dict[str, int]:
    return {channel.name: channel.deferred_count for channel in topic.channels.values()}


def channel_seqs(topic: Topic) -> list[int]:
    extents = topic.log.extents
    return [extents.nth(ordinal) for ordinal in range(extents.between(0, topic.log.head))]


async def test_what_waits_and_whose_it_is_survives_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as nsqd:
        topic = nsqd.topic("t")
        topic.channel("ch")
        topic.publish_deferred(b"of the channel", 1_000)
        topic.set_paused(True)
        topic.publish_deferred(b"of the topic", 1_000)
    async with opened(tmp_path) as nsqd:
        topic = nsqd.topics["t"]
        assert (topic.channels["ch"].deferred.count, topic.deferrals.own.count) == (2, 1)
        assert topic.channel("new").deferred.count == 1
        assert topic in nsqd.deferring
        await pass_time(nsqd, topic, 1_000, expected=2)
        topic.set_paused(False)
        assert [channel.depth for channel in topic.channels.values()] == [2, 1]


async def test_what_an_ephemeral_channel_waited_for_is_counted_for_the_first_channel_after_a_restart(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as nsqd:
        topic = nsqd.topic("t")
        topic.channel("ch#ephemeral")
        topic.publish_deferred(b"m", 1_000)
    async with opened(tmp_path, ms=START_MS) as nsqd:
        topic = nsqd.topics["t"]
        channel = topic.channel("ch")
        assert channel.deferred.count == 1
        await pass_time(nsqd, topic, 1_000, expected=1)
        assert (channel.deferred.count, channel.depth) == (0, 1)
