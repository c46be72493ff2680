"""Makes what IDENTIFY may put between a client and the broker: TLS, snappy, deflate.

All that a publisher sends is compressed once, before the load starts: nothing that is compressed here refers to what
went before on the connection, so the same bytes may be sent again and again.
"""

import contextlib
import random
import shutil
import socket
import ssl
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.wire import Address, LoadError, Unit, connect_v2, expect_ok
from nsquark.wire.compression import (
    DEFLATE_LEVEL_DEFAULT,
    RAW_DEFLATE_WBITS,
    CorruptStream,
    Decoder,
    DeflateDecoder,
    SnappyDecoder,
    SnappyEncoder,
)

READ_BYTES = 64 * 1024
CERTIFICATE_SECONDS_MAX = 30
EVENT_BYTES_MIN = 120
_WORDS = ("red", "green", "blue", "small", "large", "shoes", "shirt", "summer", "winter", "sale", "new", "cotton")


class Incomplete(Exception):
    """Says that what has come so far cannot be decoded yet."""


class Connection(Protocol):
    """Is a socket, or what acts as one."""

    def fileno(self) -> int: ...

    def sendall(self, data: bytes | memoryview, /) -> None: ...

    def recv(self, size: int, /) -> bytes: ...

    def recv_into(self, view: memoryview, /) -> int: ...


@dataclass(frozen=True)
class Upgrade:
    tls: bool = False
    compression: str = ""

    def features(self) -> dict[str, bool]:
        names = (["tls_v1"] if self.tls else []) + ([self.compression] if self.compression else [])
        return dict.fromkeys(names, True)

    def encoded(self, unit: Unit) -> Unit:
        """Returns the unit as it is sent with `send_encoded`."""
        return replace(unit, payload=_ENCODE[self.compression](unit.payload)) if self.compression else unit


PLAIN = Upgrade()


def _snappy(data: bytes | memoryview) -> bytes:
    # Starts with the stream's start, which may stand before any chunk.
    return SnappyEncoder().encode(data)


def _deflate(data: bytes | memoryview) -> bytes:
    deflate = zlib.compressobj(DEFLATE_LEVEL_DEFAULT, zlib.DEFLATED, RAW_DEFLATE_WBITS)
    return deflate.compress(data) + deflate.flush(zlib.Z_SYNC_FLUSH)


_ENCODE: dict[str, Callable[[bytes | memoryview], bytes]] = {"snappy": _snappy, "deflate": _deflate}
_DECODERS: dict[str, Callable[[], Decoder]] = {"snappy": SnappyDecoder, "deflate": DeflateDecoder}


class EncodedConnection:
    """Is a connection whose bytes are compressed in both directions."""

    def __init__(self, inner: Connection, compression: str) -> None:
        self._inner = inner
        self._encode = _ENCODE[compression]
        self._decoder = _DECODERS[compression]()
        self._plain = b""
        self.send_encoded = inner.sendall

    def fileno(self) -> int:
        return self._inner.fileno()

    def sendall(self, data: bytes | memoryview, /) -> None:
        self._inner.sendall(self._encode(data))

    def recv(self, size: int, /) -> bytes:
        """Waits for at least one byte, unless the broker has closed the connection."""
        while True:
            with contextlib.suppress(Incomplete):
                return self._recv(size)

    def recv_into(self, view: memoryview, /) -> int:
        """Does not wait for the rest if what has come is only a part of something encoded."""
        plain = self._recv(len(view))
        view[: len(plain)] = plain
        return len(plain)

    def _recv(self, size: int) -> bytes:
        if not self._plain:
            data = self._inner.recv(READ_BYTES)
            if not data:
                return b""
            self._decoder.feed(data)
            self._plain = self._decode(size)
            if not self._plain:
                raise Incomplete
        plain = self._plain
        self._plain = plain[size:] or self._decode(READ_BYTES)
        return plain[:size]

    def pending(self) -> int:
        """Returns, as a TLS socket does, how much can be read although the system has nothing more for us."""
        return len(self._plain) or pending(self._inner)

    def _decode(self, size: int) -> bytes:
        try:
            return self._decoder.read(size)
        except CorruptStream as error:
            raise LoadError(f"the broker sent what cannot be decoded: {error}") from None


def pending(connection: Connection) -> int:
    return connection.pending() if isinstance(connection, EncodedConnection | ssl.SSLSocket) else 0


def open_connection(address: Address, upgrade: Upgrade) -> Connection:
    """Connects a client that has said IDENTIFY and got all that it asked for."""
    sock = connect_v2(address, upgrade.features())
    connection: Connection = _secured(sock) if upgrade.tls else sock
    if upgrade.tls:
        expect_ok(connection)
    if upgrade.compression:
        connection = EncodedConnection(connection, upgrade.compression)
        expect_ok(connection)
    return connection


def open_subscription(address: Address, upgrade: Upgrade, topic: str, channel: str) -> Connection:
    connection = open_connection(address, upgrade)
    connection.sendall(f"SUB {topic} {channel}\n".encode())
    expect_ok(connection)
    return connection


def _secured(sock: socket.socket) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(sock)


def can_make_certificates() -> bool:
    return shutil.which("openssl") is not None


def make_certificate(directory: Path) -> tuple[str, ...]:
    """Makes a certificate for this run; returns the flags with which an nsqd uses it."""
    certificate, key = directory / "cert.pem", directory / "key.pem"
    command: list[Any] = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-out", certificate, "-keyout", key]
    made = subprocess.run(command, capture_output=True, text=True, timeout=CERTIFICATE_SECONDS_MAX, check=False)
    if made.returncode:
        raise LoadError(f"openssl made no certificate: {made.stderr.strip()}")
    return f"--tls-cert={certificate}", f"--tls-key={key}"


def events(count: int, body_bytes: int) -> list[bytes]:
    """Makes bodies like those of real events, with the same names and other values: compressors are made for them."""
    if body_bytes < EVENT_BYTES_MIN:
        raise ValueError(f"an event has at least {EVENT_BYTES_MIN} bytes")
    values = random.Random(1)
    return [_event(values, number, body_bytes) for number in range(count)]


def _event(values: random.Random, number: int, body_bytes: int) -> bytes:
    action = values.choice(("view", "click", "purchase", "search"))
    head = f'{{"id":{number:06d},"action":"{action}","user":"{values.getrandbits(64):016x}","price":'
    head += f'{values.random() * 100:.2f},"currency":"EUR","text":"'
    text = " ".join(values.choices(_WORDS, k=body_bytes // 4))
    return (head + text)[: body_bytes - 2].encode() + b'"}'
