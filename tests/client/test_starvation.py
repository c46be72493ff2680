"""Checks what NSQ's users met: a consumer that is connected, while messages wait, and gets none."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from client.consumer_rig import is_done, publish
from client.pool_rig import address_of, start_nsqds
from harness import FaultProxy, Nsqd, until
from nsquark import Consumer, Message

WAIT_S = 20.0
QUICK: dict[str, Any] = {
    "rdy_redistribute_interval": "100ms",
    "low_rdy_idle_timeout": "1s",
    "low_rdy_timeout": "1s",
    "backoff_multiplier": "20ms",
    "default_requeue_delay": "0s",
    "lookupd_poll_interval": "200ms",
    "output_buffer_timeout": "25ms",
}


@pytest.fixture(scope="module")
def nsqds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Nsqd]]:
    daemons = start_nsqds(tmp_path_factory.mktemp("nsqds"), 3)
    yield daemons
    for daemon in daemons:
        daemon.kill()


async def handled_all(consumer: Consumer, handler: Any, count: int) -> None:
    running = asyncio.create_task(consumer.run(handler))
    await until(lambda: consumer.stats().finished >= count, WAIT_S)
    await consumer.close()
    await running


async def test_an_idle_connection_does_not_hold_the_rdy_of_others(nsqds: list[Nsqd], topic: str) -> None:
    """One message may be in flight over three connections, of which the last has all messages."""
    publish(nsqds[2], topic, *(b"%d" % number for number in range(50)))
    async with Consumer(topic, "ch", nsqd=map(address_of, nsqds), max_in_flight=1, **QUICK) as consumer:
        await handled_all(consumer, lambda _: None, 50)
    assert is_done(nsqds[2], topic)


async def test_a_busy_connection_does_not_hold_the_rdy_of_others(nsqds: list[Nsqd], topic: str) -> None:
    """The first connection has hundreds of messages; the few of the others must be handled too."""
    for daemon in nsqds:
        publish(daemon, topic, *(b"%d" % number for number in range(3)))
    publish(nsqds[0], topic, *(b"%d" % number for number in range(500)))
    left = {address_of(daemon) for daemon in nsqds[1:]}

    async def handle(message: Message) -> None:
        await asyncio.sleep(0.01)
        left.discard(message.nsqd_address)

    async with Consumer(topic, "ch", nsqd=map(address_of, nsqds), max_in_flight=1, **QUICK) as consumer:
        running = asyncio.create_task(consumer.run(handle))
        await until(lambda: not left, WAIT_S)
        await consumer.close()
        await running


async def test_one_in_flight_is_one_over_all_nsqds_while_rdy_moves(nsqds: list[Nsqd], topic: str) -> None:
    """What is being handled counts until it is answered, also after its connection had to make room for others."""
    for daemon in nsqds:
        publish(daemon, topic, b"1", b"2")
    by_address = {address_of(daemon): daemon for daemon in nsqds}
    async with Consumer(topic, "ch", nsqd=list(by_address), max_in_flight=1, **QUICK) as consumer:
        for _ in range(2):
            message = await asyncio.wait_for(anext(consumer), WAIT_S)
            source = by_address[message.nsqd_address]
            await until(lambda source=source: source.channel(topic)["clients"][0]["ready_count"] == 0)
            assert await consumer.get(0.3) is None
            assert sum(daemon.channel(topic)["in_flight_count"] for daemon in nsqds) == 1
            message.finish()


async def test_what_was_in_flight_on_an_nsqd_that_is_left_and_lost_makes_room_for_others(
    nsqds: list[Nsqd], topic: str
) -> None:
    """One message may be in flight; the one that was is never answered."""
    publish(nsqds[0], topic, b"left")
    with FaultProxy(nsqds[0].tcp) as proxy:
        address = "{}:{}".format(*proxy.address)
        async with Consumer(topic, "ch", nsqd=address, max_in_flight=1, **QUICK) as consumer:
            assert await consumer.get(WAIT_S) is not None
            await consumer.connect_to_nsqd(address_of(nsqds[1]))
            publish(nsqds[1], topic, b"next")
            leaving = asyncio.create_task(consumer.disconnect_from_nsqd(address))
            await until(lambda: not nsqds[0].channel(topic)["clients"][0]["ready_count"])
            assert await consumer.get(0) is None
            proxy.cut()
            await leaving
            message = await consumer.get(WAIT_S)
            assert message is not None and message.body == b"next"
            message.finish()


async def test_backoff_with_many_connections_comes_to_an_end(nsqds: list[Nsqd], topic: str) -> None:
    """The message to try comes from one connection in three: whichever is asked first, it is found."""
    publish(nsqds[1], topic, *(b"%d" % number for number in range(30)))
    failures = 3

    def handle(_: Message) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise RuntimeError("down")

    async with Consumer(topic, "ch", nsqd=map(address_of, nsqds), max_in_flight=30, **QUICK) as consumer:
        await handled_all(consumer, handle, 30)
        assert consumer.stats().backoff_level == 0
    assert is_done(nsqds[1], topic)


@pytest.mark.parametrize("max_in_flight", [1, 10])
@pytest.mark.parametrize("is_failing", [False, True])
async def test_a_consumer_does_not_stick_after_a_reconnect(
    nsqds: list[Nsqd], topic: str, max_in_flight: int, is_failing: bool
) -> None:
    """The consumer may have been in backoff, and have lost the connection that was asked for a message to try."""
    with FaultProxy(nsqds[0].tcp) as proxy:
        address = "{}:{}".format(*proxy.address)
        async with Consumer(topic, "ch", nsqd=address, max_in_flight=max_in_flight, **QUICK) as consumer:
            if is_failing:
                publish(nsqds[0], topic, b"first")
                (await anext(consumer)).requeue(60)  # the level rises, and nothing is there to try
                await until(lambda: nsqds[0].channel(topic)["clients"][0]["ready_count"] == 1)
            else:
                await until(lambda: consumer.connections)
            proxy.cut()
            await until(lambda: not consumer.connections)
            await until(lambda: consumer.connections)
            publish(nsqds[0], topic, *(b"%d" % number for number in range(20)))
            await handled_all(consumer, lambda _: None, 20)
