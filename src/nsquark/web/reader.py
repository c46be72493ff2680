"""Turns bytes into requests: it has the parser's callbacks, and the limits on what a request may be."""

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Final

import httptools

from nsquark.base.addresses import UNIX_PEER
from nsquark.base.logs import Logger
from nsquark.web.browsers import BrowserGuard
from nsquark.web.limits import HttpLimits
from nsquark.web.messages import Request, Response, error, plain
from nsquark.web.router import BAD_REQUEST, Router, Target

HEADERS_TOO_BIG: Final = plain(431, "431 Request Header Fields Too Large", close=True)
INTERNAL_ERROR: Final = error(500, "INTERNAL_ERROR")
END_OF_HEAD: Final = b"\r\n\r\n"


class Persistence(IntEnum):
    """Says what follows the answer. HTTP/1.0 knows no chunks, and wants keep-alive confirmed."""

    KEEP = 0
    KEEP_1_0 = 1
    CLOSE = 2
    CLOSE_1_0 = 3


OF_BROWSERS: Final = frozenset((b"origin", b"sec-fetch-site"))
"""Only browsers send these, and always with what a page asks of another site."""

UNLIKE: Final = frozenset((b"expect", b"transfer-encoding", b"upgrade"))
"""With one of these headers a request is more than a head and a body of the length that the head tells."""

KEEP: Final = Persistence.KEEP
"""Saves looking the member up in its enumeration, which costs as much as a function call."""


class RefusedError(Exception):
    """Leaves the parser early, with the answer to a request whose rest is not wanted."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


class RequestReader:
    """Reads the requests of one connection and hands each to `accept`.

    `stopped` is set by the last request of a connection, or from outside; what comes after is not read.
    """

    __slots__ = (
        "_accept",
        "_body",
        "_body_bytes",
        "_browsers",
        "_client_name",
        "_fed",
        "_headers",
        "_https",
        "_known_hosts",
        "_limits",
        "_logger",
        "_parser",
        "_progress",
        "_remote",
        "_resolve",
        "_resolved",
        "_send_continue",
        "_unproductive_bytes",
        "has_begun",
        "stopped",
        "target",
        "url",
    )

    def __init__(
        self,
        router: Router,
        browsers: BrowserGuard,
        limits: HttpLimits,
        logger: Logger,
        remote: str,
        https: bool,
        client_name: str,
        accept: Callable[[Request, Persistence], None],
        send_continue: Callable[[], None],
    ) -> None:
        self._resolve = router.resolve
        self._resolved = router.resolved
        self._browsers = browsers
        self._known_hosts = browsers.known_hosts
        self._limits = limits
        self._logger = logger
        self._remote = remote
        self._https = https
        self._client_name = client_name
        self._accept = accept
        self._send_continue = send_continue
        self._parser = httptools.HttpRequestParser(self)
        self.has_begun = False
        """Tells whether some of a request was read, not all."""
        self._fed = b""
        """Has what is being fed, if no request in it has ended yet and none began before it."""
        self.url = b""
        """Is not empty while the target of a request is known and its end has not come."""
        self._headers: dict[bytes, bytes] = {}
        # One piece stays as it came, several are joined: a list of tiny ones would need far more memory.
        self._body: bytes | bytearray = b""
        self._body_bytes = 0
        self._unproductive_bytes = 0
        self._progress: tuple[bool, int] | None = None
        self.target: Target | None = None
        """Has the meaning of the request line, once the headers are read."""
        self.stopped = False

    def feed(self, data: bytes) -> Response | None:
        """Reads on. If it returns a response, send that behind earlier answers, and let it read no more."""
        self._fed = b"" if self.has_begun else data
        return self._parse(data)

    def _parse(self, data: bytes) -> Response | None:
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
        return self._check_progress(len(data)) if self.url else None

    def release(self) -> None:
        """Lets go of the parser, which refers to this object's methods: without that cycle all is freed at once."""
        del self._parser, self._accept, self._send_continue

    # -- called by the parser ----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.has_begun = True

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.setdefault(name.lower(), value)

    def on_headers_complete(self) -> None:
        method = self._parser.get_method()
        url = self.url
        self.target = target = self._resolved.get((method, url)) or self._resolve(method, url)
        headers = self._headers
        if headers.get(b"host") not in self._known_hosts or not headers.keys().isdisjoint(OF_BROWSERS):
            self._check_browser(target, headers)
        length = headers.get(b"content-length")
        if length is not None and int(length) > target.max_body_bytes:
            raise RefusedError(target.too_big)
        if b"expect" in headers and headers[b"expect"].lower() == b"100-continue":
            self._send_continue()

    def on_body(self, data: bytes) -> None:
        if not self._body:
            self._body = data
        else:
            if type(self._body) is bytes:
                self._body = bytearray(self._body)
            self._body += data
        self._body_bytes += len(data)
        target = self.target
        assert target is not None
        if self._body_bytes > target.max_body_bytes:
            raise RefusedError(target.too_big)

    def on_message_complete(self) -> None:
        headers = self._headers
        parser = self._parser
        if b"upgrade" in headers and parser.should_upgrade():
            return
        target = self.target
        assert target is not None
        body = bytes(self._body)
        keep = parser.should_keep_alive()
        persistence = KEEP
        if not keep or b"connection" in headers:
            self.stopped = self.stopped or not keep
            persistence = _persistence(keep, parser.get_http_version() != "1.1")
        fed, self._fed = self._fed, b""
        head = fed[: len(fed) - len(body)] if target.lane is not None and persistence is KEEP else b""
        if not head.endswith(END_OF_HEAD) or END_OF_HEAD in head[:-1] or not headers.keys().isdisjoint(UNLIKE):
            head = b""
        self.has_begun = False
        self.url = b""
        self._headers = {}
        self.target = self._progress = None
        if body:
            self._body = b""
            self._body_bytes = 0
        request = Request(
            target, target.query, target.query_ok, body, headers, self._remote, self._https, head, self._client_name
        )
        self._accept(request, persistence)

    # -- details -----------------------------------------------------------------------------------------

    def _check_browser(self, target: Target, headers: Mapping[bytes, bytes]) -> None:
        if target.method == "GET" and target.path == "/ping":
            return
        refusal = self._browsers.refusal(headers, checks_host=self._remote != UNIX_PEER)
        if refusal is not None:
            raise RefusedError(refusal)

    def _check_progress(self, fed_bytes: int) -> Response | None:
        """Bounds what a request may send without getting on: endless headers, trailers or chunk extensions."""
        progress = (self.target is not None, self._body_bytes)
        if progress != self._progress:
            self._progress = progress
            self._unproductive_bytes = 0
            return None
        self._unproductive_bytes += fed_bytes
        return HEADERS_TOO_BIG if self._unproductive_bytes > self._limits.header_bytes else None

    def _without_upgrade(self, rest: bytes) -> bytes:
        """Rewrites a request that offers an upgrade as the plain request it also is, to be parsed once more.

        Java's HTTP client offers HTTP/2 like that with any request, and the parser mistakes the body of such a request
        for another protocol.
        """
        if b"upgrade" not in self._headers:
            # CONNECT: it has been refused, and what follows it is for no HTTP server.
            self.stopped = True
            return b""
        head = [self._parser.get_method() + b" " + self.url + b" HTTP/1.1"]
        if b"close" in self._headers.get(b"connection", b"").lower():
            head.append(b"Connection: close")
        skipped = (b"upgrade", b"connection", b"http2-settings")
        head += [name + b": " + value for name, value in self._headers.items() if name not in skipped]
        self._parser = httptools.HttpRequestParser(self)
        self.url = b""
        self._headers = {}
        return b"\r\n".join(head) + b"\r\n\r\n" + rest


def _persistence(keep: bool, is_1_0: bool) -> Persistence:
    if keep:
        return Persistence.KEEP_1_0 if is_1_0 else Persistence.KEEP
    return Persistence.CLOSE_1_0 if is_1_0 else Persistence.CLOSE
