"""Defines what a handler gets and gives: requests, responses, and the response styles of NSQ's daemons."""

from __future__ import annotations

import http
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from nsquark.web.router import Target

JSON_TYPE: Final = "application/json; charset=utf-8"
TEXT_TYPE: Final = "text/plain; charset=utf-8"
NSQ_HEADER: Final = ("X-Nsq-Content-Type", "nsq; version=1.0")
"""go-nsq reads an answer of nsqlookupd in the current format only with exactly this header."""

_JSON_ESCAPES: Final = (
    (b"<", rb"\u003c"),
    (b">", rb"\u003e"),
    (b"&", rb"\u0026"),
    ("\u2028".encode(), rb"\u2028"),
    ("\u2029".encode(), rb"\u2029"),
)
"""These are escaped, as Go does, so that an answer may stand inside a script element or an old JavaScript string."""

Headers = tuple[tuple[str, str], ...]


class Request(msgspec.Struct, gc=False):
    """Is one received request. It must not be changed: what follows from the request line is shared."""

    target: Target
    query: Mapping[str, str]
    """Has the first value of each name."""
    query_ok: bool
    """Is False if the query has a bad escape or a `;`: NSQ answers 400 INVALID_REQUEST then."""
    body: bytes
    headers: Mapping[bytes, bytes]
    """Has headers by lower-case name, the first of repeated ones."""
    remote: str
    https: bool
    head: bytes = b""
    """Has all before the body, if nothing but this request was received with it."""
    client_name: str = ""
    """Is the common name of the client's certificate, if it showed one."""
    on_left: Callable[[], object] | None = None
    """A handler that waits for long may set it. It is called when the client sends no more, and may be gone."""

    @property
    def method(self) -> str:
        return self.target.method

    @property
    def peer(self) -> str:
        """Returns the host that the request came from, whatever the port; all clients of a unix socket are one."""
        return self.remote.rpartition(":")[0] or self.remote

    @property
    def uri(self) -> str:
        """Returns the request target as it was sent."""
        return self.target.uri

    @property
    def path(self) -> str:
        return self.target.path

    @property
    def tail(self) -> str:
        """Returns what follows the prefix of a prefix route."""
        return self.target.tail


class Response:
    """Is a complete answer. Its bytes are remembered once made, so a constant one costs nothing to send again."""

    __slots__ = ("body", "close", "content_type", "headers", "keep_alive_wire", "omit_body", "status")

    def __init__(
        self,
        status: int = 200,
        body: bytes = b"",
        content_type: str | None = None,
        headers: Headers = (),
        close: bool = False,
        omit_body: bool = False,
    ) -> None:
        self.status = status
        self.body = body
        self.content_type = content_type
        self.headers = headers
        self.close = close
        # An answer to HEAD announces a body and must not have it.
        self.omit_body = omit_body
        self.keep_alive_wire = b""

    def wire(self) -> bytes:
        """Encodes the answer for a connection that stays open."""
        if not self.keep_alive_wire:
            self.keep_alive_wire = self.encode("")
        return self.keep_alive_wire

    def encode(self, connection: str) -> bytes:
        """Encodes the answer with a `Connection` header, if that is not empty."""
        length = (("Content-Length", str(len(self.body))),)
        head = encode_head(self.status, self.content_type, self.headers + length, connection)
        return head if self.omit_body else head + self.body


class StreamResponse:
    """Is an answer of unknown length, sent in chunks as fast as the peer reads them."""

    __slots__ = ("chunks", "content_type", "headers", "status")

    def __init__(
        self,
        status: int,
        content_type: str | None,
        headers: Headers,
        chunks: AsyncIterator[bytes | memoryview],
    ) -> None:
        self.status = status
        self.content_type = content_type
        self.headers = headers
        self.chunks = chunks


class Pending(msgspec.Struct, eq=False):
    """Promises an answer for later: return it from a handler, and `resolve` it exactly once."""

    _response: Response | StreamResponse | None = None
    _callback: Callable[[Response | StreamResponse], object] | None = None

    def resolve(self, response: Response | StreamResponse) -> None:
        self._response = response
        if self._callback is not None:
            self._callback(response)

    def when_resolved(self, callback: Callable[[Response | StreamResponse], object]) -> None:
        """Calls the server back when the answer is there, which may be at once."""
        self._callback = callback
        if self._response is not None:
            callback(self._response)


Answer = Response | StreamResponse
Handler = Callable[[Request], Answer | Pending | Coroutine[Any, Any, Answer]]


def empty() -> Response:
    return Response(headers=(NSQ_HEADER,))


def text(body: str) -> Response:
    return Response(body=body.encode(), content_type=TEXT_TYPE if body else None, headers=(NSQ_HEADER,))


def json(value: object, status: int = 200, *, close: bool = False) -> Response:
    return Response(status, encode_json(value), JSON_TYPE, (NSQ_HEADER,), close)


def error(status: int, code: str, *, close: bool = False) -> Response:
    return json({"message": code}, status, close=close)


def plain(status: int, body: str, *, close: bool = False) -> Response:
    return Response(status, body.encode(), TEXT_TYPE, close=close)


def encode_json(value: object) -> bytes:
    data = msgspec.json.encode(value)
    # These bytes can only stand inside strings, so replacing them keeps the JSON what it is.
    for raw, escaped in _JSON_ESCAPES:
        if raw in data:
            data = data.replace(raw, escaped)
    return data


def encode_head(status: int, content_type: str | None, headers: Headers, connection: str) -> bytes:
    # No browser is to mistake an answer for a page or a script.
    lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}", "X-Content-Type-Options: nosniff"]
    if content_type is not None:
        lines.append(f"Content-Type: {content_type}")
    lines += [f"{name}: {value}" for name, value in headers]
    if connection:
        lines.append(f"Connection: {connection}")
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header must not contain a line break")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")
