"""Keeps one connection to an nsqd, framed, compressed and watched, for producers and consumers alike.

What is sent within one turn of the event loop leaves in one write; what one read brings is split by the kernel in one
call. Heartbeats are answered here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol, cast

if sys.platform != "win32":
    import fcntl
    import termios

from nsquark.base.addresses import split_address
from nsquark.client.config import Config
from nsquark.client.errors import NotConnected, NsqError
from nsquark.client.patience import within
from nsquark.kernel.frames import FRAME_SIZE_MAX_BYTES, LARGE_FRAME_BYTES, FrameError, FrameScanner
from nsquark.wire import commands
from nsquark.wire.compression import CorruptStream, Decoder, Encoder
from nsquark.wire.frames import FrameType

RECEIVE_BYTES: Final = 2 * LARGE_FRAME_BYTES
"""Is the size of the receive buffer. What a read leaves there is less than half of it: larger messages are gathered by
the scanner.
"""
WRITE_BUFFER_BYTES: Final = 256 << 10
"""Above this a write that does not move counts against write_timeout."""
TURN_S: Final = 0.005
"""What comes is taken for so long before others have their turn. Event loops read a busy socket again and again."""
BREAK_S: Final = 0.001
"""Reads that are further apart had others between them."""
FRAME_PREFIX_BYTES: Final = 8
HTTP_AS_SIZE: Final = int.from_bytes(b"HTTP", "big")
LOOKUPD_AS_KIND: Final = int.from_bytes(b"E_BAD_PROTOCOL"[:4], "big")
"""Is what nsqlookupd's refusal of nsqd's protocol, which has no type, has in place of a frame's type."""
RESPONSE: Final = int(FrameType.RESPONSE)
"""Is a plain number, which is compared with the type of each frame: to look up an enumeration's member takes longer."""
HEARTBEAT: Final = b"_heartbeat_"
LOCAL_HOST: Final = "127.0.0.1"
"""Is used where an address names no host."""

RawMessage = tuple[int, int, bytes, bytes]
"""Has timestamp in ns, attempts, id and body of a message."""


class Receiver(Protocol):
    """Uses a connection once it is set up. `connection_lost` comes once, and nothing after it."""

    def messages_received(self, messages: list[RawMessage]) -> None: ...
    def response_received(self, data: bytes) -> None: ...
    def error_received(self, text: str) -> None: ...
    def connection_lost(self, reason: NsqError) -> None: ...


class NsqdConnection(asyncio.BufferedProtocol):
    """This is one connection. Invariants:

    * Bytes `_start.._end` of the buffer were received, are decoded and are not yet frames.
    * While `_is_giving_way` nothing is read: `_go_on` comes in the next turn, and the decoder may have more until then.
    * Until `begin` the set-up takes frames one by one: what follows the answer to IDENTIFY may be compressed already.
    * Once `_reason` is set nothing more is sent or handed on.
    """

    def __init__(self, address: str, config: Config) -> None:
        self.address = address
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._receiver: Receiver | None = None
        self._transport: asyncio.Transport | None = None
        self._below_tls: asyncio.Transport | None = None
        """Is the socket's own transport where TLS is: what the one above has passed on may wait there."""
        self._scanner = FrameScanner(config.max_msg_size or FRAME_SIZE_MAX_BYTES)
        self._buffer = bytearray()  # until it is connected: it may never be
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._decoder: Decoder | None = None
        self._encoder: Encoder | None = None
        self._out: list[bytes] = []
        self._is_flush_due = False
        self._given_bytes = 0
        self._reason: NsqError | None = None
        self._received: asyncio.Future[None] | None = None
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._last_read_s = time.monotonic()
        self._busy_since_s = self._busy_until_s = 0.0
        """These times are of the reads that followed each other without a break."""
        self._is_giving_way = False
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self.round_trip_s = 0.0
        """Tells how long the answer to IDENTIFY took."""
        self.before_flush: Callable[[], None] | None = None
        """Is called before each write, for a user who gathers what it sends by itself."""

    # -- opening and upgrading ---------------------------------------------------------------------------

    async def open(self) -> None:
        seconds = self._config.dial_timeout.seconds
        try:
            async with within(seconds) if seconds else contextlib.nullcontext():
                if self.address.startswith("/"):
                    await self._loop.create_unix_connection(lambda: self, self.address)
                else:
                    host, port = self.host_and_port()
                    local = split_address(self._config.local_addr) if self._config.local_addr else None
                    await self._loop.create_connection(lambda: self, host or LOCAL_HOST, port, local_addr=local)
        except TimeoutError:
            raise NotConnected(f"{self.address}: no connection within {seconds:g} s (dial_timeout)") from None
        except OSError as error:
            raise NotConnected(f"{self.address}: {error.strerror or error}") from None
        except UnicodeError as error:
            raise NotConnected(f"{self.address}: this host name cannot be looked up: {error}") from None

    def host_and_port(self) -> tuple[str, int]:
        try:
            return split_address(self.address)
        except ValueError as error:
            raise NotConnected(f"{error}, for instance 127.0.0.1:4150") from None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its type
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._buffer = bytearray(RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._read_timer = self._loop.call_later(self._config.read_timeout.seconds, self._check_reading)

    async def start_tls(self, context: ssl.SSLContext) -> None:
        assert self._transport is not None
        if self._end > self._start:
            # Whoever sits in between could have put it there, to be taken for what comes through TLS.
            raise NotConnected(f"{self.address}: {self._end - self._start} bytes came in clear before TLS began")
        # Never empty: without a name to expect, any trusted certificate would do.
        host = "localhost" if self.address.startswith("/") else self.host_and_port()[0] or LOCAL_HOST
        try:
            transport = await self._loop.start_tls(self._transport, self, context, server_hostname=host)
        except (OSError, ssl.SSLError) as error:
            raise NotConnected(f"{self.address}: TLS failed - {_told(error)}") from None
        if transport is None:
            raise self._reason or NotConnected(f"{self.address}: TLS failed - the connection was closed")
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._transport, self._below_tls = transport, self._transport

    def compress(self, decoder: Decoder, encoder: Encoder) -> None:
        """Encodes both directions from here on, also what came already."""
        decoder.feed(bytes(self._view[self._start : self._end]))
        self._start = self._end = 0
        self._decoder, self._encoder = decoder, encoder
        self._encoded = _encoded_bytes.view
        self._busy_since_s = time.monotonic()
        self._hand_on()
        if self._reason is not None:
            raise self._reason

    async def next_frame(self) -> tuple[int, bytes]:
        """Returns type and data of a frame, for the set-up."""
        while True:
            have = self._end - self._start
            if have >= FRAME_PREFIX_BYTES:
                size = int.from_bytes(self._view[self._start : self._start + 4], "big")
                if not 4 <= size <= RECEIVE_BYTES - 4:
                    raise NotConnected(f"{self.address}: {self._explain('no nsqd answers here')}")
                if have >= 4 + size:
                    begin = self._start + FRAME_PREFIX_BYTES
                    self._start += 4 + size
                    kind = int.from_bytes(self._view[begin - 4 : begin], "big")
                    if kind == LOOKUPD_AS_KIND:
                        raise NotConnected(
                            f"{self.address}: this is nsqlookupd's TCP port (4160 by default);"
                            " give the TCP port of nsqd (4150), or as lookupd= nsqlookupd's HTTP port (4161)"
                        )
                    return kind, bytes(self._view[begin : self._start])
            if self._reason is not None:
                raise self._reason
            self._received = self._loop.create_future()
            await self._received

    def begin(self, receiver: Receiver) -> None:
        """Ends the set-up: frames go to the receiver."""
        if self._reason is not None:
            raise self._reason
        self._receiver = receiver
        if self._config.heartbeat_interval <= 0 and self._read_timer is not None:
            self._read_timer.cancel()  # without heartbeats a connection may be quiet for ever
        if self._end > self._start:
            self._loop.call_soon(self._hand_on_early_frames)  # by then the receiver knows its connection

    # -- sending -----------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Sends data together with everything else that is sent in this turn of the loop."""
        self._out.append(data)
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self.flush)

    def flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        if self.before_flush is not None:
            self.before_flush()
        self._is_flush_due = False
        out = self._out
        if out and self._reason is None and self._transport is not None:
            data = b"".join(out) if len(out) > 1 else out[0]
            if self._encoder is not None:
                data = self._encoder.encode(data)
            self._given_bytes += len(data)
            self._transport.write(data)
        out.clear()

    def pause_writing(self) -> None:
        self._watch_writing()

    def resume_writing(self) -> None:
        if self._write_timer is not None and self._reason is None:
            self._write_timer.cancel()
            self._write_timer = None

    def _watch_writing(self) -> None:
        seconds = self._config.write_timeout.seconds
        self._write_timer = self._loop.call_later(seconds, self._check_writing, self._written_bytes)

    @property
    def _written_bytes(self) -> int:
        """Counts what the system has sent: it takes nothing new until a third of its buffer, megabytes of a fast
        network, is free.
        """
        transport = self._transport
        if transport is None:
            return 0
        below_bytes = 0 if self._below_tls is None else self._below_tls.get_write_buffer_size()
        return self._given_bytes - transport.get_write_buffer_size() - below_bytes - _unsent_bytes(transport)

    def _check_writing(self, written_bytes: int) -> None:
        """Ends a connection on which nothing moves. A slow network is not a dead one: it may take any time as long as
        something moves.
        """
        if self._written_bytes > written_bytes:
            self._watch_writing()
        else:
            seconds = self._config.write_timeout.seconds
            self.abort(NotConnected(f"{self.address}: nothing could be written for {seconds:g} s (write_timeout)"))

    # -- receiving ---------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._end :] if self._decoder is None else self._encoded

    def buffer_updated(self, nbytes: int) -> None:
        self._last_read_s = now_s = time.monotonic()
        if self._reason is not None:
            return
        if now_s - self._busy_until_s > BREAK_S:
            self._busy_since_s = now_s
        if self._decoder is None:
            self._end += nbytes
        else:
            self._decoder.feed(self._encoded[:nbytes])
        self._hand_on()

    def _hand_on(self) -> None:
        """Hands on what was received, and gives way to others when it took long."""
        try:
            if self._decoder is None:
                self._plain_received()
            else:
                self._decode()
        except (FrameError, CorruptStream) as error:
            self.abort(NotConnected(f"{self.address}: {self._explain(str(error))}"))
        self._busy_until_s = now_s = time.monotonic()
        if now_s - self._busy_since_s > TURN_S:
            self._give_way()

    def _decode(self) -> None:
        """Decodes plain bytes into the buffer and on, until the decoder needs more input or the turn is over."""
        decoder = self._decoder
        assert decoder is not None
        while self._reason is None and ((plain := decoder.read(RECEIVE_BYTES - self._end)) or decoder.has_more):
            self._view[self._end : self._end + len(plain)] = plain
            self._end += len(plain)
            self._plain_received()
            if time.monotonic() - self._busy_since_s > TURN_S:
                return

    def _give_way(self) -> None:
        if self._reason is None and not self._is_giving_way and self._transport is not None:
            self._is_giving_way = True
            self._transport.pause_reading()
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_giving_way = False
        if self._reason is not None or self._transport is None or self._transport.is_closing():
            return
        self._busy_since_s = time.monotonic()
        if self._decoder is not None:
            self._hand_on()
        if not self._is_giving_way and self._reason is None:
            self._transport.resume_reading()

    def _hand_on_early_frames(self) -> None:
        """Hands on what came together with the end of the set-up."""
        try:
            if self._reason is None:
                self._hand_on_frames()
        except FrameError as error:
            self.abort(NotConnected(f"{self.address}: {error}"))

    def _plain_received(self) -> None:
        if self._receiver is not None:
            self._hand_on_frames()
        elif self._end >= RECEIVE_BYTES:
            raise FrameError("the answer to IDENTIFY is too long")
        else:
            self._wake()

    def _hand_on_frames(self) -> None:
        receiver = self._receiver
        assert receiver is not None
        consumed, messages, others = self._scanner.scan(self._view, self._start, self._end)
        self._start += consumed
        self._make_room()
        if messages:
            receiver.messages_received(messages)
        is_asked = False
        for kind, data in others:
            if self._reason is not None:
                return
            if kind == RESPONSE:
                if data == HEARTBEAT:
                    is_asked = True
                else:
                    receiver.response_received(data)
            elif kind == FrameType.ERROR:
                receiver.error_received(data.decode("utf-8", "replace"))
            else:
                raise FrameError(f"unknown frame type {kind}")
        if is_asked:
            self.send(commands.NOP)  # one for all heartbeats that came together

    def _make_room(self) -> None:
        """Moves what is left, the first part of a frame, to the front of the buffer."""
        left = self._end - self._start
        if left and self._start:
            self._buffer[:left] = self._buffer[self._start : self._end]
        self._start, self._end = 0, left

    def _explain(self, problem: str) -> str:
        if int.from_bytes(self._view[self._start : self._start + 4], "big") == HTTP_AS_SIZE:
            return "an HTTP server answers here; give the TCP port of nsqd (4150 by default)"
        return problem

    def _wake(self) -> None:
        if self._received is not None and not self._received.done():
            self._received.set_result(None)

    # -- end ---------------------------------------------------------------------------------------------

    def _check_reading(self) -> None:
        seconds = self._config.read_timeout.seconds
        left = self._last_read_s + seconds - time.monotonic()
        if left > 0:
            self._read_timer = self._loop.call_later(left, self._check_reading)
        else:
            self.abort(NotConnected(f"{self.address}: nothing came for {seconds:g} s (read_timeout)"))

    def close(self, reason: NsqError) -> None:
        """Sends what waits to be sent, then ends."""
        if self._reason is None and self._transport is not None:
            self.flush()
            self._reason = reason
            self._transport.close()
            if self._write_timer is not None:
                self._write_timer.cancel()
            self._watch_writing()  # a peer that takes nothing would keep the socket open for ever

    def abort(self, reason: NsqError) -> None:
        self._reason = self._reason or reason
        self._wake()
        if self._transport is not None:
            self._transport.abort()

    def drop(self, reason: NsqError) -> None:
        """Aborts, and tells the receiver at once that the connection is lost: it may connect anew in this turn."""
        self.abort(reason)
        self._tell_lost()

    async def wait_lost(self, timeout_s: float | None = None) -> None:
        """Waits until the socket is closed; what is not sent by then is dropped."""
        if self._transport is not None:
            await asyncio.wait([self._lost], timeout=timeout_s)
            if not self._lost.done():
                self._transport.abort()
                await asyncio.wait([self._lost])

    def eof_received(self) -> None:
        """Ends the whole connection: nsqd never closes one side only."""

    def connection_lost(self, error: Exception | None) -> None:
        for timer in (self._read_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        if self._reason is None:
            self._reason = NotConnected(f"{self.address}: {_told(error)}")
        self._wake()
        if not self._lost.done():
            self._lost.set_result(None)
        self._tell_lost()

    def _tell_lost(self) -> None:
        assert self._reason is not None
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.connection_lost(self._reason)


def _told(error: Exception | None) -> str:
    """Tells why a connection ended: what asyncio makes of a peer's end may have no text."""
    return str(error or "") or "nsqd closed the connection"


def _unsent_bytes(transport: asyncio.Transport) -> int:
    """Counts what the system has yet to send, where it tells."""
    if sys.platform == "win32":
        return 0
    try:
        fileno = transport.get_extra_info("socket").fileno()
        return int.from_bytes(fcntl.ioctl(fileno, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):
        return 0


class _EncodedBytes(threading.local):
    """Keeps one buffer for each thread, through which the encoded bytes of all its connections pass: they are taken
    over before the next read. An event loop in another thread may read at the same time.
    """

    def __init__(self) -> None:
        self.view = memoryview(bytearray(RECEIVE_BYTES))


_encoded_bytes = _EncodedBytes()
