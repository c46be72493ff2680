"""Checks ansq, on asyncio, against nsqd."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from client.stall_watch import StallWatch
from harness import Nsqd, eventually

ansq = pytest.importorskip("ansq")

STEP_TIMEOUT_S = 30


def _address(nsqd: Nsqd) -> str:
    return f"127.0.0.1:{nsqd.tcp[1]}"


@pytest.fixture
async def writer(nsqd: Nsqd) -> AsyncIterator[Any]:
    made = await ansq.create_writer(nsqd_tcp_addresses=[_address(nsqd)])
    yield made
    await made.close()


async def _reader(nsqd: Nsqd, topic: str) -> Any:
    return await ansq.create_reader(topic=topic, channel="ch", nsqd_tcp_addresses=[_address(nsqd)])


async def test_publish_and_consume(nsqd: Nsqd, writer: Any, topic: str) -> None:
    assert (await writer.pub(topic, "single")).is_ok
    assert (await writer.mpub(topic, "multi 1", "multi 2", "multi 3")).is_ok
    assert (await writer.dpub(topic, "deferred", 200)).is_ok
    reader = await _reader(nsqd, topic)
    seen = []
    async with asyncio.timeout(STEP_TIMEOUT_S):
        async for message in reader.messages():
            seen.append((bytes(message.body), message.attempts))
            await message.fin()
            if len(seen) == 5:
                break
    assert sorted(body for body, _ in seen) == [b"deferred", b"multi 1", b"multi 2", b"multi 3", b"single"]
    assert {attempts for _, attempts in seen} == {1}
    await asyncio.to_thread(eventually, lambda: nsqd.channel(topic)["in_flight_count"] == 0)
    assert nsqd.channel(topic)["clients"][0]["finish_count"] == 5
    await reader.close()


async def test_requeue(nsqd: Nsqd, writer: Any, topic: str) -> None:
    await writer.mpub(topic, "good", "bad")
    reader = await _reader(nsqd, topic)
    seen = []
    async with asyncio.timeout(STEP_TIMEOUT_S):
        async for message in reader.messages():
            seen.append((bytes(message.body), message.attempts))
            if message.body == b"bad" and message.attempts < 3:
                await message.req(timeout=0)
            else:
                await message.fin()
            if len(seen) == 4:
                break
    assert sorted(seen) == [(b"bad", 1), (b"bad", 2), (b"bad", 3), (b"good", 1)]
    assert nsqd.channel(topic)["requeue_count"] == 2
    await reader.close()


async def test_timeout_messages(nsqd: Nsqd, topic: str) -> None:
    """What timed out comes behind the message that waited meanwhile, as in ansq's own test of that name."""
    features = ansq.ConnectionFeatures(msg_timeout=1000)
    options = ansq.ConnectionOptions(features=features)
    connection = await ansq.open_connection("127.0.0.1", nsqd.tcp[1], connection_options=options)
    for body in ("first", "second"):
        assert (await connection.pub(topic, body)).is_ok
    await connection.subscribe(topic, "ch", 1)
    await asyncio.to_thread(eventually, lambda: nsqd.channel(topic)["timeout_count"] >= 1)
    came = []

    async def take() -> None:
        while (message := await connection.wait_for_message()) is not None:
            came.append((bytes(message.body), message.attempts))
            if message.can_be_processed:
                await message.fin()

    taking = asyncio.create_task(take())
    await asyncio.to_thread(
        eventually,
        lambda: len(came) >= 3 and nsqd.channel(topic)["depth"] == nsqd.channel(topic)["in_flight_count"] == 0,
    )
    # On a busy machine the second may be finished too late and come again as well, behind these.
    assert came[:3] == [(b"first", 1), (b"second", 1), (b"first", 2)]
    await connection.close()
    taking.cancel()
    await asyncio.wait([taking])


async def test_touch(nsqd: Nsqd, topic: str) -> None:
    """A message that is touched stays with its consumer for longer than its timeout."""
    features = ansq.ConnectionFeatures(msg_timeout=4000)
    connection = await ansq.open_connection(
        "127.0.0.1", nsqd.tcp[1], connection_options=ansq.ConnectionOptions(features=features)
    )
    assert (await connection.pub(topic, "x")).is_ok
    await connection.subscribe(topic, "ch", 1)
    message = await asyncio.wait_for(connection.wait_for_message(), STEP_TIMEOUT_S)
    with StallWatch(nsqd) as watch:
        for _ in range(6):
            await asyncio.sleep(1)
            assert message.can_be_processed or watch.stood_still
            if message.can_be_processed:
                await message.touch()
        is_kept = nsqd.channel(topic)["timeout_count"] == 0
        assert is_kept or watch.stood_still
    assert message.attempts == 1
    if is_kept:
        await message.fin()
        await asyncio.to_thread(eventually, lambda: nsqd.channel(topic)["in_flight_count"] == 0)
    await connection.close()


async def test_many_messages(nsqd: Nsqd, writer: Any, topic: str) -> None:
    for start in range(0, 500, 100):
        await writer.mpub(topic, *[str(number) for number in range(start, start + 100)])
    reader = await _reader(nsqd, topic)
    seen: set[bytes] = set()
    async with asyncio.timeout(STEP_TIMEOUT_S):
        async for message in reader.messages():
            seen.add(bytes(message.body))
            await message.fin()
            if len(seen) == 500:
                break
    assert seen == {b"%d" % number for number in range(500)}
    await asyncio.to_thread(eventually, lambda: nsqd.channel(topic)["in_flight_count"] == 0)
    shown = nsqd.channel(topic)
    assert (shown["depth"], shown["clients"][0]["finish_count"]) == (0, 500)
    await reader.close()
