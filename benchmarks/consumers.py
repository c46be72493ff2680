"""Has roles that consume and finish every message at once."""

import select
import struct
import time
from collections.abc import Iterator

from benchmarks.upgrades import PLAIN, Connection, Incomplete, Upgrade, open_subscription, pending
from benchmarks.wire import MESSAGE, Address, LoadError
from benchmarks.worker import Load
from nsquark.kernel.frames import FrameScanner, finish_all

READ_BYTES = 256 * 1024
POLL_SECONDS = 0.2
CLOSE_SECONDS_MAX = 20
TAIL_SHARE = 50
"""The last fiftieth is read but not timed: a broker may let it wait for its output buffer's timeout."""


class Consumers:
    """Serves some subscriptions by one epoll loop, with one buffer for all, so that it stays in the cache."""

    def __init__(
        self,
        address: Address,
        upgrade: Upgrade,
        topic: str,
        channels: list[str],
        connections_per_channel: int,
    ) -> None:
        self.messages = 0
        self.closed = 0
        self._socks = {
            sock.fileno(): sock
            for channel in channels
            for sock in [open_subscription(address, upgrade, topic, channel) for _ in range(connections_per_channel)]
        }
        self._rests = dict.fromkeys(self._socks, b"")
        self._epoll = select.epoll()
        for fileno in self._socks:
            self._epoll.register(fileno, select.EPOLLIN)
        self._buffer = bytearray(READ_BYTES)
        self._view = memoryview(self._buffer)
        # A FIN is shorter than any message frame, so what one read brings can always be answered.
        self._out = bytearray(READ_BYTES)
        self._out_view = memoryview(self._out)

    def send_all(self, command: bytes) -> None:
        for sock in self._socks.values():
            sock.sendall(command)

    def serve(self) -> int:
        """Serves one turn: reads what is there and finishes it. It returns the number of messages."""
        before = self.messages
        for fileno, _ in self._epoll.poll(POLL_SECONDS):
            sock = self._socks[fileno]
            self._read(fileno, sock)
            while pending(sock):
                self._read(fileno, sock)
        return self.messages - before

    def _read(self, fileno: int, sock: Connection) -> None:
        rest = self._rests[fileno]
        kept = len(rest)
        self._buffer[:kept] = rest
        try:
            got = sock.recv_into(self._view[kept:])
        except Incomplete:
            return
        if not got:
            raise LoadError("the broker closed a consumer's connection")
        end = kept + got
        consumed, messages, written, others = finish_all(self._buffer, 0, end, self._out)
        if written:
            sock.sendall(self._out_view[:written])
        self.messages += messages
        self._rests[fileno] = bytes(self._view[consumed:end])
        for _, text in others:
            self._answer(sock, text)

    def _answer(self, sock: Connection, text: bytes) -> None:
        if text == b"_heartbeat_":
            sock.sendall(b"NOP\n")
        elif text == b"CLOSE_WAIT":
            self.closed += 1
        else:
            raise LoadError(f"a consumer was sent {text!r}")

    def close(self) -> None:
        """Sends CLS on each connection; what still arrives is finished and counted."""
        self.send_all(b"CLS\n")
        deadline = time.monotonic() + CLOSE_SECONDS_MAX
        while self.closed < len(self._socks) or self.serve():
            if self.closed < len(self._socks):
                self.serve()
            if time.monotonic() > deadline:
                raise LoadError(f"no CLOSE_WAIT within {CLOSE_SECONDS_MAX} s")


def consume(
    address: Address,
    upgrade: Upgrade,
    topic: str,
    channels: list[str],
    connections_per_channel: int,
    rdy: int,
    expected: int,
    seconds: float,
) -> Iterator[Load | int | None]:
    """Consumes until `expected` messages, less the tail, or the time is reached.

    Its next step is to read the tail, if there is time left, to close, and to give the final count.
    """
    consumers = Consumers(address, upgrade, topic, channels, connections_per_channel)
    yield None
    started = ended = time.monotonic()
    deadline = started + seconds
    consumers.send_all(b"RDY %d\n" % rdy)
    timed = expected - expected // TAIL_SHARE
    while consumers.messages < timed and ended < deadline:
        consumers.serve()
        ended = time.monotonic()
    yield Load(consumers.messages, started, ended)
    while consumers.messages < expected and time.monotonic() < deadline:
        consumers.serve()
    consumers.close()
    yield consumers.messages


def collect_latencies(
    address: Address, topic: str, channel: str, rdy: int, expected: int, seconds: float
) -> Iterator[Load | None]:
    """Reads what `publish_paced` sends; each message must come exactly once."""
    sock = open_subscription(address, PLAIN, topic, channel)
    scanner = FrameScanner()
    latencies: dict[int, int] = {}
    rest = b""
    yield None
    sock.sendall(b"RDY %d\n" % rdy)
    started = time.monotonic()
    while len(latencies) < expected:
        data = sock.recv(READ_BYTES)
        now_ns = time.monotonic_ns()
        if not data or time.monotonic() - started > seconds:
            raise LoadError(f"{len(latencies)} of {expected} messages came within {seconds} s")
        data = rest + data
        consumed, messages, others = scanner.scan(data, 0, len(data))
        rest = data[consumed:]
        if messages:
            sock.sendall(b"".join(b"FIN %b\n" % message_id for _, _, message_id, _ in messages))
        for _, _, _, body in messages:
            number, sent_ns = struct.unpack_from(">qq", body)
            if number in latencies:
                raise LoadError(f"message {number} came twice")
            latencies[number] = now_ns - sent_ns
        for kind, text in others:
            if kind != MESSAGE and text == b"_heartbeat_":
                sock.sendall(b"NOP\n")
            else:
                raise LoadError(f"a consumer was sent {text!r}")
    yield Load(len(latencies), started, time.monotonic(), tuple(latencies.values()))
