"""Speaks NSQ's V2 protocol by hand: a blocking client that sends exactly the bytes it is told to."""

import contextlib
import json
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.closing import Closing

MAGIC = b"  V2"

RESPONSE = 0
ERROR = 1
MESSAGE = 2

HEARTBEAT = b"_heartbeat_"
READ_TIMEOUT_S = 20.0
RECEIVE_BYTES = 65536


class ClosedError(Exception):
    """Says that the other side ended the connection, politely or not."""


class Frame(NamedTuple):
    kind: int
    data: bytes


@dataclass(frozen=True)
class Message:
    timestamp_ns: int
    attempts: int
    id: bytes
    body: bytes

    @classmethod
    def parse(cls, data: bytes) -> "Message":
        timestamp_ns, attempts, message_id = struct.unpack_from(">qH16s", data)
        return cls(timestamp_ns, attempts, message_id, data[26:])


def body_of(data: bytes) -> bytes:
    """Encodes a command's body as it follows the line: its size, then itself."""
    return struct.pack(">i", len(data)) + data


def mpub_messages(bodies: Sequence[bytes]) -> bytes:
    """Encodes the part of MPUB that HTTP's binary mode shares: count, then each message with its size."""
    return struct.pack(">i", len(bodies)) + b"".join(map(body_of, bodies))


def mpub_body(bodies: Sequence[bytes]) -> bytes:
    return body_of(mpub_messages(bodies))


class Wire(Closing):
    """Is one connection. Upper-case methods send the command of that name and read nothing."""

    def __init__(self, address: tuple[str, int] | str, *, magic: bytes = MAGIC, timeout_s: float = READ_TIMEOUT_S):
        """Connects to `address`, which is a host and port, or the path of a unix socket."""
        self.timeout_s = timeout_s
        if isinstance(address, str):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(timeout_s)
            self.socket.connect(address)
        else:
            self.socket = socket.create_connection(address, timeout=timeout_s)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pending = bytearray()
        self.send(magic)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()

    @property
    def local_port(self) -> int:
        return int(self.socket.getsockname()[1])

    # -- sending -----------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        if data:
            self.socket.settimeout(self.timeout_s)
            self.socket.sendall(data)

    def command(self, line: str, body: bytes | None = None) -> None:
        self.send(line.encode() + b"\n" + (b"" if body is None else body_of(body)))

    def end_of_input(self) -> None:
        """Says that nothing more will come, while still reading."""
        self.socket.shutdown(socket.SHUT_WR)

    def IDENTIFY(self, **fields: Any) -> None:
        self.command("IDENTIFY", json.dumps(fields).encode())

    def AUTH(self, secret: str) -> None:
        self.command("AUTH", secret.encode())

    def PUB(self, topic: str, body: bytes) -> None:
        self.command(f"PUB {topic}", body)

    def MPUB(self, topic: str, bodies: Sequence[bytes]) -> None:
        self.send(f"MPUB {topic}\n".encode() + mpub_body(bodies))

    def DPUB(self, topic: str, delay_ms: int, body: bytes) -> None:
        self.command(f"DPUB {topic} {delay_ms}", body)

    def SUB(self, topic: str, channel: str) -> None:
        self.command(f"SUB {topic} {channel}")

    def RDY(self, count: int) -> None:
        self.command(f"RDY {count}")

    def FIN(self, message_id: bytes) -> None:
        self.send(b"FIN " + message_id + b"\n")

    def REQ(self, message_id: bytes, delay_ms: int) -> None:
        self.send(b"REQ " + message_id + b" %d\n" % delay_ms)

    def TOUCH(self, message_id: bytes) -> None:
        self.send(b"TOUCH " + message_id + b"\n")

    def CLS(self) -> None:
        self.command("CLS")

    def NOP(self) -> None:
        self.command("NOP")

    # -- reading -----------------------------------------------------------------------------------------

    def receive(self) -> bytes:
        """Returns whatever the socket gives next."""
        try:
            data = self.socket.recv(RECEIVE_BYTES)
        except (ConnectionResetError, BrokenPipeError) as error:
            raise ClosedError from error
        if not data:
            raise ClosedError
        return data

    def _fill(self, count: int, deadline: float) -> None:
        """Reads until so many bytes are pending; on TimeoutError what came so far stays pending."""
        while len(self._pending) < count:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            self._pending += self.receive()

    def take_pending(self) -> bytes:
        """Returns what came beyond the last frame that was read."""
        data = bytes(self._pending)
        self._pending.clear()
        return data

    def read_frame(self, timeout_s: float | None = None) -> Frame:
        """Reads the next frame, heartbeats included."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        self._fill(8, deadline)
        size, kind = struct.unpack_from(">ii", self._pending)
        self._fill(4 + size, deadline)
        data = bytes(self._pending[8 : 4 + size])
        del self._pending[: 4 + size]
        return Frame(kind, data)

    def read_message(self, timeout_s: float | None = None) -> Message:
        frame = self.read_frame(timeout_s)
        assert frame.kind == MESSAGE, f"wanted a message, got {frame}"
        return Message.parse(frame.data)

    def read_messages(self, count: int, *, finish: bool = False) -> list[Message]:
        messages = []
        for _ in range(count):
            messages.append(self.read_message())
            if finish:
                self.FIN(messages[-1].id)
        return messages

    def expect(self, data: bytes | str, kind: int = RESPONSE) -> None:
        wanted = data.encode() if isinstance(data, str) else data
        frame = self.read_frame()
        assert frame == Frame(kind, wanted), frame

    def expect_ok(self, times: int = 1) -> None:
        for _ in range(times):
            self.expect(b"OK")

    def expect_error(self, text: str | bytes, *, fatal: bool = True) -> None:
        self.expect(text, ERROR)
        if fatal:
            self.expect_closed()

    def expect_closed(self) -> None:
        """Asserts that the connection ends here, with no further frame."""
        try:
            frame = self.read_frame()
        except ClosedError:
            assert not self._pending, f"closed in the middle of a frame: {bytes(self._pending)!r}"
        else:
            raise AssertionError(f"wanted the connection closed, got {frame}")

    def expect_silence(self, duration_s: float) -> None:
        """Asserts that nothing at all comes for so long."""
        try:
            frame = self.read_frame(duration_s)
        except TimeoutError:
            return
        raise AssertionError(f"wanted silence, got {frame}")

    # -- whole steps -------------------------------------------------------------------------------------

    def identify(self, **fields: Any) -> dict[str, Any]:
        """Sends IDENTIFY with feature negotiation; returns the settings that nsqd answers."""
        self.IDENTIFY(feature_negotiation=True, **fields)
        frame = self.read_frame()
        assert frame.kind == RESPONSE, frame
        answer: dict[str, Any] = json.loads(frame.data)
        return answer

    def publish(self, topic: str, *bodies: bytes) -> None:
        """Publishes by PUB one message, by MPUB several, and waits for the OK."""
        if len(bodies) == 1:
            self.PUB(topic, bodies[0])
        else:
            self.MPUB(topic, bodies)
        self.expect_ok()

    def subscribe(self, topic: str, channel: str = "ch", rdy: int = 0, **identify: Any) -> "Wire":
        """Sends SUB and, where not 0, RDY; with any IDENTIFY fields, those first."""
        if identify:
            self.identify(**identify)
        self.SUB(topic, channel)
        self.expect_ok()
        if rdy:
            self.RDY(rdy)
        return self

    def assert_usable(self) -> None:
        """Proves by a round trip that the connection still works."""
        self.PUB("still_usable#ephemeral", b"x")
        self.expect_ok()
