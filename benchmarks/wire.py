"""Makes what the load generators send, built once, and connections that cannot hang."""

import json
import socket
import struct
from dataclasses import dataclass
from typing import Protocol

MAGIC_V2 = b"  V2"
OK = struct.pack(">ii", 6, 0) + b"OK"
RESPONSE, MESSAGE = 0, 2

SOCKET_TIMEOUT_SECONDS = 20
"""A broker that is silent for longer is an error, not a slow one."""

Address = tuple[str, int]


class Readable(Protocol):
    def recv(self, size: int, /) -> bytes: ...


class LoadError(Exception):
    """Says that the broker answered something that makes a figure worthless."""


@dataclass(frozen=True)
class Unit:
    """Is the smallest thing a publisher sends at once."""

    payload: bytes
    replies: int
    messages: int


def _sized(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def pub(topic: str, body: bytes) -> Unit:
    return Unit(f"PUB {topic}\n".encode() + _sized(body), 1, 1)


def pipelined_pub(topic: str, body: bytes, count: int) -> Unit:
    return Unit(pub(topic, body).payload * count, count, count)


def mpub(topic: str, bodies: list[bytes]) -> Unit:
    batch = struct.pack(">i", len(bodies)) + b"".join(map(_sized, bodies))
    return Unit(f"MPUB {topic}\n".encode() + _sized(batch), 1, len(bodies))


def http_pub(address: Address, topic: str, body: bytes) -> bytes:
    host = f"{address[0]}:{address[1]}"
    lines = (f"POST /pub?topic={topic} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}", "", "")
    return "\r\n".join(lines).encode() + body


def connect(address: Address) -> socket.socket:
    """Connects a blocking socket with the kernel's own timeouts: Python's would cost a poll() for each call."""
    sock = socket.create_connection(address, timeout=SOCKET_TIMEOUT_SECONDS)
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    limit = struct.pack("ll", SOCKET_TIMEOUT_SECONDS, 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return sock


def connect_v2(address: Address, features: dict[str, bool]) -> socket.socket:
    """Connects a client as it comes: with the magic and an IDENTIFY that leaves all but some features at their
    defaults.
    """
    sock = connect(address)
    identity = json.dumps({"client_id": "bench", "feature_negotiation": True, **features}).encode()
    sock.sendall(MAGIC_V2 + b"IDENTIFY\n" + _sized(identity))
    kind, data = read_frame(sock)
    if kind != RESPONSE or not data.startswith(b"{"):
        raise LoadError(f"IDENTIFY was answered with {data!r}")
    granted = json.loads(data)
    refused = [name for name in features if not granted.get(name)]
    if refused:
        raise LoadError(f"the broker does not offer {', '.join(refused)}")
    return sock


def expect_ok(sock: Readable) -> None:
    kind, data = read_frame(sock)
    if (kind, data) != (RESPONSE, b"OK"):
        raise LoadError(f"expected OK, got {data!r}")


def read_frame(sock: Readable) -> tuple[int, bytes]:
    """Reads one frame, for the conversation before the load starts."""
    size, kind = struct.unpack(">ii", _read_exactly(sock, 8))
    return kind, _read_exactly(sock, size - 4)


def _read_exactly(sock: Readable, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise LoadError("the broker closed the connection")
        data += piece
    return bytes(data)
