"""Checks values instead of bytes: what is published comes out; what cannot be decoded is given up with its reason."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict, assert_type

import msgspec
import pytest

from client.consumer_rig import consumer_of, handle_until, is_done, publish
from client.pool_rig import address_of
from harness import Nsqd, until
from nsquark import Message, Producer, ProducerPool, sync
from nsquark.client.giving_up import HOOKS_MAX
from nsquark.errors import ConfigError, DecodeFailed


class Order(msgspec.Struct):
    id: int
    items: list[str] = []


@dataclass
class Point:
    x: float
    y: float


@pytest.mark.parametrize("form", ["json", "msgpack"])
@pytest.mark.parametrize("value", [Order(1, ["a"]), Point(0.5, 2), [1, 2], {"a": "b"}, "text", None])
async def test_values_come_out_as_they_went_in(nsqd: Nsqd, topic: str, form: Any, value: Any) -> None:
    kind = None if value is None else type(value)
    async with Producer(address_of(nsqd)) as producer, ProducerPool(address_of(nsqd)) as pool:
        await producer.publish(topic, value, encode=form)
        await producer.multi_publish(topic, [value, value], encode=form)
        await pool.deferred_publish(topic, 0.01, value, encode=form)
        await pool.multi_publish(topic, iter([value]), encode=form)
    async with consumer_of(nsqd, topic) as consumer:
        for _ in range(5):
            async with (await anext(consumer)).or_raise() as message:
                assert message.decode(kind, form) == value


async def test_a_type_that_cannot_be_hashed(nsqd: Nsqd, topic: str) -> None:
    kind = Annotated[int, {"unit": "EUR"}]
    publish(nsqd, topic, b"1", b"one")
    async with consumer_of(nsqd, topic) as consumer:
        async with (await anext(consumer)).or_raise() as message:
            assert message.decode(kind) == 1
        async with await anext(consumer) as message:
            with pytest.raises(DecodeFailed, match="JSON is malformed"):
                message.decode(kind)
            with pytest.raises(TypeError, match="is not supported"):
                message.decode({"unit": "EUR"})


async def _decode_async(body: bytes) -> None: ...


@pytest.mark.parametrize("kind", ["json", "Order", 5, (), [int], print])
async def test_what_is_no_type_is_named(nsqd: Nsqd, topic: str, kind: Any) -> None:
    async with Producer(address_of(nsqd)) as producer:
        await producer.publish(topic, b"5")
    async with consumer_of(nsqd, topic) as consumer, await anext(consumer) as message:
        with pytest.raises((TypeError, ConfigError), match=r"kind=.* is no type to decode to|make a \(\)") as error:
            message.decode(kind)
        assert ("the format is the second argument" in str(error.value)) == (kind == "json")


async def test_functions_of_the_user(nsqd: Nsqd, topic: str) -> None:
    async with Producer(address_of(nsqd)) as producer:
        await producer.publish(topic, {"b": 1}, encode=lambda value: json.dumps(value).encode())
        with pytest.raises(ConfigError, match='give "json", "msgpack" or a function'):
            await producer.publish(topic, {}, encode="yaml")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="Encoding objects of type object"):
            await producer.publish(topic, object(), encode="json")
    async with consumer_of(nsqd, topic) as consumer, (await anext(consumer)).or_raise() as message:
        assert message.decode() == {"b": 1}
        assert message.decode(decode=json.loads) == {"b": 1}
        assert_type(message.decode(decode=len), int)
        with pytest.raises(DecodeFailed, match="not int: invalid literal"):
            message.decode(decode=int)
        with pytest.raises(DecodeFailed, match=r"not json of type Order: .*missing required field `id`"):
            message.decode(Order)
        with pytest.raises(ConfigError, match=r"decode=.*_decode_async is an async function: give a plain one"):
            message.decode(decode=_decode_async)  # type: ignore[unused-coroutine]
        with pytest.raises(ConfigError, match="decode='yaml'"):
            message.decode(Order, "yaml")  # type: ignore[call-overload]


@pytest.mark.parametrize("threads", [0, 2])
async def test_what_cannot_be_decoded_is_given_up_at_once(
    nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture, threads: int
) -> None:
    publish(nsqd, topic, b'{"id": 1}', b"{", b'{"id": "x"}')
    seen: list[int] = []
    buried: list[tuple[bytes, str, int]] = []

    async def bury(message: Message) -> None:
        await asyncio.sleep(0.01)
        buried.append((message.body, message.give_up_reason, message.attempts))

    def handle(message: Message) -> None:
        seen.append(message.decode(Order).id)

    with caplog.at_level(logging.WARNING, "nsquark.client"):
        async with consumer_of(nsqd, topic, on_give_up=bury) as consumer:
            await handle_until(consumer, handle, lambda: consumer.stats().finished == 3, threads=threads)
            assert (consumer.stats().given_up, consumer.stats().requeued) == (2, 0)
    assert seen == [1]
    assert {(body, attempts) for body, _, attempts in buried} == {(b"{", 1), (b'{"id": "x"}', 1)}
    reasons = sorted(reason for _, reason, _ in buried)
    assert reasons[0].startswith("cannot be decoded (not json of type Order: Expected `int`, got `str`")
    assert reasons[1].startswith("cannot be decoded (not json of type Order: Input data was truncated")
    assert caplog.text.count("giving up") == 2 and "Traceback" not in caplog.text
    await until(lambda: is_done(nsqd, topic))


async def test_a_hook_that_fails_gets_the_message_again(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"{")
    calls = 0

    async def bury(message: Message) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("the dead-letter topic is away")

    async with consumer_of(nsqd, topic, on_give_up=bury) as consumer:
        async for message in consumer:
            async with message:
                message.decode(Order)
            await until(lambda message=message: message.is_answered)
            if calls == 2:
                break
    await until(lambda: is_done(nsqd, topic))


@pytest.mark.parametrize(
    ("body", "reason"), [(b"{", "cannot be decoded (not json of type Order"), (b'{"id": 1}', "attempted 2 times")]
)
async def test_a_hook_that_fails_for_long_gets_the_same_reason(
    nsqd: Nsqd, topic: str, body: bytes, reason: str
) -> None:
    publish(nsqd, topic, body)
    reasons: list[str] = []

    def bury(message: Message) -> None:
        reasons.append(message.give_up_reason)
        if len(reasons) < 5:
            raise RuntimeError("the dead-letter topic is away")

    def handle(message: Message) -> None:
        raise ValueError(message.decode(Order))

    options: Any = {"max_attempts": 2, "default_requeue_delay": "0s", "max_backoff_duration": "0s"}
    async with consumer_of(nsqd, topic, on_give_up=bury, **options) as consumer:
        await handle_until(consumer, handle, lambda: consumer.stats().given_up)
    assert len(reasons) == 5 and len(set(reasons)) == 1 and reasons[0].startswith(reason)
    await until(lambda: is_done(nsqd, topic))


async def test_the_end_waits_for_hooks(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"{")
    buried: list[bytes] = []

    async def bury(message: Message) -> None:
        await asyncio.sleep(0.3)
        buried.append(message.body)

    async with consumer_of(nsqd, topic, on_give_up=bury) as consumer, await anext(consumer) as message:
        message.decode(Order)
    assert buried == [b"{"]
    assert is_done(nsqd, topic)


async def test_an_error_of_another_message_is_a_failure_like_any(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"{", b"1", b"2")
    async with consumer_of(nsqd, topic) as consumer:
        batch = await anext(consumer.batches(3, 60))
        assert len(batch) == 3
        async with batch:
            next(message for message in batch if message.body == b"{").decode()
        await until(lambda: consumer.stats().given_up == 1)
        assert consumer.stats().requeued == 2
        for _ in range(2):
            (await anext(consumer)).finish()
    await until(lambda: is_done(nsqd, topic))


async def test_or_raise_raises_and_gives_up(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"{")
    async with consumer_of(nsqd, topic) as consumer:
        with pytest.raises(DecodeFailed):
            async with (await anext(consumer)).or_raise() as message:
                message.decode(Order)
        await until(lambda: consumer.stats().given_up == 1)


def test_without_asyncio(nsqd: Nsqd, topic: str) -> None:
    with sync.Producer(address_of(nsqd)) as producer:
        producer.publish(topic, Order(7), encode="msgpack")
        producer.publish(topic, b"\xc1")
    orders: list[Order] = []
    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd), max_in_flight=5) as consumer:
        for message in (next(consumer), next(consumer)):
            with message:
                orders.append(message.decode(Order, "msgpack"))
    assert orders == [Order(7)]
    assert consumer.stats().given_up == 1 and is_done(nsqd, topic)


async def test_the_end_does_not_wait_for_a_hook_for_ever(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"[]")
    hooks: list[asyncio.Task[None] | None] = []

    async def hang(_: Message) -> None:
        hooks.append(asyncio.current_task())
        await asyncio.sleep(3600)

    async with consumer_of(nsqd, topic, on_give_up=hang) as consumer:
        running = asyncio.create_task(consumer.run(lambda message: message.decode(int)))
        await until(lambda: hooks)
        await consumer.close(0.1)
        await running
    assert hooks[0] is not None
    assert hooks[0].cancelled()
    await until(lambda: nsqd.channel(topic)["depth"] == 1)


async def test_a_cancelled_close_leaves_no_hook(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"[]")
    hooks: list[asyncio.Task[None] | None] = []
    started = asyncio.Event()

    async def hang(_: Message) -> None:
        hooks.append(asyncio.current_task())
        await asyncio.sleep(3600)

    async def handle(message: Message) -> None:
        with contextlib.suppress(DecodeFailed):
            async with message.or_raise():
                message.decode(int)
        await until(lambda: hooks)
        started.set()
        await asyncio.sleep(3600)

    consumer = await consumer_of(nsqd, topic, on_give_up=hang).start()
    running = asyncio.create_task(consumer.run(handle))
    await started.wait()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await consumer.close()
    await asyncio.wait([running], timeout=20)
    assert hooks[0] is not None
    await until(hooks[0].cancelled)


async def test_a_hook_may_close_its_consumer(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"[]")

    async def close(_: Message) -> None:
        await consumer.close(3600)

    consumer = consumer_of(nsqd, topic, on_give_up=close)
    async with asyncio.timeout(20), consumer:
        await consumer.run(lambda message: message.decode(int))


async def test_what_goes_back_because_its_hook_closes_the_consumer_is_not_given_up(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"[]")

    async def close(_: Message) -> None:
        await closing.close()

    closing = consumer_of(nsqd, topic, on_give_up=close)
    async with asyncio.timeout(20), closing:
        await closing.run(lambda message: message.decode(int))
    assert (closing.stats().given_up, closing.stats().finished) == (0, 0)
    reasons: list[str] = []
    async with consumer_of(nsqd, topic, on_give_up=lambda message: reasons.append(message.give_up_reason)) as consumer:
        await handle_until(consumer, lambda message: message.decode(int), lambda: is_done(nsqd, topic))
    assert len(reasons) == consumer.stats().given_up == 1


async def test_hooks_that_hang_are_no_more_than_a_thousand(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *(b"no json" for _ in range(HOOKS_MAX + 20)))
    begun: list[Message] = []
    go_on = asyncio.Event()

    async def bury(message: Message) -> None:
        begun.append(message)
        await go_on.wait()

    async def handle(message: Message) -> None:
        message.decode(dict)

    async with consumer_of(nsqd, topic, max_in_flight=2 * HOOKS_MAX, on_give_up=bury) as consumer:
        running = asyncio.create_task(consumer.run(handle))
        await until(lambda: consumer.stats().requeued >= 20 and len(begun) >= HOOKS_MAX)
        assert len(begun) == HOOKS_MAX
        go_on.set()
        await until(lambda: consumer.stats().given_up == HOOKS_MAX + 20)
    await running
    assert is_done(nsqd, topic)


class Model:
    """This is a class of a library that msgspec does not know."""

    def __init__(self, text: bytes) -> None:
        self.fields = json.loads(text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Model) and other.fields == self.fields


class Tree(msgspec.Struct):
    children: "list[Tree]"
    model: Model


class Fields(TypedDict, total=False):
    model: Model


class WithDefault(msgspec.Struct):
    id: int
    own: Model = msgspec.field(default_factory=lambda: Model(b"{}"))


async def test_a_class_that_msgspec_does_not_know_costs_no_message(nsqd: Nsqd, topic: str) -> None:
    async with Producer(address_of(nsqd)) as producer:
        await producer.publish(topic, b'{"id": 1}')
    async with consumer_of(nsqd, topic) as consumer:
        message = await anext(consumer)
        for kind in (
            Model,
            list[Model],
            Model | None,
            dict[str, Model],
            tuple[int, Model],
            Tree,
            Fields,
            list[dict[str, Tree]],
        ):
            for _ in range(2):
                with pytest.raises(ConfigError, match=r"msgspec does not know how to make a Model.*decode="):
                    message.decode(kind)
        assert message.decode(Mapping) == message.decode(decode=Model).fields == {"id": 1}
        assert message.decode(WithDefault).own == Model(b"{}"), "one that no body has"
        message.finish()
    async with Producer(address_of(nsqd)) as producer:
        await producer.publish(topic, b'{"id": 1}')
    async with consumer_of(nsqd, topic, default_requeue_delay="0s") as consumer:
        await handle_until(consumer, lambda message: message.decode(Model), lambda: consumer.stats().requeued)
    await until(lambda: nsqd.channel(topic)["depth"] == 1)
