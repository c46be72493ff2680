"""Asks nsqds and nsqlookupds over HTTP, with limits on time, size and the number of connections.

Errors are worded as Go's HTTP client words them, since NSQ's /api shows them and scripts look for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Final, TypeVar

import aiohttp
from yarl import URL

from nsquark.admin.errors import UpstreamError
from nsquark.admin.options import NsqadminOptions, OptionsError
from nsquark.base.printable import escaped
from nsquark.base.secrets import read_secret
from nsquark.web.fetch import ACCEPT, named_https_port
from nsquark.wire.documents import decode_json

T = TypeVar("T")

RESPONSE_BYTES_MAX: Final = 64 << 20
ERROR_BODY_BYTES_SHOWN_MAX: Final = 4096
CONNECTIONS_MAX: Final = 128
CONNECTIONS_PER_HOST_MAX: Final = 6
READ_BYTES: Final = 64 << 10

_REASONS: Final = {
    errno.ECONNREFUSED: "connection refused",
    errno.ECONNRESET: "connection reset by peer",
    errno.EHOSTUNREACH: "no route to host",
    errno.ENETUNREACH: "network is unreachable",
    errno.ETIMEDOUT: "connection timed out",
}


class ClusterClient:
    """Is the HTTP client for everything that nsqadmin asks. `close` ends its connections."""

    def __init__(self, options: NsqadminOptions) -> None:
        self._options = options
        self._secret = _secret(options)
        self._tls = _tls(options)
        self._session: aiohttp.ClientSession | None = None

    @property
    def lookupds(self) -> list[str]:
        return self._options.lookupd_http_address

    @property
    def nsqds(self) -> list[str]:
        return self._options.nsqd_http_address

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, address: str, target: str, kind: type[T], *, timeout_s: float | None = None) -> T:
        """Returns the JSON answer to a GET as a value of this type. It raises UpstreamError, whatever goes wrong."""
        body = await self.ask("GET", f"http://{address}{target}", timeout_s=timeout_s)
        return decode(body, kind)

    async def post(self, address: str, target: str, body: bytes | None = None) -> bytes:
        return await self.ask("POST", f"http://{address}{target}", body=body)

    async def ask(
        self,
        method: str,
        url: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        shows_secret: bool = True,
    ) -> bytes:
        """Returns the body of an answer with status 200; any other status raises UpstreamError too."""
        async with self.request(
            method, url, data=body, headers=headers, timeout_s=timeout_s, shows_secret=shows_secret
        ) as answer:
            received = await _read(answer)
        if answer.status != 200:
            shown = quoted(received[:ERROR_BODY_BYTES_SHOWN_MAX].decode("utf-8", "surrogateescape"))
            raise UpstreamError(f"got response {answer.status} {answer.reason} {shown}", answer.status, received)
        return received

    @contextlib.asynccontextmanager
    async def request(
        self,
        method: str,
        url: str,
        *,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        shows_secret: bool = True,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Makes a request and yields the answer, of any status, to be read inside the `async with`. The timeout covers
        the reading too.

        An nsqd that wants TLS or the secret is asked once more, with it. The secret is for nsqds alone: a caller that
        asks another server clears `shows_secret`.
        """
        try:
            async with asyncio.timeout(timeout_s or self._options.http_client_request_timeout.seconds):
                answer = await self._send(method, url, data, headers)
                try:
                    if answer.status == 403 and url.startswith("http://"):
                        port = named_https_port(await _read(answer))
                        if port is not None:
                            url = str(URL(url, encoded=True).with_scheme("https").with_port(port))
                            answer.release()
                            answer = await self._send(method, url, data, headers)
                    if answer.status == 401 and self._secret and shows_secret:
                        answer.release()
                        shown = {**(headers or {}), "Authorization": f"Bearer {self._secret}"}
                        answer = await self._send(method, url, data, shown)
                    yield answer
                finally:
                    answer.release()
        except TimeoutError:
            text = "context deadline exceeded (Client.Timeout exceeded while awaiting headers)"
            raise UpstreamError(f'{method.capitalize()} "{url}": {text}') from None
        except aiohttp.ClientPayloadError:
            raise UpstreamError("unexpected EOF") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise UpstreamError(f'{method.capitalize()} "{url}": {_explained(error)}') from None

    async def _send(
        self, method: str, url: str, data: bytes | None, headers: Mapping[str, str] | None
    ) -> aiohttp.ClientResponse:
        if self._session is None:
            self._session = self._new_session()
        target = URL(url, encoded=True)
        return await self._session.request(method, target, data=data, headers=headers, allow_redirects=False)

    def _new_session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=CONNECTIONS_MAX, limit_per_host=CONNECTIONS_PER_HOST_MAX, ssl=self._tls, ttl_dns_cache=10
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._options.http_client_connect_timeout.seconds)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            headers={"Accept": ACCEPT, "Accept-Encoding": "identity", "User-Agent": "nsqadmin"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """Reads the body of an answer and keeps it there, so that it can be read again."""
    if answer._body is None:
        received = bytearray()
        async for piece in answer.content.iter_chunked(READ_BYTES):
            received += piece
            if len(received) > RESPONSE_BYTES_MAX:
                raise ValueError(f"the answer has more than {RESPONSE_BYTES_MAX} bytes")
        answer._body = bytes(received)
    return answer._body


def decode(body: bytes, kind: type[T]) -> T:
    try:
        return decode_json(body, kind)
    except ValueError as error:
        raise UpstreamError(_json_trouble(body, str(error))) from None


def _json_trouble(body: bytes, otherwise: str) -> str:
    """Describes a body that is no JSON at all in the words of Go's parser, and any other by `otherwise`."""
    text = body.lstrip()
    if not text or "truncated" in otherwise:
        return "unexpected end of JSON input"
    if text[0] not in b'{["-0123456789tfn':
        return f"invalid character {go_char(text[:4].decode('utf-8', 'replace')[0])} looking for beginning of value"
    return otherwise


def go_char(char: str) -> str:
    return "'\\''" if char == "'" else "'\"'" if char == '"' else f"'{escaped(char)}'"


def quoted(text: str) -> str:
    """Quotes a text as Go's %q does."""
    inner = "".join({'"': '\\"', "\\": "\\\\"}.get(char) or escaped(char) for char in text)
    return f'"{inner}"'


def _explained(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        reason = _REASONS.get(number or 0) or (os.strerror(number) if number else str(error.os_error))
        return f"dial tcp {error.host}:{error.port}: connect: {reason}"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "EOF"
    if isinstance(error, aiohttp.ClientResponseError):
        trouble = error.message.partition(":")[0]
        return f"net/http: HTTP/1.x transport connection broken: malformed HTTP response ({trouble})"
    return str(error) or type(error).__name__


def _secret(options: NsqadminOptions) -> str:
    if not options.auth_secret_file:
        return ""
    try:
        return read_secret(options.auth_secret_file)
    except ValueError as error:
        raise OptionsError(f"--auth-secret-file {error}") from None


def _tls(options: NsqadminOptions) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if options.http_client_tls_insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if options.http_client_tls_cert:
        cert, key = options.http_client_tls_cert, options.http_client_tls_key
        try:
            context.load_cert_chain(cert, key)
        except (OSError, ssl.SSLError) as error:
            raise OptionsError(f"failed to LoadX509KeyPair {cert}, {key} - {error}") from None
    if options.http_client_tls_root_ca_file:
        path = options.http_client_tls_root_ca_file
        try:
            context.load_verify_locations(path)
        except ssl.SSLError:
            raise OptionsError(f"failed to AppendCertsFromPEM {path}") from None
        except OSError as error:
            raise OptionsError(f"failed to read TLS root CA file {path} - {error.strerror}") from None
    return context
