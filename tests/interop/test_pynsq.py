"""Checks pynsq, on tornado, against nsqd."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from harness import Nsqd, eventually, until

nsq = pytest.importorskip("nsq")

STEP_TIMEOUT_S = 30


async def _ask(call: Callable[..., Any], *arguments: Any) -> Any:
    """Awaits a Writer's method, which answers by a callback."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    call(*arguments, callback=lambda conn, data: answer.set_result(data))
    return await asyncio.wait_for(answer, STEP_TIMEOUT_S)


@pytest.fixture
async def writer(nsqd: Nsqd) -> AsyncIterator[Any]:
    made = nsq.Writer([f"127.0.0.1:{nsqd.tcp[1]}"])
    await until(lambda: bool(made.conns))
    await until(lambda: all(conn.state == "CONNECTED" for conn in made.conns.values()))
    yield made
    for conn in list(made.conns.values()):
        conn.close()


def _reader(nsqd: Nsqd, topic: str, handler: Callable[[Any], bool], **options: Any) -> Any:
    return nsq.Reader(
        topic=topic,
        channel="ch",
        nsqd_tcp_addresses=[f"127.0.0.1:{nsqd.tcp[1]}"],
        message_handler=handler,
        max_in_flight=10,
        **options,
    )


async def test_publish_and_consume(nsqd: Nsqd, writer: Any, topic: str) -> None:
    assert await _ask(writer.pub, topic, b"single") == b"OK"
    assert await _ask(writer.mpub, topic, [b"multi 1", b"multi 2", b"multi 3"]) == b"OK"
    assert await _ask(writer.dpub, topic, 200, b"deferred") == b"OK"
    seen: list[tuple[bytes, int]] = []

    def handler(message: Any) -> bool:
        seen.append((message.body, message.attempts))
        return True

    reader = _reader(nsqd, topic, handler)
    await until(lambda: len(seen) == 5)
    assert sorted(body for body, _ in seen) == [b"deferred", b"multi 1", b"multi 2", b"multi 3", b"single"]
    assert {attempts for _, attempts in seen} == {1}
    await asyncio.to_thread(eventually, lambda: nsqd.channel(topic)["in_flight_count"] == 0)
    shown = nsqd.channel(topic)
    assert shown["depth"] == 0
    assert shown["clients"][0]["finish_count"] == 5
    assert shown["clients"][0]["user_agent"].startswith("pynsq/")
    reader.close()


async def test_requeue(nsqd: Nsqd, writer: Any, topic: str) -> None:
    await _ask(writer.mpub, topic, [b"good", b"bad"])
    seen: list[tuple[bytes, int]] = []

    def handler(message: Any) -> bool:
        seen.append((message.body, message.attempts))
        if message.body == b"bad" and message.attempts < 3:
            message.requeue(backoff=False, delay=0)
        else:
            message.finish()
        return True

    reader = _reader(nsqd, topic, handler)
    await until(lambda: len(seen) >= 4)
    assert sorted(seen) == [(b"bad", 1), (b"bad", 2), (b"bad", 3), (b"good", 1)]
    assert nsqd.channel(topic)["requeue_count"] == 2
    reader.close()


async def test_many_messages_with_heartbeats(nsqd: Nsqd, writer: Any, topic: str) -> None:
    for start in range(0, 500, 100):
        await _ask(writer.mpub, topic, [b"%d" % number for number in range(start, start + 100)])
    seen: set[bytes] = set()

    def handler(message: Any) -> bool:
        seen.add(message.body)
        return True

    reader = _reader(nsqd, topic, handler, heartbeat_interval=1)
    beats: Counter[Any] = Counter()
    reader.heartbeat = lambda conn: beats.update([conn])
    await until(lambda: len(seen) == 500)
    # pynsq answers each by itself: after two without an answer nsqd would have closed the connection. So it does where
    # this process stood still; pynsq opens another then.
    await until(lambda: max(beats.values(), default=0) >= 3)
    await until(lambda: len(reader.conns) == 1)
    assert await _ask(writer.pub, topic, b"after") == b"OK"
    await until(lambda: b"after" in seen)
    reader.close()


async def test_error_is_told(nsqd: Nsqd, writer: Any) -> None:
    answer = await _ask(writer.pub, "bad$topic", b"x")
    assert isinstance(answer, nsq.Error)
    assert 'PUB topic name "bad$topic" is not valid' in str(answer)
