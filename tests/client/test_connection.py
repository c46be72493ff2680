"""Checks what a connection does with answers that a real nsqd gives rarely, late or never."""

import asyncio
import contextlib
import socket
import time
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from client.scripted import HEARTBEAT, OK, Peer, ScriptedNsqd, error_frame, frame, message_frame
from client.stall_watch import StallWatch
from harness import FaultProxy, Nsqd, until
from nsquark import Consumer, Producer, ProducerPool
from nsquark.client.errors import (
    AuthFailed,
    IdentifyFailed,
    MessageTooBig,
    NotConnected,
    NsqError,
    ServerError,
)

WAIT_S = 30.0


# -- setting up ------------------------------------------------------------------------------------------


async def test_what_identify_says() -> None:
    async with (
        ScriptedNsqd() as server,
        Producer(
            server.address,
            client_id="me",
            hostname="here",
            user_agent="mine/1",
            heartbeat_interval="2s",
            sample_rate=7,
            output_buffer_size=1000,
            output_buffer_timeout="20ms",
            msg_timeout="3s",
            topology_region="r1",
            topology_zone="z1",
        ) as producer,
    ):
        await producer.ping()
        assert server.peer.identify == {
            "client_id": "me",
            "short_id": "me",
            "hostname": "here",
            "long_id": "here",
            "user_agent": "mine/1",
            "feature_negotiation": True,
            "show_limits": True,
            "requeue_uncounted": True,
            "heartbeat_interval": 2000,
            "sample_rate": 7,
            "output_buffer_size": 1000,
            "output_buffer_timeout": 20,
            "msg_timeout": 3000,
            "tls_v1": False,
            "deflate": False,
            "deflate_level": 6,
            "snappy": False,
            "topology_region": "r1",
            "topology_zone": "z1",
        }


async def test_identify_refused() -> None:
    async with ScriptedNsqd() as server:
        server.identify_answer = error_frame("E_BAD_BODY IDENTIFY heartbeat interval (1) is invalid")
        async with Producer(server.address) as producer:
            with pytest.raises(IdentifyFailed, match="failed to IDENTIFY - E_BAD_BODY IDENTIFY heartbeat interval"):
                await producer.publish("t", b"x")
        with pytest.raises(IdentifyFailed, match="failed to IDENTIFY"):
            await Consumer("t", "c", nsqd=server.address).start()


async def test_an_nsqd_with_the_highest_limits(start_nsqd: Callable[..., Nsqd], topic: str) -> None:
    nsqd = start_nsqd("--max-msg-timeout=2000000h", f"--max-rdy-count={(1 << 63) - 1}")
    async with Producer(nsqd.tcp_address) as producer:
        await producer.publish(topic, b"x")
    options = {"max_in_flight": 1 << 40, "msg_timeout": "1000000h", "auto_touch": True}
    async with Consumer(topic, "c", nsqd=nsqd.tcp_address, **options) as consumer:  # type: ignore[arg-type]
        message = await consumer.get(WAIT_S)
        assert message is not None
        message.touch()
        message.finish()
    await until(lambda: not nsqd.channel(topic, "c")["in_flight_count"])
    assert nsqd.channel(topic, "c")["requeue_count"] == 0


async def test_an_old_nsqd_that_negotiates_nothing() -> None:
    async with ScriptedNsqd() as server:
        server.identify_answer = OK
        async with Producer(server.address) as producer:
            await producer.publish("t", b"x")
        async with Consumer("t", "c", nsqd=server.address, max_in_flight=5000):
            await until(lambda: server.peer.lines(b"RDY") == [b"RDY 2500"])


@pytest.mark.parametrize("answer", [frame(b"{"), frame(b'{"max_rdy_count": "many"}'), frame(b'{"tls_v1": 1}')])
async def test_an_answer_that_makes_no_sense(answer: bytes) -> None:
    async with ScriptedNsqd() as server:
        server.identify_answer = answer
        async with Producer(server.address) as producer:
            with pytest.raises(IdentifyFailed, match="failed to IDENTIFY"):
                await producer.ping()


@pytest.mark.parametrize(
    "answer", [b"220 mail ready\r\n", b"\x00\x00\x00\x00\x00\x00\x00\x00", b"\x7f\xff\xff\xff1234"]
)
async def test_something_else_answers(answer: bytes) -> None:
    async with ScriptedNsqd() as server:
        server.identify_answer = answer
        async with Producer(server.address) as producer:
            with pytest.raises(NotConnected, match="no nsqd answers here"):
                await producer.ping()


async def test_compressed_garbage_in_the_set_up() -> None:
    async with ScriptedNsqd() as server:
        server.identify_answer = frame(b'{"snappy": true}') + b"this is no snappy stream"
        async with Producer(server.address, snappy=True) as producer:
            with pytest.raises(NotConnected, match=server.address):
                await producer.ping()
        async with Consumer("t", "c", nsqd=server.address, snappy=True, lookupd="127.0.0.1:1") as consumer:
            assert consumer.connections == []


async def test_an_unknown_frame_behind_the_set_up() -> None:
    async with ScriptedNsqd() as server:
        server.identify_answer = frame(b"{}") + frame(b"what is this", 9)
        async with Producer(server.address) as producer:
            future = producer.publish_nowait("t", b"x")
            with pytest.raises(NotConnected):
                await future


async def test_an_upgrade_that_is_not_confirmed() -> None:
    async with ScriptedNsqd() as server:
        server.identify_answer = frame(b'{"deflate": true}') + _deflated(frame(b"NO"))
        async with Producer(server.address, deflate=True) as producer:
            with pytest.raises(IdentifyFailed, match="invalid response from Deflate upgrade"):
                await producer.ping()


def _deflated(data: bytes) -> bytes:
    stream = zlib.compressobj(6, zlib.DEFLATED, -15)
    return stream.compress(data) + stream.flush(zlib.Z_SYNC_FLUSH)


async def test_auth_is_wanted_and_no_secret_is_set() -> None:
    async with ScriptedNsqd(auth_required=True) as server, Producer(server.address) as producer:
        with pytest.raises(AuthFailed, match="Auth Required - set auth_secret"):
            await producer.ping()


async def test_auth_is_refused() -> None:
    async with ScriptedNsqd(auth_required=True) as server, Producer(server.address, auth_secret="s3") as producer:
        server.on_command = lambda peer, line, body: error_frame("E_UNAUTHORIZED AUTH no authorizations found")
        with pytest.raises(AuthFailed, match="Error authenticating E_UNAUTHORIZED AUTH no authorizations found"):
            await producer.ping()
        assert server.peer.commands == [(b"AUTH", b"s3")]


@pytest.mark.parametrize("heartbeat", ["100ms", -1])
async def test_a_server_that_never_answers(heartbeat: str | int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        async with Producer(address, read_timeout="150ms", heartbeat_interval=heartbeat) as producer:
            with pytest.raises(NotConnected, match="read_timeout"):
                async with asyncio.timeout(WAIT_S):
                    await producer.ping()


async def test_an_nsqd_that_accepts_nobody() -> None:
    with socket.socket() as full, contextlib.ExitStack() as opened:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(8):  # the queue of those who wait to be accepted has its end
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        async with Producer("{}:{}".format(*full.getsockname()), dial_timeout="300ms") as producer:
            with pytest.raises(NotConnected, match=r"no connection within 0.3 s \(dial_timeout\)"):
                async with asyncio.timeout(WAIT_S):
                    await producer.ping()


@pytest.mark.parametrize("turns", range(1, 8))
async def test_a_program_that_holds_up_its_loop_does_not_blame_its_nsqd(nsqd: Nsqd, topic: str, turns: int) -> None:
    """It begins to connect, and after so many turns of the loop it computes for longer than that may take."""
    async with Producer("{}:{}".format(*nsqd.tcp), dial_timeout="300ms") as producer:
        publishing = asyncio.create_task(producer.publish(topic, b"x"))
        for _ in range(turns):
            await asyncio.sleep(0)
        time.sleep(0.5)
        await publishing


# -- working ---------------------------------------------------------------------------------------------


async def test_publishes_of_one_turn_leave_in_one_write() -> None:
    async with ScriptedNsqd(deflate=True) as server, Producer(server.address, deflate=True) as producer:
        await producer.ping()
        await until(lambda: server.peer.commands)
        before = server.peer.write_count
        await asyncio.gather(*(producer.publish("t", b"%d" % number) for number in range(1000)))
        assert server.peer.write_count - before == 1
        assert [body for line, body in server.peer.commands if line == b"PUB t"] == [b"%d" % n for n in range(1000)]


async def test_finishes_of_one_turn_leave_in_one_write() -> None:
    ids = [b"%016d" % number for number in range(200)]
    messages = b"".join(message_frame(b"x", message_id) for message_id in ids)

    def answer(_: Peer, line: bytes, __: bytes) -> bytes:
        return messages if line.startswith(b"RDY 200") else OK if line.startswith(b"SUB") else b""

    async with ScriptedNsqd(deflate=True) as server:
        server.on_command = answer
        async with Consumer("t", "c", nsqd=server.address, deflate=True, max_in_flight=200) as consumer:
            held = [await anext(consumer) for _ in ids]
            before = server.peer.write_count
            for message in held:
                message.finish()
            await until(lambda: len(server.peer.lines(b"FIN")) == 200)
            assert server.peer.write_count - before == 1
            assert server.peer.lines(b"FIN") == [b"FIN " + message_id for message_id in ids]


@pytest.mark.parametrize(("attempts", "delay_ms"), [(1, 90_000), (2, 180_000), (9, 810_000), (11, 900_000)])
async def test_the_automatic_delay_grows_with_attempts(attempts: int, delay_ms: int) -> None:
    """The delay is, as in go-nsq, 90 s for each attempt, at most 15 minutes."""
    async with ScriptedNsqd() as server, Consumer("t", "c", nsqd=server.address, max_attempts=0) as consumer:
        await until(lambda: server.peer.lines(b"RDY"))
        server.peer.send(message_frame(b"x", b"a" * 16, attempts))
        (await anext(consumer)).requeue()
        await until(lambda: server.peer.lines(b"REQ") == [b"REQ aaaaaaaaaaaaaaaa %d" % delay_ms])


async def test_a_heartbeat_between_publish_and_answer() -> None:
    async with ScriptedNsqd() as server, Producer(server.address) as producer:
        server.on_command = lambda peer, line, body: HEARTBEAT + OK if line.startswith(b"PUB") else b""
        await producer.publish("t", b"x")
        await until(lambda: server.peer.lines(b"NOP"))
        await producer.publish("t", b"y")


async def test_a_heartbeat_during_the_set_up() -> None:
    async with ScriptedNsqd(auth_required=True) as server, Producer(server.address, auth_secret="s") as producer:
        server.on_command = lambda peer, line, body: HEARTBEAT + OK if line == b"AUTH" else OK
        await producer.publish("t", b"x")
        assert server.peer.lines(b"NOP")


async def test_each_answer_goes_to_its_publish() -> None:
    """An error frame goes to its publish too, from an nsqd that keeps the connection open."""

    def answer(_: Peer, __: bytes, body: bytes) -> bytes:
        return error_frame("E_PUB_FAILED PUB failed disk full") if body == b"bad" else OK

    async with ScriptedNsqd() as server, Producer(server.address) as producer:
        server.on_command = answer
        futures = [producer.publish_nowait("t", body) for body in (b"a", b"bad", b"b", b"bad", b"c")]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [type(None), ServerError, type(None), ServerError, type(None)]
        assert producer.is_connected


async def test_an_answer_that_nobody_waits_for() -> None:
    async with ScriptedNsqd() as server, Producer(server.address) as producer:
        await producer.publish("t", b"x")
        server.peer.send(OK)
        await until(lambda: not producer.is_connected)
        await producer.publish("t", b"y")
        assert len(server.peers) == 2


async def test_an_answer_before_anything_was_asked() -> None:
    async with ScriptedNsqd() as server, Producer(server.address) as producer:
        server.identify_answer = frame(b"{}") + OK
        with contextlib.suppress(NotConnected):
            await producer.ping()
        await until(lambda: not producer.is_connected)


async def test_a_producer_gets_a_message() -> None:
    async with ScriptedNsqd() as server, Producer(server.address) as producer:
        server.on_command = lambda peer, line, body: message_frame(b"for someone else")
        with pytest.raises(NotConnected, match="sent messages to a producer"):
            await producer.publish("t", b"x")


async def test_sizes_are_checked_where_nsqd_tells_its_limit() -> None:
    async with ScriptedNsqd(max_msg_size=10) as server, Producer(server.address) as producer:
        await producer.publish("t", b"x")
        with pytest.raises(MessageTooBig, match="11 bytes"):
            await producer.publish("t", b"x" * 11)
        with pytest.raises(MessageTooBig):
            await producer.multi_publish("t", [b"x", b"x" * 11])
        await producer.publish("t", b"x" * 10)
        assert len(server.peers) == 1


@pytest.mark.parametrize("auth_secret", ["", "secret"])
async def test_nothing_goes_in_clear_to_an_nsqd_without_the_tls_that_was_asked_for(
    start_nsqd: Callable[..., Nsqd], auth_secret: str
) -> None:
    nsqd = start_nsqd()
    async with Producer("{}:{}".format(*nsqd.tcp), tls_v1=True, auth_secret=auth_secret) as producer:
        with pytest.raises(IdentifyFailed, match="offers none"):
            await producer.publish("secrets", b"x")
    assert not nsqd.topic_names()


@pytest.mark.ours
async def test_our_nsqd_tells_its_limits_so_that_nothing_too_big_is_sent(start_nsqd: Callable[..., Nsqd]) -> None:
    nsqd = start_nsqd("--max-msg-size=100", "--max-body-size=1000")
    async with Producer("{}:{}".format(*nsqd.tcp)) as producer:
        await producer.publish("limits", b"x" * 100)
        with pytest.raises(MessageTooBig, match="101 bytes"):
            await producer.publish("limits", b"x" * 101)
        with pytest.raises(MessageTooBig, match="publish fewer at once"):
            await producer.multi_publish("limits", [b"x" * 100] * 11)
        await producer.publish("limits", b"still connected")
    assert nsqd.topic("limits")["message_count"] == 2


async def test_a_frame_larger_than_max_msg_size_ends_the_connection() -> None:
    async with ScriptedNsqd() as server, Producer(server.address, max_msg_size=1000) as producer:
        server.on_command = lambda peer, line, body: frame(bytes(2000))
        with pytest.raises(NotConnected):
            await producer.publish("t", b"x")


async def test_frames_in_any_pieces() -> None:
    """Bytes come one by one, then comes a frame much larger than the receive buffer."""
    big = bytes(range(256)) * 4000

    async def dribble(peer: Peer) -> None:
        for byte in message_frame(b"small", b"a" * 16):
            peer.send(bytes([byte]))
            await asyncio.sleep(0)
        peer.send(message_frame(big, b"b" * 16) + message_frame(b"last", b"c" * 16))

    async with ScriptedNsqd() as server, Consumer("t", "c", nsqd=server.address, max_in_flight=10) as consumer:
        await until(lambda: server.peer.lines(b"RDY"))
        dribbling = asyncio.create_task(dribble(server.peer))
        assert [(await anext(consumer)).body for _ in range(3)] == [b"small", big, b"last"]
        await dribbling


async def test_finishing_while_the_connection_is_lost() -> None:
    """One message is finished in each turn of the loop, some of them between the loss and its being known."""
    messages = b"".join(message_frame(b"x", b"%016d" % number) for number in range(500))
    async with (
        ScriptedNsqd() as server,
        Consumer("t", "c", nsqd=server.address, max_in_flight=500, lookupd_poll_interval="20ms") as consumer,
    ):
        await until(lambda: server.peer.lines(b"RDY"))
        server.peer.send(messages)
        held = [await anext(consumer) for _ in range(500)]
        for message in held:
            message.finish()
            if len(server.peer.lines(b"FIN")) > 10:
                server.peer.reset()
            await asyncio.sleep(0)
        await until(lambda: len(server.peers) == 2)
        assert all(message.is_answered for message in held)


async def test_an_error_that_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with ScriptedNsqd() as server, Consumer("t", "c", nsqd=server.address) as consumer:
        await until(lambda: server.peer.lines(b"RDY"))
        server.peer.send(error_frame("E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight"))
        server.peer.send(message_frame(b"x"))
        (await anext(consumer)).finish()
        assert "E_FIN_FAILED" in caplog.text
        assert len(server.peers) == 1


async def test_silence_longer_than_read_timeout() -> None:
    async with ScriptedNsqd() as server:
        server.on_command = lambda peer, line, body: b""
        async with Producer(server.address, read_timeout="150ms", heartbeat_interval="100ms") as producer:
            with pytest.raises(NotConnected, match=r"nothing came for 0.15 s \(read_timeout\)"):
                await producer.publish("t", b"x")


async def test_silence_without_heartbeats_is_no_fault() -> None:
    def late(peer: Peer, line: bytes, _: bytes) -> bytes:
        if line.startswith(b"PUB"):
            asyncio.get_running_loop().call_later(3.0, peer.send, OK)
        return b""

    async with ScriptedNsqd() as server:
        server.on_command = late
        async with Producer(server.address, read_timeout="2s", heartbeat_interval=-1) as producer:
            await producer.publish("t", b"x")


async def test_nothing_can_be_written() -> None:
    """The peer accepts, sets up, and then stops reading."""
    async with ScriptedNsqd() as server:
        server.on_ready = lambda peer: peer.pause()
        async with Producer(server.address, write_timeout="200ms", outstanding_bytes_max=64 << 20) as producer:
            await producer.ping()
            futures = [producer.publish_nowait("t", bytes(1 << 20)) for _ in range(40)]
            outcomes = await asyncio.gather(*futures, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {NotConnected}
            assert "write_timeout" in str(outcomes[0])


async def test_a_slow_network_is_not_a_dead_one(nsqd: Nsqd, proxy: FaultProxy, topic: str) -> None:
    """It takes several times write_timeout until all is written, but never stands still. The system's buffer is so
    large that for longer than that it takes nothing new.
    """
    proxy.up.chunk_bytes, proxy.up.bytes_per_s = 1 << 16, 1e6
    with StallWatch(nsqd) as watch:
        async with Producer("{}:{}".format(*proxy.address), write_timeout="500ms") as producer:
            publishes = (producer.publish(topic, bytes(1_000_000)) for _ in range(8))
            outcomes = await asyncio.gather(*publishes, return_exceptions=True)
    assert (outcomes, nsqd.topic(topic)["message_count"]) == ([None] * 8, 8) or watch.stood_still


@pytest.mark.parametrize("kind", [Producer, ProducerPool])
async def test_a_slow_nsqd_does_not_hold_up_the_end(proxy: FaultProxy, topic: str, kind: Any) -> None:
    """It would take more than a minute to take all; who publishes has an outcome before that."""
    producer = kind("{}:{}".format(*proxy.address), outstanding_bytes_max=64 << 20)
    await producer.ping()
    proxy.up.chunk_bytes, proxy.up.bytes_per_s = 1 << 14, 3e5
    publishes = [producer.publish_nowait(topic, bytes(1_000_000)) for _ in range(30)]
    async with asyncio.timeout(WAIT_S):
        await producer.close(0.5)
    outcomes = await asyncio.gather(*publishes, return_exceptions=True)
    assert isinstance(outcomes[-1], NsqError)


async def test_the_reasons_name_the_address() -> None:
    async with ScriptedNsqd() as server, Producer(server.address) as producer:
        server.on_command = lambda peer, line, body: peer.reset() or b""  # type: ignore[func-returns-value]
        with pytest.raises(NsqError, match=server.address):
            await producer.publish("t", b"x")


@pytest.mark.parametrize("end", [Peer.close, Peer.reset])
async def test_a_connection_that_ends_during_tls_has_a_reason(end: Callable[[Peer], None]) -> None:
    async with ScriptedNsqd(tls_v1=True) as server, Producer(server.address, tls_v1=True) as producer:
        server.on_ready = end
        with pytest.raises(NotConnected, match=r"TLS failed - \S"):
            await producer.publish("t", b"x")
