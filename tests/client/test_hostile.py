"""Meets an nsqd or nsqlookupd that means harm: an error ends its connection, memory is bounded, and the others have
their turn.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio

from client.consumer_rig import handle_until, is_done, publish
from client.loop_watch import HELD_S_MAX, HeldLoopWatch
from client.pool_rig import address_of
from client.scripted import HEARTBEAT, OK, Peer, ScriptedNsqd, error_frame, frame, message_frame, say_ok
from harness import Nsqd, until
from harness.http_server import LocalServer, QuietHandler
from harness.upgrades import trusting_anything
from nsquark import Consumer, Message, Producer
from nsquark.client.config import Config
from nsquark.client.lookupd import lookup
from nsquark.errors import IdentifyFailed, LookupFailed, NotConnected, NsqError
from nsquark.wire.lookup_answer import PRODUCERS_MAX

QUICK: dict[str, Any] = {
    "lookupd_poll_interval": "50ms",
    "max_in_flight": 10,
    "read_timeout": "2s",
    "heartbeat_interval": "1s",
}


@pytest_asyncio.fixture(autouse=True)
async def _loop_is_free(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Checks in every test here that the loop is never held for long, or for what a test gives as its parameter."""
    async with HeldLoopWatch(getattr(request, "param", HELD_S_MAX)):
        yield


@pytest.mark.parametrize(
    "features",
    [
        {"deflate": True, "deflate_level": 99},
        {"msg_timeout": 10**30},
        {"msg_timeout": 0},
        {"msg_timeout": -5},
        {"max_msg_timeout": 10**400},
        {"max_rdy_count": -1},
        {"max_rdy_count": 10**20},
        {"version": ["1"]},
        {"snappy": True, "deflate": True},
    ],
)
async def test_features_that_no_nsqd_has_are_an_error_and_it_is_tried_again(features: dict[str, Any]) -> None:
    async with ScriptedNsqd() as server:
        server.identify_answer = frame(json.dumps({**server.features, **features}).encode())
        with pytest.raises(NsqError):
            await Consumer("t", "c", nsqd=server.address, **QUICK).start()
        async with Producer(server.address, read_timeout="2s", heartbeat_interval="1s") as producer:
            with pytest.raises(NsqError):
                await producer.publish("t", b"x")
    async with ScriptedNsqd() as good, ScriptedNsqd() as bad:
        bad.identify_answer = frame(json.dumps({**bad.features, **features}).encode())
        async with Consumer("t", "c", nsqd=[good.address, bad.address], read_timeout="2s", heartbeat_interval="1s"):
            await until(lambda: len(bad.peers) >= 2)


@pytest.mark.parametrize("answer", [b"{" * 50_000, b'{"a":' + b"[" * 100_000, b"\xff{", b"{}" * 3])
async def test_answers_to_identify_that_are_none(answer: bytes) -> None:
    async with ScriptedNsqd() as server:
        server.identify_answer = frame(answer)
        if answer.startswith(b"{"):
            with pytest.raises(IdentifyFailed):
                await Consumer("t", "c", nsqd=server.address, **QUICK).start()


async def test_heartbeats_without_end_instead_of_an_answer() -> None:
    async with ScriptedNsqd() as server:
        server.identify_answer = HEARTBEAT * 2000
        server.on_ready = lambda peer: asyncio.get_running_loop().call_later(0.1, peer.send, HEARTBEAT * 2000)  # type: ignore[assignment]
        with pytest.raises(NotConnected, match="read_timeout"):
            await Consumer("t", "c", nsqd=server.address, read_timeout="1s", heartbeat_interval="1s").start()


async def test_an_id_that_is_no_text(caplog: pytest.LogCaptureFixture) -> None:
    def send(peer: Peer, line: bytes, body: bytes) -> bytes:
        if line.startswith(b"RDY 1"):
            return message_frame(b"x", b"\xff\x00\n\x1b[31m" + bytes(range(9)))
        return say_ok(peer, line, body)

    async with ScriptedNsqd() as server:
        server.on_command = send
        async with Consumer("t", "c", nsqd=server.address, max_in_flight=1) as consumer:
            message = await asyncio.wait_for(anext(consumer), 20)
            assert "\\xff" in repr(message)
            message.fail(RuntimeError("told with the id"))
    assert "told with the id" in caplog.text
    assert "\x1b" not in caplog.text


async def test_more_messages_than_were_asked_for() -> None:
    sent = b"".join(message_frame(b"x" * 100, b"%016d" % number) for number in range(5000))
    handled = 0

    def handle(_: Message) -> None:
        nonlocal handled
        handled += 1

    async with ScriptedNsqd() as server:
        server.on_command = lambda peer, line, body: sent if line.startswith(b"RDY 10") else say_ok(peer, line, body)
        async with Consumer("t", "c", nsqd=server.address, max_in_flight=10) as consumer:
            await until(lambda: consumer.stats().connections == 0)
            assert consumer.stats().received < 5000
            await until(lambda: len(server.peers) >= 2)


async def test_errors_without_end_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    flood = error_frame("E_" + "x" * 50) * 3000 + message_frame(b"behind them")

    async with ScriptedNsqd() as server:
        server.on_command = lambda peer, line, body: flood if line.startswith(b"RDY") else say_ok(peer, line, body)
        async with Consumer("t", "c", nsqd=server.address) as consumer:
            assert (await asyncio.wait_for(anext(consumer), 20)).body == b"behind them"
            assert consumer.stats().connections == 1
    assert 20 <= len([record for record in caplog.records if "E_xx" in record.message]) <= 60


async def test_what_comes_in_clear_before_tls_is_an_error() -> None:
    """A man in the middle puts a message behind the answer to IDENTIFY, to be read as if it came through TLS."""
    async with ScriptedNsqd(tls_v1=True) as server:
        answer = frame(json.dumps(server.features).encode())
        server.identify_answer = answer + OK + message_frame(b"injected")
        # In a thread: to read the authorities that the machine trusts is not what the peer makes the loop do.
        options: dict[str, Any] = {"tls_v1": True, "tls_config": await asyncio.to_thread(trusting_anything)}
        with pytest.raises(NotConnected, match="bytes came in clear before TLS began"):
            await Consumer("t", "c", nsqd=server.address, **options).start()
        async with Producer(server.address, **options) as producer:
            with pytest.raises(NotConnected, match="bytes came in clear before TLS began"):
                await producer.publish("t", b"x")


async def test_a_refused_subscription_is_tried_ever_more_rarely(nsqd: Nsqd, topic: str) -> None:
    refused: list[float] = []

    def refuse(peer: Peer, line: bytes, body: bytes) -> bytes:
        if line.startswith(b"SUB"):
            refused.append(time.monotonic())
            asyncio.get_running_loop().call_later(0.01, peer.close)
            return error_frame("E_SUB_FAILED SUB failed exceeds limit")
        return say_ok(peer, line, body)

    publish(nsqd, topic, b"x")
    async with ScriptedNsqd() as server:
        server.on_command = refuse
        async with Consumer(topic, "ch", nsqd=[server.address, address_of(nsqd)]) as consumer:
            handled: list[bytes] = []
            await handle_until(consumer, lambda message: handled.append(message.body), lambda: is_done(nsqd, topic))
        async with Consumer("t", "c", nsqd=server.address, lookupd_poll_interval="10ms"):
            refused.clear()
            await until(lambda: refused)
            await asyncio.sleep(2.0)
    assert len(refused) <= 3


async def test_a_connection_that_is_lost_before_sub_is_answered_was_not_refused() -> None:
    def lose(peer: Peer, line: bytes, body: bytes) -> bytes:
        if line.startswith(b"SUB"):
            peer.close()
        return b""

    async with ScriptedNsqd() as server:
        server.on_command = lose
        async with Consumer("t", "c", nsqd=server.address, lookupd_poll_interval="50ms"):
            await until(lambda: len(server.peers) >= 10)


# -- nsqlookupd ------------------------------------------------------------------------------------------


@pytest.fixture
def answers() -> Iterator[Callable[[bytes], str]]:
    """Serves a body at an address."""
    with contextlib.ExitStack() as servers:

        def serve(body: bytes) -> str:
            class AnswersBody(QuietHandler):
                def do_GET(self) -> None:
                    self.answer(200, body)

            return servers.enter_context(LocalServer(AnswersBody)).address

        yield serve


def _producers(count: int) -> bytes:
    return json.dumps(
        {"producers": [{"broadcast_address": f"10.0.{n // 250}.{n % 250}", "tcp_port": 4150} for n in range(count)]}
    ).encode()


def _topics(size: int) -> bytes:
    """Makes an answer that has nothing but names of topics, of one nsqd that has no port."""
    return b'{"producers":[{"broadcast_address":"a","topics":[' + b'"ab",' * (size // 5) + b'"a"]}]}'


@pytest.mark.parametrize(
    "body",
    [_producers(60_000), b"[" * 3_000_000, b'{"producers":[' + b" " * (5 << 20), _topics(4_000_000)],
    ids=["producers", "deep", "endless", "topics"],
)
async def test_answers_of_an_nsqlookupd_that_are_too_much(answers: Callable[[bytes], str], body: bytes) -> None:
    with pytest.raises(LookupFailed):
        await lookup(answers(body), "t", Config())


@pytest.mark.parametrize("_loop_is_free", [2 * HELD_S_MAX], indirect=True, ids=["a while"])  # it takes 45 ms at best
async def test_more_nsqds_than_any_cluster_has(
    answers: Callable[[bytes], str], nsqd: Nsqd, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish(nsqd, topic, b"x")
    address = answers(_producers(PRODUCERS_MAX))
    async with Consumer(topic, "ch", nsqd=address_of(nsqd), lookupd=address, dial_timeout="5s") as consumer:
        await until(lambda: "more than 1000 nsqds were found" in caplog.text)
        async with (await asyncio.wait_for(anext(consumer), 20)).or_raise() as message:
            assert message.body == b"x"
