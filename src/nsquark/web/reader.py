"""Bytes to requests: the parser's callbacks, and the limits on what a request may be.

A request costs few Python steps: the parser puts pieces of line, headers and body straight into a list, a dict and a
list, and what follows from a request line, or from the names of the headers, is worked out once and remembered.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Final, NamedTuple

import httptools

from nsquark.cli.logs import Logger
from nsquark.web.limits import Limits
from nsquark.web.messages import Request, Response, error, plain
from nsquark.web.router import BAD_REQUEST, Router, Target

# The same few sets of header names come again and again; what they mean is kept for this many of them.
SHAPES_MAX: Final = 1024
SHAPE_NAMES_MAX: Final = 32
# A body in more pieces than this is put together: many tiny ones take a multiple of their bytes.
BODY_PIECES_MAX: Final = 4096

HEADERS_TOO_BIG: Final = plain(431, "431 Request Header Fields Too Large", close=True)
INTERNAL_ERROR: Final = error(500, "INTERNAL_ERROR")


class Persistence(IntEnum):
    """What follows the answer. HTTP/1.0 knows no chunks, and wants keep-alive confirmed."""

    KEEP = 0
    KEEP_1_0 = 1
    CLOSE = 2
    CLOSE_1_0 = 3


class RefusedError(Exception):
    """Leaves the parser early, with the answer to a request whose rest is not wanted."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


class HeaderShape(NamedTuple):
    """Under which spelling a request has the headers that matter here; empty where it has none."""

    content_length: bytes
    connection: bytes
    expect: bytes
    upgrade: bytes


_shapes: dict[tuple[bytes, ...], HeaderShape] = {}


def _shape_of(names: tuple[bytes, ...]) -> HeaderShape:
    spelt = {name.lower(): name for name in reversed(names)}
    wanted = (b"content-length", b"connection", b"expect", b"upgrade")
    shape = HeaderShape(*(spelt.get(name, b"") for name in wanted))
    if len(names) <= SHAPE_NAMES_MAX:
        if len(_shapes) >= SHAPES_MAX:
            _shapes.clear()
        _shapes[names] = shape
    return shape


class RequestReader:
    """Reads the requests of one connection and hands each to `take`.

    `stopped` is set by the last request of a connection, or from outside; what comes after is not read.
    """

    def __init__(
        self,
        router: Router,
        limits: Limits,
        logger: Logger,
        remote: str,
        https: bool,
        take: Callable[[Request, Persistence], None],
        send_continue: Callable[[], None],
    ) -> None:
        self._resolve = router.resolve
        self._resolved = router.resolved
        self._limits = limits
        self._logger = logger
        self._remote = remote
        self._https = https
        self._take = take
        self._send_continue = send_continue
        # The parts of the request being read, by the parser.
        self.line: list[bytes] = []
        self._body: list[bytes] = []
        self._body_counted = 0
        self._body_bytes = 0
        self._unproductive_bytes = 0
        self._progress: tuple[bool, int] | None = None
        self._shape = HeaderShape(b"", b"", b"", b"")
        self._headers: dict[bytes, bytes]
        self._parser: httptools.HttpRequestParser
        self._start_parser()
        # The meaning of the request line, once the headers are read.
        self.target: Target | None = None
        self.stopped = False

    def feed(self, data: bytes) -> Response | None:
        """Read on. A response means: answer with it in its turn, and read no more."""
        try:
            while True:
                try:
                    self._parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    data = self._without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as left:
            if isinstance(left.__context__, RefusedError):
                return left.__context__.response
            raise
        except httptools.HttpParserError as malformed:
            # After a request that ends the connection, further bytes do not matter.
            if self.stopped:
                return None
            self._logger.debug(f"HTTP: ({self._remote}) malformed request - {malformed}")
            return BAD_REQUEST
        return self._check_partial(len(data)) if self.line else None

    def release(self) -> None:
        """The parser holds this object's methods; without it all is freed at once."""
        del self._parser, self.on_url, self.on_header, self.on_body, self._take, self._send_continue

    # --- called by the parser

    def on_headers_complete(self) -> None:
        headers = self._headers
        names = tuple(headers)
        self._shape = shape = _shapes.get(names) or _shape_of(names)
        line = self.line
        url = line[0] if len(line) == 1 else b"".join(line)
        method = self._parser.get_method()
        self.target = target = self._resolved.get((method, url)) or self._resolve(method, url)
        if shape.content_length and int(headers[shape.content_length]) > target.max_body_bytes:
            raise RefusedError(target.too_big)
        if shape.expect and headers[shape.expect].lower() == b"100-continue":
            self._send_continue()

    def on_message_complete(self) -> None:
        shape = self._shape
        parser = self._parser
        if shape.upgrade and parser.should_upgrade():
            return
        target = self.target
        assert target is not None
        pieces = self._body
        body = b"".join(pieces)
        if len(body) > target.max_body_bytes:
            raise RefusedError(target.too_big)
        keep = parser.should_keep_alive()
        persistence = Persistence.KEEP
        if shape.connection or not keep:
            self.stopped = self.stopped or not keep
            persistence = _persistence(keep, parser.get_http_version() != "1.1")
        headers = self._headers.copy()
        self._forget_request()
        self._take(
            Request(target, target.query, target.query_ok, body, headers, self._remote, self._https),
            persistence,
        )

    # --- details

    def _start_parser(self) -> None:
        """The parser calls these as they are, without a step in Python."""
        self._headers = {}
        self.on_url = self.line.append
        self.on_header = self._headers.setdefault
        self.on_body = self._body.append
        self._parser = httptools.HttpRequestParser(self)

    def _forget_request(self) -> None:
        self.line.clear()
        self._headers.clear()
        self._body.clear()
        self.target = None
        if self._progress is not None:
            self._progress = None
            self._body_bytes = self._body_counted = 0

    def _check_partial(self, fed_bytes: int) -> Response | None:
        """Bound what is kept of a body, and what a request may send without getting on: endless headers,
        trailers or chunk extensions."""
        target = self.target
        pieces = self._body
        self._body_bytes += sum(map(len, pieces[self._body_counted :]))
        if target is not None and self._body_bytes > target.max_body_bytes:
            return target.too_big
        if len(pieces) > BODY_PIECES_MAX:
            pieces[:] = [b"".join(pieces)]
        self._body_counted = len(pieces)
        progress = (target is not None, self._body_bytes)
        if progress != self._progress:
            self._progress = progress
            self._unproductive_bytes = 0
            return None
        self._unproductive_bytes += fed_bytes
        return HEADERS_TOO_BIG if self._unproductive_bytes > self._limits.header_bytes else None

    def _without_upgrade(self, rest: bytes) -> bytes:
        """A request that offers an upgrade, as the plain request it also is, to be parsed once more.

        Java's HTTP client offers HTTP/2 like that with any request, and the parser takes the body of such a
        request for another protocol.
        """
        if not self._shape.upgrade or not self.line:
            # CONNECT: it has been refused, and what follows it is for no HTTP server.
            self.stopped = True
            return b""
        head = [self._parser.get_method() + b" " + b"".join(self.line) + b" HTTP/1.1"]
        if b"close" in self._headers.get(self._shape.connection, b"").lower():
            head.append(b"Connection: close")
        skipped = (b"upgrade", b"connection", b"http2-settings")
        head += [name + b": " + value for name, value in self._headers.items() if name.lower() not in skipped]
        self._forget_request()
        self._start_parser()
        return b"\r\n".join(head) + b"\r\n\r\n" + rest


def _persistence(keep: bool, is_1_0: bool) -> Persistence:
    if keep:
        return Persistence.KEEP_1_0 if is_1_0 else Persistence.KEEP
    return Persistence.CLOSE_1_0 if is_1_0 else Persistence.CLOSE
