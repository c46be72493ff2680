"""Makes connections by an IDENTIFY that switches on TLS or compression."""

import socket
import ssl
import struct
import subprocess
import zlib
from pathlib import Path

from harness.wire import Wire

SNAPPY_STREAM_START = b"\xff\x06\x00\x00sNaPpY"
_CRC32C_POLYNOMIAL = 0x82F63B78

OPENSSL_NEW = ["openssl", "req", "-x509", "-nodes", "-days", "2", "-newkey"]
NEW_EC_KEY = ["ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
NEW_RSA_KEY = ["rsa:2048"]

Certificate = tuple[Path, Path]
"""Names the files of a certificate and of its key."""


def use_tls(wire: Wire, context: ssl.SSLContext | None = None) -> None:
    wire.socket.settimeout(wire.timeout_s)
    wire.socket = (context or trusting_anything()).wrap_socket(wire.socket, server_hostname="localhost")


class _Coded:
    """Is a socket whose bytes are coded on the way; it has only what Wire uses.

    The first coded bytes may have come together with the last plain frame: they are `early`.
    """

    def __init__(self, inner: socket.socket, early: bytes):
        self.inner = inner
        self._early = early
        self.settimeout = inner.settimeout
        self.close = inner.close
        self.shutdown = inner.shutdown

    def sendall(self, data: bytes) -> None:
        self.inner.sendall(self.encode(data))

    def recv(self, size: int) -> bytes:
        while True:
            data, self._early = self._early or self.inner.recv(size), b""
            if not data:
                return b""
            plain = self.decode(data)
            if plain:
                return plain

    def encode(self, data: bytes) -> bytes:
        raise NotImplementedError

    def decode(self, data: bytes) -> bytes:
        raise NotImplementedError


class _Deflated(_Coded):
    def __init__(self, inner: socket.socket, early: bytes):
        super().__init__(inner, early)
        self._deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
        self._inflate = zlib.decompressobj(-15)

    def encode(self, data: bytes) -> bytes:
        return self._deflate.compress(data) + self._deflate.flush(zlib.Z_SYNC_FLUSH)

    def decode(self, data: bytes) -> bytes:
        return self._inflate.decompress(data)


class _Snappy(_Coded):
    """Speaks snappy's framing, and sends uncompressed chunks only; `received` keeps what came, as it came."""

    CHUNK_BYTES = 65536

    def __init__(self, inner: socket.socket, early: bytes):
        super().__init__(inner, early)
        self._pending = b""
        self._started = False
        self.received = b""

    def encode(self, data: bytes) -> bytes:
        chunks = [b"" if self._started else SNAPPY_STREAM_START]
        self._started = True
        for start in range(0, len(data), self.CHUNK_BYTES):
            piece = data[start : start + self.CHUNK_BYTES]
            chunks.append(b"\x01" + struct.pack("<I", len(piece) + 4)[:3])
            chunks.append(struct.pack("<I", masked_crc32c(piece)) + piece)
        return b"".join(chunks)

    def decode(self, data: bytes) -> bytes:
        self.received += data
        self._pending += data
        plain = b""
        while len(self._pending) >= 4:
            kind, size = self._pending[0], int.from_bytes(self._pending[1:4], "little")
            if len(self._pending) < 4 + size:
                break
            content, self._pending = self._pending[4 : 4 + size], self._pending[4 + size :]
            plain += self._chunk(kind, content)
        return plain

    @staticmethod
    def _chunk(kind: int, content: bytes) -> bytes:
        if kind == 0xFF:
            assert content == SNAPPY_STREAM_START[4:]
            return b""
        assert kind in (0, 1), f"chunk type {kind}"
        piece = content[4:] if kind == 1 else _snappy_decompress(content[4:])
        assert struct.unpack_from("<I", content)[0] == masked_crc32c(piece)
        return piece


def use_deflate(wire: Wire) -> None:
    wire.socket = _Deflated(wire.socket, wire.take_pending())  # type: ignore[assignment]


def use_snappy(wire: Wire) -> None:
    wire.socket = _Snappy(wire.socket, wire.take_pending())  # type: ignore[assignment]


def _crc32c_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_CRC32C_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_CRC32C = _crc32c_table()


def masked_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC32C[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(data: bytes) -> tuple[int, int]:
    value = position = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << 7 * position
        position += 1
        if byte < 0x80:
            return value, position


def _snappy_decompress(data: bytes) -> bytes:
    size, position = _varint(data)
    plain = bytearray()
    while position < len(data):
        tag = data[position]
        position += 1
        if tag & 3 == 0:
            length = tag >> 2
            if length >= 60:
                extra = length - 59
                length = int.from_bytes(data[position : position + extra], "little")
                position += extra
            plain += data[position : position + length + 1]
            position += length + 1
            continue
        if tag & 3 == 1:
            length, offset = (tag >> 2 & 7) + 4, (tag >> 5) << 8 | data[position]
            position += 1
        else:
            width = 2 if tag & 3 == 2 else 4
            length, offset = (tag >> 2) + 1, int.from_bytes(data[position : position + width], "little")
            position += width
        for _ in range(length):
            plain.append(plain[-offset])
    assert len(plain) == size
    return bytes(plain)


def make_certificate(
    directory: Path, common_name: str = "localhost", signed_by: Certificate | None = None, rsa: bool = False
) -> Certificate:
    """Makes a certificate, self-signed unless told otherwise; an RSA key is for old ciphers only: making one can take
    seconds.
    """
    certificate, key = directory / f"{common_name}.cert.pem", directory / f"{common_name}.key.pem"
    command = [*OPENSSL_NEW, *(NEW_RSA_KEY if rsa else NEW_EC_KEY)]
    command += ["-subj", f"/CN={common_name}", "-keyout", str(key), "-out", str(certificate)]
    if common_name == "localhost":
        command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    if signed_by is not None:
        command += ["-CA", str(signed_by[0]), "-CAkey", str(signed_by[1])]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def trusting_anything(certificate: Certificate | None = None) -> ssl.SSLContext:
    """Makes a client's context that accepts any server, and shows this certificate."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if certificate is not None:
        context.load_cert_chain(*certificate)
    return context
