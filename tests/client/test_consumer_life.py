"""Checks a consumer's connections while it runs: how much each may send, which nsqds there are, what happens when one
goes.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from client.consumer_rig import consumer_of, handle_until, is_done, publish
from client.pool_rig import address_of
from harness import FaultProxy, Nsqd, eventually, nsqd_is_ours, until
from harness.lookupd import Nsqlookupd
from nsquark import Consumer, Message
from nsquark.client.errors import Closed, ConfigError, NotConnected, NsqError

WAIT_S = 30.0


@pytest.fixture(scope="module")
def nsqds(lookupd: Nsqlookupd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Nsqd]]:
    """Runs two nsqds that an nsqlookupd knows."""
    daemons = [new_nsqd(tmp_path_factory.mktemp("nsqd"), lookupd) for _ in range(2)]
    yield daemons
    for daemon in daemons:
        daemon.kill()


def new_nsqd(data_path: Path, lookupd: Nsqlookupd) -> Nsqd:
    daemon = Nsqd(data_path, f"--lookupd-tcp-address={lookupd.tcp_address}").start()
    daemon.keep_ports()
    return daemon


@pytest.fixture(scope="module")
def nsqd(nsqds: list[Nsqd]) -> Nsqd:
    return nsqds[0]


def rdy_at(daemon: Nsqd, topic: str) -> int:
    """Returns the RDY count that nsqd has of its only consumer; -1 if there is none."""
    clients = daemon.channel(topic)["clients"]
    return clients[0]["ready_count"] if clients else -1


def publish_known(lookupd: Nsqlookupd, daemons: list[Nsqd], topic: str, *bodies: bytes) -> None:
    for daemon in daemons:
        publish(daemon, topic, *bodies)
    eventually(lambda: lookupd.producers(topic) == {daemon.tcp for daemon in daemons})


# -- how much --------------------------------------------------------------------------------------------


async def test_max_in_flight_is_shared_and_changes(nsqds: list[Nsqd], topic: str) -> None:
    first, second = nsqds
    async with Consumer(topic, "ch", nsqd=map(address_of, nsqds), max_in_flight=20) as consumer:
        await until(lambda: rdy_at(first, topic) == rdy_at(second, topic) == 10)
        consumer.change_max_in_flight(7)
        await until(lambda: rdy_at(first, topic) == rdy_at(second, topic) == 3)
        await consumer.disconnect_from_nsqd(address_of(second))
        await until(lambda: rdy_at(first, topic) == 7)
        consumer.change_max_in_flight(10_000)
        await until(lambda: rdy_at(first, topic) == 2500)
        with pytest.raises(ConfigError, match="invalid max_in_flight ! -1 < 0"):
            consumer.change_max_in_flight(-1)


async def test_no_more_in_flight_than_allowed(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *(b"%d" % number for number in range(20)))
    async with consumer_of(nsqd, topic, max_in_flight=4) as consumer:
        held = [await anext(consumer) for _ in range(4)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(consumer), 0.3)
        assert nsqd.channel(topic)["in_flight_count"] == 4
        held[0].finish()
        await asyncio.wait_for(anext(consumer), WAIT_S)


async def test_pause_and_unpause(nsqd: Nsqd, topic: str) -> None:
    async with consumer_of(nsqd, topic, max_in_flight=8) as consumer:
        await until(lambda: rdy_at(nsqd, topic) == 8)
        consumer.pause()
        consumer.pause()
        assert consumer.is_paused
        await until(lambda: rdy_at(nsqd, topic) == 0)
        publish(nsqd, topic, b"x")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(consumer), 0.2)
        consumer.unpause()
        consumer.unpause()
        assert not consumer.is_paused
        async with await asyncio.wait_for(anext(consumer), WAIT_S):
            pass
        assert rdy_at(nsqd, topic) == 8


async def test_paused_from_the_start(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"x")
    async with consumer_of(nsqd, topic, max_in_flight=0) as consumer:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(consumer), 0.1)
        consumer.change_max_in_flight(5)
        async with await asyncio.wait_for(anext(consumer), WAIT_S):
            pass


async def test_is_starved(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *(b"%d" % number for number in range(20)))
    async with consumer_of(nsqd, topic, max_in_flight=10) as consumer:
        held = [await anext(consumer) for _ in range(10)]
        assert consumer.is_starved
        assert consumer.stats().in_flight == 10
        consumer.pause()
        for message in held:
            message.finish()
        assert not consumer.is_starved


async def test_sampling(nsqd: Nsqd, topic: str) -> None:
    async with consumer_of(nsqd, topic, sample_rate=50, max_in_flight=100) as consumer:
        got: list[bytes] = []
        running = asyncio.create_task(consumer.run(lambda message: got.append(message.body)))
        publish(nsqd, topic, *(b"%d" % number for number in range(400)))
        await until(lambda: got and is_done(nsqd, topic))
        await consumer.close()
        await running
    assert 100 < len(got) < 300


async def test_what_nsqd_knows_of_a_consumer(nsqd: Nsqd, topic: str) -> None:
    async with consumer_of(nsqd, topic, client_id="c1", hostname="h1", user_agent="mine/2", sample_rate=3):
        await until(lambda: nsqd.channel(topic)["clients"])
        (known,) = nsqd.channel(topic)["clients"]
    assert (known["client_id"], known["hostname"], known["user_agent"]) == ("c1", "h1", "mine/2")
    assert known["sample_rate"] == 3


async def test_backoff_on_a_real_nsqd(nsqd: Nsqd, topic: str) -> None:
    """After a failure nothing comes for a while, then one message to try, and after that all of them again."""
    publish(nsqd, topic, *(b"%d" % number for number in range(20)))
    failures = 2
    most_after_failure: list[int] = []

    async def handle(_: Message) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise RuntimeError("down")
        most_after_failure.append(consumer.stats().backoff_level)

    consumer = consumer_of(nsqd, topic, max_in_flight=1, backoff_multiplier="500ms", default_requeue_delay="0s")
    async with consumer:
        running = asyncio.create_task(consumer.run(handle))
        await until(lambda: consumer.stats().backoff_level == 1)
        await until(lambda: rdy_at(nsqd, topic) == 0)
        await until(lambda: consumer.stats().finished == 20)
        await consumer.close()
        await running
    # NSQ's nsqd may send one more message before it reads RDY 0, and a failure while holding back does not count.
    level = most_after_failure[0]
    assert level == 2 or (level == 1 and not nsqd_is_ours())
    assert most_after_failure[: level + 1] == list(range(level, -1, -1))
    assert is_done(nsqd, topic)


# -- which nsqds -----------------------------------------------------------------------------------------


async def test_connect_and_disconnect_while_it_runs(nsqds: list[Nsqd], topic: str) -> None:
    first, second = map(address_of, nsqds)
    for daemon in nsqds:
        publish(daemon, topic, b"x")
    async with consumer_of(nsqds[0], topic) as consumer:
        with pytest.raises(NsqError, match="already connected"):
            await consumer.connect_to_nsqd(first)
        async with (await anext(consumer)).or_raise() as message:
            assert message.nsqd_address == first
        await consumer.connect_to_nsqd(second)
        assert sorted(consumer.connections) == sorted([first, second])
        async with (await asyncio.wait_for(anext(consumer), WAIT_S)).or_raise() as message:
            assert message.nsqd_address == second
        await consumer.disconnect_from_nsqd(first)
        assert consumer.connections == [second]
        with pytest.raises(NotConnected, match="not connected"):
            await consumer.disconnect_from_nsqd(first)
        await asyncio.sleep(0.15)  # three times what a reconnect would take
        assert consumer.connections == [second]
        with pytest.raises(NotConnected):
            await consumer.connect_to_nsqd("127.0.0.1:1")
        await until(lambda: nsqds[0].channel(topic)["clients"] == [])


async def test_disconnecting_gives_back_what_was_prefetched(nsqds: list[Nsqd], topic: str) -> None:
    for daemon in nsqds:
        publish(daemon, topic, b"1", b"2", b"3")
    first, second = map(address_of, nsqds)
    async with Consumer(topic, "ch", nsqd=[first, second], max_in_flight=10) as consumer:
        await until(lambda: consumer.stats().in_flight == 6)
        await consumer.disconnect_from_nsqd(first)
        await until(lambda: nsqds[0].channel(topic)["depth"] == 3)
        got = [await anext(consumer) for _ in range(3)]
        assert {message.nsqd_address for message in got} == {second}


async def test_disconnecting_waits_for_what_is_handled(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"x")
    async with consumer_of(nsqd, topic) as consumer:
        message = await anext(consumer)
        leaving = asyncio.create_task(consumer.disconnect_from_nsqd(address_of(nsqd)))
        await asyncio.sleep(0.2)
        assert not leaving.done()
        message.finish()
        await asyncio.wait_for(leaving, WAIT_S)
        await until(lambda: is_done(nsqd, topic))


async def test_disconnecting_what_is_being_connected(nsqd: Nsqd, topic: str) -> None:
    with FaultProxy(nsqd.tcp) as proxy:
        proxy.stall()
        address = "{}:{}".format(*proxy.address)
        async with consumer_of(nsqd, topic) as consumer:
            connecting = asyncio.create_task(consumer.connect_to_nsqd(address))
            await until(lambda: proxy.connection_count)
            await consumer.disconnect_from_nsqd(address)
            with pytest.raises(Closed, match="disconnected"):
                await connecting
            proxy.resume()
            await asyncio.sleep(0.15)
            assert consumer.connections == [address_of(nsqd)]


async def test_connecting_is_cancelled(nsqd: Nsqd, topic: str) -> None:
    with FaultProxy(nsqd.tcp) as proxy:
        proxy.stall()
        async with consumer_of(nsqd, topic) as consumer:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await consumer.connect_to_nsqd("{}:{}".format(*proxy.address))
            proxy.resume()
            await asyncio.sleep(0.1)
            assert consumer.connections == [address_of(nsqd)]


async def test_found_through_nsqlookupd(lookupd: Nsqlookupd, nsqds: list[Nsqd], topic: str) -> None:
    publish_known(lookupd, nsqds, topic, b"x", b"y")
    got: list[str] = []
    async with Consumer(topic, "ch", lookupd=lookupd.http_address, max_in_flight=4) as consumer:
        await handle_until(consumer, lambda message: got.append(message.nsqd_address), lambda: len(got) == 4)
    assert sorted(got) == sorted([address_of(daemon) for daemon in nsqds] * 2)


async def test_a_filter_leaves_one_out(lookupd: Nsqlookupd, nsqds: list[Nsqd], topic: str) -> None:
    publish_known(lookupd, nsqds, topic, b"x")
    wanted = address_of(nsqds[1])
    async with Consumer(
        topic,
        "ch",
        lookupd=lookupd.http_address,
        lookupd_poll_interval="20ms",
        address_filter=lambda addresses: [address for address in addresses if address == wanted],
    ) as consumer:
        async with (await asyncio.wait_for(anext(consumer), WAIT_S)).or_raise() as message:
            assert message.nsqd_address == wanted
        await asyncio.sleep(0.3)  # more rounds
        assert consumer.connections == [wanted]


async def test_a_topic_that_appears_later(lookupd: Nsqlookupd, nsqds: list[Nsqd], topic: str, tmp_path: Path) -> None:
    """First nobody has the topic, then one nsqd has it, then one that was started later."""
    async with Consumer(
        topic, "ch", lookupd=[lookupd.http_address], lookupd_poll_interval="50ms", max_in_flight=5
    ) as consumer:
        assert consumer.connections == []
        publish(nsqds[0], topic, b"x")
        async with (await asyncio.wait_for(anext(consumer), WAIT_S)).or_raise() as message:
            assert message.nsqd_address == address_of(nsqds[0])
        late = new_nsqd(tmp_path, lookupd)
        try:
            publish(late, topic, b"y")
            async with (await asyncio.wait_for(anext(consumer), WAIT_S)).or_raise() as message:
                assert message.nsqd_address == address_of(late)
        finally:
            late.kill()
        await until(lambda: consumer.connections == [address_of(nsqds[0])])


async def test_nsqlookupds_while_it_runs(lookupd: Nsqlookupd, nsqds: list[Nsqd], topic: str) -> None:
    publish_known(lookupd, nsqds, topic, b"x")
    async with consumer_of(nsqds[0], topic) as consumer:
        (await anext(consumer)).finish()
        with pytest.raises(ConfigError, match="missing port"):
            consumer.connect_to_nsqlookupd("127.0.0.1")
        consumer.connect_to_nsqlookupd(lookupd.http_address)
        async with (await asyncio.wait_for(anext(consumer), WAIT_S)).or_raise() as message:
            assert message.nsqd_address == address_of(nsqds[1])
        with pytest.raises(ConfigError, match="is the last one"):
            consumer.disconnect_from_nsqlookupd(lookupd.http_address)
        consumer.connect_to_nsqlookupd("127.0.0.1:1")
        consumer.disconnect_from_nsqlookupd(lookupd.http_address)


async def test_one_of_two_given_cannot_be_reached(nsqd: Nsqd, topic: str) -> None:
    """The nsqd that cannot be reached is tried again, and found when it is there."""
    with FaultProxy(nsqd.tcp) as proxy:
        proxy.refusing = True
        addresses = [address_of(nsqd), "{}:{}".format(*proxy.address)]
        async with Consumer(topic, "ch", nsqd=addresses, lookupd_poll_interval="30ms") as consumer:
            assert consumer.connections == addresses[:1]
            proxy.refusing = False
            await until(lambda: consumer.connections == addresses)


async def test_a_lost_nsqd_that_is_asked_for_in_vain_is_still_tried_again(nsqd: Nsqd, topic: str) -> None:
    with FaultProxy(nsqd.tcp) as proxy:
        address = "{}:{}".format(*proxy.address)
        async with Consumer(topic, "ch", nsqd=address, lookupd_poll_interval="300ms") as consumer:
            proxy.refusing = True
            proxy.cut()
            await until(lambda: not consumer.connections)
            error: NsqError | None = None
            while not isinstance(error, NotConnected):  # another is told while it is just being tried again anyway
                with pytest.raises(NsqError) as raised:
                    await consumer.connect_to_nsqd(address)
                error = raised.value
                await asyncio.sleep(0.01)
            proxy.refusing = False
            await until(lambda: consumer.connections)


# -- an nsqd goes and comes back -------------------------------------------------------------------------


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("by", ["address", "nsqlookupd"])
async def test_nsqd_is_restarted(
    lookupd: Nsqlookupd, start_nsqd: Callable[..., Nsqd], topic: str, by: str, crash: bool
) -> None:
    daemon = start_nsqd(f"--lookupd-tcp-address={lookupd.tcp_address}")
    publish_known(lookupd, [daemon], topic, b"before")
    where = {"nsqd": address_of(daemon)} if by == "address" else {"lookupd": lookupd.http_address}
    async with Consumer(topic, "ch", lookupd_poll_interval="50ms", max_in_flight=5, **where) as consumer:  # type: ignore[arg-type]
        async with (await asyncio.wait_for(anext(consumer), WAIT_S)).or_raise() as message:
            assert message.body == b"before"
        await until(lambda: is_done(daemon, topic))
        await asyncio.to_thread(daemon.restart, crash=crash)
        await until(lambda: consumer.connections)
        publish(daemon, topic, b"after")
        bodies = set()
        while b"after" not in bodies:
            async with await asyncio.wait_for(anext(consumer), WAIT_S) as message:
                bodies.add(message.body)


async def test_messages_of_a_lost_connection_are_not_handled(nsqd: Nsqd, topic: str) -> None:
    """The answers of such messages would go nowhere, and nsqd delivers them again."""
    publish(nsqd, topic, *(b"%d" % number for number in range(5)))
    with FaultProxy(nsqd.tcp) as proxy:
        address = "{}:{}".format(*proxy.address)
        async with Consumer(
            topic, "ch", nsqd=address, max_in_flight=5, msg_timeout="3s", lookupd_poll_interval="50ms"
        ) as consumer:
            held = await anext(consumer)
            await until(lambda: consumer.stats().in_flight == 5)
            proxy.cut()
            await until(lambda: not consumer.connections)
            assert consumer.stats().in_flight == 0
            held.finish()
            again: list[tuple[bytes, int]] = []
            while len({body for body, _ in again}) < 5:
                async with await asyncio.wait_for(anext(consumer), WAIT_S) as message:
                    again.append((message.body, message.attempts))
            assert all(attempts >= 2 for _, attempts in again)
            assert consumer.stats().finished == len(again)
