"""Checks the nsqds of a consumer: what is being connected ends with it."""

import asyncio
import contextlib

import pytest

from client.consumer_rig import publish
from harness import FaultProxy, Nsqd, until
from nsquark import Consumer


@pytest.mark.parametrize("turns", range(6))
async def test_a_close_that_is_cancelled_ends_what_is_being_connected(nsqd: Nsqd, topic: str, turns: int) -> None:
    """The close is cancelled after so many turns of the event loop."""
    publish(nsqd, topic, b"1")
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(FaultProxy(nsqd.tcp)) for _ in range(3)]
        addresses = ["{}:{}".format(*proxy.address) for proxy in proxies]
        before = asyncio.all_tasks()
        consumer = await Consumer(topic, "ch", nsqd=addresses, lookupd_poll_interval="50ms").start()
        for proxy in proxies:
            proxy.stall()
            proxy.cut()
        await until(lambda: len(consumer._nsqds._connecting) == len(proxies))
        closing = asyncio.create_task(consumer.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        await consumer.close()
        await until(lambda: asyncio.all_tasks() == before)
        for proxy in proxies:
            proxy.heal()
        await until(lambda: not nsqd.channel(topic)["clients"])
        assert not consumer.connections
