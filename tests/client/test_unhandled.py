"""Checks that no message is finished that no handler saw: not one that waited too long, nor one that a consumer gave
back.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable

import pytest

from client.consumer_rig import consumer_of, handle_until, is_done, publish
from client.scripted import OK, Peer, ScriptedNsqd, error_frame, message_frame
from client.stall_watch import StallWatch
from harness import FaultProxy, Nsqd, until
from nsquark import Consumer, Dedupe, Message
from nsquark.client.dedupe import Claim

NSQD_FLAGS = ["--msg-timeout=30s"]
COUNT = 60
BODIES = [b"%d" % number for number in range(COUNT)]


@pytest.mark.parametrize("auto_touch", [False, True])
@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_handlers_slower_than_the_window(nsqd: Nsqd, topic: str, kind: str, auto_touch: bool) -> None:
    """All messages are sent at once, and the last is handled when its timeout is over several times."""
    publish(nsqd, topic, *BODIES)
    handled: list[tuple[bytes, int]] = []

    async def handle(message: Message) -> None:
        handled.append((message.body, message.attempts))
        await asyncio.sleep(0.15)

    def block(message: Message) -> None:
        handled.append((message.body, message.attempts))
        time.sleep(0.15)

    consumer = consumer_of(nsqd, topic, max_in_flight=100, msg_timeout="4s", max_attempts=1, auto_touch=auto_touch)
    with StallWatch(nsqd) as watch:
        async with consumer:
            await handle_until(
                consumer, handle if kind == "async" else block, lambda: len(handled) >= COUNT and is_done(nsqd, topic)
            )
            stats = consumer.stats()
    assert {body for body, _ in handled} == set(BODIES)
    if not watch.stood_still:
        assert sorted(handled) == sorted((body, 1) for body in BODIES)
        assert (stats.finished, stats.given_up, stats.expired) == (COUNT, 0, 0)
        assert nsqd.channel(topic)["timeout_count"] == 0


@pytest.mark.parametrize("kind", ["async", "plain"])
@pytest.mark.parametrize(("block_s", "concurrency"), [(0.15, 10), (0.6, 1), (0.05, 30)])
async def test_handlers_that_block_the_loop_let_what_waits_be_touched(
    nsqd: Nsqd, topic: str, kind: str, block_s: float, concurrency: int
) -> None:
    """Between two messages the loop has its turn, with all that is due in it, however many handlers there are."""
    bodies = BODIES[: int(8 / block_s)]
    publish(nsqd, topic, *bodies)
    handled: list[tuple[bytes, int]] = []

    def block(message: Message) -> None:
        handled.append((message.body, message.attempts))
        time.sleep(block_s)

    async def handle(message: Message) -> None:
        block(message)

    with StallWatch(nsqd) as watch:
        async with consumer_of(nsqd, topic, max_in_flight=100, msg_timeout="4s") as consumer:
            await handle_until(
                consumer,
                handle if kind == "async" else block,
                lambda: len(handled) >= len(bodies) and is_done(nsqd, topic),
                concurrency=concurrency,
            )
    assert {body for body, _ in handled} == set(bodies)
    if not watch.stood_still:
        assert sorted(handled) == sorted((body, 1) for body in bodies)
        assert nsqd.channel(topic)["timeout_count"] == 0


async def test_the_window_shrinks_to_what_handlers_take_and_grows_again(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *BODIES)
    delay_s = 0.2

    async def handle(_: Message) -> None:
        await asyncio.sleep(delay_s)

    async with consumer_of(nsqd, topic, max_in_flight=100, msg_timeout="1s") as consumer:
        running = asyncio.create_task(consumer.run(handle))
        await until(lambda: nsqd.channel(topic)["in_flight_count"] > 0)
        await until(lambda: nsqd.channel(topic)["clients"][0]["ready_count"] < 20)
        delay_s = 0.0
        await until(lambda: is_done(nsqd, topic))
        await until(lambda: nsqd.channel(topic)["clients"][0]["ready_count"] == 100)
        await consumer.close()
        await running


@pytest.mark.parametrize("kind", ["async", "plain", "batch"])
async def test_a_message_that_waited_has_its_whole_timeout_when_it_is_handed_out(
    nsqd: Nsqd, topic: str, kind: str
) -> None:
    """A handler takes nearly msg_timeout, for a message that waited for a part of it."""
    wait_s, handle_s = 2.0, 6.4
    publish(nsqd, topic, b"first", b"second")
    handled: list[tuple[bytes, int]] = []

    def begin(message: Message) -> float:
        handled.append((message.body, message.attempts))
        return wait_s if message.body == b"first" else handle_s

    async def handle(message: Message) -> None:
        await asyncio.sleep(begin(message))

    def block(message: Message) -> None:
        time.sleep(begin(message))

    with StallWatch(nsqd) as watch:
        async with consumer_of(nsqd, topic, max_in_flight=3, msg_timeout="8s", max_attempts=1) as consumer:
            await until(lambda: consumer.stats().in_flight == 2)
            if kind == "batch":
                async for batch in consumer.batches(max_messages=3, max_wait=wait_s):
                    async with batch:
                        await asyncio.sleep(max(map(begin, batch)))
                    consumer.stop()
            else:
                await handle_until(
                    consumer,
                    handle if kind == "async" else block,
                    lambda: consumer.stats().finished >= 2 and (watch.stood_still or is_done(nsqd, topic)),
                )
            stats = consumer.stats()
    assert {body for body, _ in handled} == {b"first", b"second"}
    if not watch.stood_still:
        assert sorted(handled) == [(b"first", 1), (b"second", 1)]
        assert (stats.finished, stats.given_up) == (2, 0)
        assert is_done(nsqd, topic) and nsqd.channel(topic)["timeout_count"] == 0


async def test_many_restarts_give_nothing_up(nsqd: Nsqd, topic: str) -> None:
    """Each consumer takes all messages, handles a few, and is stopped in order."""
    publish(nsqd, topic, *BODIES)
    handled: list[bytes] = []

    async def handle(message: Message) -> None:
        handled.append(message.body)
        await asyncio.sleep(0.01)

    for turn in range(1, 9):
        async with consumer_of(nsqd, topic, max_in_flight=100, max_attempts=2) as consumer:
            await until(lambda consumer=consumer: consumer.stats().received == COUNT - len(handled))
            await handle_until(consumer, handle, lambda turn=turn: len(handled) >= 3 * turn)
            assert consumer.stats().given_up == 0
    async with consumer_of(nsqd, topic, max_in_flight=100, max_attempts=2) as consumer:
        await handle_until(consumer, handle, lambda: is_done(nsqd, topic))
        assert consumer.stats().given_up == 0
    assert sorted(handled) == sorted(BODIES)


async def test_cancelled_handlers_give_nothing_up(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"x")
    async with consumer_of(nsqd, topic, max_attempts=2) as consumer:
        for _ in range(6):
            started = asyncio.Event()

            async def handle(_: Message, started: asyncio.Event = started) -> None:
                started.set()
                await asyncio.sleep(600)

            running = asyncio.create_task(consumer.run(handle))
            await asyncio.wait_for(started.wait(), 20)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        async with (await asyncio.wait_for(anext(consumer), 20)).or_raise() as message:
            assert message.body == b"x"
        assert consumer.stats().given_up == 0
    assert is_done(nsqd, topic)


async def test_lost_connections_give_nothing_up(nsqd: Nsqd, topic: str) -> None:
    """What was prefetched when a connection broke has one attempt more, and no handler saw it."""
    publish(nsqd, topic, *BODIES[:5])
    options = {"max_attempts": 1, "msg_timeout": "4s", "lookupd_poll_interval": "50ms"}
    handled: list[bytes] = []
    with FaultProxy(nsqd.tcp) as proxy:
        address = "{}:{}".format(*proxy.address)
        async with Consumer(topic, "ch", nsqd=address, max_in_flight=10, **options) as consumer:  # type: ignore[arg-type]
            for deliveries in (1, 2):
                await until(lambda deliveries=deliveries: consumer.stats().received >= 5 * deliveries)
                proxy.cut()
            await until(lambda: consumer.stats().received >= 15)
            await handle_until(consumer, lambda message: handled.append(message.body), lambda: len(set(handled)) == 5)
            assert consumer.stats().given_up == 0


async def test_what_nsqd_lets_be_touched_no_longer_goes_back_and_does_not_count(
    start_nsqd: Callable[..., Nsqd], topic: str
) -> None:
    """Nobody takes the messages: they are touched up to max-msg-timeout, and then come again."""
    daemon = start_nsqd("--max-msg-timeout=2s")
    publish(daemon, topic, b"1", b"2", b"3")
    async with consumer_of(daemon, topic, max_in_flight=100, msg_timeout="1s", max_attempts=1) as consumer:
        await until(lambda: daemon.channel(topic)["requeue_count"] >= 6)
        handled: list[bytes] = []
        await handle_until(consumer, lambda message: handled.append(message.body), lambda: is_done(daemon, topic))
        assert consumer.stats().given_up == 0
    assert set(handled) == {b"1", b"2", b"3"}


async def test_what_an_iteration_never_answers_is_forgotten(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, *BODIES[:40])
    consumer = consumer_of(nsqd, topic, max_in_flight=5, msg_timeout="1s", max_attempts=0)
    async with contextlib.AsyncExitStack() as stack:
        watch = stack.enter_context(StallWatch(nsqd))
        await stack.enter_async_context(consumer)
        taken = []
        for _ in range(15):
            taken.append(await asyncio.wait_for(anext(consumer), 20))
            # What nsqd has taken back is known within a quarter of the timeout.
            assert consumer.stats().in_flight <= 11 or watch.stood_still
        await until(lambda: nsqd.channel(topic)["timeout_count"] >= 10)
        await until(lambda: consumer.stats().in_flight <= 5)


async def test_two_consumers_of_a_slow_one_share_the_backlog(nsqd: Nsqd, topic: str) -> None:
    """What a slow consumer has too much of is touched, not lost to it: another gets only what was not sent."""
    publish(nsqd, topic, *BODIES)
    handled: list[bytes] = []

    async def slow(message: Message) -> None:
        handled.append(message.body)
        await asyncio.sleep(0.3)

    with StallWatch(nsqd) as watch:
        async with (
            consumer_of(nsqd, topic, max_in_flight=20, msg_timeout="4s", max_attempts=1) as first,
            consumer_of(nsqd, topic, max_in_flight=20, max_attempts=1) as second,
        ):
            running = asyncio.create_task(first.run(slow))
            await handle_until(
                second,
                lambda message: handled.append(message.body),
                lambda: len(handled) >= COUNT and is_done(nsqd, topic),
            )
            await first.close()
            await running
    assert set(handled) == set(BODIES)
    assert len(handled) == COUNT or watch.stood_still


# -- giving up after failures, not after deliveries ------------------------------------------------------


class FailingHandler:
    """Fails each time as a handler, and keeps the attempts; its consumer gives up at last."""

    def __init__(self) -> None:
        self.attempts: list[int] = []
        self.reasons: list[str] = []

    async def handle(self, message: Message) -> None:
        self.attempts.append(message.attempts)
        raise ValueError("on purpose")

    def give_up(self, message: Message) -> None:
        self.reasons.append(message.give_up_reason)


async def test_what_an_nsqd_counts_that_no_handler_had_is_no_failure(topic: str) -> None:
    """NSQ's nsqd counts each delivery, also of a message whose handler was cancelled."""
    failing = FailingHandler()

    def deliver_again(peer: Peer, line: bytes, _: bytes) -> bytes:
        words = line.split()
        if words[0] == b"SUB":
            return OK + message_frame(b"x")
        return message_frame(b"x", attempts=1 + len(peer.lines(b"REQ"))) if words[0] == b"REQ" else b""

    async with ScriptedNsqd() as nsqd:
        nsqd.on_command = deliver_again
        options = {"max_attempts": 2, "default_requeue_delay": "0ms", "backoff_multiplier": "1ms"}
        consumer = Consumer(topic, "ch", nsqd=nsqd.address, on_give_up=failing.give_up, **options)  # type: ignore[arg-type]
        async with consumer:
            for _ in range(6):
                await _cancel_a_handler(consumer)
            await handle_until(consumer, failing.handle, lambda: consumer.stats().given_up)
    assert failing.attempts == [7, 8]
    assert failing.reasons == ["attempted 2 times"]


async def _cancel_a_handler(consumer: Consumer) -> None:
    started = asyncio.Event()

    async def handle(_: Message) -> None:
        started.set()
        await asyncio.sleep(600)

    running = asyncio.create_task(consumer.run(handle))
    await asyncio.wait_for(started.wait(), 20)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_deliveries_that_were_lost_with_a_connection_are_no_failures(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"x")
    failing = FailingHandler()
    options = {"max_attempts": 2, "msg_timeout": "2s", "lookupd_poll_interval": "50ms", "default_requeue_delay": "0ms"}
    with FaultProxy(nsqd.tcp) as proxy:
        address = "{}:{}".format(*proxy.address)
        consumer = Consumer(topic, "ch", nsqd=address, on_give_up=failing.give_up, backoff_multiplier="1ms", **options)  # type: ignore[arg-type]
        async with consumer:
            for deliveries in (1, 2, 3):
                await until(lambda deliveries=deliveries: consumer.stats().received >= deliveries)
                proxy.cut()
            await until(lambda: consumer.stats().received >= 4)
            await handle_until(consumer, failing.handle, lambda: consumer.stats().given_up)
    first, second = failing.attempts
    assert first >= 4 and second > first  # more, where it also timed out on a busy machine
    assert failing.reasons == ["attempted 2 times"]


async def test_a_message_that_was_handled_later_than_nsqd_waited_did_not_fail(topic: str) -> None:
    """Its FIN is refused, and it comes again, with an attempt more."""
    handled: list[int] = []
    failing = FailingHandler()

    def refuse_to_finish(peer: Peer, line: bytes, _: bytes) -> bytes:
        words = line.split()
        if words[0] == b"SUB":
            return OK + message_frame(b"x")
        if words[0] != b"FIN" or len(peer.lines(b"FIN")) > 3:
            return b""
        refusal = error_frame(f"E_FIN_FAILED FIN {words[1].decode()} failed ID not in flight")
        return refusal + message_frame(b"x", attempts=1 + len(peer.lines(b"FIN")))

    async with ScriptedNsqd() as nsqd:
        nsqd.on_command = refuse_to_finish
        async with Consumer(topic, "ch", nsqd=nsqd.address, on_give_up=failing.give_up, max_attempts=1) as consumer:
            await handle_until(consumer, lambda message: handled.append(message.attempts), lambda: len(handled) == 4)
    assert handled == [1, 2, 3, 4]
    assert failing.reasons == []


async def test_a_message_that_was_handled_while_its_connection_was_lost_did_not_fail(nsqd: Nsqd, topic: str) -> None:
    """Its FIN cannot be sent, so it comes again, with an attempt more."""
    publish(nsqd, topic, b"x")
    handled: list[int] = []
    failing = FailingHandler()
    options = {"max_attempts": 2, "msg_timeout": "2s", "lookupd_poll_interval": "50ms", "default_requeue_delay": "0ms"}
    with FaultProxy(nsqd.tcp) as proxy:
        address = "{}:{}".format(*proxy.address)
        consumer = Consumer(topic, "ch", nsqd=address, on_give_up=failing.give_up, backoff_multiplier="1ms", **options)  # type: ignore[arg-type]
        async with consumer:

            async def handle(message: Message) -> None:
                if len(handled) == 4:
                    await failing.handle(message)
                handled.append(message.attempts)
                proxy.refusing = True
                proxy.cut()
                await until(lambda: not consumer.connections)
                proxy.refusing = False

            await handle_until(consumer, handle, lambda: consumer.stats().given_up)
    assert len(handled) == 4 and len(failing.attempts) == 2
    assert handled[-1] >= 4 and failing.attempts[-1] >= 6
    assert failing.reasons == ["attempted 2 times"]


async def test_a_message_whose_fin_was_lost_with_the_connection_is_not_given_up(nsqd: Nsqd, topic: str) -> None:
    """It was sent, and nobody knows that it did not arrive until the message comes again, with an attempt more."""
    publish(nsqd, topic, b"x")
    handled: list[int] = []
    failing = FailingHandler()
    with FaultProxy(nsqd.tcp) as proxy:
        options = {"msg_timeout": "2s", "lookupd_poll_interval": "50ms", "on_give_up": failing.give_up}
        address = "{}:{}".format(*proxy.address)
        async with Consumer(topic, "ch", nsqd=address, max_attempts=1, **options) as consumer:  # type: ignore[arg-type]

            def handle(message: Message) -> None:
                handled.append(message.attempts)
                if len(handled) == 1:
                    proxy.stall()

            async def lose() -> None:
                await until(lambda: consumer.stats().finished)
                proxy.cut()
                proxy.resume()

            losing = asyncio.create_task(lose())
            await handle_until(consumer, handle, lambda: len(handled) > 1 and is_done(nsqd, topic))
            await losing
    assert failing.reasons == []


async def test_a_message_is_not_given_up_while_its_handler_still_has_it(nsqd: Nsqd, topic: str) -> None:
    """Its connection was lost meanwhile, so it comes again; how the first delivery ends nobody knows yet."""
    publish(nsqd, topic, b"x")
    handled: list[int] = []
    failing = FailingHandler()
    is_again = asyncio.Event()
    with FaultProxy(nsqd.tcp) as proxy:
        options = {"msg_timeout": "2s", "lookupd_poll_interval": "50ms", "on_give_up": failing.give_up}
        address = "{}:{}".format(*proxy.address)
        async with Consumer(topic, "ch", nsqd=address, max_attempts=1, max_in_flight=2, **options) as consumer:  # type: ignore[arg-type]

            async def handle(message: Message) -> None:
                handled.append(message.attempts)
                if len(handled) > 1:
                    is_again.set()
                else:
                    proxy.cut()
                    await is_again.wait()

            await handle_until(consumer, handle, lambda: len(handled) > 1 and is_done(nsqd, topic), concurrency=2)
    assert failing.reasons == []


async def test_a_store_of_keys_that_fails_is_no_failure_of_the_handler(nsqd: Nsqd, topic: str) -> None:
    class FailingDedupe(Dedupe):
        left = 4

        def claim(self, key: bytes) -> Claim:
            if self.left:
                self.left -= 1
                raise OSError("no store")
            return super().claim(key)

    publish(nsqd, topic, b"x")
    failing = FailingHandler()
    async with consumer_of(
        nsqd, topic, max_attempts=2, dedupe=FailingDedupe(), on_give_up=failing.give_up, max_backoff_duration="10ms"
    ) as consumer:
        await handle_until(consumer, failing.handle, lambda: consumer.stats().given_up)
    assert len(failing.attempts) == 2
    assert failing.reasons == ["attempted 2 times"]
