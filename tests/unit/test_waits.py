"""Checks what a session waits for: it reads nothing meanwhile, and goes on once when the last reason has ended."""

import asyncio
import socket

from nsquark.broker.tcp.waits import FOR_AUTH, FOR_COMMIT, Waits


class Peer(asyncio.Protocol):
    """Counts how often it may go on."""

    def __init__(self) -> None:
        self.went_on = 0

    def go_on(self) -> None:
        self.went_on += 1


async def waiting() -> tuple[Waits, Peer, asyncio.Transport, socket.socket]:
    """Yields a transport over a real pair of sockets, and the other end of it."""
    near, far = socket.socketpair()
    loop, peer = asyncio.get_running_loop(), Peer()
    transport, _ = await loop.create_connection(lambda: peer, sock=near)
    waits = Waits(loop, peer.go_on)
    waits.transport = transport
    return waits, peer, transport, far


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_it_goes_on_when_the_last_reason_has_ended() -> None:
    async def check() -> None:
        waits, peer, transport, far = await waiting()
        waits.begin(FOR_AUTH)
        waits.begin(FOR_COMMIT)
        assert not transport.is_reading()
        waits.end(FOR_AUTH)
        await turns()
        assert peer.went_on == 0
        waits.end(FOR_COMMIT)
        assert peer.went_on == 0  # others have their turn first
        await turns()
        assert (peer.went_on, waits.reasons) == (1, 0)
        waits.resume_reading()
        assert transport.is_reading()
        transport.abort()
        far.close()

    asyncio.run(check())


def test_a_reason_that_comes_meanwhile_is_waited_for_too() -> None:
    async def check() -> None:
        waits, peer, transport, far = await waiting()
        waits.give_way()
        waits.give_way()
        waits.begin(FOR_COMMIT)
        await turns()
        assert peer.went_on == 0
        waits.resume_reading()
        assert not transport.is_reading()
        waits.end(FOR_AUTH)  # not waited for
        waits.end(FOR_COMMIT)
        await turns()
        assert peer.went_on == 1
        transport.abort()
        far.close()

    asyncio.run(check())
