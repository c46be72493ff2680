"""Lets producers and consumers work on networks and with daemons that fail.

No publish is reported as done that nsqd does not have, no consumer is stuck, and everything comes to an end.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from client.consumer_rig import is_done, publish
from client.pool_rig import address_of
from harness import FaultProxy, Nsqd, nsqd_is_ours, until
from harness.lookupd import Nsqlookupd
from nsquark import Config, Consumer, Producer
from nsquark.client.errors import NotConnected, NsqError

WAIT_S = 30.0
CONFIG = Config(
    heartbeat_interval="1s",  # the shortest that nsqd takes
    read_timeout="1200ms",
    max_in_flight=20,
    msg_timeout="1s",
    lookupd_poll_interval="50ms",
    default_requeue_delay="10ms",
    backoff_multiplier="10ms",
    output_buffer_timeout="25ms",
    max_attempts=0,
)
CALM_CONFIG = CONFIG.replace(heartbeat_interval="30s", read_timeout="60s")
"""Is for connections that nothing is done to: the shortest times would end them where nsqd stands still for a while."""
Fault = Callable[[FaultProxy], Coroutine[Any, Any, None]]


def proxied(proxy: FaultProxy) -> str:
    return "{}:{}".format(*proxy.address)


async def started(make: Callable[[], Consumer]) -> Consumer:
    """Starts a consumer, again and again where nsqd does not answer within the short read_timeout."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(NotConnected):
                return await make().start()


async def publish_at_last(producer: Producer, topic: str, body: bytes) -> None:
    """Publishes, again and again where nsqd does not answer within the short read_timeout."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(NotConnected):
                return await producer.publish(topic, body)


# -- what the network does, a few times ------------------------------------------------------------------


async def cut(proxy: FaultProxy) -> None:
    proxy.cut()
    await asyncio.sleep(0.1)


async def close_politely(proxy: FaultProxy) -> None:
    proxy.cut(reset=False)
    await asyncio.sleep(0.1)


async def cut_in_the_middle_of_frames(proxy: FaultProxy) -> None:
    proxy.up.chunk_bytes = proxy.down.chunk_bytes = 7
    await asyncio.sleep(0.1)
    proxy.cut()
    proxy.heal()


async def stall(proxy: FaultProxy) -> None:
    proxy.stall()
    await asyncio.sleep(1.4)
    proxy.resume()


async def stop_listening(proxy: FaultProxy) -> None:
    proxy.refusing = True
    proxy.cut()
    await asyncio.sleep(0.2)
    proxy.refusing = False


async def half_close_up(proxy: FaultProxy) -> None:
    proxy.half_close("up")
    await asyncio.sleep(0.1)
    proxy.heal()
    proxy.cut()


async def half_close_down(proxy: FaultProxy) -> None:
    proxy.half_close("down")
    await asyncio.sleep(0.1)
    proxy.heal()


async def garble(proxy: FaultProxy) -> None:
    """Garbles one connection, and no more: a garbled IDENTIFY of the next might ask for no checksums."""
    proxy.refusing = True
    proxy.up.garble_every_bytes = proxy.down.garble_every_bytes = 300
    await asyncio.sleep(0.3)
    proxy.heal()
    proxy.cut()


FAULTS: list[Fault] = [
    cut,
    close_politely,
    cut_in_the_middle_of_frames,
    stall,
    stop_listening,
    half_close_up,
    half_close_down,
]


async def publish_numbers(producer: Producer, topic: str, done: set[bytes], stop: asyncio.Event) -> None:
    """Publishes numbers, some at a time, until told to stop."""
    numbers = itertools.count()
    while not stop.is_set():
        bodies = [b"%d" % next(numbers) for _ in range(20)]
        outcomes = await asyncio.gather(*(producer.publish(topic, body) for body in bodies), return_exceptions=True)
        assert all(outcome is None or isinstance(outcome, NsqError) for outcome in outcomes), outcomes
        done.update(body for body, outcome in zip(bodies, outcomes, strict=True) if outcome is None)
        await asyncio.sleep(0.005)


async def take_all(daemon: Nsqd, topic: str, wanted: set[bytes]) -> None:
    """Takes messages until every wanted one was there."""
    missing = set(wanted)
    async with Consumer(topic, "ch", nsqd=address_of(daemon), config=CALM_CONFIG) as consumer:
        async with asyncio.timeout(WAIT_S):
            while missing:
                async with await anext(consumer) as message:
                    missing.discard(message.body)


async def producer_meets(fault: Fault, nsqd: Nsqd, proxy: FaultProxy, topic: str, config: Config) -> None:
    done: set[bytes] = set()
    stop = asyncio.Event()
    async with Producer(proxied(proxy), config) as producer:
        publishing = asyncio.create_task(publish_numbers(producer, topic, done, stop))
        for _ in range(2):
            before = len(done)
            await until(lambda: len(done) > before + 100)  # noqa: B023  (called before the loop goes on)
            await fault(proxy)
        before = len(done)
        await until(lambda: len(done) > before + 100)
        stop.set()
        await publishing
        assert producer.outstanding == producer.outstanding_bytes == 0
    await take_all(nsqd, topic, done)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_what_is_reported_as_done_is_there(nsqd: Nsqd, proxy: FaultProxy, topic: str, fault: Fault) -> None:
    await producer_meets(fault, nsqd, proxy, topic, CONFIG)


async def test_garbled_publishes_are_not_reported_as_done(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    """Snappy has checksums: what passes them is what was sent."""
    await producer_meets(garble, nsqd, proxy, topic, CONFIG.replace(snappy=True))


async def test_garbled_without_checksums(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    """Nobody can say what arrived, but all comes to an end, and goes on when the network is well again."""
    async with Producer(proxied(proxy), CONFIG) as producer:
        await publish_at_last(producer, topic, b"x")
        proxy.up.garble_every_bytes = proxy.down.garble_every_bytes = 40
        for _ in range(10):
            futures = [asyncio.ensure_future(producer.publish(topic, b"y" * 50)) for _ in range(20)]
            async with asyncio.timeout(WAIT_S):
                outcomes = await asyncio.gather(*futures, return_exceptions=True)
            assert all(outcome is None or isinstance(outcome, NsqError) for outcome in outcomes), outcomes
        proxy.heal()
        proxy.cut()
        await until(lambda: not producer.is_connected)
        await publish_at_last(producer, topic, b"z")


@pytest.mark.parametrize("crash", [pytest.param(True, marks=pytest.mark.ours), False])
async def test_publishing_while_nsqd_is_restarted(start_nsqd: Callable[..., Nsqd], topic: str, crash: bool) -> None:
    """What was acknowledged is there after kill -9 (of an nsqd that writes before it answers)."""
    daemon = start_nsqd()
    done: set[bytes] = set()
    stop = asyncio.Event()
    async with Producer(address_of(daemon), CONFIG) as producer:
        publishing = asyncio.create_task(publish_numbers(producer, topic, done, stop))
        for _ in range(2):
            before = len(done)
            await until(lambda: len(done) > before + 100)  # noqa: B023
            await asyncio.to_thread(daemon.restart, crash=crash)
        before = len(done)
        await until(lambda: len(done) > before + 100)
        stop.set()
        await publishing
    await take_all(daemon, topic, done)


# -- consumers -------------------------------------------------------------------------------------------


async def consumer_meets(fault: Fault, nsqd: Nsqd, proxy: FaultProxy, topic: str, config: Config) -> None:
    """Publishes before, during and after a fault: each message is handled, and the channel is empty in the end."""
    handled: set[bytes] = set()
    numbers = itertools.count()

    def publish_some() -> set[bytes]:
        bodies = {b"%d" % next(numbers) for _ in range(50)}
        publish(nsqd, topic, *bodies)
        return bodies

    wanted = publish_some()
    consumer = await started(lambda: Consumer(topic, "ch", nsqd=proxied(proxy), config=config))
    try:
        running = asyncio.create_task(consumer.run(lambda message: handled.add(message.body)))
        await until(lambda: handled >= wanted, WAIT_S)
        wanted |= publish_some()
        await fault(proxy)
        wanted |= publish_some()
        await until(lambda: handled >= wanted, WAIT_S)
        await until(lambda: is_done(nsqd, topic), WAIT_S)
    finally:
        await consumer.close()
    await running
    assert handled == wanted


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_a_consumer_goes_on(nsqd: Nsqd, proxy: FaultProxy, topic: str, fault: Fault) -> None:
    await consumer_meets(fault, nsqd, proxy, topic, CONFIG)


async def test_a_consumer_goes_on_after_garbage(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    await consumer_meets(garble, nsqd, proxy, topic, CONFIG.replace(snappy=True))


@pytest.mark.parametrize("crash", [pytest.param(True, marks=pytest.mark.ours), False])
async def test_consuming_while_nsqd_is_restarted(start_nsqd: Callable[..., Nsqd], topic: str, crash: bool) -> None:
    daemon = start_nsqd()
    wanted = {b"%d" % number for number in range(400)}
    publish(daemon, topic, *wanted)
    handled: set[bytes] = set()

    async def handle(message: Any) -> None:
        await asyncio.sleep(0.002)
        handled.add(message.body)

    async with Consumer(topic, "ch", nsqd=address_of(daemon), config=CALM_CONFIG) as consumer:
        running = asyncio.create_task(consumer.run(handle, concurrency=5))
        for share in (50, 150):
            await until(lambda: len(handled) > share)  # noqa: B023
            await asyncio.to_thread(daemon.restart, crash=crash)
        await until(lambda: handled == wanted, WAIT_S)
        await until(lambda: is_done(daemon, topic), WAIT_S)
        await consumer.close()
        await running


async def test_nsqlookupd_goes_and_comes_back(
    make_lookupd: Callable[..., Nsqlookupd], start_nsqd: Callable[..., Nsqd], topic: str
) -> None:
    """What is connected stays so; what is new is found once there is someone to ask."""
    lookupd = make_lookupd()
    flag = f"--lookupd-tcp-address={lookupd.tcp_address}"
    first = start_nsqd(flag)
    publish(first, topic, b"1")
    config = CALM_CONFIG.replace(msg_timeout="60s")
    async with Consumer(topic, "ch", lookupd=lookupd.http_address, config=config) as consumer:
        async with (await asyncio.wait_for(anext(consumer), WAIT_S)).or_raise() as message:
            assert message.body == b"1"
        lookupd.kill()
        publish(first, topic, b"2")
        async with (await asyncio.wait_for(anext(consumer), WAIT_S)).or_raise() as message:
            assert message.body == b"2"
        await asyncio.sleep(0.2)  # rounds in which nobody answers
        assert consumer.connections == [address_of(first)]
        await asyncio.to_thread(lookupd.start)
        second = start_nsqd(flag)
        publish(second, topic, b"3")
        async with (await asyncio.wait_for(anext(consumer), 2 * WAIT_S)).or_raise() as message:
            assert message.nsqd_address == address_of(second)


async def test_closing_while_nothing_moves(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    """Closing takes as long as it is given, and leaves nothing behind."""
    publish(nsqd, topic, b"x")
    consumer = await started(lambda: Consumer(topic, "ch", nsqd=proxied(proxy), config=CONFIG))
    await anext(consumer)
    proxy.stall()
    async with asyncio.timeout(WAIT_S):
        await consumer.close(timeout=0.2)
    assert consumer.connections == []
    proxy.resume()
    if nsqd_is_ours():
        await until(lambda: not nsqd.channel(topic)["clients"])
