"""Checks when a batch is handed out, and how it is answered."""

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from client.consumer_rig import consumer_of, finish_rest, is_done, publish
from client.pool_rig import address_of
from client.scripted import ScriptedNsqd, message_frame
from client.stall_watch import StallWatch
from harness import FaultProxy, Nsqd, until
from nsquark import Consumer, sync
from nsquark.errors import ConfigError

LONG_S = 60.0
"""No test sits out a wait of this length."""


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


async def test_full_batches_do_not_wait(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *numbered(100))
    seen: list[bytes] = []
    async with consumer_of(nsqd, topic, max_in_flight=50) as consumer:
        async for batch in consumer.batches(25, LONG_S):
            assert len(batch) == len(batch.bodies) == 25
            async with batch:
                seen += batch.bodies
            if len(seen) == 100:
                break
    assert sorted(seen, key=int) == numbered(100)
    await until(lambda: is_done(nsqd, topic))


async def test_a_batch_waits_for_others_only_so_long(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *numbered(3))
    async with consumer_of(nsqd, topic, max_in_flight=50) as consumer:
        await until(lambda: consumer.stats().in_flight == 3)
        batch = await anext(consumer.batches(25, timedelta(seconds=0.2)))
        assert sorted(batch.bodies) == numbered(3)
        batch.finish()
    await until(lambda: is_done(nsqd, topic))


async def test_a_batch_does_not_wait_for_what_cannot_come(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *numbered(16))
    async with consumer_of(nsqd, topic, max_in_flight=8) as consumer:
        batches = consumer.batches(25, LONG_S)
        async with asyncio.timeout(20):
            first = await anext(batches)
            assert len(first) == 8
            first[0].requeue(0)  # in backoff one message comes at a time
            first.finish()
            sizes: list[int] = []
            while sum(sizes) < 9:
                async with await anext(batches) as batch:
                    sizes.append(len(batch))
        assert sizes == [1, 8]
    await until(lambda: is_done(nsqd, topic))


async def test_touching_and_requeueing_is_for_those_that_are_not_answered() -> None:
    ids = [b"%016d" % number for number in range(3)]
    async with ScriptedNsqd() as server, Consumer("t", "c", nsqd=server.address, max_in_flight=3) as consumer:
        server.peer.send(b"".join(message_frame(b"x", message_id) for message_id in ids))
        batch = await anext(consumer.batches())
        batch[0].finish()
        batch.touch()
        batch.requeue(timedelta(seconds=1.5), backoff=False)
        await until(lambda: server.peer.lines(b"REQ"))
        assert server.peer.lines(b"FIN", b"TOUCH", b"REQ") == [
            *(b"TOUCH " + message_id for message_id in ids[1:]),
            *(b"REQ " + message_id + b" 1500" for message_id in ids[1:]),
            b"FIN " + ids[0],
        ]


async def test_answers_one_by_one_and_for_the_rest(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *numbered(10))
    async with consumer_of(nsqd, topic) as consumer:
        batches = consumer.batches(10, LONG_S)
        async with await anext(batches) as batch:
            for message in batch[:3]:
                message.requeue(0, backoff=False)
            kept = {message.body for message in batch[:3]}
        assert not batch.unanswered
        again: set[bytes] = set()
        while len(again) < 3:
            async with (await anext(consumer.batches(3, 0.1))).or_raise() as batch:
                assert {message.attempts for message in batch} == {2}
                again.update(batch.bodies)
        assert again == kept
        assert consumer.stats().finished == 10
    await until(lambda: is_done(nsqd, topic))


async def test_a_failure_requeues_all_and_is_logged_once(
    nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish(nsqd, topic, *numbered(10))
    async with consumer_of(nsqd, topic) as consumer:
        with caplog.at_level(logging.ERROR, "nsquark.client"):
            async with await anext(consumer.batches(10, LONG_S)) as batch:
                batch[0].finish()
                raise RuntimeError("the database is away")
        assert [record.message for record in caplog.records] == [f"{topic}/ch: a batch of 10 messages failed"]
        assert (consumer.stats().requeued, consumer.stats().backoff_level) == (9, 1)
        with pytest.raises(RuntimeError, match="again"):
            async with (await anext(consumer.batches(10, 0.1))).or_raise() as batch:
                raise RuntimeError("again")
        assert not batch.unanswered and consumer.stats().requeued == 9 + len(batch)
        left = 9
        async for batch in consumer.batches(10, 0.1):
            left -= len(batch)
            batch.finish()
            if not left:
                break
    await until(lambda: is_done(nsqd, topic))


async def test_a_cancelled_wait_gives_back_what_it_had(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *numbered(3))
    async with consumer_of(nsqd, topic) as consumer:
        waiting = asyncio.create_task(anext(consumer.batches(10, LONG_S)))
        await until(lambda: consumer.stats().in_flight == 3)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        again = [await anext(consumer) for _ in range(3)]
        assert {message.body for message in again} == set(numbered(3))
        assert consumer.stats().backoff_level == 0
        for message in again:
            message.finish()


async def test_the_end_hands_out_what_there_is(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *numbered(3))
    async with consumer_of(nsqd, topic) as consumer:
        sizes = []
        await until(lambda: consumer.stats().in_flight == 3)
        async for batch in consumer.batches(10, 0.2):
            consumer.stop()
            async with batch:
                sizes.append(len(batch))
    assert sizes == [3]
    await until(lambda: is_done(nsqd, topic))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_messages": 0},
        {"max_messages": 2.5},
        {"max_messages": "9"},
        {"max_wait": -1},
        {"max_wait": "1s"},
        {"max_wait": float("nan")},
    ],
)
async def test_wrong_sizes_are_told_at_once(nsqd: Nsqd, topic: str, wrong: dict[str, Any]) -> None:
    async with consumer_of(nsqd, topic) as consumer:
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            consumer.batches(**wrong)


def test_batches_without_asyncio(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *numbered(20))
    seen: set[bytes] = set()
    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd), max_in_flight=10, backoff_multiplier="10ms") as consumer:
        for batch in consumer.batches(10, 0.5):
            with batch:
                if not seen:
                    batch[0].requeue(0, backoff=False)
                seen.update(message.body for message in batch if not message.is_answered)
            if len(seen) == 20:
                consumer.stop()
        assert consumer.get(0) is None
        assert consumer.stats().finished == 20
    assert seen == set(numbered(20))


async def test_what_is_gathered_longer_than_its_timeout_is_kept_alive(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"1")
    with StallWatch(nsqd) as watch:
        async with consumer_of(nsqd, topic, msg_timeout="4s") as consumer:
            async with (await anext(consumer.batches(10, 6.0))).or_raise() as batch:
                assert set(batch.bodies) == {b"1"}
                assert [message.attempts for message in batch] == [1] or watch.stood_still
            await finish_rest(consumer, nsqd, topic)
    assert nsqd.channel(topic)["timeout_count"] == 0 or watch.stood_still


async def test_what_a_lost_connection_brought_is_not_in_the_batch(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    publish(nsqd, topic, *numbered(2))
    async with Consumer(
        topic, "ch", nsqd="{}:{}".format(*proxy.address), max_in_flight=3, msg_timeout="3s"
    ) as consumer:
        taking = asyncio.create_task(anext(consumer.batches(10, LONG_S)))
        await until(lambda: consumer.stats().in_flight == 2)
        proxy.cut()
        publish(nsqd, topic, b"2")
        async with asyncio.timeout(30):
            batch = await taking  # when no more can come: all three are here
        seen = [(message.body, message.attempts) for message in batch]
        batch.finish()
        seen += await finish_rest(consumer, nsqd, topic)
        assert {body for body, _ in seen} == set(numbered(3))
        assert not {(b"0", 1), (b"1", 1)}.intersection(seen), "the lost connection brought these"


async def test_a_message_of_cancelled_batches_is_not_given_up(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"1")
    async with consumer_of(nsqd, topic, max_attempts=1) as consumer:
        for received in range(1, 4):
            waiting = asyncio.create_task(anext(consumer.batches(10, LONG_S)))
            await until(lambda: consumer.stats().received == received)  # noqa: B023
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
        message = await consumer.get(20)
        assert message is not None
        message.finish()
        assert consumer.stats().given_up == 0


@pytest.mark.parametrize("settings", [{"max_attempts": 1}, {"dedupe": True}], ids=["attempts", "dedupe"])
async def test_what_is_lost_while_it_is_gathered_comes_again_as_one_that_nobody_saw(
    nsqd: Nsqd, proxy: FaultProxy, topic: str, settings: dict[str, Any]
) -> None:
    publish(nsqd, topic, b"1")
    address = "{}:{}".format(*proxy.address)
    async with Consumer(topic, "ch", nsqd=address, msg_timeout="1s", max_in_flight=10, **settings) as consumer:
        gathering = asyncio.create_task(anext(consumer.batches(2, 5.0)))
        await until(lambda: consumer.stats().in_flight == 1)
        proxy.cut()
        async with asyncio.timeout(30), (await gathering).or_raise() as batch:
            assert batch.bodies == [b"1"]
        assert (consumer.stats().given_up, consumer.stats().duplicates) == (0, 0)
        await finish_rest(consumer, nsqd, topic)


async def test_what_goes_back_while_it_is_gathered_comes_again_as_one_that_nobody_saw(
    start_nsqd: Callable[..., Nsqd], topic: str
) -> None:
    """nsqd lets the message be touched no longer, while its batch waits for others."""
    daemon = start_nsqd("--max-msg-timeout=1s")
    publish(daemon, topic, b"1")
    async with consumer_of(daemon, topic, msg_timeout="1s", max_attempts=1, dedupe=True) as consumer:
        async with asyncio.timeout(30), (await anext(consumer.batches(2, 5.0))).or_raise() as batch:
            assert batch.bodies == [b"1"]
        assert (consumer.stats().given_up, consumer.stats().duplicates) == (0, 0)
        await finish_rest(consumer, daemon, topic)
