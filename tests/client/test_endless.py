"""Lets an nsqd send without end, as fast as it can, in clear or compressed: the client's other work goes on."""

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import cramjam
import pytest
import uvloop

from client.loop_watch import HeldLoopWatch
from client.scripted import FEATURES, HEARTBEAT, OK, error_frame, frame, message_frame
from nsquark import Consumer, Producer
from nsquark.client.subscription import OVERFLOW_BYTES_MAX
from nsquark.errors import NotConnected, ServerError
from nsquark.kernel.frames import FRAME_SIZE_MAX_BYTES

FLOOD_S = 0.5
SEND_BYTES = 1 << 20
BOMB_BYTES = 30 << 20
HUGE_BYTES = 16 << 20
MAX_IN_FLIGHT = 2000

FLOODS = {
    "heartbeats": HEARTBEAT,
    "responses": OK,
    "empty responses": frame(b""),
    "errors": error_frame("E_FIN_FAILED"),
    "messages": message_frame(b""),
}
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class EndlessNsqd:
    """Answers IDENTIFY, and sends what it is told to again and again once `trigger` came; in a thread of its own."""

    def __init__(self, flood: bytes, trigger: bytes, **features: Any) -> None:
        self._flood = flood
        self._trigger = trigger
        self._hello = frame(json.dumps({**FEATURES, **features}).encode())
        self._coded_ok = b""
        if features.get("deflate"):
            self._coded_ok = _deflated(OK)
        if features.get("snappy"):
            self._coded_ok = bytes(cramjam.snappy.compress(OK))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._opened: list[socket.socket] = []
        self.flooded = threading.Event()
        self.connections = 0

    @property
    def address(self) -> str:
        return "{}:{}".format(*self._listener.getsockname())

    def __enter__(self) -> "EndlessNsqd":
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Ends every connection, and takes no more."""
        for each in [self._listener, *self._opened]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._opened.append(connection)
                self.connections += 1
                threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()

    def _serve_one(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self._wait_for(connection, b"}")
            connection.sendall(self._hello)
            connection.sendall(self._coded_ok)
            if self._coded_ok:
                connection.recv(1)  # what the client sends from here on is coded, so any byte is the trigger
            else:
                self._wait_for(connection, self._trigger)
            while True:
                connection.sendall(self._flood)
                self.flooded.set()

    @staticmethod
    def _wait_for(connection: socket.socket, word: bytes) -> None:
        received = b""
        while word not in received:
            data = connection.recv(1 << 16)
            if not data:
                raise ConnectionError
            received += data


def _deflated(data: bytes) -> bytes:
    """Makes a piece of a stream that refers to nothing before it, so that it can be sent any number of times."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    return deflate.compress(data) + deflate.flush(zlib.Z_FULL_FLUSH)


def _repeated(unit: bytes, size: int) -> bytes:
    return unit * (size // len(unit) + 1)


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Coroutine[Any, Any, None]], None]]:
    """Runs a coroutine in a loop of either kind."""
    loop = LOOPS[request.param]()
    yield loop.run_until_complete
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


async def _stand(
    server: EndlessNsqd, max_in_flight: int = MAX_IN_FLIGHT, *, closes_in_flood: bool = False, **options: Any
) -> None:
    """Consumes from the server for a while. To close during a flood takes the time that CLS may take: the server does
    not answer it.
    """
    consumer = Consumer("t", "c", nsqd=server.address, max_in_flight=max_in_flight, **options)
    async with HeldLoopWatch() as watch:
        await consumer.start()
        assert await asyncio.to_thread(server.flooded.wait, 30)
        before = watch.looks
        deadline_s = time.monotonic() + FLOOD_S
        while time.monotonic() < deadline_s or watch.looks - before < 10:
            await asyncio.sleep(0.01)
        if not closes_in_flood:
            server.end()
        await asyncio.wait_for(consumer.close(), 30)


@pytest.mark.parametrize("name", FLOODS)
def test_frames_without_end(run: Callable[[Coroutine[Any, Any, None]], None], name: str) -> None:
    with EndlessNsqd(_repeated(FLOODS[name], SEND_BYTES), b"RDY") as server:
        run(_stand(server))


def test_a_consumer_closes_while_messages_come(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    with EndlessNsqd(_repeated(FLOODS["messages"], SEND_BYTES), b"RDY") as server:
        run(_stand(server, closes_in_flood=True))


@pytest.mark.parametrize("name", FLOODS)
@pytest.mark.parametrize("coding", ["deflate", "snappy"])
def test_bombs_without_end(run: Callable[[Coroutine[Any, Any, None]], None], coding: str, name: str) -> None:
    """A few kilobytes become tens of megabytes, again and again."""
    plain = _repeated(FLOODS[name], BOMB_BYTES)
    flood = _deflated(plain) if coding == "deflate" else bytes(cramjam.snappy.compress(plain))
    with EndlessNsqd(flood, b"", **{coding: True}) as server:
        run(_stand(server, **{coding: True}))


@pytest.mark.parametrize("coding", ["plain", "deflate", "snappy"])
def test_huge_messages_without_end(run: Callable[[Coroutine[Any, Any, None]], None], coding: str) -> None:
    """The messages consist of zeros, which are coded well. To copy the body of one would take longer than the loop may
    be held.
    """
    message = struct.pack(">ii", FRAME_SIZE_MAX_BYTES, 2) + bytes(FRAME_SIZE_MAX_BYTES - 4)
    coded: dict[str, Callable[[bytes], bytes]] = {
        "plain": bytes,
        "deflate": _deflated,
        "snappy": lambda plain: bytes(cramjam.snappy.compress(plain)),
    }
    options = {coding: True} if coding != "plain" else {}
    with EndlessNsqd(coded[coding](message), b"RDY 1", **options) as server:
        run(_stand(server, 1, **options))


def test_a_huge_error(caplog: pytest.LogCaptureFixture, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """The error is refused by its size, before it is read as text."""

    async def consume() -> None:
        async with HeldLoopWatch(), Consumer("t", "c", nsqd=server.address):
            while "above the limit of" not in caplog.text:
                await asyncio.sleep(0.01)

    with EndlessNsqd(struct.pack(">ii", HUGE_BYTES, 1) + b"\xff" * (HUGE_BYTES - 4), b"RDY") as server:
        run(asyncio.wait_for(consume(), 60))


def test_more_bytes_than_were_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """A few messages may be sent by mistake, and large ones may be; not both without end."""

    async def consume() -> None:
        async with Consumer("t", "c", nsqd=server.address, max_in_flight=1) as consumer:
            while "RDY was 1 at most" not in caplog.text:
                await asyncio.sleep(0.01)
            assert consumer.stats().received <= OVERFLOW_BYTES_MAX // HUGE_BYTES

    with EndlessNsqd(struct.pack(">ii", HUGE_BYTES, 2) + bytes(HUGE_BYTES - 4), b"RDY 1") as server:
        asyncio.run(asyncio.wait_for(consume(), 60))


@pytest.mark.parametrize("name", FLOODS)
def test_a_producer_is_answered_without_end(run: Callable[[Coroutine[Any, Any, None]], None], name: str) -> None:
    async def publish() -> None:
        async with HeldLoopWatch(), Producer(server.address, read_timeout="2s", heartbeat_interval="1s") as producer:
            deadline_s = time.monotonic() + FLOOD_S
            while time.monotonic() < deadline_s or not server.flooded.is_set():
                with contextlib.suppress(NotConnected, ServerError, TimeoutError):
                    await asyncio.wait_for(producer.publish("t", b"x"), FLOOD_S)

    with EndlessNsqd(_repeated(FLOODS[name], SEND_BYTES), b"PUB") as server:
        run(publish())
        assert server.flooded.is_set()
