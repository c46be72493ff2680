"""Sets the bounds of an HTTP server: no peer may use more than these."""

from dataclasses import dataclass
from typing import Final

BODY_BYTES_MAX: Final = 1024 * 1024
"""The body of a request has at most this many bytes where its route names no limit of its own."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    header_bytes: int = 32 * 1024
    """Bounds request line and headers together, and what may pass in a body's framing without a byte of the body."""
    idle_seconds: int = 600
    """Closes a connection without a request. It is long, since NSQ's nsqd never closes one and clients count on it."""
    request_seconds: int = 60
    """Bounds the time from the first byte of a request to its last."""
    pipelined_requests: int = 256
    """Bounds the requests of one connection that are being answered; more wait unread."""
    waiting_handlers: int = 2
    """Bounds the requests of one connection whose handlers wait for something other than a commit."""
    write_buffer_bytes: int = 256 * 1024
    """Bounds the answers that wait for the peer to read; above it the peer's requests are not read either."""
    write_stall_seconds: int = 120
    """Cuts off a peer that reads nothing at all of what waits for it."""
    linger_seconds: float = 1.0
    """Gives the peer time, before the connection ends, to read an answer that refuses the rest of its request."""
    close_seconds: float = 5.0
    """Bounds the time that `HttpServer.close` gives the requests being answered."""
    connections: int = 0
    """Bounds the connections at once; 0 = unlimited."""
