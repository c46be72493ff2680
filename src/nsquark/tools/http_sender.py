"""Sends the requests of nsq_to_http, on persistent connections."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote, quote_plus

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from nsquark.base.durations import Duration
from nsquark.base.version import NSQ_VERSION
from nsquark.tools.forwarding import NotAccepted
from nsquark.tools.program import Fatal

USER_AGENT: Final = f"nsq_to_http v{NSQ_VERSION}"
REFUSED: Final = range(400, 500)
NOT_THE_MESSAGE: Final = frozenset((401, 403, 404, 408, 421, 425, 429))
"""These statuses of REFUSED blame the endpoint or the moment, not the message."""
REDIRECTS_MAX: Final = 10
HEAD_LINE_BYTES_MAX: Final = 1 << 20
"""A line in the head of an answer may be this long, as for Go's client; aiohttp alone would allow 8 KiB."""
ASCII: Final = bytes(range(33, 127)).decode()

_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class _Garbled(ValueError):
    """Says that what followed the head of an answer is no HTTP."""


class _Answers(ResponseHandler):
    """Reads the head of an answer before anything that came with it.

    aiohttp alone drops an answer for garbage that came together with its head, even for garbage behind its end; and
    where the garbage comes later, nobody who reads the body is told.
    """

    _body: aiohttp.StreamReader | None = None

    def data_received(self, data: bytes) -> None:
        head, blank, rest = data.partition(b"\r\n\r\n")
        super().data_received(head + blank)
        if rest and self.exception() is None:
            super().data_received(rest)

    def feed_data(self, data: tuple[Any, aiohttp.StreamReader], size: int = 0) -> None:
        self._body = data[1]
        super().feed_data(data, size)

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        super().set_exception(exc, *cause)
        if isinstance(exc, HttpProcessingError) and self._body is not None and not self._body.is_eof():
            self._body.set_exception(_Garbled())


class HttpSender:
    """Sends bodies by POST, or by GET as part of the URL. It raises NotAccepted, which says why one was not."""

    def __init__(
        self, *, headers: Mapping[str, str], content_type: str, connect_timeout: Duration, request_timeout: Duration
    ) -> None:
        # Go sends these, so that an endpoint that looks at headers sees no difference.
        sent = {"User-Agent": USER_AGENT, "Accept-Encoding": "gzip"}
        if content_type:
            sent["Content-Type"] = content_type
        self._is_post = bool(content_type)
        connector = aiohttp.TCPConnector(limit=0)  # the number of handlers limits the connections
        make: type[ResponseHandler] = _Answers
        connector._factory = functools.partial(make, asyncio.get_running_loop())  # aiohttp has no option for it
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={**sent, **headers},
            skip_auto_headers=("Accept",),
            timeout=aiohttp.ClientTimeout(total=request_timeout.seconds, sock_connect=connect_timeout.seconds),
            auto_decompress=False,
            # Cookies would bind all messages to one server behind a balancer; Go's client keeps none either.
            cookie_jar=aiohttp.DummyCookieJar(),
            max_line_size=HEAD_LINE_BYTES_MAX,
            max_field_size=HEAD_LINE_BYTES_MAX,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def send(self, address: str, body: bytes) -> None:
        try:
            if self._is_post:
                status = await self._status("POST", address, body)
                is_accepted = 200 <= status < 300
            else:
                status = await self._status("GET", filled_in(address, body), None)
                is_accepted = status == 200
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NotAccepted(f"{address}: {_reason(error)}") from None
        if not is_accepted:
            is_refused = status in REFUSED and status not in NOT_THE_MESSAGE
            raise NotAccepted(f"{address}: got status code {status}", is_refused=is_refused)

    async def _status(self, method: str, url: str, body: bytes | None) -> int:
        request = self._session.request(method, _url(url), data=body, max_redirects=REDIRECTS_MAX)
        async with request as answer:
            # The status alone says whether the message was taken, as for NSQ's tool. The rest is read so that the
            # connection can be used again; sending the message again because that fails would only double it.
            with contextlib.suppress(aiohttp.ClientError, OSError, _Garbled):
                async for _ in answer.content.iter_any():
                    pass
            return answer.status


def _reason(error: Exception) -> str:
    """Says why there was no answer."""
    if isinstance(error, aiohttp.TooManyRedirects):
        return f"more than {REDIRECTS_MAX} redirects"
    if isinstance(error, aiohttp.RedirectClientError):
        return f"cannot follow to {error}"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"no HTTP answer: {_one_line(error.message)}"  # the status in its text is aiohttp's own
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the connection was closed before an answer"  # aiohttp shows its objects here
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)


def _one_line(message: str) -> str:
    """Makes one line of an error of aiohttp's parser, which is a little picture with an arrow below the place."""
    return " ".join(message.removesuffix("^").split())


def filled_in(address: str, body: bytes) -> str:
    """Puts the body in the place of %s in the address of a GET. As in NSQ's tool, %% is a percent sign."""
    before, _, after = address.partition("%s")
    return before.replace("%%", "%") + quote_plus(body) + after.replace("%%", "%")


def _url(text: str) -> URL:
    """Makes a URL whose printable ASCII characters stay as they were given."""
    return URL(quote(text, safe=ASCII), encoded=True)


def check_urls(flag: str, addresses: Sequence[str]) -> None:
    """Refuses a URL that cannot work, since it would cost every message its attempts."""
    for address in addresses:
        try:
            url = _url(address.replace("%s", ""))
            is_good = url.scheme in ("http", "https") and bool(url.host)
        except ValueError:
            is_good = False
        if not is_good:
            raise Fatal(f"--{flag} {address}: expected http://host:port/path or https://host:port/path")


def parse_headers(given: Sequence[str]) -> dict[str, str]:
    """Reads headers given as `Name: value`, and capitalises the names as Go does."""
    headers = {}
    for text in given:
        name, _, value = (part.strip() for part in text.partition(":"))
        if not _TOKEN.fullmatch(name) or not value or not value.isprintable():
            raise Fatal("--header value format should be 'Name: value'")
        headers["-".join(part.capitalize() for part in name.split("-"))] = value
    return headers
