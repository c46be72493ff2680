"""nsqd closes a connection on which it refused a publish: the next publish goes with a new one."""

import asyncio

import pytest

from client.pool_rig import address_of
from harness import Nsqd
from nsquark import Producer
from nsquark.errors import NotConnected, ServerError

TOO_LATE_S = 7200
"""Is more than nsqd's max-req-timeout."""


async def test_a_publish_right_after_a_refused_one_arrives(nsqd: Nsqd, topic: str) -> None:
    async with Producer(address_of(nsqd)) as producer:
        for number in range(20):
            with pytest.raises(ServerError, match="out of range"):
                await producer.deferred_publish(topic, TOO_LATE_S, b"x")
            await producer.publish(topic, b"%d" % number)
    assert nsqd.topic(topic)["message_count"] == 20


async def test_what_waits_for_room_behind_a_refused_one_arrives(nsqd: Nsqd, topic: str) -> None:
    async with Producer(address_of(nsqd), outstanding_max=2) as producer:
        await producer.ping()
        refused = asyncio.ensure_future(producer.deferred_publish(topic, TOO_LATE_S, b"x"))
        others = [asyncio.ensure_future(producer.publish(topic, b"x")) for _ in range(3)]
        outcomes = await asyncio.gather(refused, *others, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ServerError, NotConnected, type(None), type(None)]
    assert nsqd.topic(topic)["message_count"] == 2
