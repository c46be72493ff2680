"""Runs a server that answers as a test tells it to, and keeps what it was sent: for what a real nsqd never does."""

import asyncio
import json
import struct
import zlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from harness.wire import ERROR, MESSAGE, RESPONSE

WITH_BODY = (b"IDENTIFY", b"AUTH", b"PUB", b"MPUB", b"DPUB")
FLUSH_MARK = b"\x00\x00\xff\xff"
"""Stands where deflate was flushed: once for each write of a client."""

FEATURES: dict[str, Any] = {"max_rdy_count": 2500, "msg_timeout": 60_000, "version": "1.3.0"}


def frame(data: bytes, kind: int = RESPONSE) -> bytes:
    return struct.pack(">ii", len(data) + 4, kind) + data


def error_frame(text: str) -> bytes:
    return frame(text.encode(), ERROR)


def message_frame(body: bytes, message_id: bytes = b"0123456789abcdef", attempts: int = 1) -> bytes:
    return frame(struct.pack(">qH16s", 1_700_000_000_000_000_000, attempts, message_id) + body, MESSAGE)


OK = frame(b"OK")
HEARTBEAT = frame(b"_heartbeat_")
CLOSE_WAIT = frame(b"CLOSE_WAIT")


class Peer:
    """Is one connection of a client."""

    def __init__(self, server: "ScriptedNsqd", reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server = server
        self._reader = reader
        self._writer = writer
        self._inflate = zlib.decompressobj(-15) if server.features.get("deflate") else None
        self._deflate = zlib.compressobj(6, zlib.DEFLATED, -15) if server.features.get("deflate") else None
        self._is_coded = False
        self._pending = b""
        self._reading = asyncio.Event()
        self._reading.set()
        self.identify: dict[str, Any] = {}
        self.commands: list[tuple[bytes, bytes]] = []
        """Has line and body of each command after IDENTIFY."""
        self.write_count = 0
        """Counts the client's writes after IDENTIFY; only those of one that deflates are known."""

    def lines(self, *verbs: bytes) -> list[bytes]:
        return [line for line, _ in self.commands if line.partition(b" ")[0] in verbs]

    def send(self, data: bytes) -> None:
        if self._is_coded and self._deflate is not None:
            data = self._deflate.compress(data) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        self._writer.write(data)

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        self._writer.transport.abort()

    def pause(self) -> None:
        """Stops reading."""
        self._reading.clear()

    async def serve(self) -> None:
        magic = await self._reader.readexactly(4)
        assert magic == b"  V2"
        line, body = await self._command()
        assert line == b"IDENTIFY"
        self.identify = json.loads(body)
        self.send(self._server.identify_answer or frame(json.dumps(self._server.features).encode()))
        if self._inflate is not None:
            self._is_coded = True
            self.send(OK)
        if self._server.on_ready is not None:
            self._server.on_ready(self)
        while True:
            command = await self._command()
            self.commands.append(command)
            if command[0] == b"CLS":
                self.send(CLOSE_WAIT)
            answer = self._server.on_command(self, *command)
            if answer:
                self.send(answer)

    async def _command(self) -> tuple[bytes, bytes]:
        line = (await self._until(lambda data: data.find(b"\n") + 1))[:-1]
        if line.partition(b" ")[0] not in WITH_BODY:
            return line, b""
        (size,) = struct.unpack(">i", await self._until(lambda _: 4))
        return line, await self._until(lambda _: size)

    async def _until(self, count: Callable[[bytes], int]) -> bytes:
        """Reads as many bytes as `count` says; 0 means that more is needed to say it."""
        while not 0 < (size := count(self._pending)) <= len(self._pending):
            await self._reading.wait()
            data = await self._reader.read(1 << 16)
            if not data:
                raise asyncio.IncompleteReadError(b"", None)
            if self._is_coded and self._inflate is not None:
                self.write_count += data.count(FLUSH_MARK)
                data = self._inflate.decompress(data)
            self._pending += data
        taken, self._pending = self._pending[:size], self._pending[size:]
        return taken


def say_ok(_: Peer, line: bytes, __: bytes) -> bytes:
    return OK if line.partition(b" ")[0] in (b"PUB", b"MPUB", b"DPUB", b"SUB", b"AUTH") else b""


class ScriptedNsqd:
    """Answers commands with the bytes that `on_command(peer, line, body)` returns; that is `say_ok` unless told
    otherwise.
    """

    def __init__(self, **features: Any) -> None:
        self.features = {**FEATURES, **features}
        self.identify_answer = b""
        """Is sent instead of the features, as it is."""
        self.on_ready: Callable[[Peer], None] | None = None
        self.on_command: Callable[[Peer, bytes, bytes], bytes] = say_ok
        self.peers: list[Peer] = []
        self.address = ""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def peer(self) -> Peer:
        """Returns the latest connection."""
        return self.peers[-1]

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname())
        return self

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(self, reader, writer)
        self.peers.append(peer)
        task = asyncio.get_running_loop().create_task(self._serve(peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _serve(peer: Peer) -> None:
        try:
            await peer.serve()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            peer.close()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
