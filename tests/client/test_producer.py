"""Checks a producer with a real nsqd."""

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from client.pool_rig import address_of
from harness import FaultProxy, Nsqd, Wire, until
from harness.lookupd import Nsqlookupd
from nsquark import Consumer, Producer
from nsquark.client.errors import (
    Closed,
    ConfigError,
    InvalidName,
    MessageTooBig,
    NotConnected,
    ServerError,
    TooMuchOutstanding,
)

NSQD_FLAGS = ["--max-msg-size=100000", "--max-body-size=20000000"]
WAIT_S = 30.0
TOO_LONG_S = 7200
"""nsqd refuses a delay as long as this, and closes the connection for it."""


def bodies_of(wire: Wire, topic: str, count: int) -> list[bytes]:
    return [message.body for message in wire.subscribe(topic, rdy=count).read_messages(count, finish=True)]


def proxied(proxy: FaultProxy) -> str:
    return "{}:{}".format(*proxy.address)


async def test_publish(nsqd: Nsqd, client: Wire, topic: str) -> None:
    async with Producer(address_of(nsqd)) as producer:
        await producer.publish(topic, b"one")
        await producer.publish(topic, bytearray(b"two"))
        await producer.publish(topic, memoryview(b"three"))
    assert bodies_of(client, topic, 3) == [b"one", b"two", b"three"]


async def test_multi_publish(nsqd: Nsqd, client: Wire, topic: str) -> None:
    async with Producer(address_of(nsqd)) as producer:
        await producer.multi_publish(topic, [b"one", b"two"])
        await producer.multi_publish(topic, (body for body in (b"three", bytearray(b"four"))))
    assert bodies_of(client, topic, 4) == [b"one", b"two", b"three", b"four"]


@pytest.mark.parametrize("delay", [1.0, timedelta(milliseconds=1000)])
async def test_deferred_publish(nsqd: Nsqd, client: Wire, topic: str, delay: float | timedelta) -> None:
    client.subscribe(topic, rdy=2)
    async with Producer(address_of(nsqd)) as producer:
        began_s = time.monotonic()
        await producer.deferred_publish(topic, delay, b"later")
        await producer.publish(topic, b"now")
        took_s = time.monotonic() - began_s
    came_s: dict[bytes, float] = {}
    for _ in range(2):
        (message,) = client.read_messages(1, finish=True)
        came_s[message.body] = time.monotonic() - began_s
    assert set(came_s) == {b"now", b"later"}
    assert came_s[b"later"] > 0.95
    assert list(came_s) == [b"now", b"later"] or took_s > 0.5  # a busy machine may publish it only when both are due


async def test_each_form_without_waiting(nsqd: Nsqd, client: Wire, topic: str) -> None:
    async with Producer(address_of(nsqd)) as producer:
        futures = [
            producer.publish_nowait(topic, b"one"),
            producer.multi_publish_nowait(topic, [b"two", b"three"]),
            producer.deferred_publish_nowait(topic, 0, b"four"),
        ]
        assert producer.outstanding == 3
        assert producer.outstanding_bytes > len(b"onetwothreefour")
        assert await asyncio.gather(*futures) == [None, None, None]
        assert (producer.outstanding, producer.outstanding_bytes) == (0, 0)
    assert sorted(bodies_of(client, topic, 4)) == [b"four", b"one", b"three", b"two"]


async def test_thousands_at_once_arrive_in_order(nsqd: Nsqd, client: Wire, topic: str) -> None:
    wanted = [b"%d" % number for number in range(3000)]
    settled: list[int] = []
    async with Producer(address_of(nsqd)) as producer:
        futures = [producer.publish_nowait(topic, body) for body in wanted]
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: settled.append(number))
        await asyncio.gather(*futures)
    assert settled == list(range(3000))
    client.subscribe(topic, rdy=2000)
    assert sorted(int(message.body) for message in client.read_messages(3000, finish=True)) == list(range(3000))


async def test_many_tasks_share_a_producer(nsqd: Nsqd, topic: str) -> None:
    async with Producer(address_of(nsqd)) as producer:

        async def publish_some(name: int) -> None:
            for number in range(20):
                await producer.publish(topic, b"%d.%d" % (name, number))

        await asyncio.gather(*(publish_some(name) for name in range(20)))
    assert nsqd.topic(topic)["message_count"] == 400


async def test_a_big_message(nsqd: Nsqd, client: Wire, topic: str) -> None:
    body = bytes(range(256)) * 390
    async with Producer(address_of(nsqd)) as producer:
        await producer.publish(topic, body)
    assert bodies_of(client, topic, 1) == [body]


# -- connecting ------------------------------------------------------------------------------------------


async def test_connects_with_the_first_publish(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    async with Producer(proxied(proxy)) as producer:
        assert not producer.is_connected
        assert proxy.connection_count == 0
        await producer.publish(topic, b"x")
        assert producer.is_connected
        assert proxy.connection_count == 1


async def test_ping_connects(nsqd: Nsqd) -> None:
    async with Producer(address_of(nsqd)) as producer:
        await producer.ping()
        assert producer.is_connected
        await producer.ping()


async def test_nobody_listens(nsqd: Nsqd, topic: str) -> None:
    with FaultProxy(nsqd.tcp) as proxy:
        address = proxied(proxy)
    async with Producer(address) as producer:
        for _ in range(2):
            with pytest.raises(NotConnected, match=address):
                await producer.publish(topic, b"x")
        with pytest.raises(NotConnected, match=address):
            await producer.ping()
        failed = producer.publish_nowait(topic, b"x")
        with pytest.raises(NotConnected):
            await failed


@pytest.mark.parametrize("address", ["127.0.0.1", "nsqd", "127.0.0.1:x", "127.0.0.1:99999", "::1:4150", ""])
def test_wrong_addresses_fail_at_once(address: str) -> None:
    with pytest.raises(ConfigError, match=r"give it as host:port|IPv6 host in brackets"):
        Producer(address)


async def test_a_host_that_cannot_be_looked_up() -> None:
    async with Producer("..:4150", dial_timeout="5s") as producer:
        with pytest.raises(NotConnected, match=r"127\.0\.0\.1:4150|host"):
            await producer.ping()


async def test_http_port_given_by_mistake(nsqd: Nsqd, topic: str) -> None:
    async with Producer("{}:{}".format(*nsqd.http)) as producer:
        with pytest.raises(NotConnected, match="an HTTP server answers here; give the TCP port of nsqd"):
            await producer.publish(topic, b"x")


async def test_tcp_port_of_an_nsqlookupd_given_by_mistake(lookupd: Nsqlookupd, topic: str) -> None:
    address = "{}:{}".format(*lookupd.tcp)
    async with Producer(address) as producer:
        with pytest.raises(NotConnected, match=r"this is nsqlookupd's TCP port .* give the TCP port of nsqd"):
            await producer.publish(topic, b"x")
    with pytest.raises(NotConnected, match=r"this is nsqlookupd's TCP port .* or as lookupd= nsqlookupd's HTTP port"):
        await Consumer(topic, "ch", nsqd=address).start()


async def test_next_publish_connects_again(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    async with Producer(proxied(proxy)) as producer:
        await producer.publish(topic, b"one")
        proxy.cut()
        await until(lambda: not producer.is_connected)
        await producer.publish(topic, b"two")
    assert nsqd.topic(topic)["message_count"] == 2


async def test_a_local_address_to_connect_from(nsqd: Nsqd, topic: str) -> None:
    async with Producer(address_of(nsqd), local_addr="127.0.0.2:0") as producer:
        await producer.publish(topic, b"x")
        assert any(entry["remote_address"].startswith("127.0.0.2:") for entry in nsqd.stats()["producers"])


async def test_unix_socket(tmp_path: Path, topic: str) -> None:
    with (
        TemporaryDirectory(prefix="nsq") as directory,
        Nsqd(tmp_path, f"--tcp-address={directory}/tcp") as daemon,
    ):
        async with Producer(f"{directory}/tcp") as producer:
            await producer.publish(topic, b"x")
        assert daemon.topic(topic)["message_count"] == 1


async def test_works_over_ipv6(tmp_path: Path, topic: str) -> None:
    with Nsqd(tmp_path, "--tcp-address=[::1]:0") as daemon:
        async with Producer("[{}]:{}".format(*daemon.tcp)) as producer:
            await producer.publish(topic, b"x")
        assert daemon.topic(topic)["message_count"] == 1


# -- refused before sending ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 65, "ünï", "a\n", "#ephemeral"])
async def test_names_are_checked_before_sending(nsqd: Nsqd, topic: str, name: str) -> None:
    async with Producer(address_of(nsqd)) as producer:
        for publish in (
            lambda: producer.publish(name, b"x"),
            lambda: producer.multi_publish(name, [b"x"]),
            lambda: producer.deferred_publish(name, 1, b"x"),
        ):
            with pytest.raises(InvalidName, match="is not valid"):
                await publish()  # type: ignore[no-untyped-call]
        assert not producer.is_connected
        await producer.publish(topic, b"x")


async def test_bodies_are_checked_before_sending(nsqd: Nsqd, topic: str) -> None:
    async with Producer(address_of(nsqd)) as producer:
        with pytest.raises(ValueError, match="must not be empty"):
            await producer.publish(topic, b"")
        with pytest.raises(ValueError, match="must not be empty"):
            await producer.multi_publish(topic, [b"x", b""])
        with pytest.raises(ValueError, match="at least one message"):
            await producer.multi_publish(topic, [])
        with pytest.raises(TypeError, match="encode it first"):
            await producer.publish(topic, "text")
        with pytest.raises(TypeError, match="encode it first"):
            await producer.multi_publish(topic, ["text"])
        assert not producer.is_connected


@pytest.mark.parametrize("delay", [-1, -0.001, float("nan"), float("inf"), timedelta(seconds=-1)])
async def test_delays_are_checked_before_sending(nsqd: Nsqd, topic: str, delay: float | timedelta) -> None:
    async with Producer(address_of(nsqd)) as producer:
        with pytest.raises(ValueError, match="give 0 or more"):
            await producer.deferred_publish(topic, delay, b"x")
        assert not producer.is_connected


@pytest.mark.ours  # NSQ's own does not tell its limit
async def test_sizes_are_checked_before_sending(nsqd: Nsqd, topic: str) -> None:
    async with Producer(address_of(nsqd)) as producer:
        await producer.publish(topic, bytes(100_000))
        with pytest.raises(MessageTooBig, match="100001 bytes"):
            await producer.publish(topic, bytes(100_001))
        with pytest.raises(MessageTooBig, match="100001 bytes"):
            await producer.multi_publish(topic, [b"x", bytes(100_001)])
        assert producer.is_connected


async def test_a_size_that_only_nsqd_can_refuse(nsqd: Nsqd, topic: str) -> None:
    """At the first publish nothing is known of nsqd yet."""
    async with Producer(address_of(nsqd)) as producer:
        with pytest.raises(ServerError, match="E_BAD_MESSAGE PUB message too big 100001 > 100000"):
            await producer.publish(topic, bytes(100_001))


# -- errors of nsqd --------------------------------------------------------------------------------------


async def test_an_error_fails_its_publish_and_loses_those_behind(nsqd: Nsqd, topic: str) -> None:
    async with Producer(address_of(nsqd)) as producer:
        await producer.ping()
        before = producer.publish_nowait(topic, b"before")
        wrong = producer.deferred_publish_nowait(topic, TOO_LONG_S, b"wrong")
        behind = [producer.publish_nowait(topic, b"behind") for _ in range(3)]
        await before
        with pytest.raises(ServerError) as caught:
            await wrong
        assert caught.value.code == "E_INVALID"
        assert caught.value.text == "E_INVALID DPUB timeout 7200000 out of range 0-3600000"
        assert str(caught.value) == caught.value.text
        for future in behind:
            with pytest.raises(NotConnected):
                await future
        await producer.publish(topic, b"after")
    assert nsqd.topic(topic)["message_count"] == 2


# -- back-pressure ---------------------------------------------------------------------------------------


async def test_publish_nowait_refuses_above_the_limit(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    async with Producer(proxied(proxy), outstanding_max=3) as producer:
        await producer.ping()
        proxy.stall()
        futures = [producer.publish_nowait(topic, b"x") for _ in range(3)]
        with pytest.raises(TooMuchOutstanding, match="3 publishes"):
            producer.publish_nowait(topic, b"x")
        proxy.resume()
        await asyncio.gather(*futures)
        await producer.publish_nowait(topic, b"x")
    assert nsqd.topic(topic)["message_count"] == 4


async def test_publish_waits_above_the_limit(nsqd: Nsqd, proxy: FaultProxy, client: Wire, topic: str) -> None:
    async with Producer(proxied(proxy), outstanding_bytes_max=1000) as producer:
        await producer.ping()
        proxy.stall()
        tasks = [asyncio.create_task(producer.publish(topic, b"%d" % number * 300)) for number in range(8)]
        await asyncio.sleep(0)
        assert producer.outstanding == 3
        assert producer.outstanding_bytes <= 1000
        with pytest.raises(TooMuchOutstanding):
            producer.publish_nowait(topic, b"overtaking those that wait")
        tasks[4].cancel()
        proxy.resume()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [number for number, outcome in enumerate(outcomes) if outcome is not None] == [4]
    assert [body[:1] for body in bodies_of(client, topic, 7)] == [b"0", b"1", b"2", b"3", b"5", b"6", b"7"]


async def test_one_publish_is_let_through_however_big(nsqd: Nsqd, topic: str) -> None:
    async with Producer(address_of(nsqd), outstanding_bytes_max=10) as producer:
        await asyncio.gather(*(producer.publish(topic, bytes(1000)) for _ in range(5)))
    assert nsqd.topic(topic)["message_count"] == 5


async def test_those_that_wait_go_with_the_next_connection(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    async with Producer(proxied(proxy), outstanding_max=2) as producer:
        await producer.ping()
        proxy.stall()
        tasks = [asyncio.create_task(producer.publish(topic, b"x")) for _ in range(5)]
        await asyncio.sleep(0)
        proxy.cut()
        proxy.resume()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [NotConnected] * 2 + [type(None)] * 3


# -- cancelling and closing ------------------------------------------------------------------------------


async def test_a_cancelled_publish_keeps_its_place(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    """If it lost its place, its answer would be taken for that of the next, and the error would hit the wrong one."""
    async with Producer(proxied(proxy)) as producer:
        await producer.ping()
        proxy.stall()
        cancelled = asyncio.create_task(producer.publish(topic, b"cancelled"))
        await asyncio.sleep(0)
        good = producer.publish_nowait(topic, b"good")
        wrong = producer.deferred_publish_nowait(topic, TOO_LONG_S, b"wrong")
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        proxy.resume()
        await good
        with pytest.raises(ServerError):
            await wrong
    assert nsqd.topic(topic)["message_count"] == 2


async def test_a_publish_that_is_cancelled_while_it_waits_for_room_holds_no_other(
    nsqd: Nsqd, proxy: FaultProxy, topic: str
) -> None:
    async with Producer(proxied(proxy), outstanding_bytes_max=1000) as producer:
        await producer.ping()
        proxy.stall()
        first = producer.publish_nowait(topic, b"x" * 400)
        big = asyncio.create_task(producer.publish(topic, b"y" * 700))
        await asyncio.sleep(0)
        small = asyncio.create_task(producer.publish(topic, b"z"))
        await asyncio.sleep(0)
        assert producer.outstanding == 1
        big.cancel()
        await until(lambda: producer.outstanding == 2)
        last = producer.publish_nowait(topic, b"there is room")
        proxy.resume()
        await asyncio.gather(first, small, last)
    assert nsqd.topic(topic)["message_count"] == 3


async def test_close_waits_for_answers(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    producer = Producer(proxied(proxy))
    proxy.down.delay_s = 0.1
    futures = [producer.publish_nowait(topic, b"x") for _ in range(10)]
    await producer.close()
    assert all(future.done() and future.exception() is None for future in futures)
    assert nsqd.topic(topic)["message_count"] == 10


async def test_close_settles_what_gets_no_answer(proxy: FaultProxy, topic: str) -> None:
    producer = Producer(proxied(proxy), outstanding_max=2)
    await producer.ping()
    proxy.stall()
    tasks = [asyncio.create_task(producer.publish(topic, b"x")) for _ in range(4)]
    await asyncio.sleep(0)
    await producer.close(timeout=0.1)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Closed] * 4
    assert "may or may not have the message" in str(outcomes[0])
    assert "before the message was sent" in str(outcomes[3])


async def test_close_while_connecting(proxy: FaultProxy, topic: str) -> None:
    proxy.stall()
    producer = Producer(proxied(proxy))
    future = producer.publish_nowait(topic, b"x")
    ping = asyncio.create_task(producer.ping())
    await until(lambda: proxy.connection_count)
    await producer.close(timeout=0.05)
    with pytest.raises(Closed):
        await future
    with pytest.raises(Closed):
        await ping


async def test_a_cancelled_close_still_closes(proxy: FaultProxy, topic: str) -> None:
    producer = Producer(proxied(proxy))
    await producer.ping()
    proxy.stall()
    future = producer.publish_nowait(topic, b"x")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await producer.close()
    with pytest.raises(Closed):
        await asyncio.wait_for(future, WAIT_S)
    await until(lambda: not producer.is_connected)


async def test_nothing_works_after_close(nsqd: Nsqd, topic: str) -> None:
    producer = Producer(address_of(nsqd))
    await producer.publish(topic, b"x")
    await producer.close()
    await producer.close()
    calls: list[Callable[[], object]] = [
        lambda: producer.publish(topic, b"x"),
        lambda: producer.multi_publish(topic, [b"x"]),
        lambda: producer.deferred_publish(topic, 1, b"x"),
        producer.ping,
    ]
    for call in calls:
        with pytest.raises(Closed, match="stopped"):
            await call()
    with pytest.raises(Closed, match="stopped"):
        producer.publish_nowait(topic, b"x")


async def test_close_without_ever_connecting() -> None:
    producer = Producer("127.0.0.1:1")
    await producer.close()
    assert not producer.is_connected
