"""Checks how a consumer starts and ends: nothing is lost, nothing comes to a stand, and wrong use is told at once."""

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from client.consumer_rig import AFTER_GIVING_BACK, consumer_of, is_done, publish
from client.pool_rig import address_of
from harness import FaultProxy, Nsqd, eventually, until
from nsquark import Consumer, Message, sync
from nsquark.client.errors import Closed, ConfigError, InvalidName, NotConnected, NsqError
from nsquark.client.stats import Stats

NSQD_FLAGS = ["--msg-timeout=30s"]
WAIT_S = 30.0
ON_ITS_WAY_S = 0.3
"""What nsqd has sent comes so long after a consumer began to close."""


# -- closing ---------------------------------------------------------------------------------------------


async def test_leaving_gives_back_what_was_prefetched(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *(b"%d" % number for number in range(10)))
    async with consumer_of(nsqd, topic) as consumer:
        taken = [await anext(consumer) for _ in range(3)]
        taken[0].finish()
        await until(lambda: consumer.stats().in_flight == 9)
    with nsqd.connect() as wire:
        again = wire.subscribe(topic, rdy=10).read_messages(9, finish=True)
    assert {message.attempts for message in again} == {AFTER_GIVING_BACK}


async def test_leaving_gives_back_what_is_on_its_way(nsqd: Nsqd, topic: str) -> None:
    """Messages that nsqd has sent and that have not come yet must not wait for their timeout."""
    with FaultProxy(nsqd.tcp) as proxy:
        publish(nsqd, topic, b"first")
        async with Consumer(topic, "ch", nsqd="{}:{}".format(*proxy.address), max_in_flight=10) as consumer:
            (await anext(consumer)).finish()
            proxy.down.stalled = True
            publish(nsqd, topic, b"1", b"2", b"3")
            await until(lambda: nsqd.channel(topic)["in_flight_count"] == 3)
            assert consumer.stats().in_flight == 0
            asyncio.get_running_loop().call_later(ON_ITS_WAY_S, proxy.resume)
        await until(lambda: nsqd.channel(topic)["in_flight_count"] == 0)
        assert nsqd.channel(topic)["depth"] == 3


@pytest.mark.parametrize("end", ["close at once", "two cancelled closes", "cancelled disconnect"])
@pytest.mark.parametrize("is_handling", [False, True])
async def test_what_is_on_its_way_goes_back_however_hurried_the_end_is(
    nsqd: Nsqd, topic: str, end: str, is_handling: bool
) -> None:
    with FaultProxy(nsqd.tcp) as proxy:
        address = "{}:{}".format(*proxy.address)
        publish(nsqd, topic, b"first")
        consumer = await Consumer(topic, "ch", nsqd=address, max_in_flight=10).start()
        message = await anext(consumer)
        running = asyncio.create_task(consumer.run(_never_done))
        if not is_handling:
            message.finish()
        proxy.down.stalled = True
        publish(nsqd, topic, b"1", b"2", b"3")
        await until(lambda: nsqd.channel(topic)["in_flight_count"] == 3 + is_handling)
        assert consumer.stats().in_flight == is_handling
        asyncio.get_running_loop().call_later(ON_ITS_WAY_S, proxy.resume)
        if end == "close at once":
            await consumer.close(0)
        else:
            disconnects = end == "cancelled disconnect"
            ends = [
                asyncio.create_task(consumer.disconnect_from_nsqd(address) if disconnects else consumer.close())
                for _ in range(2)
            ]
            for ending in ends:
                await asyncio.sleep(0)
                ending.cancel()
            await asyncio.wait(ends, timeout=WAIT_S)
            assert all(ending.done() for ending in ends)
            if disconnects:
                message.finish()
        await until(lambda: nsqd.channel(topic)["in_flight_count"] == 0)
        await until(lambda: not nsqd.channel(topic)["clients"])
        assert nsqd.channel(topic)["depth"] == 3 + (is_handling and end != "cancelled disconnect")
        await consumer.close()
        await asyncio.wait_for(running, WAIT_S)
        assert consumer.connections == []


async def _never_done(_: Message) -> None:
    await asyncio.sleep(600)


async def test_close_lets_handlers_finish(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *(b"%d" % number for number in range(10)))
    begun = 0
    may_end = asyncio.Event()
    handled: list[bytes] = []

    async def handle(message: Message) -> None:
        nonlocal begun
        begun += 1
        await may_end.wait()
        handled.append(message.body)

    async with consumer_of(nsqd, topic) as consumer:
        await until(lambda: consumer.stats().in_flight == 10)
        running = asyncio.create_task(consumer.run(handle, concurrency=3))
        await until(lambda: begun == 3)
        closing = asyncio.create_task(consumer.close())
        await asyncio.sleep(0)
        may_end.set()
        await closing
        await running
        assert len(handled) == 3
    channel = nsqd.channel(topic)
    assert (channel["depth"], channel["in_flight_count"], channel["requeue_count"]) == (7, 0, 7)


async def test_close_does_not_wait_for_ever(nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    publish(nsqd, topic, b"x")
    started = asyncio.Event()

    async def handle(_: Message) -> None:
        started.set()
        await asyncio.sleep(600)

    consumer = consumer_of(nsqd, topic)
    await consumer.start()
    running = asyncio.create_task(consumer.run(handle))
    await started.wait()
    await consumer.close(timeout=0.1)
    await running
    assert "1 handlers still ran" in caplog.text
    await until(lambda: nsqd.channel(topic)["depth"] == 1)


async def test_close_does_not_wait_twice_for_a_hook_that_hangs(nsqd: Nsqd, topic: str) -> None:
    """A handler waits for it too, since its message is the next."""
    publish(nsqd, topic, b"x")
    may_end = threading.Event()
    buried: list[bytes] = []

    def bury(message: Message) -> None:
        buried.append(message.body)
        assert may_end.wait(60)

    def handle(_: Message) -> None:
        raise ValueError("no")

    async with consumer_of(nsqd, topic, max_attempts=1, on_give_up=bury) as consumer:
        running = asyncio.create_task(consumer.run(handle, threads=1))
        await until(lambda: buried)
        asked_s: list[float] = []
        giving_up = consumer._giving_up
        end = giving_up.end
        giving_up.end = lambda timeout_s: asked_s.append(timeout_s) or end(timeout_s)  # type: ignore[func-returns-value, method-assign]
        await consumer.close(timeout=0.2)
        await running
    assert asked_s and asked_s[0] < 0.1, "what was left of the time, and not as much again"
    await until(lambda: nsqd.channel(topic)["depth"] + nsqd.channel(topic)["deferred_count"] == 1)
    may_end.set()


async def test_a_signal_stops_also_who_began_after_another_had_set_a_handler(nsqd: Nsqd, topic: str) -> None:
    """As a web framework does that starts between two consumers. It has its handler back at the end."""
    signalled: list[int] = []

    def handle_signal(number: int, _: object) -> None:
        signalled.append(number)

    before = signal.getsignal(signal.SIGTERM)
    try:
        async with consumer_of(nsqd, topic) as first, consumer_of(nsqd, topic) as second:
            running = [asyncio.create_task(first.run(print, stop_on_signals=True))]
            await until(lambda: signal.getsignal(signal.SIGTERM) is not before)
            signal.signal(signal.SIGTERM, handle_signal)
            running.append(asyncio.create_task(second.run(print, stop_on_signals=True)))
            await until(lambda: signal.getsignal(signal.SIGTERM) is not handle_signal)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(asyncio.gather(*running), WAIT_S)
        assert signal.getsignal(signal.SIGTERM) is handle_signal and not signalled
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_a_signal_handler_that_was_set_while_a_consumer_ran_stays(nsqd: Nsqd, topic: str) -> None:
    def handle_signal(*_: object) -> None: ...

    before = signal.getsignal(signal.SIGTERM)
    try:
        async with consumer_of(nsqd, topic) as consumer:
            running = asyncio.create_task(consumer.run(print, stop_on_signals=True))
            await until(lambda: signal.getsignal(signal.SIGTERM) is not before)
            signal.signal(signal.SIGTERM, handle_signal)
            consumer.stop()
            await running
        assert signal.getsignal(signal.SIGTERM) is handle_signal
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_whoever_closes_waits_until_it_is_closed(nsqd: Nsqd, topic: str) -> None:
    """A signal handler closes, and so does the end of `async with`: the second must not end the program under the
    first.
    """
    publish(nsqd, topic, b"x")
    finished: list[bytes] = []

    async def handle(message: Message) -> None:
        closing.append(asyncio.create_task(consumer.close()))
        await asyncio.sleep(0.2)
        finished.append(message.body)

    closing: list[asyncio.Task[None]] = []
    async with consumer_of(nsqd, topic) as consumer:
        await consumer.run(handle)
    assert closing[0].done()
    assert finished == [b"x"]
    assert is_done(nsqd, topic)
    assert consumer.stats().connections == 0


async def test_a_handler_may_close_its_consumer(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"1", b"2", b"3")

    async def handle(message: Message) -> None:
        message.finish()
        await consumer.close()

    async with consumer_of(nsqd, topic) as consumer:
        await asyncio.wait_for(consumer.run(handle, concurrency=2), WAIT_S)
    channel = nsqd.channel(topic)
    assert channel["in_flight_count"] == 0
    assert channel["depth"] in (1, 2)


async def test_a_cancelled_close_leaves_no_connection(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"x")
    started = asyncio.Event()

    async def handle(_: Message) -> None:
        started.set()
        await asyncio.sleep(600)

    consumer = await consumer_of(nsqd, topic).start()
    running = asyncio.create_task(consumer.run(handle))
    await started.wait()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await consumer.close()
    await asyncio.wait([running], timeout=WAIT_S)
    assert running.done()
    await until(lambda: not nsqd.channel(topic)["clients"])


async def test_a_close_that_is_cancelled_at_once_waits_for_no_handler(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"x")
    started = asyncio.Event()

    async def handle(_: Message) -> None:
        started.set()
        await asyncio.sleep(600)

    consumer = await consumer_of(nsqd, topic).start()
    running = asyncio.create_task(consumer.run(handle))
    await started.wait()
    closing = asyncio.create_task(consumer.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    await asyncio.wait_for(running, WAIT_S)
    await until(lambda: nsqd.channel(topic)["depth"] == 1 and not nsqd.channel(topic)["clients"])


def test_an_answer_after_the_end_of_the_event_loop_is_ignored(nsqd: Nsqd, topic: str) -> None:
    """A thread answers a message that nsqd has taken back long since."""
    publish(nsqd, topic, b"1", b"not json")

    async def take() -> list[Message]:
        async with consumer_of(nsqd, topic, msg_timeout="1s", max_in_flight=2) as consumer:
            taken = [await anext(consumer), await anext(consumer)]
            consumer.pause()
            await until(lambda: consumer.stats().in_flight == 0)
            return taken

    def answer() -> None:
        first.touch()
        first.finish()
        with second:
            second.decode()

    first, second = asyncio.run(take())
    with ThreadPoolExecutor(1) as thread:
        thread.submit(answer).result(WAIT_S)
    assert first.is_answered
    eventually(lambda: nsqd.channel(topic)["depth"] == 2)


async def test_an_answer_after_the_end_is_ignored(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"1", b"2")
    async with consumer_of(nsqd, topic) as consumer:
        first, second = await anext(consumer), await anext(consumer)
        first.disable_auto_response()
    first.finish()
    second.requeue()
    assert first.is_answered
    assert nsqd.channel(topic)["depth"] == 2


async def test_iterating_ends_when_it_is_closed(nsqd: Nsqd, topic: str) -> None:
    async with consumer_of(nsqd, topic) as consumer:
        waiting = [asyncio.create_task(_count(consumer)) for _ in range(2)]
        await asyncio.sleep(0.05)
        await consumer.close()
        assert await asyncio.gather(*waiting) == [0, 0]
        assert await _count(consumer) == 0


async def _count(consumer: Consumer) -> int:
    return len([message async for message in consumer])


# -- before it runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic_name", "channel", "wrong"),
    [("a b", "c", "topic"), ("", "c", "topic"), ("t", "c d", "channel"), ("t", "x" * 65, "channel")],
)
def test_names_are_checked(topic_name: str, channel: str, wrong: str) -> None:
    with pytest.raises(InvalidName, match=f"^{wrong} name .* is not valid"):
        Consumer(topic_name, channel, nsqd="127.0.0.1:4150")


async def test_nobody_to_connect_to() -> None:
    with pytest.raises(ConfigError, match="give the consumer an nsqd"):
        await Consumer("t", "c").start()


async def test_no_nsqd_can_be_reached(nsqd: Nsqd) -> None:
    with pytest.raises(NotConnected):
        await Consumer("t", "c", nsqd=["127.0.0.1:1", "127.0.0.1:2"]).start()


@pytest.mark.parametrize("address", ["nowhere", "ftp://here:1", "127.0.0.1"])
async def test_a_wrong_nsqlookupd_address(address: str) -> None:
    with pytest.raises(ConfigError, match="nsqlookupd address"):
        await Consumer("t", "c", lookupd=address).start()


async def test_started_once(nsqd: Nsqd, topic: str) -> None:
    async with consumer_of(nsqd, topic) as consumer:
        with pytest.raises(NsqError, match="make a new one"):
            await consumer.start()
    with pytest.raises(NsqError, match="make a new one"):
        await consumer.start()


async def test_closed_before_it_was_started(nsqd: Nsqd, topic: str) -> None:
    consumer = consumer_of(nsqd, topic)
    await consumer.close()
    with pytest.raises(Closed):
        await consumer.start()


async def test_closed_while_it_starts(nsqd: Nsqd, topic: str) -> None:
    with FaultProxy(nsqd.tcp) as proxy:
        proxy.stall()
        consumer = Consumer(topic, "ch", nsqd="{}:{}".format(*proxy.address), lookupd="127.0.0.1:1")
        starting = asyncio.create_task(consumer.start())
        await until(lambda: proxy.connection_count)
        await consumer.close()
        with pytest.raises(Closed):
            await starting


async def test_not_started_yet(nsqd: Nsqd, topic: str) -> None:
    consumer = consumer_of(nsqd, topic)
    assert consumer.stats() == Stats(0, 0, 0, 0, 0, 0, 0, 0, 0)
    assert not consumer.is_starved
    assert consumer.connections == []
    with pytest.raises(NsqError, match="not started"):
        await anext(consumer)
    with pytest.raises(NsqError, match="not started"):
        await consumer.run(print)
    with pytest.raises(NsqError, match="not started"):
        consumer.pause()
    with pytest.raises(NsqError, match="not started"):
        consumer.change_max_in_flight(3)
    with pytest.raises(NsqError, match="not started"):
        await consumer.connect_to_nsqd(address_of(nsqd))
    await consumer.close()


def test_not_started_yet_without_asyncio(nsqd: Nsqd, topic: str) -> None:
    with pytest.raises(NsqError, match=r"in nsquark\.sync use `with`"):
        next(sync.Consumer(topic, "ch", nsqd=address_of(nsqd)))


async def test_the_same_nsqd_twice_is_one_connection(nsqd: Nsqd, topic: str) -> None:
    address = address_of(nsqd)
    async with Consumer(topic, "ch", nsqd=[address, address]) as consumer:
        assert consumer.connections == [address]
        await until(lambda: nsqd.channel(topic)["clients"])
        assert len(nsqd.channel(topic)["clients"]) == 1
    await until(lambda: not nsqd.channel(topic)["clients"])


async def test_after_the_end(nsqd: Nsqd, topic: str) -> None:
    async with consumer_of(nsqd, topic) as consumer:
        pass
    await consumer.close()
    with pytest.raises(Closed):
        await consumer.connect_to_nsqd(address_of(nsqd))
    with pytest.raises(Closed):
        consumer.connect_to_nsqlookupd("127.0.0.1:4161")
    consumer.change_max_in_flight(5)
    consumer.pause()
