"""Puts between a session and its socket what IDENTIFY asked for: TLS, then snappy or deflate, each announced by an OK.

Event loops have `start_tls` for this, but a failed handshake then ends the connection without a word, where NSQ sends
an error frame in clear; and compression would need the same place again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

from nsquark.broker.tcp.tls import TlsState
from nsquark.web.fairness import TURN_NS_MAX
from nsquark.wire.compression import (
    CorruptStream,
    Decoder,
    DeflateDecoder,
    DeflateEncoder,
    Encoder,
    SnappyDecoder,
    SnappyEncoder,
)
from nsquark.wire.errors import FatalClientError
from nsquark.wire.frames import OK

if TYPE_CHECKING:
    from nsquark.broker.tcp.session import Session

HANDSHAKE_TIMEOUT_S: Final = 5.0
SOCKET_READ_BYTES: Final = 128 << 10
PLAIN_BYTES_MAX: Final = 64 << 10
"""At most this much is decoded at a time: little input may become much."""
GATHER_BYTES_MAX: Final = 64 << 10
"""What is written within a turn is encoded together, up to this."""
UNENCODED_BYTES_MAX: Final = 256 << 10
"""A session that wrote more than this faster than it can be encoded waits."""
TLS_RECORD_BYTES_MAX: Final = 16 << 10
TLS_HANDSHAKE_RECORD: Final = 0x16

_received = memoryview(bytearray(SOCKET_READ_BYTES))
"""All connections read into this, since what is read is copied before the next read."""

_decrypted = memoryview(bytearray(TLS_RECORD_BYTES_MAX))
"""All connections decrypt into this what is still compressed, since decoders copy it."""


def is_wanted(session: Session) -> bool:
    settings = session.settings
    return settings.feature_negotiation and (settings.tls_v1 or settings.snappy or settings.deflate)


class Upgrade(asyncio.BufferedProtocol, asyncio.Transport):
    """Is the socket's protocol and the session's transport; the session itself works as on a plain connection.

    * Encoded bytes are read from the socket only while none are left from before, so a connection has at most
      SOCKET_READ_BYTES of them and one unfinished record or chunk, however much they would become.
    * Nothing is written between the answer to IDENTIFY and the last OK.
    * Nothing is written to a socket that is closing: `_write` alone writes to it.
    * Decoding gives way to the others as the session itself does; the session's own time is part of it. So does
      encoding: little output may have been much.
    """

    def __init__(self, session: Session, fail: Callable[[FatalClientError], object]) -> None:
        super().__init__()
        self._session = session
        self._fail = fail
        self._loop = session.nsqd.loop
        self._socket = session.transport
        self._tls: ssl.SSLObject | None = None
        self._tls_in = ssl.MemoryBIO()
        self._tls_out = ssl.MemoryBIO()
        self._encoder: Encoder | None = None
        self._decoder: Decoder | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_begun = False
        """Tells whether a first record of the handshake has come."""
        self._is_ready = False
        """Tells whether the handshake is over, so that commands may come."""
        self._is_reading = not session.waits.reasons
        self._is_ended = False
        """Tells whether the client has closed its side, or all is closed."""
        self._is_decoding = False
        """Tells whether the others have their turn, after which more is decoded."""
        self._gathered: deque[bytes | bytearray | memoryview] = deque()
        self._gathered_bytes = 0
        self._is_flush_due = False
        self._encoding_ns = 0
        """Tells how long was encoded since the last flush."""
        self._is_behind = False
        """Tells whether the session may write no more, since too much waits to be encoded."""
        self._is_socket_full = False

    def begin(self) -> None:
        """Begins when IDENTIFY's answer is written: what comes now is TLS or compressed."""
        if isinstance(self._socket, Upgrade):
            self._fail(FatalClientError("E_IDENTIFY_FAILED", "IDENTIFY failed the connection is upgraded already"))
            return
        self._socket.set_protocol(self)
        self._session.use(self)
        if self._session.settings.tls_v1:
            context = self._session.nsqd.tls_context
            assert context is not None
            self._tls = context.wrap_bio(self._tls_in, self._tls_out, server_side=True)
            self._timer = self._loop.call_later(HANDSHAKE_TIMEOUT_S, self._refuse, "tls: handshake timed out")
        else:
            self._compress()

    # -- TLS ---------------------------------------------------------------------------------------------

    def _shake_hands(self, data: memoryview) -> None:
        assert self._tls is not None
        if not self._has_begun and data[0] != TLS_HANDSHAKE_RECORD:
            self._refuse("tls: first record does not look like a TLS handshake")
            return
        self._has_begun = True
        self._tls_in.write(data)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send_tls()
        except ssl.SSLError as error:
            self._send_tls()  # the alert
            self._refuse(f"tls: {(error.reason or str(error)).lower().replace('_', ' ')}")
        else:
            self._session.secured(TlsState.of(self._tls))
            self._stop_timer()
            self._send(OK)
            self._compress()
            self._go_on()

    def _refuse(self, reason: str) -> None:
        """Sends an error; the connection is plain once more for it."""
        self._stop_timer()
        self._socket.set_protocol(self._session)
        self._session.use(self._socket)
        self._fail(FatalClientError("E_IDENTIFY_FAILED", f"IDENTIFY failed {reason}"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send_tls(self) -> None:
        if self._tls_out.pending:
            self._write(self._tls_out.read())

    def _compress(self) -> None:
        settings = self._session.settings
        if settings.snappy:
            self._encoder, self._decoder = SnappyEncoder(), SnappyDecoder()
        elif settings.deflate:
            self._encoder, self._decoder = DeflateEncoder(settings.deflate_level), DeflateDecoder()
        self._is_ready = True
        if self._encoder is not None:
            self._send(OK)

    # -- the socket's protocol ---------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return _received

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_ended:
            return
        data = _received[:nbytes]
        if not self._is_ready:
            self._shake_hands(data)
            return
        if self._tls is not None:
            self._tls_in.write(data)
        else:
            assert self._decoder is not None
            self._decoder.feed(data)
        self._go_on()

    def eof_received(self) -> bool:
        if not self._is_ready:
            self._refuse("EOF")
        elif not self._is_ended:
            self._end()
        return True

    def pause_writing(self) -> None:
        self._is_socket_full = True
        self._session.pause_writing()

    def resume_writing(self) -> None:
        self._is_socket_full = False
        if not self._is_behind:
            self._session.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop()
        self._session.connection_lost(exc)

    # -- decoding ----------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Gives the session what can be decoded in a turn; the rest later, or when it reads again."""
        self._is_decoding = False
        until_ns = monotonic_ns() + TURN_NS_MAX
        while self._is_reading and not self._is_ended:
            view = self._session.get_buffer(-1)[:PLAIN_BYTES_MAX]
            try:
                count = self._decode_into(view, until_ns)
            except (CorruptStream, ssl.SSLError) as error:
                self._session.nsqd.logger.error(f"[{self._session.remote_address}] - failed to read command - {error}")
                self.abort()
                return
            if count:
                self._session.buffer_updated(count)
            if not self._has_more():
                break
            if monotonic_ns() >= until_ns:
                self._is_decoding = True
                self._loop.call_soon(self._go_on)
                break
            if not count:
                break
        self._send_tls()
        self._set_socket_reading()

    def _has_more(self) -> bool:
        """Tells whether there may be something to decode before more has come; asking is cheaper than trying."""
        if self._decoder is not None and (self._decoder.has_more or self._decoder.is_ended):
            return True
        return self._has_record()

    def _has_record(self) -> bool:
        return self._tls is not None and bool(self._tls_in.pending or self._tls.pending())

    def _decode_into(self, view: memoryview, until_ns: int) -> int:
        """Decodes plain bytes into `view`; returns how many, or 0 if more has to come first, or the time is over."""
        if self._decoder is None:
            return self._decrypt_into(view, until_ns)
        plain = self._decoder.read(len(view))
        while not plain and not self._decoder.is_ended and monotonic_ns() < until_ns:
            if not self._decoder.has_more and not self._feed_decoder(until_ns):
                break
            plain = self._decoder.read(len(view))
        view[: len(plain)] = plain
        if not plain and self._decoder.is_ended:
            self._end()
        return len(plain)

    def _feed_decoder(self, until_ns: int) -> bool:
        """Gives the decoder what TLS has for it, if the connection uses TLS; returns False if that is nothing."""
        if self._tls is None:
            return False
        assert self._decoder is not None
        count = self._decrypt_into(_decrypted, until_ns)
        self._decoder.feed(_decrypted[:count])
        return count > 0

    def _decrypt_into(self, view: memoryview, until_ns: int) -> int:
        """Decrypts as `_decode_into` does. A read is of one record, and refuses many empty ones: so no read lasts."""
        assert self._tls is not None
        count = 0
        while count < len(view) and monotonic_ns() < until_ns:
            size: Any = 0
            try:
                size = self._tls.read(len(view) - count, view[count:])
            except ssl.SSLWantReadError:
                break
            except ssl.SSLZeroReturnError:
                pass
            if size == 0:
                if count == 0:
                    self._end()
                break
            count += size
            if not self._has_record():
                break
        return count

    def _end(self) -> None:
        self._is_ended = True
        self._session.eof_received()

    def _set_socket_reading(self) -> None:
        if self._socket.is_closing():
            return
        if self._is_reading and not self._is_decoding:
            self._socket.resume_reading()
        else:
            self._socket.pause_reading()

    # -- the session's transport -------------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket.get_extra_info(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._socket.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._socket.get_write_buffer_size() + self._gathered_bytes

    def is_closing(self) -> bool:
        return self._socket.is_closing()

    def pause_reading(self) -> None:
        self._is_reading = False
        self._set_socket_reading()

    def resume_reading(self) -> None:
        if self._is_reading:
            return
        self._is_reading = True
        if self._is_ready:
            self._is_decoding = True
            self._loop.call_soon(self._go_on)
        else:
            self._set_socket_reading()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_ready:
            return  # it is a heartbeat, and the client waits for OK
        self._gathered.append(data)
        self._gathered_bytes += len(data)
        if self._gathered_bytes >= GATHER_BYTES_MAX:
            self._encode()
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)
        if self._gathered_bytes > UNENCODED_BYTES_MAX and not self._is_behind:
            self._is_behind = True
            self._session.pause_writing()

    def _flush(self) -> None:
        """Sends what was gathered; what takes too long to encode is sent when the others had their turn."""
        self._encoding_ns = 0
        self._encode()
        self._is_flush_due = bool(self._gathered)
        if self._is_flush_due:
            self._loop.call_soon(self._flush)
        elif self._is_behind:
            self._is_behind = False
            if not self._is_socket_full:
                self._session.resume_writing()

    def _encode(self) -> None:
        """Encodes and sends what was gathered, as long as a turn allows."""
        while self._gathered and self._encoding_ns < TURN_NS_MAX:
            started_ns = monotonic_ns()
            self._send(self._next_gathered())
            self._encoding_ns += monotonic_ns() - started_ns

    def _next_gathered(self) -> bytes | bytearray | memoryview:
        """Takes what is encoded next: at least GATHER_BYTES_MAX if there is as much, and less than twice that."""
        pieces, count = [], 0
        while self._gathered and count < GATHER_BYTES_MAX:
            piece = self._gathered.popleft()
            if len(piece) > GATHER_BYTES_MAX:
                self._gathered.appendleft(memoryview(piece)[GATHER_BYTES_MAX:])
                piece = memoryview(piece)[:GATHER_BYTES_MAX]
            pieces.append(piece)
            count += len(piece)
        self._gathered_bytes -= count
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _send(self, data: bytes | bytearray | memoryview) -> None:
        if self._encoder is not None:
            data = self._encoder.encode(data)
        if self._tls is None:
            self._write(data)
            return
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]
        self._send_tls()

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        """Writes to the socket, unless it is closing: uvloop's refuses to be written to once it is closed."""
        if not self._socket.is_closing():
            self._socket.write(data)

    def close(self) -> None:
        if self._socket.is_closing():
            return
        while self._gathered:
            self._send(self._next_gathered())
        if self._tls is not None and self._is_ready:
            with contextlib.suppress(ssl.SSLError):  # it only waits for the client's own farewell
                self._tls.unwrap()
            self._send_tls()
        self._drop()
        self._socket.close()

    def abort(self) -> None:
        self._drop()
        self._socket.abort()

    def _drop(self) -> None:
        """Forgets what was gathered and what is waited for: nobody reads or sends any more."""
        self._is_ended = True
        self._gathered.clear()
        self._gathered_bytes = 0
        self._stop_timer()
