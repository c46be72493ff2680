"""Has roles that publish. One process serves its connections in turn: two system calls per reply, no poll."""

import socket
import struct
import time
from collections.abc import Iterator

from benchmarks.upgrades import PLAIN, EncodedConnection, Upgrade, open_connection
from benchmarks.wire import OK, Address, LoadError, Unit, connect, http_pub
from benchmarks.worker import Load
from nsquark.kernel.frames import FrameScanner

REPLY_READ_BYTES = 64 * 1024
_OKS = OK * (REPLY_READ_BYTES // len(OK) + 2)
HTTP_REPLY_BYTES_MAX = 4096


class Publisher:
    """Is a connection with a bounded number of units not yet answered. Every reply is checked to be OK."""

    def __init__(self, address: Address, upgrade: Upgrade = PLAIN) -> None:
        self.sock = open_connection(address, upgrade)
        self._send_encoded = self.sock.send_encoded if isinstance(self.sock, EncodedConnection) else self.sock.sendall
        self.unanswered = 0
        self._rest = b""

    def send(self, unit: Unit, window: int, messages_left: int) -> int:
        """Fills the window, with no unit more than the messages left need; gives the messages sent.

        The unit is encoded as the connection is.
        """
        units = min(window - -(-self.unanswered // unit.replies), -(-messages_left // unit.messages))
        if units <= 0:
            return 0
        self._send_encoded(unit.payload * units if units > 1 else unit.payload)
        self.unanswered += units * unit.replies
        return units * unit.messages

    def read_replies(self) -> None:
        data = self.sock.recv(REPLY_READ_BYTES)
        if data == OK and not self._rest:
            self.unanswered -= 1
            return
        if not data:
            raise LoadError("the broker closed a publisher's connection")
        data = self._rest + data
        whole = len(data) - len(data) % len(OK)
        if data[:whole] != _OKS[:whole]:
            whole = self._read_mixed(data)
        else:
            self.unanswered -= whole // len(OK)
        self._rest = data[whole:]

    def _read_mixed(self, data: bytes) -> int:
        consumed, messages, others = FrameScanner().scan(data, 0, len(data))
        for kind, text in others:
            if text == b"_heartbeat_":
                self.sock.sendall(b"NOP\n")
            elif (kind, text) == (0, b"OK"):
                self.unanswered -= 1
            else:
                raise LoadError(f"publishing was answered with {text!r}")
        if messages:
            raise LoadError("a publisher was sent a message")
        return consumed


def publish(
    address: Address,
    upgrade: Upgrade,
    unit: Unit,
    connections: int,
    window: int,
    seconds: float,
    messages_max: int,
) -> Iterator[Load | None]:
    """Publishes as fast as the replies come, until the time or the count is reached; then all replies are awaited."""
    publishers = [Publisher(address, upgrade) for _ in range(connections)]
    unit = upgrade.encoded(unit)
    yield None
    started = time.monotonic()
    deadline = started + seconds
    sent = 0
    while sent < messages_max and time.monotonic() < deadline:
        for publisher in publishers:
            if publisher.unanswered:
                publisher.read_replies()
            sent += publisher.send(unit, window, messages_max - sent)
    for publisher in publishers:
        while publisher.unanswered:
            publisher.read_replies()
    yield Load(sent, started, time.monotonic())


def publish_http(
    address: Address, topic: str, body: bytes, connections: int, seconds: float, messages_max: int
) -> Iterator[Load | None]:
    """Sends POST /pub on keep-alive connections, one request outstanding on each."""
    request = http_pub(address, topic, body)
    socks = [connect(address) for _ in range(connections)]
    yield None
    started = time.monotonic()
    deadline = started + seconds
    for sock in socks:
        sock.sendall(request)
    done = 0
    while done < messages_max and time.monotonic() < deadline:
        for sock in socks:
            _read_http_ok(sock)
            sock.sendall(request)
        done += connections
    for sock in socks:
        _read_http_ok(sock)
    yield Load(done + connections, started, time.monotonic())


def _read_http_ok(sock: socket.socket) -> None:
    reply = sock.recv(HTTP_REPLY_BYTES_MAX)
    while not reply.endswith(b"\r\n\r\nOK"):
        piece = sock.recv(HTTP_REPLY_BYTES_MAX)
        if not piece or len(reply) > HTTP_REPLY_BYTES_MAX:
            raise LoadError(f"/pub was answered with {reply[:200]!r}")
        reply += piece
    if not reply.startswith(b"HTTP/1.1 200 "):
        raise LoadError(f"/pub was answered with {reply[:200]!r}")


def publish_paced(address: Address, topic: str, body_bytes: int, rate: int, seconds: float) -> Iterator[Load | None]:
    """Publishes at a steady rate; each body starts with its number and the time at which it was sent, in ns."""
    publisher = Publisher(address)
    head = f"PUB {topic}\n".encode() + struct.pack(">i", body_bytes)
    padding = b"x" * (body_bytes - 16)
    total = int(rate * seconds)
    yield None
    started = time.monotonic()
    for number in range(total):
        ahead = started + number / rate - time.monotonic()
        if ahead > 0:
            time.sleep(ahead)
        publisher.sock.sendall(head + struct.pack(">qq", number, time.monotonic_ns()) + padding)
        publisher.unanswered += 1
        if publisher.unanswered >= rate // 100:
            publisher.read_replies()
    while publisher.unanswered:
        publisher.read_replies()
    yield Load(total, started, time.monotonic())
