"""Checks Consumer(dedupe=...): copies of a message are handled once, by a memory in this process or a user's store."""

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from client.consumer_rig import consumer_of, handle_until, is_done, publish
from client.pool_rig import address_of
from harness import FaultProxy, Nsqd, until
from nsquark import Consumer, Dedupe, Message, Producer, ProducerPool
from nsquark.client.dedupe import Claim
from nsquark.client.envelope import new_key, wrap
from nsquark.errors import NotConnected


class SlowStore:
    """Is a store that answers later, as one over a network would."""

    def __init__(self) -> None:
        self.claims: dict[bytes, str] = {}

    async def claim(self, key: bytes) -> Claim:
        await asyncio.sleep(0)
        state = self.claims.get(key, "new")
        if state == "new":
            self.claims[key] = "busy"
        return state  # type: ignore[return-value]

    async def done(self, key: bytes) -> None:
        await asyncio.sleep(0)
        self.claims[key] = "seen"

    async def release(self, key: bytes) -> None:
        await asyncio.sleep(0)
        self.claims.pop(key, None)


async def publish_copies(nsqd: Nsqd, topic: str, bodies: list[bytes]) -> None:
    async with Producer(address_of(nsqd)) as producer:
        for body in bodies:
            wrapped = wrap(new_key(), body)
            await producer.multi_publish(topic, [wrapped, wrapped])


@pytest.mark.parametrize("store", [Dedupe(), SlowStore()], ids=["memory", "store"])
async def test_two_channels_share_a_store_and_each_handles_a_message_once(
    nsqd: Nsqd, topic: str, store: Dedupe | SlowStore
) -> None:
    bodies = [b"%d" % number for number in range(20)]
    for channel in ("a", "b"):
        nsqd.post(f"/topic/create?topic={topic}")
        nsqd.post(f"/channel/create?topic={topic}&channel={channel}")
    await publish_copies(nsqd, topic, bodies)
    for channel in ("a", "b"):
        handled: Counter[bytes] = Counter()
        async with Consumer(topic, channel, nsqd=address_of(nsqd), max_in_flight=50, dedupe=store) as consumer:
            running = asyncio.create_task(consumer.run(lambda message, seen=handled: seen.update([message.body])))
            await until(lambda consumer=consumer: consumer.stats().finished == 40)
            await consumer.close()
            await running
        assert handled == dict.fromkeys(bodies, 1)
    if isinstance(store, SlowStore):
        assert set(store.claims.values()) == {"seen"} and len(store.claims) == 40


async def test_a_copy_is_wanted_again_when_the_first_failed(nsqd: Nsqd, topic: str) -> None:
    await publish_copies(nsqd, topic, [b"x"])
    outcomes: list[str] = []

    async def handle(message: Message) -> None:
        outcomes.append("failed" if not outcomes else "done")
        if len(outcomes) == 1:
            message.requeue(0, backoff=False)

    async with Consumer(topic, "ch", nsqd=address_of(nsqd), max_in_flight=10, dedupe=SlowStore()) as consumer:
        running = asyncio.create_task(consumer.run(handle, concurrency=4))
        await until(lambda: consumer.stats().finished == 2)
        await consumer.close()
        await running
    assert outcomes == ["failed", "done"]


async def test_a_message_whose_connection_was_lost_counts_as_seen_when_its_handler_ends(nsqd: Nsqd, topic: str) -> None:
    await publish_copies(nsqd, topic, [b"x"])
    store, handled, may_end = SlowStore(), 0, asyncio.Event()

    async def handle(message: Message) -> None:
        nonlocal handled
        handled += 1
        await may_end.wait()

    options = {"lookupd_poll_interval": "50ms", "msg_timeout": "1s"}
    async with Consumer(
        topic,
        "ch",
        nsqd=address_of(nsqd),
        max_in_flight=10,
        dedupe=store,
        **options,  # type: ignore[arg-type]
    ) as consumer:
        running = asyncio.create_task(consumer.run(handle, concurrency=4))
        await until(lambda: handled == 1)
        for subscription in list(consumer._nsqds.subscriptions.values()):
            assert subscription._connection is not None
            subscription._connection.abort(NotConnected("cut by the test"))
        await until(lambda: consumer.stats().connections == 0)
        may_end.set()
        await until(lambda: set(store.claims.values()) == {"seen"})
        await until(lambda: consumer.stats().finished >= 2)
        await consumer.close()
        await running
    assert handled == 1


async def test_a_store_that_fails_costs_a_retry_not_a_message(nsqd: Nsqd, topic: str) -> None:
    class FailsFirst(SlowStore):
        failures = 0

        async def claim(self, key: bytes) -> Claim:
            if not self.failures:
                self.failures += 1
                raise ConnectionError("the database is away")
            return await super().claim(key)

    await publish_copies(nsqd, topic, [b"x"])
    handled: list[bytes] = []
    options = {"default_requeue_delay": "10ms", "backoff_multiplier": "10ms", "max_in_flight": 1}
    async with Consumer(topic, "ch", nsqd=address_of(nsqd), dedupe=FailsFirst(), **options) as consumer:  # type: ignore[arg-type]
        running = asyncio.create_task(consumer.run(lambda message: handled.append(message.body)))
        await until(lambda: consumer.stats().finished == 2)
        await consumer.close()
        await running
    assert handled == [b"x"]


async def test_a_publish_whose_answer_was_lost_is_handled_once(start_nsqd: Callable[..., Nsqd], topic: str) -> None:
    """The message is on two nsqds then, with the key that its envelope has."""
    first, second = start_nsqd(), start_nsqd()
    bodies = [b"%d" % number for number in range(20)]
    with FaultProxy(first.tcp) as proxy:
        addresses = ["{}:{}".format(*proxy.address), address_of(second)]
        async with ProducerPool(addresses, envelope=True) as pool:
            await pool.ping()
            proxy.down.stalled = True
            publishes = [pool.publish_nowait(topic, body) for body in bodies]
            await until(lambda: topic in first.topic_names() and first.topic(topic)["message_count"] >= 10)
            proxy.cut()
            await asyncio.gather(*publishes)
        proxy.heal()
    handled: Counter[bytes] = Counter()
    nsqds = [address_of(first), address_of(second)]
    # Ten are there twice; more, where the pool also asked `first` for what a busy `second` owed it for long.
    count = sum(daemon.topic(topic)["message_count"] for daemon in (first, second))
    assert count >= 30
    async with Consumer(topic, "ch", nsqd=nsqds, max_in_flight=50, dedupe=True) as consumer:
        running = asyncio.create_task(consumer.run(lambda message: handled.update([message.body])))
        await until(lambda: consumer.stats().finished == count)
        assert consumer.stats().duplicates == count - 20
        await consumer.close()
        await running
    assert handled == dict.fromkeys(bodies, 1)


async def test_a_message_whose_finish_was_lost_is_handled_once(nsqd: Nsqd, topic: str) -> None:
    """The message has no envelope: its nsqd and id tell that it is the same."""
    async with Producer(address_of(nsqd)) as producer:
        await producer.publish(topic, b"x")
    handled: list[int] = []
    options = {"lookupd_poll_interval": "50ms", "msg_timeout": "1s"}
    with FaultProxy(nsqd.tcp) as proxy:
        address = "{}:{}".format(*proxy.address)
        async with Consumer(topic, "ch", nsqd=address, dedupe=True, **options) as consumer:  # type: ignore[arg-type]
            message = await anext(consumer)
            proxy.up.stalled = True
            handled.append(message.attempts)
            message.finish()
            await asyncio.sleep(0.1)
            proxy.cut()
            proxy.heal()
            running = asyncio.create_task(consumer.run(lambda again: handled.append(again.attempts)))
            await until(lambda: consumer.stats().duplicates >= 1)
            await until(lambda: not nsqd.channel(topic)["in_flight_count"] and not nsqd.channel(topic)["depth"])
            await consumer.close()
            await running
    assert len(handled) == 1


@pytest.mark.parametrize("settings", [{}, {"envelope": True}, {"dedupe": True}])
async def test_a_body_like_an_envelope_arrives_as_it_is_where_none_was_asked_for(
    nsqd: Nsqd, topic: str, settings: dict[str, bool]
) -> None:
    body = wrap(new_key(), b"inside")
    async with Producer(address_of(nsqd)) as producer:
        await producer.publish(topic, body)
    consumer = Consumer(topic, "ch", nsqd=address_of(nsqd), **settings)  # type: ignore[arg-type]
    async with consumer, (await anext(consumer)).or_raise() as message:
        assert message.body == (b"inside" if settings else body)


@pytest.mark.parametrize("note", ["done", "release"])
async def test_a_store_that_cannot_note_an_answer_costs_no_more_than_a_line(
    nsqd: Nsqd, topic: str, note: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that is not async raises in the middle of the answer."""

    class FailsToWrite(Dedupe):
        def done(self, key: bytes) -> None:
            super().done(key)
            assert note != "done", "the database is away"

        def release(self, key: bytes) -> None:
            super().release(key)
            assert note != "release", "the database is away"

    publish(nsqd, topic, b"1", b"2", b"3")
    handled: Counter[bytes] = Counter()

    async def handle(message: Message) -> None:
        handled[message.body] += 1
        assert handled[message.body] > 1

    async with consumer_of(nsqd, topic, dedupe=FailsToWrite(), max_in_flight=1) as consumer:
        await handle_until(consumer, handle, lambda: len(handled) == 3 and is_done(nsqd, topic))
        assert consumer.stats().finished == 3
    assert set(handled.values()) == {2}
    assert "the store of keys failed" in caplog.text


async def test_a_claim_that_nobody_waits_for_any_more_is_released(nsqd: Nsqd, topic: str) -> None:
    class ClaimsAndWaits(SlowStore):
        def __init__(self) -> None:
            super().__init__()
            self.may_answer = asyncio.Event()

        async def claim(self, key: bytes) -> Claim:
            claim = await super().claim(key)
            await self.may_answer.wait()
            return claim

    publish(nsqd, topic, b"1")
    store = ClaimsAndWaits()
    async with consumer_of(nsqd, topic, dedupe=store) as consumer:
        getting = asyncio.create_task(consumer.get())
        await until(lambda: store.claims)
        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting
        store.may_answer.set()
        await until(lambda: not store.claims)
        message = await consumer.get(20)
        assert message is not None
        message.finish()


async def test_a_store_that_is_cancelled_fails_like_any(nsqd: Nsqd, topic: str) -> None:
    class Cancelled(SlowStore):
        failures = 0

        async def claim(self, key: bytes) -> Claim:
            self.failures += 1
            if self.failures == 1:
                raise asyncio.CancelledError
            return await super().claim(key)

    publish(nsqd, topic, b"1")
    handled: list[bytes] = []
    async with consumer_of(nsqd, topic, dedupe=Cancelled()) as consumer:
        await handle_until(consumer, lambda message: handled.append(message.body), lambda: is_done(nsqd, topic))
    assert handled == [b"1"]


async def test_a_copy_that_goes_back_unhandled_leaves_the_claim_to_its_twin(nsqd: Nsqd, topic: str) -> None:
    """Two consumers share a store. One handles a copy while the other, which only had the second one, is stopped."""
    store = SlowStore()
    await publish_copies(nsqd, topic, [b"x"])
    async with consumer_of(nsqd, topic, dedupe=store, max_in_flight=1) as first:
        message = await first.get(20)
        assert message is not None
        async with consumer_of(nsqd, topic, dedupe=store) as second:
            await until(lambda: second.stats().received == 1)
        assert list(store.claims.values()) == ["busy"]
        async with consumer_of(nsqd, topic, dedupe=store) as third:
            assert await third.get(0.5) is None
            message.finish()
            await until(lambda: set(store.claims.values()) == {"seen"})
