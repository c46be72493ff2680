"""Reads, shows and listens on addresses as NSQ writes them: `host:port`, with an IPv6 host in brackets, or a unix
socket's path.

Listening is here too, so that every program does it in one way and shows the same address for it.
"""

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Callable
from typing import Any, Final, NamedTuple

PORT_MAX: Final = 65535
BACKLOG: Final = 1024
"""This many connections may wait to be accepted: a whole cluster reconnects at once when its nsqlookupd restarts."""
TLS_HANDSHAKE_S_MAX: Final = 10.0
UNIX_PORT: Final = -1
"""Stands for the port of a unix socket, as in NSQ."""
UNIX_PEER: Final = "@"
"""Stands for a client of a unix socket, which has no address of its own."""
PROBE_TIMEOUT_S: Final = 1.0
"""A process that listens on a unix socket has this long to accept the connection that probes it."""


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port`; a ValueError says what is wrong with it."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > PORT_MAX:
        raise ValueError(f"address {address}: give it as host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"address {address}: put the IPv6 host in brackets")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Writes `host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def show_host(host: str) -> str:
    """Shows the host of a socket's name; an IPv4 peer of a dual-stack listener is shown as IPv4."""
    return host.removeprefix("::ffff:") if "." in host else host


def show_address(name: tuple[Any, ...]) -> str:
    """Shows a socket's own or remote name as `host:port`."""
    return join_address(show_host(str(name[0])), int(name[1]))


def show_peer(transport: asyncio.BaseTransport) -> str:
    """Shows who is at the other end of a connection."""
    peer = transport.get_extra_info("peername")
    return show_address(peer) if isinstance(peer, tuple) else UNIX_PEER


class Listener(NamedTuple):
    """Has a socket that listens, the address that people are shown for it, and its port."""

    socket: socket.socket
    shown: str
    port: int

    async def serve(
        self,
        new_protocol: Callable[[], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None = None,
        *,
        start: bool = True,
    ) -> asyncio.AbstractServer:
        """Lets the running event loop accept connections, at once or when the server is told to start; if that fails,
        the socket is closed.
        """
        loop = asyncio.get_running_loop()
        create = loop.create_unix_server if self.port == UNIX_PORT else loop.create_server
        try:
            return await create(
                new_protocol,
                sock=self.socket,
                ssl=tls,
                backlog=BACKLOG,
                ssl_handshake_timeout=TLS_HANDSHAKE_S_MAX if tls is not None else None,
                start_serving=start,
            )
        except BaseException:
            self.socket.close()
            self.remove_file()
            raise

    def remove_file(self) -> None:
        """Removes the file of a unix socket, when nobody is to connect any more."""
        if self.port == UNIX_PORT:
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.lstat(self.shown).st_mode):
                    os.unlink(self.shown)


def listen(address: str) -> Listener:
    """Listens on `host:port`; of a name's several addresses on the first, IPv4 before IPv6, as in NSQ."""
    host, port = split_address(address)
    if host in ("", "0.0.0.0", "::"):  # every address of either IP version means those of both, as for NSQ
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        bound = socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=dual)
    else:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, name = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        bound = socket.create_server((str(name[0]), port), family=family, backlog=BACKLOG)
    name = bound.getsockname()
    return Listener(bound, show_address(name), int(name[1]))


def listen_anywhere(address: str) -> Listener:
    """Listens on `host:port`, or at the path of a unix socket."""
    return Listener(_listen_unix(address), address, UNIX_PORT) if is_unix_address(address) else listen(address)


def is_unix_address(address: str) -> bool:
    """Tells whether an address is a path. As in NSQ, everything that does not have the form `host:port` is one, whether
    or not host and port make sense.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("["):
        return not (colon and host.endswith("]"))
    return not colon or ":" in host or "[" in host or "]" in port


def _listen_unix(path: str) -> socket.socket:
    """Returns a socket that listens at `path`. A socket file nobody listens on is replaced, any other file stays."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            listener.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _is_abandoned(path):
                raise
            os.unlink(path)
            listener.bind(path)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _is_abandoned(path: str) -> bool:
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
