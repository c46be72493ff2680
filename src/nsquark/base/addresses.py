"""Addresses as NSQ writes them: `host:port`, an IPv6 host in brackets, or the path of a unix socket."""

import contextlib
import errno
import os
import socket
import stat
from typing import Any, Final

BACKLOG = 1024
"""A whole cluster reconnects at once when its nsqlookupd restarts."""
PROBE_TIMEOUT_S: Final = 1.0
"""How long a listener may take to answer whether a unix socket is in use."""


def split_address(address: str) -> tuple[str, int]:
    """The parts of `host:port`; ValueError says what is wrong with it."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"address {address}: give it as host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"address {address}: put the IPv6 host in brackets")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def show_address(name: tuple[Any, ...]) -> str:
    """Of a socket's own or remote name. An IPv4 peer of a dual-stack listener is shown as IPv4."""
    host = str(name[0])
    return join_address(host.removeprefix("::ffff:") if "." in host else host, int(name[1]))


def host_to_bind(host: str) -> str:
    """Every address of either IP version means those of both, as for NSQ; empty says so."""
    return "" if host in ("0.0.0.0", "::") else host


def listen(address: str) -> socket.socket:
    host, port = split_address(address)
    host = host_to_bind(host)
    if not host:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=dual)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, name = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return socket.create_server((str(name[0]), port), family=family, backlog=BACKLOG)


def is_unix_address(address: str) -> bool:
    """As for NSQ all that has not the form `host:port` is a path, whether or not host and port make sense."""
    host, colon, port = address.rpartition(":")
    if host.startswith("["):
        return not (colon and host.endswith("]"))
    return not colon or ":" in host or "[" in host or "]" in port


def listen_unix(path: str) -> socket.socket:
    """A listening socket at `path`. A socket file nobody listens on is replaced; any other file is left alone."""
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


def remove_socket(path: str) -> None:
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)


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
