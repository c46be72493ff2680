"""Checks that handlers and hooks may close their own consumer: it must not wait for the one that closes it."""

import asyncio
import threading

import pytest

from client.consumer_rig import consumer_of, is_done, publish
from client.pool_rig import address_of
from harness import Nsqd, eventually, until
from nsquark import Message, sync

WAIT_S = 30.0


@pytest.mark.parametrize("first", ["hook", "handler"])
async def test_two_at_once(nsqd: Nsqd, topic: str, first: str, caplog: pytest.LogCaptureFixture) -> None:
    """A hook that closes the consumer while another, or a handler, does so."""
    publish(nsqd, topic, b"no json", b"no json either", *([b"true"] if first == "handler" else []))
    buried: list[bytes] = []

    async def bury(message: Message) -> None:
        buried.append(message.body)
        await until(lambda: len(buried) == 2)
        if first == "handler":
            await until(lambda: consumer._is_closing)
        await consumer.close()

    async def handle(message: Message) -> None:
        assert message.decode(bool)
        await until(lambda: len(buried) == 2)
        await consumer.close()

    consumer = await consumer_of(nsqd, topic, on_give_up=bury).start()
    await consumer.run(handle, concurrency=3)
    await consumer.close()
    assert "still ran" not in caplog.text
    assert consumer.connections == []


async def test_two_hooks_at_once_in_tasks_that_begin_at_once(
    nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Python 3.12 and later have such tasks."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(getattr(asyncio, "eager_task_factory", None))
    publish(nsqd, topic, b"no json", b"no json either")

    async def bury(_: Message) -> None:
        await consumer.close()

    consumer = await consumer_of(nsqd, topic, on_give_up=bury).start()
    await until(lambda: consumer.stats().in_flight == 2)
    await consumer.run(lambda message: message.decode(bool), concurrency=2)
    await consumer.close()
    loop.set_task_factory(None)
    assert "still ran" not in caplog.text
    assert consumer.connections == []


@pytest.mark.parametrize("kind", ["run", "iteration"])
def test_a_hook_of_the_blocking_client(nsqd: Nsqd, topic: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    publish(nsqd, topic, b"no json")

    def bury(_: sync.Message) -> None:
        consumer.close()

    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd), on_give_up=bury) as consumer:
        if kind == "run":
            consumer.run(lambda message: message.decode(dict))
        else:
            for message in consumer:
                with message:
                    message.decode(dict)
    assert "still ran" not in caplog.text
    eventually(lambda: is_done(nsqd, topic))


def test_a_thread_that_comes_after_handlers_is_none_of_them(nsqd: Nsqd, topic: str) -> None:
    """A new thread mostly has the identifier of one that has ended."""
    publish(nsqd, topic, b"x")
    handlers: list[threading.Thread] = []

    def handle(_: sync.Message) -> None:
        handlers.append(threading.current_thread())
        consumer.stop()

    with sync.Consumer(topic, "ch", nsqd=address_of(nsqd)) as consumer:
        consumer.run(handle)
        for handler in handlers:
            handler.join(WAIT_S)
        closing = threading.Thread(target=consumer.close)
        closing.start()
        closing.join(WAIT_S)
        assert consumer.connections == []
