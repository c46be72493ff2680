"""Checks handlers that cannot handle, are cancelled, or are stopped by a signal: no message is finished for them."""

import asyncio
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from client.consumer_rig import consumer_of, handle_until, is_done, publish
from client.pool_rig import address_of
from harness import Nsqd, eventually, until
from nsquark import Consumer, Message
from nsquark.client.tasks import ThreadExit
from nsquark.errors import ConfigError, InvalidName, WrongHandler

NSQD_FLAGS = ["--msg-timeout=30s"]


async def _handle(_: Message) -> None: ...


async def _yields(_: Message) -> Any:
    yield 1


def _yields_too(_: Message) -> Any:
    yield 1


async def _takes_two(_: Message, __: object) -> None: ...


async def _takes_none() -> None: ...


def _supplied(function: Callable[..., Any]) -> Callable[[Message], Any]:
    """Adds an argument, as decorators do; the result seems to take what the function takes."""

    @functools.wraps(function)
    def call(message: Message) -> Any:
        return function(message, "a database")

    return call


async def _forgets_to_await(message: Message) -> Any:
    return _handle(message)


async def _forgets_to_await_tasks(message: Message) -> Any:
    return [asyncio.create_task(_handle(message)) for _ in range(2)]


async def _awaits_tasks(message: Message) -> Any:
    tasks = [asyncio.create_task(_handle(message)) for _ in range(2)]
    await asyncio.wait(tasks)
    return tasks


@pytest.mark.parametrize(
    ("handler", "threads"),
    [
        (_forgets_to_await, 0),
        (lambda message: _forgets_to_await(message), 0),
        (lambda message: _handle(message), 2),
        (lambda message: _yields(message), 0),
        (lambda _: (x for x in "ab"), 2),
        (lambda _: Future(), 0),
        (lambda _: Future(), 2),
        (lambda message: (_handle(message), _handle(message)), 0),
        (lambda message: [_handle(message)], 2),
        (lambda message: [asyncio.ensure_future(_handle(message))], 0),
        (_forgets_to_await_tasks, 0),
        (lambda _: [Future()], 2),
        (lambda message: {asyncio.ensure_future(_handle(message))}, 0),
        (lambda message: {"a": _handle(message)}, 2),
        (lambda message: map(print, message.body), 2),
    ],
    ids=[
        "coroutine",
        "coroutine of a plain function",
        "coroutine in a thread",
        "async generator",
        "generator",
        "work of another thread",
        "that in a thread",
        "several coroutines",
        "several coroutines in a thread",
        "tasks",
        "tasks of an async handler",
        "work of several threads",
        "a set of tasks",
        "coroutines by name",
        "a map that nobody iterates",
    ],
)
async def test_what_is_returned_and_never_run_finishes_nothing(
    nsqd: Nsqd, topic: str, handler: Callable[[Message], Any], threads: int
) -> None:
    publish(nsqd, topic, b"1", b"2")
    async with consumer_of(nsqd, topic) as consumer:
        with pytest.raises(WrongHandler, match="the handler returned"):
            await asyncio.wait_for(consumer.run(handler, threads=threads), 20)
        assert consumer.stats().finished == 0
    await until(lambda: nsqd.channel(topic)["depth"] == 2)


async def test_tasks_that_were_awaited_may_be_returned(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"1", b"2")
    async with consumer_of(nsqd, topic) as consumer:
        await handle_until(consumer, _awaits_tasks, lambda: consumer.stats().finished == 2)


async def test_a_hook_that_forgets_to_await_gives_nothing_up(
    nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish(nsqd, topic, b"x")

    def fail(_: Message) -> None:
        raise ValueError("so that it is given up")

    async with consumer_of(nsqd, topic, max_attempts=1, on_give_up=_forgets_to_await) as consumer:
        await handle_until(consumer, fail, lambda: "on_give_up returned" in caplog.text or consumer.stats().given_up)
        assert consumer.stats().given_up == consumer.stats().finished == 0


async def test_what_cannot_be_a_handler_is_refused_at_once(nsqd: Nsqd, topic: str) -> None:
    async with consumer_of(nsqd, topic) as consumer:
        for wrong in (None, "handle", _yields, _yields_too, _takes_two, _takes_none, functools.partial(_takes_two)):
            with pytest.raises(WrongHandler, match="handler"):
                await consumer.run(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="concurrency is 1 or more"):
            await consumer.run(_handle, concurrency=0)
        with pytest.raises(ValueError, match="concurrency is 1 or more"):
            await consumer.run(_handle, concurrency="3")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="threads 0 or more; threads is '2'"):
            await consumer.run(_handle, threads="2")  # type: ignore[arg-type]


@pytest.mark.parametrize("handler", [_supplied(_takes_two), functools.partial(_takes_two, __=None), print])
async def test_what_takes_a_message_is_a_handler_however_it_is_made(nsqd: Nsqd, topic: str, handler: Any) -> None:
    publish(nsqd, topic, b"1")
    async with consumer_of(nsqd, topic) as consumer:
        await handle_until(consumer, handler, lambda: consumer.stats().finished == 1)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"dedupe": "x"}, ConfigError, "dedupe is True, or a store"),
        ({"dedupe": None}, ConfigError, "dedupe is True, or a store"),
        ({"nsqd": 4150}, ConfigError, "give 'host:port'"),
        ({"nsqd": [4150]}, ConfigError, "give 'host:port'"),
        ({"lookupd": b"127.0.0.1:4161"}, ConfigError, "give 'host:port'"),
        ({"on_give_up": "bury"}, ConfigError, "on_give_up is a function"),
        ({"on_give_up": _takes_two}, ConfigError, "on_give_up is a function that takes a message and needs nothing"),
        ({"address_filter": 5}, ConfigError, "address_filter is a function that takes a list of addresses"),
        ({"address_filter": _handle}, ConfigError, "address_filter is a plain function"),
        ({"envelope": "no"}, ConfigError, "envelope.*True or False"),
        ({"auto_touch": "no"}, ConfigError, "auto_touch.*True or False"),
        ({"lookupd": "127.0.0.1"}, ConfigError, "nsqlookupd address 127.0.0.1: missing port"),
        ({"on_give_up": _yields}, ConfigError, "on_give_up with `yield` would never run"),
        ({"on_give_up": _yields_too}, ConfigError, "on_give_up with `yield` would never run"),
        ({"topic": b"t"}, InvalidName, "a topic name is a str"),
        ({"channel": 1}, InvalidName, "a channel name is a str"),
    ],
)
def test_wrong_arguments_of_a_consumer(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Consumer(**{"topic": "t", "channel": "c", **settings})


async def test_a_cancellation_out_of_a_handler_is_a_failure_of_its_message(nsqd: Nsqd, topic: str) -> None:
    """Something the handler waited for was cancelled; `run` goes on."""
    publish(nsqd, topic, b"1", b"2", b"3")
    cancelled: list[bytes] = []

    async def handle(message: Message) -> None:
        if message.attempts == 1:
            cancelled.append(message.body)
            inner = asyncio.create_task(asyncio.sleep(600))
            asyncio.get_running_loop().call_soon(inner.cancel)
            await inner

    async with consumer_of(nsqd, topic) as consumer:
        await handle_until(consumer, handle, lambda: consumer.stats().finished == 3)
        assert consumer.stats().requeued == 3
    assert sorted(cancelled) == [b"1", b"2", b"3"]
    assert is_done(nsqd, topic)


@pytest.mark.parametrize("catches", [False, True])
@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_handler_that_cancels_its_own_task_ends_nothing(
    nsqd: Nsqd, topic: str, catches: bool, concurrency: int
) -> None:
    """Timeouts that were written before tasks could take a cancellation back cancel the task in this way."""
    bodies = [b"%d" % number for number in range(6)]
    publish(nsqd, topic, *bodies)
    handled: list[bytes] = []

    async def handle(message: Message) -> None:
        task = asyncio.current_task()
        assert task is not None
        if message.attempts == 1:
            task.cancel()
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                if not catches:
                    raise TimeoutError from None
        handled.append(message.body)

    async with consumer_of(nsqd, topic) as consumer:
        await handle_until(consumer, handle, lambda: is_done(nsqd, topic), concurrency=concurrency)
    assert sorted(handled) == bodies


async def test_a_handler_that_cancels_its_task_as_it_returns(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"1", b"2", b"3")

    def handle(_: Message) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    async with consumer_of(nsqd, topic) as consumer:
        await handle_until(consumer, handle, lambda: is_done(nsqd, topic))
        assert consumer.stats().finished == 3


@pytest.mark.parametrize("number", [SystemExit, KeyboardInterrupt])
async def test_an_exit_out_of_a_thread_is_raised_by_run(nsqd: Nsqd, topic: str, number: type[BaseException]) -> None:
    publish(nsqd, topic, b"1")

    def handle(_: Message) -> None:
        raise number(7)

    async with consumer_of(nsqd, topic) as consumer:
        with pytest.raises(ThreadExit) as raised:
            await asyncio.wait_for(consumer.handle(handle, 1, 2, stop_on_signals=False), 20)
        assert type(raised.value.reason) is number
    await until(lambda: nsqd.channel(topic)["depth"] == 1)


async def test_run_ends_well_when_close_gave_up_on_its_handlers(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"1", b"2")
    started: list[bytes] = []

    async def handle(message: Message) -> None:
        started.append(message.body)
        await asyncio.sleep(600)

    async with consumer_of(nsqd, topic) as consumer:
        running = asyncio.create_task(consumer.run(handle, concurrency=2))
        await until(lambda: len(started) == 2)
        await consumer.close(timeout=0.05)
        await running
    await until(lambda: nsqd.channel(topic)["depth"] == 2)


async def test_run_that_is_cancelled_raises_it(nsqd: Nsqd, topic: str) -> None:
    async with consumer_of(nsqd, topic) as consumer:
        running = asyncio.create_task(consumer.run(_handle))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_handlers_in_threads_answer_their_messages_also_when_run_was_cancelled(nsqd: Nsqd, topic: str) -> None:
    """Nobody can end them, so a message that went back would be handled twice. Nothing new is begun."""
    publish(nsqd, topic, b"1", b"2", b"3")
    started: list[bytes] = []
    may_end = threading.Event()

    def handle(message: Message) -> None:
        started.append(message.body)
        assert may_end.wait(60)

    async with consumer_of(nsqd, topic) as consumer:
        running = asyncio.create_task(consumer.run(handle, threads=2))
        await until(lambda: len(started) == 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        may_end.set()
    assert len(started) == consumer.stats().finished == 2
    await until(lambda: nsqd.channel(topic)["depth"] == 1 and nsqd.channel(topic)["in_flight_count"] == 0)


async def test_a_handler_in_a_thread_that_outlasts_a_cancelled_run_and_close_gives_back(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"1")
    started, may_end = threading.Event(), threading.Event()

    def handle(_: Message) -> None:
        started.set()
        assert may_end.wait(60)

    async with consumer_of(nsqd, topic) as consumer:
        running = asyncio.create_task(consumer.run(handle, threads=1))
        await until(started.is_set)
        running.cancel()
        await consumer.close(timeout=0.05)
    await until(lambda: nsqd.channel(topic)["depth"] == 1)
    may_end.set()


@pytest.mark.parametrize("threads", [0, 2])
def test_the_end_of_the_event_loop_is_no_failure_of_what_is_handled(
    nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture, threads: int
) -> None:
    """It cancels the tasks of handlers and that of `run` at once, in no certain order: so it is tried several times."""
    publish(nsqd, topic, b"1", b"2", b"3")
    started: list[bytes] = []

    async def handle(message: Message) -> None:
        started.append(message.body)
        await asyncio.sleep(3600)

    def block(message: Message) -> None:
        started.append(message.body)
        time.sleep(0.3)

    async def main() -> None:
        async def work() -> None:
            async with consumer_of(nsqd, topic, max_attempts=100, default_requeue_delay="1h") as consumer:
                await consumer.run(block if threads else handle, 1 if threads else 2, threads)

        working = asyncio.create_task(work())
        await until(lambda: len(started) >= 2 or working.done())

    for _ in range(8):
        asyncio.run(main())
        started.clear()
        eventually(lambda: nsqd.channel(topic)["depth"] == 3)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_more_handlers_than_messages_may_come(nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    async with consumer_of(nsqd, topic, max_in_flight=1) as consumer:
        running = asyncio.create_task(consumer.run(_handle, concurrency=10))
        await asyncio.sleep(0)
        consumer.stop()
        await running
    assert "set max_in_flight to 10 or more" in caplog.text
    assert f"{topic}/ch" in caplog.text


@pytest.mark.parametrize("msg_timeout", ["2s", "60s"])
async def test_a_handler_that_blocks_past_a_heartbeat_is_told_what_to_do(
    nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture, msg_timeout: str
) -> None:
    publish(nsqd, topic, b"x")
    consumer = consumer_of(nsqd, topic, heartbeat_interval="1s", read_timeout="5s", msg_timeout=msg_timeout)
    async with consumer:
        await handle_until(
            consumer, lambda _: time.sleep(1.6), lambda: consumer.stats().finished >= 1 and "threads=" in caplog.text
        )
    assert "the event loop was blocked for" in caplog.text


STOPPED_SCRIPT = """
import asyncio, sys
from nsquark import Consumer

async def main():
    loop, may_end = asyncio.get_running_loop(), asyncio.Event()

    def end_soon():
        loop.remove_reader(sys.stdin)
        loop.call_later(0.3, may_end.set)  # a signal that came before is known by then

    loop.add_reader(sys.stdin, end_soon)

    async def handle(message):
        print("began", flush=True)
        await may_end.wait()

    async with Consumer(sys.argv[1], "ch", nsqd=sys.argv[2], max_in_flight=20) as consumer:
        await consumer.run(handle, concurrency=3, stop_on_signals=True)
        assert consumer.connections == []
    print("ended", consumer.stats().finished, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_program_that_is_only_a_consumer_stops_on_signals(nsqd: Nsqd, topic: str, number: int) -> None:
    publish(nsqd, topic, *(b"%d" % number for number in range(20)))
    script = subprocess.Popen(
        [sys.executable, "-c", STOPPED_SCRIPT, topic, address_of(nsqd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert script.stdout is not None
    assert script.stdout.readline() == "began\n"
    script.send_signal(number)
    output, _ = script.communicate(timeout=60)
    finished = int(output.rpartition("ended ")[2])
    assert script.returncode == 0
    assert 1 <= finished <= 3
    eventually(lambda: nsqd.channel(topic)["in_flight_count"] == 0)
    assert nsqd.channel(topic)["depth"] == 20 - finished


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_one_signal_stops_all_consumers_of_a_program(nsqd: Nsqd, topic: str, number: int) -> None:
    """Of three, one ends by itself before; it does not end what the signal does for the others."""
    publish(nsqd, topic, b"1", b"2", b"3")
    began: list[Message] = []
    may_end = asyncio.Event()

    async def handle(message: Message) -> None:
        began.append(message)
        await may_end.wait()

    def ignore(*_: object) -> None: ...

    before = signal.signal(number, ignore)
    try:
        consumers = [await consumer_of(nsqd, topic, max_in_flight=1).start() for _ in range(3)]
        running = [asyncio.create_task(consumer.run(handle, stop_on_signals=True)) for consumer in consumers]
        await until(lambda: len(began) == 3)
        may_end.set()
        await consumers[0].close()
        await running[0]
        os.kill(os.getpid(), number)
        await asyncio.wait_for(asyncio.gather(*running), 60)
        assert signal.getsignal(number) is ignore
    finally:
        signal.signal(number, before)
    assert [consumer.connections for consumer in consumers] == [[]] * 3
    await until(lambda: is_done(nsqd, topic))


async def test_stopping_by_signals_works_in_the_main_thread_only(nsqd: Nsqd, topic: str) -> None:
    def run() -> None:
        async def main() -> None:
            async with consumer_of(nsqd, topic) as consumer:
                await consumer.run(_handle, stop_on_signals=True)

        asyncio.run(main())

    with pytest.raises(Exception, match="main thread only"):
        await asyncio.to_thread(run)


async def test_an_iterator_that_ends_in_a_thread_is_a_failure_like_any(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"1")
    attempts: list[int] = []

    def handle(message: Message) -> None:
        attempts.append(message.attempts)
        if message.attempts == 1:
            next(iter(()))

    async with consumer_of(nsqd, topic) as consumer:
        await handle_until(consumer, handle, lambda: len(attempts) == 2 and is_done(nsqd, topic), threads=1)
    assert attempts == [1, 2]


@pytest.mark.parametrize("is_failing", [False, True])
async def test_run_that_is_cancelled_ends_also_when_a_handler_does_not_let_it_out(
    nsqd: Nsqd, topic: str, is_failing: bool
) -> None:
    publish(nsqd, topic, b"1", b"2", b"3")
    handled: list[bytes] = []

    async def handle(message: Message) -> None:
        handled.append(message.body)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            assert not is_failing

    async with consumer_of(nsqd, topic) as consumer:
        running = asyncio.create_task(consumer.run(handle))
        await until(lambda: handled)
        running.cancel()
        async with asyncio.timeout(20):
            await asyncio.wait([running])
        assert running.cancelled()
        assert len(handled) == 1
