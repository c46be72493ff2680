"""Sets the bounds of an HTTP server: no peer may take more than these."""

from dataclasses import dataclass
from typing import Final

BODY_BYTES_MAX: Final = 1024 * 1024
"""The body of a request has at most so many bytes where its route names no limit of its own."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    # Request line and headers together; also what may pass in a body's framing without a byte of the body.
    header_bytes: int = 32 * 1024
    # A kept connection without a request. Long, since NSQ's nsqd never closes one and clients count on it.
    idle_seconds: int = 600
    # From the first byte of a request to its last.
    request_seconds: int = 60
    # Requests of one connection that are being answered; more wait unread.
    pipelined_requests: int = 256
    # Those of them whose handlers wait for something other than a commit.
    waiting_handlers: int = 2
    # Answers waiting for the peer to read; above it the peer's requests are not read either.
    write_buffer_bytes: int = 256 * 1024
    # A peer that reads nothing at all of what waits for it.
    write_stall_seconds: int = 120
    # After an answer that refuses the rest of a request: time for the peer to read it before the end.
    linger_seconds: float = 1.0
    # What `HttpServer.close` gives the requests being answered.
    close_seconds: float = 5.0
    # Connections at once; 0 = unlimited.
    connections: int = 0
