"""Checks a pool with nsqds that stop answering: what they owe goes elsewhere, and they are used again once they answer.

Each nsqd here is one that answers as the test tells it to. The retry deadline is so long that an nsqd is taken for
dead only long after it fell silent: where it still is silent when a publish returns, another nsqd was asked.
"""

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator, Callable

import pytest

from client.scripted import OK, Peer, ScriptedNsqd, error_frame, say_ok
from harness import FaultProxy, until
from nsquark.client.errors import NotConnected, ServerError
from nsquark.client.pool import ProducerPool

WAIT_S = 30.0
SILENCE_S = 1.5
"""Is longer than a pool waits for an nsqd before it asks another."""


@pytest.fixture
async def trio() -> AsyncIterator[list[ScriptedNsqd]]:
    async with ScriptedNsqd() as one, ScriptedNsqd() as two, ScriptedNsqd() as three:
        yield [one, two, three]


def _pool(*servers: ScriptedNsqd, retry_deadline: float = 60.0) -> ProducerPool:
    return ProducerPool([server.address for server in servers], retry_deadline=retry_deadline)


def _states(pool: ProducerPool) -> list[str]:
    return [status.state for status in pool.nsqds()]


def _say_nothing(peer: Peer, line: bytes, body: bytes) -> bytes:
    return b""


def _refuse(peer: Peer, line: bytes, body: bytes) -> bytes:
    """Answers as nsqd does to a command that is wrong: with an error, and then it closes the connection."""
    if line.startswith(b"PUB"):
        peer.send(error_frame("E_INVALID no"))
        peer.close()
    return b""


def _published(*servers: ScriptedNsqd) -> int:
    return sum(len(peer.lines(b"PUB")) for server in servers for peer in server.peers)


async def _be_refused(pool: ProducerPool, server: ScriptedNsqd, caplog: pytest.LogCaptureFixture) -> None:
    """Publishes what is refused, and waits until the connection is closed for it."""
    server.on_command = _refuse
    with pytest.raises(ServerError):
        await pool.publish("wrong", b"x")
    await until(lambda: "connection lost" in caplog.text)


# -- life after silence ----------------------------------------------------------------------------------


async def test_an_nsqd_that_ends_its_silence_with_a_refusal_is_used_again(trio: list[ScriptedNsqd]) -> None:
    server = trio[0]
    async with _pool(server) as pool, asyncio.timeout(WAIT_S):
        server.on_command = _say_nothing
        refused = pool.publish_nowait("wrong", b"x")
        await until(lambda: _states(pool) == ["silent"])
        server.on_command = say_ok
        server.peer.send(error_frame("E_INVALID no"))
        with pytest.raises(ServerError):
            await refused
        await pool.publish("fine", b"x")
        assert _states(pool) == ["up"]
        assert _published(server) == 2, "what was refused is not tried again"


async def test_an_nsqd_that_ends_its_silence_with_an_answer_is_used_again(trio: list[ScriptedNsqd]) -> None:
    server = trio[0]
    async with _pool(server) as pool, asyncio.timeout(WAIT_S):
        server.on_command = _say_nothing
        first, second = pool.publish_nowait("t", b"x"), pool.publish_nowait("t", b"x")
        await until(lambda: _states(pool) == ["silent"])
        server.on_command = say_ok
        server.peer.send(OK)
        await first
        assert _states(pool) == ["up"]
        server.peer.send(OK)
        await second
        await pool.publish("t", b"x")
        assert _published(server) == 3, "what it owed was asked of it once"


async def test_an_nsqd_that_stays_silent_gets_a_new_connection(trio: list[ScriptedNsqd]) -> None:
    """A network may have forgotten the old one, which would be silent until its timeout."""
    only = trio[0]
    async with _pool(only, retry_deadline=9) as pool:
        await pool.publish("t", b"x")
        only.on_command = _say_nothing
        publish = pool.publish_nowait("t", b"y")
        await until(lambda: "down" in _states(pool), WAIT_S)
        only.on_command = say_ok
        await publish
        assert len(only.peers) > 1 and _states(pool) == ["up"]


async def test_silence_is_told_as_such(trio: list[ScriptedNsqd], caplog: pytest.LogCaptureFixture) -> None:
    """It was the pool that closed the connection, and what for is what a reader of the log asks."""
    (silent, *_), reason = trio, r"no answer for \d+\.\d s; it may or may not have the message"
    silent.on_command = _say_nothing
    async with _pool(silent, retry_deadline=1) as pool:
        with pytest.raises(NotConnected, match=reason):
            await pool.publish("orders", b"x")
    assert re.search(f"nsqd {silent.address} is down: {silent.address}: {reason}", caplog.text)


async def test_an_nsqd_that_is_lost_while_it_is_silent_is_used_again(
    trio: list[ScriptedNsqd], caplog: pytest.LogCaptureFixture
) -> None:
    server = trio[0]
    async with _pool(server) as pool, asyncio.timeout(WAIT_S):
        await _be_refused(pool, server, caplog)
        server.on_command = _say_nothing
        publishing = pool.publish_nowait("fine", b"x")
        await until(lambda: _states(pool) == ["silent"])
        server.on_command = say_ok
        server.peer.reset()
        await publishing
        assert _states(pool) == ["up"]


async def test_a_refusal_excuses_the_loss_of_its_own_connection_only(
    trio: list[ScriptedNsqd], caplog: pytest.LogCaptureFixture
) -> None:
    server = trio[0]
    async with _pool(server) as pool, asyncio.timeout(WAIT_S):
        await _be_refused(pool, server, caplog)
        assert "is down" not in caplog.text
        server.on_command = _say_nothing
        publishing = pool.publish_nowait("fine", b"x")
        await until(lambda: _published(server) == 2)
        server.on_command = say_ok
        server.peer.reset()
        await publishing
        assert "is down" in caplog.text


# -- what a silent nsqd owes -----------------------------------------------------------------------------


def _answer_after(seconds: float) -> Callable[[Peer, bytes, bytes], bytes]:
    """Makes an nsqd that answers one publish at a time, each so long after the one before."""
    free_s = 0.0

    def answer(peer: Peer, line: bytes, body: bytes) -> bytes:
        nonlocal free_s
        if line.startswith(b"PUB"):
            loop = asyncio.get_running_loop()
            free_s = max(free_s, loop.time()) + seconds
            loop.call_at(free_s, peer.send, OK)
        return b""

    return answer


@pytest.mark.parametrize(
    ("seconds", "count", "retry_deadline"),
    [pytest.param(0.05, 40, 30.0, id="after a queue"), pytest.param(0.6, 1, 12.0, id="after a slow answer")],
)
async def test_others_are_asked_soon(
    trio: list[ScriptedNsqd], seconds: float, count: int, retry_deadline: float
) -> None:
    silent, other, _ = trio
    silent.on_command = _answer_after(seconds)
    async with _pool(silent, other, retry_deadline=retry_deadline) as pool, asyncio.timeout(WAIT_S):
        await pool.ping()
        await asyncio.gather(*(pool.publish_nowait("t", b"x") for _ in range(2 * count)))
        silent.on_command = _say_nothing
        await asyncio.gather(*(pool.publish_nowait("t", b"x") for _ in range(4)))
        assert _states(pool) == ["silent", "up"]


async def test_what_a_silent_nsqd_owes_goes_to_one_that_comes_back(trio: list[ScriptedNsqd]) -> None:
    silent, other, _ = trio
    host, port = other.address.split(":")
    with FaultProxy((host, int(port))) as proxy:
        addresses = [silent.address, "{}:{}".format(*proxy.address)]
        async with ProducerPool(addresses, retry_deadline=60) as pool, asyncio.timeout(WAIT_S):
            await pool.ping()
            silent.on_command = _say_nothing
            proxy.refusing = True
            proxy.cut()
            futures = [pool.publish_nowait("t", b"x") for _ in range(4)]
            await until(lambda: _states(pool) == ["silent", "down"])
            proxy.heal()
            await asyncio.gather(*futures)
            assert _states(pool) == ["silent", "up"]


async def test_what_a_silent_nsqd_owes_goes_to_a_third_if_the_second_fails(trio: list[ScriptedNsqd]) -> None:
    """One nsqd at a time is asked instead: three have the message at the end, of whom one is silent and one lost."""
    is_cut = False

    def cut_once(peer: Peer, line: bytes, body: bytes) -> bytes:
        nonlocal is_cut
        if is_cut or not line.startswith(b"PUB"):
            return say_ok(peer, line, body)
        is_cut = True
        peer.reset()
        return b""

    silent, *others = trio
    async with _pool(*trio) as pool, asyncio.timeout(WAIT_S):
        await pool.ping()
        silent.on_command = _say_nothing
        futures = [pool.publish_nowait("t", b"x") for _ in range(3)]
        await until(lambda: sum(future.done() for future in futures) == 2)
        for server in others:
            server.on_command = cut_once
        await asyncio.gather(*futures)
        assert is_cut and _states(pool)[0] == "silent"
        assert _published(*trio) == 5


async def test_a_program_that_holds_up_its_loop_does_not_blame_its_nsqds(
    trio: list[ScriptedNsqd], caplog: pytest.LogCaptureFixture
) -> None:
    async with _pool(*trio) as pool:
        await pool.ping()
        publishing = pool.publish_nowait("t", b"x")
        time.sleep(SILENCE_S)
        await publishing
    assert _published(*trio) == 1
    assert "answers nothing" not in caplog.text


async def test_a_short_deadline_gives_up_no_nsqd_that_answers_within_it(trio: list[ScriptedNsqd]) -> None:
    """It answers after a third of the deadline: long enough to ask another, if there were one."""
    server = trio[0]
    server.on_command = _answer_after(3.0)
    async with _pool(server, retry_deadline=8) as pool, asyncio.timeout(WAIT_S):
        await pool.ping()
        await pool.publish("t", b"x")
        assert _published(server) == 1


async def test_with_a_short_deadline_others_are_asked_sooner(trio: list[ScriptedNsqd]) -> None:
    silent, other, _ = trio
    async with _pool(silent, other, retry_deadline=2.4) as pool, asyncio.timeout(WAIT_S):
        await pool.ping()
        silent.on_command = _say_nothing
        await asyncio.gather(*(pool.publish_nowait("t", b"x") for _ in range(4)))


async def test_a_silent_nsqd_does_not_hold_up_a_ping(trio: list[ScriptedNsqd]) -> None:
    """It takes the connection and answers nothing, as one that is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = [trio[0].address, "{}:{}".format(*silent.getsockname())]
        async with ProducerPool(addresses) as pool, asyncio.timeout(WAIT_S):
            await pool.ping()
        async with ProducerPool(addresses, copies=2) as pool, asyncio.timeout(WAIT_S):
            with pytest.raises(NotConnected, match=r"2 nsqds needed.*not connected within 5 s"):
                await pool.ping()
