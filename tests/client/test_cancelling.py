"""Cancels consumers and producers wherever they happen to be: no message is lost, and none given up."""

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from client.consumer_rig import consumer_of, is_done, publish
from client.pool_rig import address_of, messages_of
from harness import Nsqd, until
from nsquark import Consumer, Dedupe, Message, Producer

NSQD_FLAGS = ["--msg-timeout=30s"]
LIVES = 25
COUNT = 40
BODIES = [b"%d" % number for number in range(COUNT)]
LIFE_S_MAX = 0.08
"""This is long enough to connect and to handle some, when the machine is idle."""


async def _run(consumer: Consumer, handle: Callable[[Message], None]) -> None:
    async def handle_later(message: Message) -> None:
        await asyncio.sleep(0.001)
        handle(message)

    await consumer.run(handle_later, concurrency=3)


async def _iterate(consumer: Consumer, handle: Callable[[Message], None]) -> None:
    async for message in consumer:
        async with message:
            await asyncio.sleep(0.001)
            handle(message)


async def _get(consumer: Consumer, handle: Callable[[Message], None]) -> None:
    while True:
        message = await consumer.get(0.001)
        if message is not None:
            with message:
                handle(message)


async def _batches(consumer: Consumer, handle: Callable[[Message], None]) -> None:
    async for batch in consumer.batches(5, 0.01):
        async with batch:
            await asyncio.sleep(0.001)
            for message in batch:
                handle(message)


@pytest.mark.parametrize("use", [_run, _iterate, _get, _batches])
async def test_a_consumer_is_cancelled_at_any_point(
    nsqd: Nsqd, topic: str, use: Callable[[Consumer, Callable[[Message], None]], Awaitable[None]]
) -> None:
    """Each life handles a few messages, if it comes so far; the last one has all the time it needs."""
    publish(nsqd, topic, *BODIES)
    handled: Counter[bytes] = Counter()
    given_up: list[bytes] = []
    when = random.Random(1)
    dedupe = Dedupe()

    def handle(message: Message) -> None:
        handled[message.body] += 1

    async def live() -> None:
        consumer = consumer_of(
            nsqd, topic, max_attempts=1, dedupe=dedupe, on_give_up=lambda message: given_up.append(message.body)
        )
        async with consumer:
            await use(consumer, handle)

    for _ in range(LIVES):
        life = asyncio.create_task(live())
        await asyncio.sleep(when.uniform(0, LIFE_S_MAX))
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life
    last = asyncio.create_task(live())
    await until(lambda: len(handled) == COUNT and is_done(nsqd, topic))
    last.cancel()
    await asyncio.wait([last])
    assert sorted(handled) == sorted(BODIES)
    assert not given_up
    await until(lambda: not nsqd.channel(topic)["clients"])


@pytest.mark.parametrize("use", ["run", "get"])
async def test_a_hook_in_a_thread_that_was_begun_is_not_begun_again(nsqd: Nsqd, topic: str, use: str) -> None:
    """Nobody can end it there: a message that went back would be buried twice."""
    publish(nsqd, topic, b"x")
    buried: list[bytes] = []
    may_end = threading.Event()

    def bury(message: Message) -> None:
        buried.append(message.body)
        assert may_end.wait(60)

    def handle(_: Message) -> None:
        raise ValueError("no")

    consumer = consumer_of(nsqd, topic, max_attempts=1, on_give_up=bury)
    consumer.calls_hook_off_loop = True
    async with consumer:
        if use == "get":
            message = await consumer.get()
            assert message is not None
            message.requeue(0)
        using = asyncio.create_task(consumer.run(handle, threads=1) if use == "run" else consumer.get())
        await until(lambda: buried)
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using
        may_end.set()
    assert consumer.stats().given_up == 1 and is_done(nsqd, topic)
    assert len(buried) == 1


async def test_publishes_are_cancelled_at_any_point(nsqd: Nsqd, topic: str) -> None:
    """The messages of publishes that returned are there, and answers go to the publishes they belong to."""
    returned: list[bytes] = []
    when = random.Random(2)
    async with Producer(address_of(nsqd), outstanding_max=5) as producer:

        async def publish_one(body: bytes) -> None:
            await producer.publish(topic, body)
            returned.append(body)

        for life in range(LIVES):
            tasks = [asyncio.create_task(publish_one(b"%d/%d" % (life, number))) for number in range(20)]
            await asyncio.sleep(when.uniform(0, LIFE_S_MAX / 4))
            for task in when.sample(tasks, 10):
                task.cancel()
            await asyncio.wait(tasks)
    there = messages_of(nsqd, topic)
    assert set(returned) <= set(there)
    assert len(there) == len(set(there))
    assert len(returned) >= 10 * LIVES


async def test_nsqd_is_killed_while_a_consumer_closes(start_nsqd: Callable[..., Nsqd], topic: str) -> None:
    when = random.Random(3)
    nsqd = start_nsqd()
    for _ in range(3):
        publish(nsqd, topic, *BODIES)
        consumer = consumer_of(nsqd, topic, max_in_flight=20)
        async with asyncio.timeout(30):
            await consumer.start()
            message = await consumer.get()
            assert message is not None
            closing = asyncio.create_task(consumer.close(10))
            await asyncio.sleep(when.uniform(0, 0.01))
            nsqd.kill()
            message.finish()
            await closing
        assert consumer.connections == []
        nsqd.start()
