"""Runs a TCP proxy that does to a connection what networks do, switchable while it runs."""

import contextlib
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Literal

from harness.closing import Closing

Direction = Literal["up", "down"]
"""Bytes go up from client to server, and down from server to client."""

CHUNK_BYTES = 16384
POLL_S = 0.02
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass
class Faults:
    """Says what happens to bytes in one direction. With all of it off, the proxy is a plain one."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    garble_every_bytes: int | None = None
    chunk_bytes: int = CHUNK_BYTES
    stalled: bool = False
    half_closed: bool = False


@dataclass(eq=False)
class _Pair:
    client: socket.socket
    server: socket.socket
    threads: list[threading.Thread] = field(default_factory=list)

    def close(self, *, reset: bool) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                else:
                    end.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                end.close()


class FaultProxy(Closing):
    """Stands between client and server: connect to `.address`; change `.up` and `.down`, or call `cut`, at any time."""

    def __init__(self, target: tuple[str, int], *, seed: int = 0):
        self.target = target
        self.up = Faults()
        self.down = Faults()
        self.refusing = False
        self._random = random.Random(seed)
        self._pairs: set[_Pair] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(POLL_S)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        self._stopping.set()
        self._acceptor.join()
        self._listener.close()
        self.cut()

    @property
    def connection_count(self) -> int:
        with self._lock:
            return len(self._pairs)

    # -- faults on all connections at once ---------------------------------------------------------------

    def cut(self, *, reset: bool = True) -> None:
        """Ends every connection now, with RST unless told otherwise."""
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            pair.close(reset=reset)

    def stall(self) -> None:
        """Connections stay open and nothing moves, in either direction."""
        self.up.stalled = self.down.stalled = True

    def resume(self) -> None:
        self.up.stalled = self.down.stalled = False

    def half_close(self, direction: Direction) -> None:
        """Lets the receiver of this direction see the end of input; the other direction goes on."""
        (self.up if direction == "up" else self.down).half_closed = True

    def heal(self) -> None:
        """Ends all faults for bytes from here on; what was cut stays cut."""
        self.up, self.down = Faults(), Faults()
        self.refusing = False

    # -- the work ----------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            if self.refusing:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                client.close()
                continue
            self._join(client)

    def _join(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self.target, timeout=5)
        except OSError:
            client.close()
            return
        pair = _Pair(client, server)
        for end in (client, server):
            end.settimeout(POLL_S)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._pairs.add(pair)
        directions: tuple[Direction, ...] = ("up", "down")
        for direction in directions:
            threading.Thread(target=self._pump, args=(pair, direction), daemon=True).start()

    def _pump(self, pair: _Pair, direction: Direction) -> None:
        source, sink = (pair.client, pair.server) if direction == "up" else (pair.server, pair.client)
        try:
            while self._move(source, sink, direction):
                pass
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            with self._lock:
                self._pairs.discard(pair)
            pair.close(reset=True)

    def _move(self, source: socket.socket, sink: socket.socket, direction: Direction) -> bool:
        """Moves one piece; False at the end of this direction."""
        faults = self._faults(direction)
        if self._stopping.is_set() or faults.half_closed:
            return False
        if faults.stalled:
            time.sleep(POLL_S)
            return True
        try:
            data = source.recv(faults.chunk_bytes)
        except TimeoutError:
            return True
        if not data:
            return False
        self._wait_out(direction, len(data))
        self._send_all(sink, self._garbled(data, self._faults(direction)))
        return True

    def _faults(self, direction: Direction) -> Faults:
        return self.up if direction == "up" else self.down

    def _wait_out(self, direction: Direction, size: int) -> None:
        faults = self._faults(direction)
        time.sleep(faults.delay_s + (size / faults.bytes_per_s if faults.bytes_per_s else 0.0))
        while self._faults(direction).stalled and not self._stopping.is_set():
            time.sleep(POLL_S)

    def _garbled(self, data: bytes, faults: Faults) -> bytes:
        if not faults.garble_every_bytes:
            return data
        spoiled = bytearray(data)
        for index in range(len(spoiled)):
            if self._random.randrange(faults.garble_every_bytes) == 0:
                spoiled[index] ^= self._random.randrange(1, 256)
        return bytes(spoiled)

    def _send_all(self, sink: socket.socket, data: bytes) -> None:
        """Sends all bytes, though not by sendall: a timeout there loses count of what was sent."""
        view = memoryview(data)
        while view and not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                view = view[sink.send(view) :]
