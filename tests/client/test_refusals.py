"""Checks that after a refused publish, for which nsqd closes the connection, the next publish goes with a new one."""

import asyncio

import pytest

from client.pool_rig import address_of, messages_of
from client.scripted import HEARTBEAT, OK, Peer, ScriptedNsqd, error_frame
from harness import Nsqd, until
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


async def test_a_publish_between_the_refusal_and_the_close_arrives(nsqd: Nsqd, topic: str) -> None:
    """Those that were sent behind the refused one fail, and nsqd has none of them; the next was not sent yet."""
    async with Producer(address_of(nsqd)) as producer:
        for number in range(20):
            await producer.ping()
            refused = producer.deferred_publish_nowait(topic, TOO_LATE_S, b"x")
            behind = [producer.publish_nowait(topic, b"behind") for _ in range(3)]
            next_ones: list[asyncio.Future[None]] = []
            refused.add_done_callback(
                lambda _, publish=producer.publish_nowait, sent=next_ones, body=b"%d" % number: sent.append(
                    publish(topic, body)
                )
            )
            outcomes = await asyncio.gather(refused, *behind, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [ServerError, *[NotConnected] * 3]
            assert "after an error: E_INVALID" in str(outcomes[1])
            await next_ones[0]
    assert nsqd.topic(topic)["message_count"] == 20
    assert sorted(messages_of(nsqd, topic)) == sorted(b"%d" % number for number in range(20))


async def test_a_publish_between_the_refusal_and_the_close_arrives_before_the_producer_closes(
    nsqd: Nsqd, topic: str
) -> None:
    async with Producer(address_of(nsqd)) as producer:
        await producer.ping()
        refused = producer.deferred_publish_nowait(topic, TOO_LATE_S, b"x")
        behind = producer.publish_nowait(topic, b"behind")
        with pytest.raises(ServerError):
            await refused
        after = producer.publish_nowait(topic, b"after")
    with pytest.raises(NotConnected):
        behind.result()
    after.result()
    assert messages_of(nsqd, topic) == [b"after"]


async def test_an_nsqd_that_goes_on_after_a_refusal_gets_what_was_held_back(topic: str) -> None:
    """NSQ's own nsqd never does; one that does must not be sent anything twice, nor be taken for one that took a
    publish.
    """

    def answer(peer: Peer, line: bytes, body: bytes) -> bytes:
        return error_frame("E_BAD_MESSAGE no") if body == b"wrong" else b""

    async with ScriptedNsqd() as nsqd, Producer(nsqd.address) as producer:
        nsqd.on_command = answer
        wrong, behind = producer.publish_nowait(topic, b"wrong"), producer.publish_nowait(topic, b"behind")
        with pytest.raises(ServerError):
            await wrong
        held = producer.publish_nowait(topic, b"held")
        nsqd.peer.send(HEARTBEAT)
        await until(lambda: nsqd.peer.lines(b"NOP"))
        assert [body for _, body in nsqd.peer.commands] == [b"wrong", b"behind", b""]
        nsqd.peer.send(OK)
        await behind
        await until(lambda: len(nsqd.peer.commands) == 4)
        assert not held.done()
        nsqd.peer.send(OK)
        await held
        assert len(nsqd.peers) == 1
        assert [body for _, body in nsqd.peer.commands] == [b"wrong", b"behind", b"", b"held"]
