"""Checks how a consumer's messages are handled and answered, on a real nsqd."""

import asyncio
import functools
import itertools
import threading
import time
from collections import deque
from datetime import timedelta

import pytest

from client.consumer_rig import AFTER_GIVING_BACK, consumer_of, finish_rest, handle_until, is_done, publish
from client.pool_rig import address_of
from client.stall_watch import StallWatch
from harness import Nsqd, eventually, until
from nsquark import Message, Producer
from nsquark.client.connection import NsqdConnection
from nsquark.wire import commands

NSQD_FLAGS = ["--msg-timeout=30s"]
WAIT_S = 30.0


# -- handlers --------------------------------------------------------------------------------------------


async def test_sync_handler(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *(b"%d" % number for number in range(500)))
    got: list[bytes] = []
    async with consumer_of(nsqd, topic, max_in_flight=100) as consumer:
        await handle_until(consumer, lambda message: got.append(message.body), lambda: len(got) == 500)
        assert consumer.stats().finished == consumer.stats().received == 500
    assert sorted(map(int, got)) == list(range(500))
    assert is_done(nsqd, topic)


async def test_async_handlers_run_at_once_up_to_concurrency(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *(b"%d" % number for number in range(20)))
    running = most = done = 0

    async def handle(_: Message) -> None:
        nonlocal running, most, done
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        done += 1

    async with consumer_of(nsqd, topic) as consumer:
        await handle_until(consumer, handle, lambda: done == 20, concurrency=4)
    assert most == 4
    assert is_done(nsqd, topic)


@pytest.mark.parametrize("kind", ["object", "partial", "lambda"])
async def test_async_handlers_of_any_kind(nsqd: Nsqd, topic: str, kind: str) -> None:
    publish(nsqd, topic, *(b"%d" % number for number in range(4)))
    arrived = asyncio.Barrier(4)

    async def handle(_: Message, __: object = None) -> None:
        await arrived.wait()

    class Callee:
        async def __call__(self, message: Message) -> None:
            await handle(message)

    handlers = {"object": Callee(), "partial": functools.partial(handle), "lambda": lambda message: handle(message)}
    async with consumer_of(nsqd, topic) as consumer:
        await handle_until(consumer, handlers[kind], lambda: consumer.stats().finished == 4, concurrency=4)
    assert is_done(nsqd, topic)


async def test_threads_for_handlers_that_block(nsqd: Nsqd, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three handlers wait for each other, which they could not do in the event loop; heartbeats go on meanwhile."""
    publish(nsqd, topic, b"1", b"2", b"3")
    barrier = threading.Barrier(3)
    gate = threading.Event()
    threads: set[str] = set()

    def handle(_: Message) -> None:
        barrier.wait(WAIT_S)
        threads.add(threading.current_thread().name)
        gate.wait(WAIT_S)

    answered = threading.Event()
    send = NsqdConnection.send

    def send_and_look(connection: NsqdConnection, data: bytes) -> None:
        send(connection, data)
        if data == commands.NOP and threads and not gate.is_set():
            answered.set()

    monkeypatch.setattr(NsqdConnection, "send", send_and_look)
    # nsqd ends a connection after two heartbeats without an answer, and a busy machine may need some seconds for one.
    consumer = consumer_of(nsqd, topic, heartbeat_interval="2500ms")
    async with consumer:
        running = asyncio.create_task(consumer.run(handle, threads=3))
        await until(lambda: len(threads) == 3)
        await until(answered.is_set)
        assert consumer.stats().connections == 1
        gate.set()
        await until(lambda: consumer.stats().finished == 3)
        await consumer.close()
        await running
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name in threads])
    assert is_done(nsqd, topic)


async def test_threads_are_not_for_async_handlers(nsqd: Nsqd, topic: str) -> None:
    """In a thread nobody would await what an async handler returns, and messages would be finished unhandled."""

    async def handle(_: Message) -> None: ...

    async with consumer_of(nsqd, topic) as consumer:
        with pytest.raises(ValueError, match="concurrency"):
            await consumer.run(handle, threads=2)
        with pytest.raises(ValueError, match="concurrency is 1 or more"):
            await consumer.run(handle, concurrency=0)
        with pytest.raises(ValueError, match="threads 0 or more"):
            await consumer.run(print, threads=-1)


async def test_slow_inline_handlers_let_the_loop_turn(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *(b"%d" % number for number in range(50)))
    handled_at_turns: list[int] = []

    async def tick() -> None:
        while True:
            handled_at_turns.append(consumer.stats().finished)
            await asyncio.sleep(0)

    async with consumer_of(nsqd, topic, max_in_flight=50) as consumer:
        await until(lambda: consumer.stats().in_flight == 50)
        ticking = asyncio.create_task(tick())
        await handle_until(consumer, lambda _: time.sleep(0.01), lambda: consumer.stats().finished == 50)
        ticking.cancel()
    in_one_turn = [after - before for before, after in itertools.pairwise(handled_at_turns)]
    assert max(in_one_turn) < 25


@pytest.mark.parametrize("threads", [0, 2])
async def test_a_handler_that_raises(nsqd: Nsqd, topic: str, threads: int, caplog: pytest.LogCaptureFixture) -> None:
    publish(nsqd, topic, b"x")
    attempts: list[int] = []

    def handle(message: Message) -> None:
        attempts.append(message.attempts)
        if len(attempts) < 3:
            raise RuntimeError("not yet")

    async with consumer_of(nsqd, topic) as consumer:
        await handle_until(consumer, handle, lambda: consumer.stats().finished == 1, threads=threads)
        assert consumer.stats().requeued == 2
    assert attempts == [1, 2, 3]
    assert is_done(nsqd, topic)
    assert [record.exc_info for record in caplog.records if "failed (attempt 1)" in record.message]


async def test_an_error_after_the_answer_is_logged(nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    publish(nsqd, topic, b"x")

    async def handle(message: Message) -> None:
        message.finish()
        raise RuntimeError("too late")

    async with consumer_of(nsqd, topic) as consumer:
        await handle_until(consumer, handle, lambda: consumer.stats().finished == 1)
        assert (consumer.stats().requeued, consumer.stats().backoff_level) == (0, 0)
    assert "too late" in caplog.text
    assert is_done(nsqd, topic)


# -- iterating -------------------------------------------------------------------------------------------


async def test_iterate(nsqd: Nsqd, topic: str) -> None:
    before_ns = time.time_ns()
    publish(nsqd, topic, b"1", b"2", b"3")
    got = []
    async with consumer_of(nsqd, topic) as consumer:
        async for message in consumer:
            got.append(message.body)
            assert message.attempts == 1
            assert len(message.id) == 16
            assert before_ns - 10**9 < message.timestamp < time.time_ns() + 10**9
            assert message.nsqd_address == address_of(nsqd)
            assert address_of(nsqd) in repr(message)
            message.finish()
            if len(got) == 3:
                break
    assert sorted(got) == [b"1", b"2", b"3"]
    assert is_done(nsqd, topic)


async def test_with_message_finishes(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"x")
    async with consumer_of(nsqd, topic) as consumer:
        message = await anext(consumer)
        assert not message.is_answered
        async with message:
            pass
        assert message.is_answered
    assert is_done(nsqd, topic)


async def test_with_message_and_an_exception(nsqd: Nsqd, topic: str) -> None:
    """The exception is swallowed and logged; the message comes again, after backoff."""
    publish(nsqd, topic, b"x")
    async with consumer_of(nsqd, topic) as consumer:
        async with await anext(consumer):
            raise RuntimeError("swallowed")
        assert consumer.stats().backoff_level == 1
        async with (await anext(consumer)).or_raise() as again:
            assert again.attempts == 2
        assert consumer.stats().backoff_level == 0
    assert is_done(nsqd, topic)


async def test_with_message_and_a_cancellation(nsqd: Nsqd, topic: str) -> None:
    """The message is requeued at once, without backoff, and the task is cancelled as was asked."""
    publish(nsqd, topic, b"x")
    consumer = consumer_of(nsqd, topic, default_requeue_delay="60m")
    async with consumer:
        taken = asyncio.Event()

        async def work() -> None:
            async with await anext(consumer):
                taken.set()
                await asyncio.sleep(WAIT_S)

        task = asyncio.create_task(work())
        await taken.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert consumer.stats().backoff_level == 0
        async with (await asyncio.wait_for(anext(consumer), WAIT_S)).or_raise() as again:
            assert again.attempts == AFTER_GIVING_BACK
    assert is_done(nsqd, topic)


async def test_a_cancelled_wait_takes_no_message(nsqd: Nsqd, topic: str) -> None:
    async with consumer_of(nsqd, topic) as consumer:
        tasks = [asyncio.create_task(consumer.__anext__()) for _ in range(3)]
        await asyncio.sleep(0)
        publish(nsqd, topic, b"x")
        tasks[0].cancel()
        done, _ = await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
        (got,) = done
        got.result().finish()
        for task in tasks:
            task.cancel()
    assert is_done(nsqd, topic)


# -- answers ---------------------------------------------------------------------------------------------


async def test_a_message_is_answered_once(nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    publish(nsqd, topic, b"x")
    async with consumer_of(nsqd, topic) as consumer:
        message = await anext(consumer)
        message.finish()
        message.finish()
        message.requeue()
        message.touch()
        await until(lambda: is_done(nsqd, topic))
        assert (consumer.stats().finished, consumer.stats().requeued) == (1, 0)
    assert "E_" not in caplog.text


@pytest.mark.parametrize("delay", [0.2, timedelta(milliseconds=200)])
async def test_requeue_with_a_delay(nsqd: Nsqd, topic: str, delay: float | timedelta) -> None:
    publish(nsqd, topic, b"x")
    async with consumer_of(nsqd, topic) as consumer:
        (await anext(consumer)).requeue(delay, backoff=False)
        start_s = time.monotonic()
        assert consumer.stats().backoff_level == 0
        async with (await anext(consumer)).or_raise() as again:
            assert again.attempts == 2
        assert time.monotonic() - start_s > 0.15


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf")])
async def test_a_delay_that_makes_no_sense(nsqd: Nsqd, topic: str, delay: float) -> None:
    publish(nsqd, topic, b"x")
    async with consumer_of(nsqd, topic) as consumer:
        message = await anext(consumer)
        with pytest.raises(ValueError, match="give 0 or more"):
            message.requeue(delay)
        assert not message.is_answered
        message.finish()


async def test_touch_keeps_a_message(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"x")
    async with consumer_of(nsqd, topic, msg_timeout="4s") as consumer:
        message = await anext(consumer)
        with StallWatch(nsqd) as watch:
            for _ in range(4):
                await asyncio.sleep(1.5)
                message.touch()
            message.finish()
            await finish_rest(consumer, nsqd, topic)
        assert nsqd.channel(topic)["timeout_count"] == 0 or watch.stood_still


async def test_auto_touch_keeps_what_is_worked_on(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"x")

    async def handle(_: Message) -> None:
        await asyncio.sleep(6)

    with StallWatch(nsqd) as watch:
        async with consumer_of(nsqd, topic, msg_timeout="4s", auto_touch=True) as consumer:
            await handle_until(consumer, handle, lambda: consumer.stats().finished and is_done(nsqd, topic))
    assert nsqd.channel(topic)["timeout_count"] == 0 or watch.stood_still


async def test_auto_response_switched_off(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"1", b"2")
    kept: list[Message] = []

    async def handle(message: Message) -> None:
        message.disable_auto_response()
        kept.append(message)
        if len(kept) == 2:
            raise RuntimeError("neither does this answer it")

    async with consumer_of(nsqd, topic) as consumer:
        running = asyncio.create_task(consumer.run(handle))
        await until(lambda: len(kept) == 2)
        assert not any(message.is_answered for message in kept)
        assert consumer.stats().in_flight == 2
        for message in kept:
            message.finish()
        await until(lambda: is_done(nsqd, topic))
        await consumer.close()
        await running


async def test_answers_from_other_threads(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *(b"%d" % number for number in range(30)))
    async with consumer_of(nsqd, topic, max_in_flight=30) as consumer:
        messages = [await anext(consumer) for _ in range(30)]

        def answer() -> None:
            for number, message in enumerate(messages):
                message.touch()
                if number % 3:
                    message.finish()
                else:
                    message.requeue(0, backoff=False)

        await asyncio.to_thread(answer)
        await until(lambda: consumer.stats().finished == 20)
        again = [await anext(consumer) for _ in range(10)]
        await asyncio.to_thread(lambda: deque(map(Message.finish, again)))
        await until(lambda: is_done(nsqd, topic))


async def test_giving_up_after_max_attempts(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"poison")
    handled: list[int] = []
    given_up: list[Message] = []

    def handle(message: Message) -> None:
        handled.append(message.attempts)
        raise RuntimeError("always")

    consumer = consumer_of(nsqd, topic, max_attempts=3, on_give_up=given_up.append)
    async with consumer:
        await handle_until(consumer, handle, lambda: given_up)
        assert consumer.stats().given_up == 1
    assert handled == [1, 2, 3]
    assert [message.body for message in given_up] == [b"poison"]
    assert is_done(nsqd, topic)


@pytest.mark.parametrize("error", [RuntimeError("hook failed"), asyncio.CancelledError("hook failed")], ids=repr)
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_hook_that_fails_is_called_again(
    nsqd: Nsqd, topic: str, kind: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """A dead-letter topic that could not be reached must not cost the message."""
    publish(nsqd, topic, b"poison", b"good")
    calls: list[bytes] = []

    def give_up(message: Message) -> None:
        calls.append(message.body)
        if len(calls) < 3:
            raise error

    async def give_up_async(message: Message) -> None:
        await asyncio.sleep(0.01)
        give_up(message)

    async def handle(message: Message) -> None:
        if message.body == b"poison":
            raise RuntimeError("always")

    hook = give_up if kind == "plain" else give_up_async
    async with consumer_of(nsqd, topic, max_attempts=1, on_give_up=hook) as consumer:
        await handle_until(consumer, handle, lambda: consumer.stats().given_up == 1 and is_done(nsqd, topic))
        assert consumer.stats().finished == 2
    assert calls == [b"poison"] * 3
    assert "hook failed" in caplog.text


async def test_a_hook_may_requeue(nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its message comes again, and is given up when the hook lets it go."""
    publish(nsqd, topic, b"x")
    buried: list[int] = []

    def bury(message: Message) -> None:
        buried.append(message.attempts)
        if len(buried) == 1:
            message.requeue(0)

    def handle(_: Message) -> None:
        raise ValueError("no")

    async with consumer_of(nsqd, topic, max_attempts=1, on_give_up=bury) as consumer:
        await handle_until(consumer, handle, lambda: len(buried) > 1 and is_done(nsqd, topic))
        assert consumer.stats().given_up == 1
    assert caplog.text.count("giving up") == 1


async def test_a_hook_may_publish(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"poison")
    nsqd.post("/topic/create", topic=f"{topic}_dead")

    def handle(_: Message) -> None:
        raise RuntimeError("always")

    async with Producer(address_of(nsqd)) as producer:

        async def bury(message: Message) -> None:
            await producer.publish(f"{topic}_dead", message.body)

        async with consumer_of(nsqd, topic, max_attempts=2, on_give_up=bury) as consumer:
            await handle_until(consumer, handle, lambda: consumer.stats().given_up == 1)
    assert is_done(nsqd, topic)
    assert nsqd.topic(f"{topic}_dead")["depth"] == 1


async def test_max_attempts_0_never_gives_up(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"x")
    async with consumer_of(nsqd, topic, max_attempts=0) as consumer:
        for _ in range(8):
            (await anext(consumer)).requeue(0, backoff=False)
        async with await anext(consumer) as last:
            assert last.attempts == 9


async def test_what_waited_too_long_is_not_handled(nsqd: Nsqd, topic: str) -> None:
    """nsqd gives the message to someone else by then; here, to the same consumer again."""
    publish(nsqd, topic, b"1", b"2", b"3")
    handled: list[tuple[bytes, int]] = []

    def handle(message: Message) -> None:
        handled.append((message.body, message.attempts))
        if len(handled) == 1:
            time.sleep(4.5)

    async with consumer_of(nsqd, topic, msg_timeout="4s") as consumer:
        await until(lambda: consumer.stats().in_flight == 3)
        await handle_until(consumer, handle, lambda: len(handled) >= 3 and is_done(nsqd, topic))
        assert consumer.stats().expired >= 2  # more, where messages also time out since the machine is busy
    first = handled[0][0]
    waited = [entry for entry in handled if entry[0] != first]
    assert {body for body, _ in waited} == {b"1", b"2", b"3"} - {first}
    assert all(attempts >= 2 for _, attempts in waited)


async def test_bigger_messages_than_the_receive_buffer(nsqd: Nsqd, topic: str) -> None:
    bodies = [bytes([number]) * 900_000 for number in range(1, 5)] + [b"small"]
    publish(nsqd, topic, *bodies)
    async with consumer_of(nsqd, topic) as consumer:
        got = []
        for _ in bodies:
            async with await anext(consumer) as message:
                got.append(message.body)
    assert sorted(got) == sorted(bodies)
