"""Checks the ways to take messages and to end taking them: `get`, `stop`, and blocks that let exceptions out."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from client.consumer_rig import AFTER_GIVING_BACK, consumer_of, is_done, publish
from client.pool_rig import address_of
from harness import FaultProxy, Nsqd, eventually, until
from nsquark import Batch, Consumer, Message, sync
from nsquark.client.inbox import LOOP_TURN_S
from nsquark.errors import Closed

NSQD_FLAGS = ["--msg-timeout=30s"]
WAIT_S = 30.0
START_S_MAX = 10.0
"""A start that is stopped takes no longer; the nsqd would be waited for three times as long."""


async def test_get_waits_only_so_long(nsqd: Nsqd, topic: str) -> None:
    async with consumer_of(nsqd, topic) as consumer:
        started_s = time.monotonic()
        assert await consumer.get(0.2) is None
        assert time.monotonic() - started_s >= 0.2
        waiting = asyncio.create_task(consumer.get(WAIT_S))
        publish(nsqd, topic, b"one")
        message = await waiting
        assert message is not None and message.body == b"one"
        message.finish()


async def test_get_takes_at_once_what_is_here(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"one", b"two")
    async with consumer_of(nsqd, topic) as consumer:
        await until(lambda: consumer.stats().in_flight == 2)
        for _ in range(2):
            message = await consumer.get(0)
            assert message is not None
            message.finish()
        assert await consumer.get(0) is None


async def test_waiting_in_vain_leaves_nothing_behind(nsqd: Nsqd, topic: str) -> None:
    """A message that comes after many waits wakes the one that still waits."""
    async with consumer_of(nsqd, topic) as consumer:
        for _ in range(50):
            assert await consumer.get(0.001) is None
        waiting = asyncio.create_task(consumer.get(WAIT_S))
        await asyncio.sleep(0)
        publish(nsqd, topic, b"one")
        message = await waiting
        assert message is not None
        message.finish()


async def test_a_message_whose_taker_is_cancelled_as_it_comes_is_for_who_still_waits(nsqd: Nsqd, topic: str) -> None:
    """The taker was woken, and lets the loop turn first, which something else has held up; it is cancelled there."""
    async with consumer_of(nsqd, topic) as consumer:
        for body in (b"%d" % number for number in range(10)):
            first, second = (asyncio.create_task(consumer.get(WAIT_S)) for _ in range(2))
            await asyncio.sleep(LOOP_TURN_S)
            received = consumer.stats().received
            publish(nsqd, topic, body)
            while consumer.stats().received == received:
                await asyncio.sleep(0)
            time.sleep(2 * LOOP_TURN_S)
            await asyncio.sleep(0)
            first.cancel()
            message = await asyncio.wait_for(second, WAIT_S / 2)
            assert message is not None and message.body == body
            message.finish()


# stop


async def test_stop_from_a_signal_handler_ends_an_iteration_after_its_message(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *(b"%d" % number for number in range(10)))
    handled: list[Any] = []
    async with consumer_of(nsqd, topic) as consumer:
        before = signal.signal(signal.SIGUSR1, lambda *_: consumer.stop())
        try:
            async for message in consumer:
                async with message:
                    if not handled:
                        os.kill(os.getpid(), signal.SIGUSR1)
                    await asyncio.sleep(0.1)  # the handler runs, and the rest goes back
                    handled.append(message.body)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert len(handled) == consumer.stats().finished == 1
        assert await consumer.get() is None
    channel = nsqd.channel(topic)
    assert (channel["depth"], channel["in_flight_count"]) == (9, 0)


async def test_stop_lets_handlers_of_run_finish(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *(b"%d" % number for number in range(10)))
    begun = 0
    handled: list[bytes] = []
    has_stopped = threading.Event()

    def stop() -> None:
        consumer.stop()
        has_stopped.set()

    async def handle(message: Message) -> None:
        nonlocal begun
        begun += 1
        if begun == 3:
            threading.Thread(target=stop).start()
        await until(has_stopped.is_set)
        handled.append(message.body)

    async with consumer_of(nsqd, topic) as consumer:
        async with asyncio.timeout(WAIT_S):
            await consumer.run(handle, concurrency=3)
        assert len(handled) == consumer.stats().finished == 3
        consumer.unpause()
        consumer.change_max_in_flight(10)
    assert nsqd.channel(topic)["depth"] == 7


async def test_stop_does_not_wait_for_ever(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"one")

    async def hang(_: Message) -> None:
        consumer.stop(0.1)
        await asyncio.sleep(3600)

    async with consumer_of(nsqd, topic) as consumer:
        running = asyncio.create_task(consumer.run(hang))
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait([running])
    await until(lambda: nsqd.channel(topic)["depth"] == 1)


async def test_a_consumer_stopped_before_its_start_does_not_start(nsqd: Nsqd, topic: str) -> None:
    consumer = consumer_of(nsqd, topic)
    consumer.stop()
    with pytest.raises(Closed):
        await consumer.start()


@pytest.mark.parametrize("with_other", [False, True], ids=["alone", "beside another"])
async def test_stop_ends_a_start_that_waits_for_an_nsqd_that_never_answers(
    nsqd: Nsqd, proxy: FaultProxy, topic: str, with_other: bool
) -> None:
    publish(nsqd, topic, b"one")
    proxy.stall()
    silent = "{}:{}".format(*proxy.address)
    consumer = Consumer(topic, "ch", nsqd=[silent, address_of(nsqd)] if with_other else silent)
    starting = asyncio.create_task(consumer.start())
    await until(lambda: proxy.connection_count == 1 and len(consumer.connections) == with_other)
    consumer.stop()
    await asyncio.wait([starting], timeout=START_S_MAX)
    assert starting.done()
    await starting
    assert await consumer.get() is None
    await consumer.run(lambda message: None)
    await consumer.close()
    await until(lambda: nsqd.channel(topic)["depth"] == 1)


def test_stop_without_asyncio_from_a_signal_handler(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"one")
    seen = []
    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd)) as consumer:
        before = signal.signal(signal.SIGUSR1, lambda *_: consumer.stop())
        timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGUSR1])
        try:
            for message in consumer:
                with message:
                    seen.append(message.body)
                timer.start()
        finally:
            timer.join()
            signal.signal(signal.SIGUSR1, before)
    assert seen == [b"one"]


# or_raise


async def test_a_block_that_lets_exceptions_out(nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    publish(nsqd, topic, b"one")
    async with consumer_of(nsqd, topic) as consumer:
        with pytest.raises(AssertionError, match="not two"):
            async with (await anext(consumer)).or_raise() as message:
                assert message.body == b"two", "not two"
        assert message.is_answered and consumer.stats().requeued == 1
        assert "failed" not in caplog.text, "whoever gets the exception decides about a log"
        async with (await anext(consumer)).or_raise() as message:
            assert message.attempts == 2
    await until(lambda: is_done(nsqd, topic))


def test_a_block_that_lets_exceptions_out_without_asyncio(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"one")
    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd), default_requeue_delay="10ms") as consumer:
        with pytest.raises(AssertionError), next(consumer).or_raise() as message:
            assert message.body == b"two"
        assert message.is_answered
        with next(consumer).or_raise() as message:
            assert message.attempts == 2
        assert consumer.stats().finished == 1


@pytest.mark.parametrize("kind", ["run", "iteration", "get", "batches"])
async def test_no_message_is_taken_after_stop(nsqd: Nsqd, topic: str, kind: str) -> None:
    """No more are taken though they are all here, and nothing has to be awaited to take them."""
    publish(nsqd, topic, *(b"%d" % number for number in range(10)))
    handled: list[bytes] = []

    def handle(message: Message) -> None:
        handled.append(message.body)
        consumer.stop()
        message.finish()

    async with consumer_of(nsqd, topic) as consumer:
        await until(lambda: consumer.stats().in_flight == 10)
        async with asyncio.timeout(WAIT_S):
            if kind == "run":
                await consumer.run(handle)
            elif kind == "iteration":
                async for message in consumer:
                    handle(message)
            elif kind == "get":
                while (taken := await consumer.get()) is not None:
                    handle(taken)
            else:
                async for batch in consumer.batches(1):
                    handle(batch[0])
        assert len(handled) == 1
    channel = nsqd.channel(topic)
    assert (channel["depth"], channel["in_flight_count"]) == (9, 0)


# interrupts


@pytest.mark.parametrize("take", ["get", "next", "batch"])
def test_a_signal_that_interrupts_taking_gives_the_message_back(nsqd: Nsqd, topic: str, take: str) -> None:
    """The message is there already when the handler of the signal raises."""

    class TakingInterrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        producer.publish(topic, b"x")
        eventually(lambda: nsqd.channel(topic)["in_flight_count"] == 1)
        eventually(lambda: consumer.stats().received == 1)
        consumer.stats()
        raise TakingInterrupted

    with (
        sync.Producer(address_of(nsqd)) as producer,
        sync.Consumer(topic, "ch", nsqd=address_of(nsqd)) as consumer,
    ):
        batches = consumer.batches(max_wait=0)
        ways: dict[str, Callable[[], Message | Batch | None]] = {
            "get": consumer.get,
            "next": lambda: next(consumer),
            "batch": lambda: next(batches),
        }
        take_one = ways[take]

        def take_and_be_interrupted() -> None:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            take_one()

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            with pytest.raises(TakingInterrupted):  # also if the signal comes at once
                take_and_be_interrupted()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        taken = take_one()
        message = taken[0] if isinstance(taken, Batch) else taken
        assert message is not None and message.attempts == AFTER_GIVING_BACK
        message.finish()
    assert is_done(nsqd, topic)
