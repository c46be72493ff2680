"""Checks that a compressed connection leaves others their turn while much is encoded for it."""

import asyncio
import contextlib
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

from harness import body_of, until
from nsquark.broker.tcp.session import Session
from nsquark.broker.topic import Topic
from unit.nsqd_parts import RawTransport, command, opened, publish

BODY = b"\0" * 40_000_000
OK_FRAME_BYTES = 10
MESSAGE_FRAME_BYTES = 34 + len(BODY)


class Socket(RawTransport):
    """Is a socket whose protocol may be replaced by that of an upgrade; it takes whatever is written."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: asyncio.BaseProtocol | None = None

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def deliver(self, data: bytes) -> None:
        assert isinstance(self.protocol, asyncio.BufferedProtocol)
        memoryview(self.protocol.get_buffer(-1))[: len(data)] = data
        self.protocol.buffer_updated(len(data))


class DeflateClient:
    """Is a consumer whose connection is compressed; `plain` is what it got so far."""

    def __init__(self, session: Session) -> None:
        self.socket = Socket()
        session.connection_made(self.socket)
        identity = json.dumps({"feature_negotiation": True, "deflate": True}).encode()
        command(session, b"  V2IDENTIFY\n" + body_of(identity))
        answer_end = 4 + int.from_bytes(self.socket.received[:4])
        self._inflate = zlib.decompressobj(-15)
        self.plain = self._inflate.decompress(self.socket.received[answer_end:])
        self.socket.received = b""
        deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
        self.socket.deliver(deflate.compress(b"SUB t ch\nRDY 9\n") + deflate.flush(zlib.Z_SYNC_FLUSH))

    def read(self) -> int:
        """Decodes what has come; returns how much that is in all."""
        received, self.socket.received = self.socket.received, b""
        self.plain += self._inflate.decompress(received)
        return len(self.plain)


@contextlib.asynccontextmanager
async def subscribed(directory: Path) -> AsyncIterator[tuple[Topic, Session, DeflateClient]]:
    """Yields a client that has subscribed to the topic, and has read the answers to that."""
    limits = (f"--max-msg-size={len(BODY)}", f"--max-body-size={2 * len(BODY)}")
    async with opened(directory, *limits) as nsqd:
        topic, session = nsqd.topic("t"), Session(nsqd)
        client = DeflateClient(session)
        await until(lambda: client.read() == 2 * OK_FRAME_BYTES)
        client.plain = b""
        yield topic, session, client


async def test_a_message_that_takes_long_to_compress_leaves_others_their_turn(tmp_path: Path) -> None:
    async with subscribed(tmp_path) as (topic, session, client):
        publish(topic, BODY)
        assert 0 < client.read() < MESSAGE_FRAME_BYTES
        assert not session.is_ready, "it gets more before it got this"
        publish(topic, b"next")
        await until(lambda: client.read() == MESSAGE_FRAME_BYTES + 34 + 4)
        assert client.plain[34:MESSAGE_FRAME_BYTES] == BODY
        assert client.plain.endswith(b"next")
        assert session.is_ready


async def test_what_waits_to_be_compressed_is_sent_before_the_connection_is_closed(tmp_path: Path) -> None:
    async with subscribed(tmp_path) as (topic, session, client):
        publish(topic, BODY)
        assert client.read() < MESSAGE_FRAME_BYTES
        session.shut_down()
        assert client.read() == MESSAGE_FRAME_BYTES
