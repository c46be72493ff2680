"""This is a small HTTP client for what the daemons ask of each other and of auth servers.

It runs the standard library's client in a thread: such requests are rare, and nsqd starts without loading it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import socket
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import SplitResult, urlsplit

import msgspec

from nsquark.base.addresses import PORT_MAX, join_address
from nsquark.web.bearer import bearer
from nsquark.wire.documents import decode_json

if TYPE_CHECKING:
    import http.client
    import ssl

ACCEPT: Final = "application/vnd.nsq; version=1.0"
RESPONSE_BYTES_MAX: Final = 64 * 1024 * 1024
READ_BYTES: Final = 64 * 1024

Fetched = tuple[int, dict[str, str], bytes]


class FetchError(Exception):
    """Says that there was no answer. The text names the request and the reason; `reason` alone is for requests with a
    secret in them.
    """

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason


class _TlsRequired(msgspec.Struct):
    """Is the body with which an nsqd that requires TLS refuses plain HTTP."""

    https_port: Annotated[int, msgspec.Meta(ge=1, le=PORT_MAX)]


def named_https_port(body: bytes) -> int | None:
    """Returns the port that a refusal of plain HTTP names for HTTPS; None if it is another refusal."""
    try:
        return decode_json(body, _TlsRequired).https_port
    except ValueError:
        return None


async def fetch(
    url: str,
    *,
    method: str = "GET",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    secret: str = "",
    connect_timeout: float,
    request_timeout: float,
    response_bytes_max: int = RESPONSE_BYTES_MAX,
    ssl_context: ssl.SSLContext | None = None,
) -> Fetched:
    """Returns status, headers by lower-case name, and body. Timeouts are in seconds; the second is for the whole
    request.

    A plain request to an nsqd that requires TLS is repeated at the HTTPS port which the refusal names, and one to an
    nsqd that asks who we are is repeated with the secret, so that none is sent in clear to an nsqd that wants TLS.
    """
    deadline = time.monotonic() + request_timeout
    parts = _split(url)
    call = _Call(
        method, parts, body, {"Accept": ACCEPT, **(headers or {})}, connect_timeout, response_bytes_max, ssl_context
    )
    answer = await call.run(deadline)
    if answer[0] == 403 and parts.scheme == "http" and (port := named_https_port(answer[2])) is not None:
        call = call.over_tls(port)
        answer = await call.run(deadline)
    if answer[0] == 401 and secret:
        answer = await call.showing(secret).run(deadline)
    return answer


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0):
            return parts
    except ValueError as error:
        raise _bad_url(url, str(error)) from None
    raise _bad_url(url, "expected http://host:port/path or https://host:port/path")


def _bad_url(url: str, reason: str) -> FetchError:
    return FetchError(f"cannot fetch {url!r} - {reason}", reason)


class _Call:
    """Makes one request in a thread of its own, which ends with it: a slow server never delays another request."""

    def __init__(
        self,
        method: str,
        parts: SplitResult,
        body: bytes | None,
        headers: Mapping[str, str],
        connect_timeout: float,
        response_bytes_max: int,
        ssl_context: ssl.SSLContext | None,
    ) -> None:
        self._method = method
        self._parts = parts
        self._body = body
        self._headers = headers
        self._connect_timeout = connect_timeout
        self._response_bytes_max = response_bytes_max
        self._ssl_context = ssl_context
        self._socket: socket.socket | None = None
        self._deadline = 0.0

    def over_tls(self, port: int) -> _Call:
        parts = self._parts._replace(scheme="https", netloc=join_address(self._parts.hostname or "", port))
        call = copy.copy(self)
        call._parts = parts
        return call

    def showing(self, secret: str) -> _Call:
        call = copy.copy(self)
        call._headers = {**self._headers, **bearer(secret)}
        return call

    async def run(self, deadline: float) -> Fetched:
        self._deadline = deadline
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Fetched] = loop.create_future()
        thread = threading.Thread(target=self._work, args=(loop, done), name="fetch", daemon=True)
        thread.start()
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await done
        except TimeoutError:
            raise self._error("timed out") from None
        finally:
            self._interrupt()

    def _work(self, loop: asyncio.AbstractEventLoop, done: asyncio.Future[Fetched]) -> None:
        try:
            answer = self._request()
        except BaseException as error:
            self._report(loop, done, error)
        else:
            self._report(loop, done, answer)

    def _report(
        self,
        loop: asyncio.AbstractEventLoop,
        done: asyncio.Future[Fetched],
        outcome: Fetched | BaseException,
    ) -> None:
        def report() -> None:
            if done.done():
                return
            if isinstance(outcome, BaseException):
                done.set_exception(outcome if isinstance(outcome, FetchError) else self._error(str(outcome)))
            else:
                done.set_result(outcome)

        # The loop may have ended while this thread waited for the server.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(report)

    def _request(self) -> Fetched:
        connection = self._connect()
        try:
            path = (self._parts.path or "/") + (f"?{self._parts.query}" if self._parts.query else "")
            connection.request(self._method, path, self._body, dict(self._headers))
            with connection.getresponse() as response:  # it may have taken over the socket
                data = bytearray()
                while piece := response.read(READ_BYTES):
                    data += piece
                    if len(data) > self._response_bytes_max:
                        raise self._error(f"the answer is larger than {self._response_bytes_max} bytes")
                if response.length:
                    raise self._error(f"the answer broke off {response.length} bytes before its end")
                names = {name.lower(): value for name, value in response.getheaders()}
                return response.status, names, bytes(data)
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        import http.client

        host = self._parts.hostname or ""
        port = self._parts.port
        connection: http.client.HTTPConnection
        timeout = min(self._connect_timeout, self._remaining())
        if self._parts.scheme == "https":
            connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=self._ssl_context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=timeout)
        try:
            connection.connect()
        except TimeoutError:
            raise self._error("timed out while connecting") from None
        self._socket = connection.sock
        self._socket.settimeout(self._remaining())
        return connection

    def _remaining(self) -> float:
        # A timeout of 0 would mean: do not wait at all, and fail with another error.
        return max(self._deadline - time.monotonic(), 0.001)

    def _interrupt(self) -> None:
        """Ends a thread that still waits: each single read may be quick enough, and the whole may never end."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _error(self, reason: str) -> FetchError:
        return FetchError(f"{self._method} {self._parts.geturl()} failed - {reason}", reason)
