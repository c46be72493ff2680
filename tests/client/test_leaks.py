"""Checks that a client that is closed leaves no task, timer, socket or thread behind, whatever happened to it."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from client.consumer_rig import consumer_of, is_done, publish
from client.pool_rig import address_of
from harness import FaultProxy, Nsqd, eventually, until
from nsquark import Config, Consumer, Message, Producer
from nsquark.client.errors import ConfigError, NsqError
from nsquark.client.lookupd import PollLoop

Scenario = Callable[[Nsqd, FaultProxy, str], Coroutine[Any, Any, None]]
NOBODY = "127.0.0.1:1"


def proxied(proxy: FaultProxy) -> str:
    return "{}:{}".format(*proxy.address)


def open_sockets() -> set[str]:
    targets = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            targets.add(os.readlink(f"/proc/self/fd/{name}"))
    return {target for target in targets if target.startswith("socket:")}


def our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "nsquark" in thread.name}


def our_timers() -> list[asyncio.TimerHandle]:
    """Lists the client's timers in asyncio's own loop; uvloop does not tell."""
    timers = getattr(asyncio.get_running_loop(), "_scheduled", ())
    return [timer for timer in timers if not timer.cancelled() and timer._callback.__module__.startswith("nsquark")]


# -- what may happen -------------------------------------------------------------------------------------


async def publish_and_close(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    async with Producer(address_of(nsqd)) as producer:
        await asyncio.gather(*(producer.publish(topic, b"x") for _ in range(100)))


async def publish_to_nobody(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    async with Producer(NOBODY) as producer:
        with pytest.raises(NsqError):
            await producer.publish(topic, b"x")


async def publish_through_cuts(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    async with Producer(proxied(proxy)) as producer:
        for _ in range(5):
            futures = [asyncio.ensure_future(producer.publish(topic, b"x")) for _ in range(50)]
            await asyncio.sleep(0)
            proxy.cut()
            await asyncio.gather(*futures, return_exceptions=True)


async def close_a_stalled_producer(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    producer = Producer(proxied(proxy), write_timeout="100ms")
    await producer.ping()
    proxy.stall()
    future = producer.publish_nowait(topic, bytes(1 << 20))
    await producer.close(timeout=0.1)
    with pytest.raises(NsqError):
        await future
    proxy.resume()


async def close_a_producer_that_connects(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    proxy.stall()
    producer = Producer(proxied(proxy))
    future = producer.publish_nowait(topic, b"x")
    await until(lambda: proxy.connection_count)
    await producer.close(timeout=0)
    with pytest.raises(NsqError):
        await future
    proxy.resume()


async def consume_and_close(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    publish(nsqd, topic, *(b"%d" % number for number in range(100)))
    async with consumer_of(nsqd, topic) as consumer:
        for _ in range(10):
            (await anext(consumer)).finish()


async def handle_and_close(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    publish(nsqd, topic, *(b"%d" % number for number in range(100)))
    async with consumer_of(nsqd, topic, auto_touch=True) as consumer:
        running = asyncio.create_task(consumer.run(lambda _: None))
        await until(lambda: is_done(nsqd, topic))
        await consumer.close()
        await running


async def handle_in_threads_and_close(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    publish(nsqd, topic, *(b"%d" % number for number in range(100)))
    async with consumer_of(nsqd, topic) as consumer:
        running = asyncio.create_task(consumer.run(lambda _: None, threads=4))
        await until(lambda: is_done(nsqd, topic))
        await consumer.close()
        await running


async def cancel_the_handling(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    publish(nsqd, topic, *(b"%d" % number for number in range(100)))
    started = asyncio.Event()

    async def handle(_: Message) -> None:
        started.set()
        await asyncio.sleep(60)

    async def work() -> None:
        async with consumer_of(nsqd, topic) as consumer:
            await consumer.run(handle, concurrency=5)

    task = asyncio.create_task(work())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def close_in_backoff(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    publish(nsqd, topic, b"1", b"2")
    async with consumer_of(nsqd, topic, backoff_multiplier="30s") as consumer:
        first, second = await anext(consumer), await anext(consumer)
        first.requeue()
        assert consumer.stats().backoff_level == 1
    second.requeue()


async def consume_through_cuts(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    publish(nsqd, topic, *(b"%d" % number for number in range(200)))
    async with Consumer(topic, "ch", nsqd=proxied(proxy), max_in_flight=20, lookupd_poll_interval="20ms") as consumer:
        for _ in range(5):
            for _ in range(10):
                (await anext(consumer)).finish()
            proxy.cut()
            await until(lambda: not consumer.connections)


async def close_a_consumer_that_connects(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    proxy.stall()
    consumer = Consumer(topic, "ch", nsqd=proxied(proxy))
    starting = asyncio.create_task(consumer.start())
    await until(lambda: proxy.connection_count)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    proxy.resume()


async def close_a_consumer_that_starts(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    proxy.stall()
    consumer = Consumer(topic, "ch", nsqd=proxied(proxy), lookupd=NOBODY)
    starting = asyncio.create_task(consumer.start())
    await until(lambda: proxy.connection_count)
    await consumer.close()
    with pytest.raises(NsqError):
        await starting
    proxy.resume()


async def close_while_a_connection_is_retried(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    addresses = [address_of(nsqd), NOBODY]
    async with Consumer(topic, "ch", nsqd=addresses, lookupd_poll_interval="10ms"):
        await asyncio.sleep(0.1)


async def start_in_vain(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    with pytest.raises(NsqError):
        await Consumer(topic, "ch", nsqd=NOBODY).start()
    with pytest.raises(ConfigError):
        await Consumer(topic, "ch", lookupd="no port").start()


async def ask_a_nsqlookupd_that_is_not_there(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    async with Consumer(topic, "ch", lookupd=NOBODY, lookupd_poll_interval="10ms"):
        await asyncio.sleep(0.1)


SCENARIOS: list[Scenario] = [
    publish_and_close,
    publish_to_nobody,
    publish_through_cuts,
    close_a_stalled_producer,
    close_a_producer_that_connects,
    consume_and_close,
    handle_and_close,
    handle_in_threads_and_close,
    cancel_the_handling,
    close_in_backoff,
    consume_through_cuts,
    close_a_consumer_that_connects,
    close_a_consumer_that_starts,
    close_while_a_connection_is_retried,
    start_in_vain,
    ask_a_nsqlookupd_that_is_not_there,
]


async def without_leaks(scenario: Coroutine[Any, Any, None]) -> None:
    """Checks in the loop that no task is left a few turns later, when what was closed has told its protocol."""
    before = asyncio.all_tasks()
    await scenario
    for _ in range(5):
        await asyncio.sleep(0)
    assert not asyncio.all_tasks() - before
    assert not our_timers()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_nothing_is_left(nsqd: Nsqd, topic: str, scenario: Scenario, loop: Callable[[], Any]) -> None:
    before, threads_before = open_sockets(), our_threads()
    with FaultProxy(nsqd.tcp) as proxy, asyncio.Runner(loop_factory=loop) as runner:
        runner.run(without_leaks(scenario(nsqd, proxy, topic)))
    eventually(lambda: not open_sockets() - before)
    eventually(lambda: not our_threads() - threads_before)


async def test_a_poll_loop_ends_when_it_is_wanted_and_closed_at_once() -> None:
    """A poll loop is wanted at that moment when a connection is lost while its consumer closes."""
    rounds = asyncio.Event()

    async def ask() -> None:
        rounds.set()

    polling = PollLoop(ask, Config(lookupd_poll_interval="5m", lookupd_poll_jitter=0.0))
    polling.start()
    await rounds.wait()
    await asyncio.sleep(0.2)  # it waits to be wanted now
    polling.poll_soon()
    async with asyncio.timeout(20):
        await polling.close()
