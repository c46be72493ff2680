"""Checks nsqds that are restarted, vanish silently, or are slow: they are used again soon, passed by, and told about in
the log.
"""

import asyncio
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from client.consumer_rig import consumer_of, handle_until, is_done, publish
from client.pool_rig import address_of
from harness import FaultProxy, Nsqd, until
from harness.holding import hold
from harness.lookupd import Nsqlookupd
from nsquark import Consumer, Producer, ProducerPool, sync
from nsquark.client import nsqds
from nsquark.client.config import Config
from nsquark.client.lookupd import lookup
from nsquark.errors import ConfigError, NsqError, WrongPort


@pytest.fixture
def lookupd(make_lookupd: Callable[..., Nsqlookupd]) -> Nsqlookupd:
    """Gives each test an nsqlookupd of its own."""
    return make_lookupd()


# -- consumers -------------------------------------------------------------------------------------------


async def test_a_restarted_nsqd_given_by_address_is_used_again_soon(
    start_nsqd: Callable[..., Nsqd], topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The lookupd_poll_interval is the default, which is a minute."""
    caplog.set_level(logging.INFO)
    daemon = start_nsqd()
    publish(daemon, topic, b"before")
    handled: list[bytes] = []
    async with Consumer(topic, "ch", nsqd=address_of(daemon)) as consumer:
        async with await asyncio.wait_for(anext(consumer), 20) as message:
            handled.append(message.body)
        await until(lambda: is_done(daemon, topic))
        await asyncio.to_thread(daemon.restart)
        publish(daemon, topic, b"after")
        async with asyncio.timeout(45), await anext(consumer) as message:  # tries are ever rarer while it restarts
            handled.append(message.body)
    assert handled == [b"before", b"after"]
    name = f"{topic}/ch: "
    said = [record.message for record in caplog.records if record.message.startswith(name)]
    assert [line for line in said if "connected" in line and address_of(daemon) in line]
    assert [line for line in said if "connection lost" in line and address_of(daemon) in line]


async def test_rdy_and_backoff_are_told_to_those_who_ask(nsqd: Nsqd, topic: str) -> None:
    """The consumer has a logger of its own, which is told."""
    publish(nsqd, topic, b"x")
    said: list[tuple[int, str]] = []

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append((record.levelno, record.getMessage()))

    logger = logging.getLogger(f"test.{topic}")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(Said())

    def handle(_: object) -> None:
        raise RuntimeError("once")

    async with consumer_of(nsqd, topic, max_attempts=1, logger=logger) as consumer:
        await handle_until(consumer, handle, lambda: consumer.stats().given_up == 1)
    for level, words in (
        (logging.DEBUG, "RDY 10"),
        (logging.DEBUG, "backing off"),
        (logging.INFO, "connected"),
        (logging.ERROR, "failed (attempt 1)"),
        (logging.WARNING, "giving up"),
    ):
        assert [line for number, line in said if number == level and words in line], words
    assert all(line.startswith(f"{topic}/ch: ") for _, line in said)
    assert all(address_of(nsqd) in line for _, line in said if "backing off" not in line and "backoff" not in line)


# -- nsqlookupd ------------------------------------------------------------------------------------------


async def test_the_tcp_port_of_an_nsqlookupd_is_an_error_at_once(
    lookupd: Nsqlookupd, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nsqds, "START_CHECK_S", 30.0)  # a busy nsqlookupd may need longer than a start waits for it
    with pytest.raises(WrongPort, match="give its HTTP port"):
        await Consumer(topic, "ch", lookupd=lookupd.tcp_address).start()
    async with ProducerPool(lookupd=lookupd.tcp_address) as pool:
        with pytest.raises(ConfigError, match="give its HTTP port"):
            await asyncio.wait_for(pool.publish(topic, b"x"), 25)
    with pytest.raises(WrongPort):
        await lookup(lookupd.tcp_address, topic, Config())


@pytest.mark.parametrize(("port", "told"), [("tcp", "nsqd's TCP port"), ("http", "nsqd's HTTP port")])
async def test_a_port_of_an_nsqd_is_no_nsqlookupd(
    nsqd: Nsqd, topic: str, monkeypatch: pytest.MonkeyPatch, port: str, told: str
) -> None:
    monkeypatch.setattr(nsqds, "START_CHECK_S", 30.0)
    host, number = getattr(nsqd, port)
    with pytest.raises(WrongPort, match=f"this is {told}.*give nsqlookupd's.*4161"):
        await Consumer(topic, "ch", lookupd=f"{host}:{number}").start()
    async with ProducerPool(lookupd=f"{host}:{number}") as pool:
        with pytest.raises(WrongPort, match=told):
            await asyncio.wait_for(pool.publish(topic, b"x"), 25)


async def test_a_topic_that_does_not_exist_yet_is_no_error(
    lookupd: Nsqlookupd, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with Consumer(topic, "ch", lookupd=lookupd.http_address, lookupd_poll_interval="50ms"):
        await until(lambda: "knows no nsqd with topic" in caplog.text)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


# -- producers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Producer, sync.Producer])
@pytest.mark.parametrize("address", [4150, ["127.0.0.1:4150"], None, b"127.0.0.1:4150"])
def test_one_address_for_a_producer(kind: Any, address: object) -> None:
    with pytest.raises(ConfigError, match="give one 'host:port'"):
        kind(address)


@pytest.mark.parametrize("addresses", [4150, [4150], [""], None])
def test_addresses_of_a_pool(addresses: Any) -> None:
    with pytest.raises(ConfigError, match="give 'host:port'"):
        ProducerPool(addresses)


async def test_names_are_texts(nsqd: Nsqd) -> None:
    async with Producer(address_of(nsqd)) as producer, ProducerPool(address_of(nsqd)) as pool:
        for publisher in (producer, pool):
            with pytest.raises(NsqError, match="a topic name is a str"):
                await publisher.publish(b"t", b"x")  # type: ignore[arg-type]


async def test_a_pool_of_unix_sockets(tmp_path: Path, topic: str) -> None:
    path, data_path = tmp_path / "nsqd.sock", tmp_path / "data"
    data_path.mkdir()
    with Nsqd(data_path, f"--tcp-address={path}") as daemon:
        async with ProducerPool([str(path)]) as pool:
            await pool.publish(topic, b"x")
        assert daemon.topic(topic)["depth"] == 1


@pytest.mark.parametrize("kind", ["producer", "pool", "consumer"])
def test_a_second_event_loop_is_told_what_to_do(nsqd: Nsqd, topic: str, kind: str) -> None:
    async def use(made: Any) -> None:
        if kind == "consumer":
            await asyncio.wait_for(anext(made), 20)
        else:
            await made.publish(topic, b"x")

    async def begin() -> Any:
        if kind == "consumer":
            return await consumer_of(nsqd, topic).start()
        made = Producer(address_of(nsqd)) if kind == "producer" else ProducerPool(address_of(nsqd))
        await use(made)
        return made

    loop = asyncio.new_event_loop()
    made = loop.run_until_complete(begin())
    try:
        with pytest.raises(NsqError, match=r"another event loop: make one in each asyncio\.run"):
            asyncio.run(use(made))
        with pytest.raises(NsqError, match=r"another event loop: make one in each asyncio\.run"):
            asyncio.run(made.close())
        publish(nsqd, topic, b"x")
        loop.run_until_complete(use(made))  # it was not closed
    finally:
        loop.run_until_complete(made.close())
        loop.close()


@pytest.mark.parametrize("kind", [Producer, ProducerPool])
async def test_a_thread_without_an_event_loop_is_told_what_to_do(nsqd: Nsqd, topic: str, kind: Any) -> None:
    async with kind(address_of(nsqd)) as producer:
        await producer.publish(topic, b"x")
        with pytest.raises(NsqError, match=r"no event loop runs in this thread: .*nsquark\.sync"):
            await asyncio.to_thread(producer.publish_nowait, topic, b"y")
        await producer.publish(topic, b"z")
    assert nsqd.topic(topic)["depth"] == 2


# -- pools -----------------------------------------------------------------------------------------------


async def test_an_nsqd_that_vanishes_silently_holds_no_publish_for_long(
    start_nsqd: Callable[..., Nsqd], topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first, second = start_nsqd(), start_nsqd()
    async with ProducerPool([address_of(first), address_of(second)]) as pool:
        for _ in range(4):
            await pool.publish(topic, b"x")
        assert first.process is not None
        hold(first.process.pid)
        try:
            await asyncio.gather(*(pool.publish(topic, b"%d" % number) for number in range(200)))
            state = {status.address: status.state for status in pool.nsqds()}[address_of(first)]
            assert state == "silent", "others were asked before the nsqd was taken for dead"
        finally:
            first.process.send_signal(signal.SIGCONT)
        await until(lambda: {status.state for status in pool.nsqds()} == {"up"} or publish_one(pool, topic), 30)
    assert f"pool: nsqd {address_of(first)} answers nothing" in caplog.text
    assert f"pool: nsqd {address_of(first)} is up again" in caplog.text


def publish_one(pool: ProducerPool, topic: str) -> bool:
    """Publishes one message: an nsqd that is back is tried by the next publish."""
    pool.publish_nowait(topic, b"x").add_done_callback(lambda answer: answer.exception())
    return False


async def test_the_faster_nsqd_is_preferred_by_those_who_await_each_publish(
    start_nsqd: Callable[..., Nsqd], topic: str
) -> None:
    slow, fast = start_nsqd(), start_nsqd()
    with FaultProxy(slow.tcp) as proxy:
        proxy.down.delay_s = 0.05
        async with ProducerPool(["{}:{}".format(*proxy.address), address_of(fast)]) as pool, asyncio.timeout(90):
            before, count = 0, 60
            while count > 20:  # one answer that came late makes the fast one seem slow, but not every time
                for _ in range(60):
                    await pool.publish(topic, b"x")
                total = slow.topic(topic)["message_count"] if topic in slow.topic_names() else 0
                before, count = total, total - before
        assert fast.topic(topic)["message_count"] >= 40


async def test_a_slow_nsqd_is_measured_anew(start_nsqd: Callable[..., Nsqd], topic: str) -> None:
    first, second = start_nsqd(), start_nsqd()
    with FaultProxy(first.tcp) as proxy:
        proxy.down.delay_s = 0.05
        async with ProducerPool(["{}:{}".format(*proxy.address), address_of(second)]) as pool:
            for _ in range(30):
                await pool.publish(topic, b"x")
            proxy.heal()
            before = first.topic(topic)["message_count"]

            async def used_again() -> bool:
                for _ in range(10):
                    await pool.publish(topic, b"x")
                return bool(first.topic(topic)["message_count"] > before + 20)

            async with asyncio.timeout(40):
                while not await used_again():
                    await asyncio.sleep(0.1)
