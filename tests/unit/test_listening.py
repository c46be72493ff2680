"""Checks listening, and how addresses are shown, which is the same for every program and both protocols."""

import asyncio
import socket
from pathlib import Path

import pytest

from nsquark.base.addresses import UNIX_PORT, Listener, listen, listen_anywhere, show_address, show_peer


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (("127.0.0.1", 4150), "127.0.0.1:4150"),
        (("::ffff:127.0.0.1", 4150, 0, 0), "127.0.0.1:4150"),
        (("::1", 4150, 0, 0), "[::1]:4150"),
        (("::", 4150, 0, 0), "[::]:4150"),
    ],
)
def test_an_ipv4_peer_of_a_listener_for_both_versions_is_shown_as_ipv4(name: tuple[object, ...], shown: str) -> None:
    assert show_address(name) == shown


class Server(asyncio.Protocol):
    """Tells its client how it is shown."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(show_peer(transport).encode())
        transport.close()


async def served(listener: Listener) -> tuple[str, asyncio.AbstractServer]:
    """Returns what a client is told by a server on this listener."""
    server = await listener.serve(Server)
    if listener.port == UNIX_PORT:
        reader, writer = await asyncio.open_unix_connection(listener.shown)
    else:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    told = (await reader.read()).decode()
    own = writer.get_extra_info("sockname")
    assert told == ("@" if listener.port == UNIX_PORT else show_address(own))
    writer.close()
    return told, server


async def test_a_port_is_listened_on_and_its_clients_are_shown_by_address() -> None:
    listener = listen_anywhere("127.0.0.1:0")
    assert listener.shown == f"127.0.0.1:{listener.port}"
    told, server = await served(listener)
    assert told.startswith("127.0.0.1:")
    server.close()


async def test_the_file_of_a_unix_socket_goes_when_it_is_told_to(tmp_path: Path) -> None:
    listener = listen_anywhere(str(tmp_path / "nsqd.sock"))
    _, server = await served(listener)
    server.close()
    listener.remove_file()
    assert not (tmp_path / "nsqd.sock").exists()
    listener.remove_file()  # it may be gone already


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
async def test_a_socket_that_cannot_be_served_is_closed(tmp_path: Path, family: socket.AddressFamily) -> None:
    path = str(tmp_path / "nsqd.sock")
    bound = socket.socket(family, socket.SOCK_DGRAM)  # connections cannot be accepted from it
    bound.bind(path if family == socket.AF_UNIX else ("127.0.0.1", 0))
    listener = Listener(bound, path, UNIX_PORT if family == socket.AF_UNIX else 1)
    with pytest.raises(ValueError, match=r"[Ss]ocket was expected"):
        await listener.serve(Server)
    assert bound.fileno() == -1
    assert not (tmp_path / "nsqd.sock").exists()


def test_only_nsqd_takes_a_path_for_an_address(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give it as host:port"):
        listen(str(tmp_path / "nsqd.sock"))
