"""Wrong arguments fail at once, with a sentence that says what to give instead."""

import asyncio
import copy
import json
import math
import pickle
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from client.consumer_rig import consumer_of
from client.pool_rig import address_of, messages_of
from harness import Nsqd
from nsquark import Config, Consumer, Dedupe, Producer, ProducerPool, sync
from nsquark.client.checks import SECONDS_MAX
from nsquark.errors import ConfigError, InvalidName

NOBODY = "127.0.0.1:1"
NO_ADDRESSES = ["127.0.0.1:99999", "localhost", "", "http://127.0.0.1:4150", 4150, None, b"127.0.0.1:4150"]


@pytest.mark.parametrize("address", NO_ADDRESSES)
@pytest.mark.parametrize("kind", [Producer, ProducerPool, sync.Producer, sync.ProducerPool])
def test_what_is_no_address_of_an_nsqd(kind: Any, address: object) -> None:
    with pytest.raises(ConfigError, match="host:port") as error:
        kind(address)
    assert "IPv6" not in str(error.value)


@pytest.mark.parametrize("address", ["a:4150,b:4150", "a:4150 b:4150", " a:4150", "a :4150", "a: 4150", "a:4150\n"])
@pytest.mark.parametrize("kind", [Producer, ProducerPool, sync.Producer, sync.ProducerPool])
def test_several_addresses_in_a_text_and_what_is_left_of_a_split_one(kind: Any, address: str) -> None:
    with pytest.raises(ConfigError, match="without blanks or commas"):
        kind(address)


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_what_is_no_address_for_a_consumer(address: object) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        Consumer("t", "c", nsqd=address)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Producer, ProducerPool, sync.Producer, sync.ProducerPool])
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"config": {"snappy": True}}, "config is a Config.*not a dict"),
        ({"outstanding_max": "x"}, "outstanding_max"),
        ({"outstanding_max": -1}, "outstanding_max"),
        ({"outstanding_bytes_max": "16MB"}, "outstanding_bytes_max"),
        ({"logger": "x"}, "logger is a logging.Logger"),
        ({"dial_timeout": "-1s"}, "dial_timeout"),
        ({"envelope": "no"}, "envelope.*True or False"),
    ],
)
def test_wrong_settings_of_a_producer(kind: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        kind(NOBODY, **settings)


@pytest.mark.parametrize("kind", [ProducerPool, sync.ProducerPool])
@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"copies": "2"}, ConfigError, "copies"),
        ({"copies": True}, ConfigError, "copies"),
        ({"copies": 1.5}, ConfigError, "copies"),
        ({"retry_deadline": "30s"}, ConfigError, "a retry_deadline of '30s': give 0 or more seconds"),
        ({"retry_deadline": math.inf}, ConfigError, "a retry_deadline of inf: give 0 or more seconds"),
        ({"lookupd_topic": "bad topic"}, InvalidName, "bad topic"),
    ],
)
def test_wrong_settings_of_a_pool(kind: Any, settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        kind(NOBODY, **settings)


def test_a_store_is_not_its_class() -> None:
    with pytest.raises(ConfigError, match=r"dedupe .*Dedupe\(\)"):
        Consumer("t", "c", nsqd=NOBODY, dedupe=Dedupe)  # type: ignore[arg-type]


NO_SECONDS = [-1, math.nan, math.inf, 1e300, 10**400, SECONDS_MAX + 1, "5", True, timedelta(seconds=-1)]


@pytest.mark.parametrize("delay", [*NO_SECONDS, None])
@pytest.mark.parametrize("kind", [Producer, ProducerPool])
async def test_what_is_no_delay(kind: Any, delay: Any) -> None:
    async with kind(NOBODY) as producer:
        with pytest.raises(ValueError, match=r"a delay of .*: give 0 or more seconds"):
            await producer.deferred_publish("t", delay, b"x")
        with pytest.raises(ValueError, match=r"a delay of .*: give 0 or more seconds"):
            producer.deferred_publish_nowait("t", delay, b"x")


@pytest.mark.parametrize("delay", NO_SECONDS)
async def test_what_is_no_delay_of_a_requeue(nsqd: Nsqd, topic: str, delay: Any) -> None:
    async with Producer(address_of(nsqd)) as producer:
        await producer.publish(topic, b"x")
    async with consumer_of(nsqd, topic) as consumer:
        message = await anext(consumer)
        with pytest.raises(ValueError, match=r"a delay of .*: give 0 or more seconds"):
            message.requeue(delay)
        assert not message.is_answered
        message.finish()


@pytest.mark.parametrize("timeout", [*NO_SECONDS, None])
async def test_what_is_no_timeout_of_close(nsqd: Nsqd, topic: str, timeout: Any) -> None:
    async with (
        Producer(address_of(nsqd)) as producer,
        ProducerPool(address_of(nsqd)) as pool,
        consumer_of(nsqd, topic) as consumer,
    ):
        for close in (producer.close, pool.close, consumer.close):
            with pytest.raises(ValueError, match=r"a timeout of .*: give 0 or more seconds"):
                await close(timeout)
        with pytest.raises(ValueError, match=r"a timeout of .*: give 0 or more seconds"):
            consumer.stop(timeout)
        await producer.publish(topic, b"it was not closed")
        await pool.publish(topic, b"it was not closed")
        async with await anext(consumer), await anext(consumer):
            pass


@pytest.mark.parametrize("timeout", ["5", True, math.nan, []])
async def test_what_is_no_timeout_of_get(nsqd: Nsqd, topic: str, timeout: Any) -> None:
    async with consumer_of(nsqd, topic) as consumer:
        with pytest.raises(ConfigError, match=r"a timeout of .*: give 0 or more seconds"):
            await asyncio.wait_for(consumer.get(timeout), 20)
        for over in (-1, -0.1, 0, timedelta(seconds=-1), timedelta(milliseconds=1)):
            assert await asyncio.wait_for(consumer.get(over), 20) is None


@pytest.mark.parametrize("count", [-1, 2.5, math.nan, "5", True, None])
async def test_what_is_no_max_in_flight(nsqd: Nsqd, topic: str, count: Any) -> None:
    async with consumer_of(nsqd, topic) as consumer:
        with pytest.raises(ConfigError, match="max_in_flight"):
            consumer.change_max_in_flight(count)


@pytest.mark.parametrize("address", [4150, None, b"127.0.0.1:4150", ["127.0.0.1:4150"], "localhost", ""])
async def test_what_is_no_address_while_a_consumer_runs(nsqd: Nsqd, topic: str, address: Any) -> None:
    async with consumer_of(nsqd, topic) as consumer:
        with pytest.raises(ConfigError, match="host:port"):
            await consumer.connect_to_nsqd(address)
        with pytest.raises(ConfigError, match="host:port"):
            await consumer.disconnect_from_nsqd(address)
        with pytest.raises(ConfigError, match="host:port"):
            consumer.connect_to_nsqlookupd(address)


@pytest.mark.parametrize("timeout", NO_SECONDS)
def test_what_is_no_timeout_of_a_blocking_close(nsqd: Nsqd, topic: str, timeout: Any) -> None:
    with sync.Producer(address_of(nsqd)) as producer, sync.Consumer(topic, "ch", nsqd=address_of(nsqd)) as consumer:
        for close in (producer.close, consumer.close, consumer.stop):
            with pytest.raises(ValueError, match=r"a timeout of .*: give 0 or more seconds"):
                close(timeout)
        producer.publish(topic, b"it was not closed")
        with next(consumer):
            pass


@pytest.mark.parametrize("kind", [Producer, ProducerPool])
async def test_wrong_arguments_of_a_publish(kind: Any) -> None:
    async with kind(NOBODY, envelope=True) as wraps, kind(NOBODY) as plain:
        for producer in (wraps, plain):
            with pytest.raises(InvalidName, match="a topic name is a str"):
                await producer.publish(["t"], b"x")
            for bodies in (None, 5, b"abc", "abc"):
                with pytest.raises(TypeError, match="multi_publish takes several bodies, such as a list"):
                    await producer.multi_publish("t", bodies)
        with pytest.raises(TypeError, match="headers are texts by name"):
            await wraps.publish("t", b"x", headers=[("a", "b")])


def test_wrong_bodies_of_a_blocking_publish() -> None:
    with sync.Producer(NOBODY) as producer:
        for publish in (producer.multi_publish, producer.multi_publish_nowait):
            with pytest.raises(TypeError, match="multi_publish takes several bodies, such as a list"):
                publish("t", None)  # type: ignore[arg-type]


class Text(bytes):
    """Is what some libraries return: bytes with more to them."""


@pytest.mark.parametrize("kind", [Producer, ProducerPool])
async def test_bytes_of_another_class_are_bytes(nsqd: Nsqd, topic: str, kind: Any) -> None:
    async with kind(address_of(nsqd)) as producer:
        await producer.publish(topic, Text(b"one"))
        await producer.multi_publish(topic, [Text(b"two"), b"three"])
        await producer.deferred_publish(topic, 0, Text(b"four"))
    assert sorted(messages_of(nsqd, topic)) == [b"four", b"one", b"three", b"two"]


async def no_bytes(value: Any) -> bytes:
    return b""


@pytest.mark.parametrize("kind", [Producer, ProducerPool])
async def test_wrong_keywords_of_a_publish(kind: Any) -> None:
    async with kind(NOBODY) as producer:
        with pytest.raises(TypeError, match="takes the keywords encode and headers, not delay"):
            await producer.publish("t", b"x", delay=5)
        with pytest.raises(TypeError, match="takes the keywords encode and headers, not header, key"):
            await producer.multi_publish("t", [b"x"], header={}, key=b"")
        with pytest.raises(TypeError, match="encode=dumps returned a str: give a function that returns bytes"):
            await producer.publish("t", {}, encode=json.dumps)
        with pytest.raises(TypeError, match="encode=no_bytes returned a coroutine: give a function that returns bytes"):
            await producer.publish("t", {}, encode=no_bytes)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"copies": "2"}, r"copies \(2\) - expected a whole number, an int and not str"),
        ({"outstanding_max": Decimal(2)}, r"\(2\) - expected a whole number, an int and not decimal.Decimal"),
        ({"envelope": "True"}, r"envelope \(True\) - expected True or False, a bool and not str"),
        ({"lookupd_poll_jitter": "0.5"}, r"\(0.5\) - expected a number, a float and not str"),
        ({"client_id": 7}, r"client_id \(7\) - expected a string, a str and not int"),
    ],
)
def test_what_only_looks_like_it(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ProducerPool(NOBODY, **settings)


def test_paths_of_unix_sockets_are_texts() -> None:
    path = Path("/run/nsqd.sock")
    made: tuple[Any, ...] = (Producer, ProducerPool, sync.Producer, lambda path: Consumer("t", "c", nsqd=[path]))
    for make in made:
        with pytest.raises(ConfigError, match=r"an address is a str; give host:port, or str\(path\)"):
            make(path)
    for relative in ("nsqd.sock", "./nsqd", "unix:/run/nsqd"):
        with pytest.raises(ConfigError, match="give it as host:port, or the whole path of a unix socket"):
            Producer(relative)


@pytest.mark.parametrize("options", [None, 5, "msg-timeout,2m", [("msg-timeout", "2m")], {b"msg_timeout": "2m"}])
def test_what_are_no_options(options: Any) -> None:
    with pytest.raises(ConfigError, match="options are values by name, such as"):
        Config.from_options(options)


@pytest.mark.parametrize("kind", [sync.Producer, sync.ProducerPool, lambda nsqd: sync.Consumer("t", "c", nsqd=nsqd)])
def test_what_blocks_cannot_be_sent_to_another_process(kind: Any) -> None:
    made = kind(NOBODY)
    for take in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match=r"cannot be copied, or sent to another process: make a .* there"):
            take(made)
