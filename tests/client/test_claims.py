"""Checks Consumer(dedupe=...): a claim lasts as long as someone works on its message, and no longer than it should."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from client.consumer_rig import AFTER_GIVING_BACK, consumer_of, finish_rest, handle_until, is_done, publish
from client.stall_watch import StallWatch
from harness import Nsqd, until
from nsquark import Consumer, Dedupe, Message
from nsquark.client.copies import WRITES_MAX
from nsquark.errors import NotConnected

WAIT_S = 30


class AnswersWhenLet(Dedupe):
    """Is a store that answers no claim until the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = False
        self.may_answer = asyncio.Event()

    async def claim(self, key: bytes) -> Any:  # type: ignore[override]
        self.is_asked = True
        await self.may_answer.wait()
        return super().claim(key)


def lose_connections(consumer: Any) -> None:
    for subscription in list(consumer._nsqds.subscriptions.values()):
        subscription._connection.abort(NotConnected("cut by the test"))


# -- what a store returns --------------------------------------------------------------------------------


async def test_what_a_store_returns_from_a_note_is_its_own_affair(nsqd: Nsqd, topic: str) -> None:
    class Talkative(Dedupe):
        def done(self, key: bytes) -> Any:
            super().done(key)
            return True

        def release(self, key: bytes) -> Any:
            super().release(key)
            return 1

    publish(nsqd, topic, b"1", b"2", b"3")
    attempts: list[int] = []

    async def handle(message: Message) -> None:
        attempts.append(message.attempts)
        assert message.attempts > 1

    async with consumer_of(nsqd, topic, dedupe=Talkative(), max_in_flight=1) as consumer:
        await handle_until(consumer, handle, lambda: is_done(nsqd, topic))
        assert consumer.stats().finished == 3
    assert sorted(attempts) == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("answer", [True, None, b"new"])
async def test_a_claim_that_is_no_word_of_the_interface_is_logged_and_tried_again(
    nsqd: Nsqd, topic: str, answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(Dedupe):
        answers = 0

        def claim(self, key: bytes) -> Any:
            self.answers += 1
            return answer if self.answers == 1 else super().claim(key)

    publish(nsqd, topic, b"1")
    attempts: list[int] = []
    async with consumer_of(nsqd, topic, dedupe=Wrong()) as consumer:
        await handle_until(
            consumer, lambda message: attempts.append(message.attempts), lambda: attempts and is_done(nsqd, topic)
        )
        assert consumer.stats().duplicates == 0
    assert attempts == [AFTER_GIVING_BACK]
    assert f"claim returned {answer!r}" in caplog.text


# -- messages that nobody answers ------------------------------------------------------------------------


@pytest.mark.parametrize("is_lost", [False, True], ids=["timeout", "connection lost"])
async def test_a_message_that_an_iteration_never_answers_comes_again(nsqd: Nsqd, topic: str, is_lost: bool) -> None:
    publish(nsqd, topic, b"1")
    async with consumer_of(nsqd, topic, dedupe=True, msg_timeout="1s") as consumer:
        assert await consumer.get(WAIT_S) is not None
        if is_lost:
            lose_connections(consumer)
        again = await consumer.get(WAIT_S)
        assert again is not None
        again.finish()
        await finish_rest(consumer, nsqd, topic)


async def test_a_message_that_nobody_answers_after_its_handler_comes_again(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"1")
    attempts: list[int] = []

    async def handle(message: Message) -> None:
        attempts.append(message.attempts)
        if len(attempts) == 1:
            message.disable_auto_response()

    async with consumer_of(nsqd, topic, dedupe=True, msg_timeout="1s") as consumer:
        await handle_until(consumer, handle, lambda: len(attempts) == 2 and is_done(nsqd, topic))


async def test_the_claim_of_a_lost_message_ends_with_its_consumer(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"1")
    dedupe = Dedupe()
    async with consumer_of(nsqd, topic, dedupe=dedupe) as consumer:
        assert await consumer.get(WAIT_S) is not None
        lose_connections(consumer)
        await until(lambda: not consumer.connections)
    assert len(dedupe) == 0


@pytest.mark.parametrize("is_lost", [False, True], ids=["timeout", "connection lost"])
async def test_a_message_that_an_iteration_finishes_late_is_not_handled_again(
    nsqd: Nsqd, topic: str, is_lost: bool
) -> None:
    publish(nsqd, topic, b"1")
    async with consumer_of(nsqd, topic, dedupe=True, msg_timeout="1s") as consumer:
        message = await consumer.get(WAIT_S)
        assert message is not None
        if is_lost:
            lose_connections(consumer)
        await until(lambda: consumer.stats().received >= 2)
        message.finish()
        assert await consumer.get(1.5) is None
        assert not await finish_rest(consumer, nsqd, topic)
        assert consumer.stats().duplicates >= 1


async def test_a_late_requeue_leaves_the_claim_to_who_has_it_now(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"1")
    dedupe = Dedupe()
    async with consumer_of(nsqd, topic, dedupe=dedupe, msg_timeout="1s") as consumer:
        late, again = await consumer.get(WAIT_S), await consumer.get(WAIT_S)
        assert late is not None and again is not None
        late.requeue(0, backoff=False)
        assert len(dedupe) == 1
        again.finish()


@pytest.mark.parametrize("is_lost", [False, True], ids=["timeout", "connection lost"])
async def test_a_handler_that_works_on_keeps_its_claim(nsqd: Nsqd, topic: str, is_lost: bool) -> None:
    publish(nsqd, topic, b"1")
    attempts: list[int] = []
    may_end = asyncio.Event()

    async def handle(message: Message) -> None:
        attempts.append(message.attempts)
        await may_end.wait()

    async with consumer_of(nsqd, topic, dedupe=True, msg_timeout="1s") as consumer:
        running = asyncio.create_task(consumer.run(handle, concurrency=4))
        await until(lambda: attempts)
        if is_lost:
            lose_connections(consumer)
        await until(lambda: consumer.stats().duplicates >= 3)
        may_end.set()
        await until(lambda: is_done(nsqd, topic))
        await consumer.close()
        await running
    assert attempts == [1]


# -- while the store is asked ----------------------------------------------------------------------------


class Hanging(Dedupe):
    """Notes nothing until it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = asyncio.Event()
        self.begun_count = 0

    async def done(self, key: bytes) -> None:  # type: ignore[override]
        self.begun_count += 1
        await self.goes_on.wait()
        super().done(key)


async def test_a_store_that_hangs_gathers_no_more_notes_than_its_limit(
    nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    count = WRITES_MAX + 200
    publish(nsqd, topic, *(b"%d" % number for number in range(count)))
    store, handled = Hanging(), set[bytes]()
    async with consumer_of(nsqd, topic, dedupe=store, max_in_flight=100) as consumer:
        running = asyncio.create_task(consumer.run(lambda message: handled.add(message.body)))
        await until(lambda: "messages wait for it" in caplog.text or len(handled) == count)
        await until(lambda: store.begun_count == len(handled))  # the last ones begin in another turn of the loop
        assert len(handled) == WRITES_MAX
        store.goes_on.set()
        await until(lambda: is_done(nsqd, topic))
        assert len(handled) == count
        consumer.stop()
        await running


@pytest.mark.parametrize("form", ["run", "get"])
async def test_a_consumer_whose_store_hangs_can_be_stopped(
    nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture, form: str
) -> None:
    publish(nsqd, topic, *(b"%d" % number for number in range(WRITES_MAX + 5)))
    store = Hanging()

    async def take(consumer: Consumer) -> None:
        while message := await consumer.get():
            message.finish()

    async with consumer_of(nsqd, topic, dedupe=store, max_in_flight=100) as consumer:
        running = asyncio.create_task(take(consumer) if form == "get" else consumer.run(lambda _: None))
        await until(lambda: "messages wait for it" in caplog.text)
        consumer.stop()
        await asyncio.wait_for(running, 20)
        await until(lambda: nsqd.channel(topic)["depth"] == 5)
        await asyncio.wait_for(consumer.close(0.1), 20)
    assert f"had {WRITES_MAX} writes to end 0.1 s after the stop" in caplog.text
    store.goes_on.set()


async def test_a_message_is_kept_alive_while_the_store_is_asked(nsqd: Nsqd, topic: str) -> None:
    publish(nsqd, topic, b"1")
    store = AnswersWhenLet()
    with StallWatch(nsqd) as watch:
        async with consumer_of(nsqd, topic, dedupe=store, msg_timeout="4s") as consumer:
            asyncio.get_running_loop().call_later(6.0, store.may_answer.set)
            message = await consumer.get(WAIT_S)
            assert message is not None
            assert message.deadline_s > asyncio.get_running_loop().time()
            message.finish()
            await finish_rest(consumer, nsqd, topic)
    assert nsqd.channel(topic)["timeout_count"] == 0 or watch.stood_still


async def test_a_message_that_went_back_while_the_store_was_asked_is_not_handled(
    start_nsqd: Callable[..., Nsqd], topic: str
) -> None:
    """The message is touched up to max-msg-timeout, and then comes again."""
    daemon = start_nsqd("--max-msg-timeout=2s")
    publish(daemon, topic, b"1")
    store, left_s = AnswersWhenLet(), []

    def handle(message: Message) -> None:
        left_s.append(message.deadline_s - asyncio.get_running_loop().time())

    async with consumer_of(daemon, topic, dedupe=store, msg_timeout="1s") as consumer:
        running = asyncio.create_task(consumer.run(handle))
        await until(lambda: consumer.stats().received >= 2)
        store.may_answer.set()
        await until(lambda: is_done(daemon, topic))
        await consumer.close()
        await running
    assert len(left_s) == 1 and left_s[0] > 0


async def test_a_message_that_timed_out_while_the_store_was_asked_is_not_handled(nsqd: Nsqd, topic: str) -> None:
    """The message was not touched in time, as happens when the loop is blocked."""
    publish(nsqd, topic, b"1")
    store = AnswersWhenLet()
    async with consumer_of(nsqd, topic, dedupe=store, msg_timeout="1s") as consumer:

        async def get() -> tuple[Message | None, bool]:
            """Tells also whether there is time left as it is handed out."""
            message = await consumer.get(WAIT_S)
            return message, message is not None and message.deadline_s > asyncio.get_running_loop().time()

        getting = asyncio.create_task(get())
        await until(lambda: store.is_asked)
        for subscription in consumer._nsqds.subscriptions.values():
            for message in subscription.in_flight:
                message.deadline_s = asyncio.get_running_loop().time() - 1
        store.may_answer.set()
        again, has_time = await getting
        assert again is not None and has_time
        assert consumer.stats().expired >= 1
        again.finish()


async def test_a_message_whose_connection_is_lost_while_the_store_is_asked_is_not_handled(
    nsqd: Nsqd, topic: str
) -> None:
    publish(nsqd, topic, b"1")
    store = AnswersWhenLet()
    async with consumer_of(nsqd, topic, dedupe=store, msg_timeout="1s") as consumer:
        getting = asyncio.create_task(consumer.get(WAIT_S))
        await until(lambda: store.is_asked)
        lose_connections(consumer)
        await until(lambda: not consumer.connections)
        store.may_answer.set()
        message = await getting
        assert message is not None
        assert message in message.subscription.in_flight
        message.finish()
        await finish_rest(consumer, nsqd, topic)


async def test_a_consumer_that_is_stopped_while_the_store_is_asked_gives_the_message_back(
    nsqd: Nsqd, topic: str
) -> None:
    publish(nsqd, topic, b"1")
    store = AnswersWhenLet()
    handled: list[Message] = []
    async with consumer_of(nsqd, topic, dedupe=store) as consumer:
        running = asyncio.create_task(consumer.run(handled.append))
        await until(lambda: store.is_asked)
        consumer.stop()
        store.may_answer.set()
        await running
    assert not handled
    assert len(store) == 0
    assert nsqd.channel(topic)["depth"] == 1


@pytest.mark.parametrize("how", ["get", "iteration"])
async def test_a_store_that_never_answers_does_not_hold_up_an_iteration_that_is_over(
    nsqd: Nsqd, topic: str, how: str
) -> None:
    publish(nsqd, topic, b"1")
    store = AnswersWhenLet()
    async with asyncio.timeout(WAIT_S):
        async with consumer_of(nsqd, topic, dedupe=store) as consumer:
            taking = asyncio.ensure_future(consumer.get() if how == "get" else anext(consumer, None))
            await until(lambda: store.is_asked)
            await consumer.close(0.1)
        assert await taking is None
    store.may_answer.set()
    async with consumer_of(nsqd, topic, dedupe=store) as consumer:
        assert [body for body, _ in await finish_rest(consumer, nsqd, topic)] == [b"1"]
