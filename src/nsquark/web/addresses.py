"""Addresses as NSQ writes them: `host:port`, an IPv6 host in brackets."""

import socket
from typing import Any

BACKLOG = 1024
"""A whole cluster reconnects at once when its nsqlookupd restarts."""


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
