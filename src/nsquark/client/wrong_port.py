"""Tells which other port of NSQ answers where nsqlookupd's HTTP API is expected."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import msgspec

from nsquark.client.errors import WrongPort
from nsquark.web.fetch import FetchError
from nsquark.web.lookupd import BadAnswer, ask_lookupd
from nsquark.wire.documents import decode_json

CHECK_S: Final = 1.0
"""Is how long one port may take to show what it is."""
LOOKUPD_PORT: Final = "nsqlookupd's TCP port (4160 by default); give its HTTP port (4161)"
NSQD_PORT: Final = "nsqd's TCP port (4150 by default); give nsqlookupd's HTTP port (4161), or the nsqd as nsqd="
NSQD_HTTP_PORT: Final = "nsqd's HTTP port (4151 by default); give nsqlookupd's (4161)"

_PROTOCOLS: Final = (
    (b"  V1PING\n", b"\x00\x00\x00\x02OK", LOOKUPD_PORT),
    (b"  V2IDENTIFY\n\x00\x00\x00\x02{}", b"\x00\x00\x00\x06\x00\x00\x00\x00OK", NSQD_PORT),
)
"""Has what a port of each protocol is sent, what it alone answers, and what it is."""


class _AboutNsqd(msgspec.Struct):
    """Is what an nsqd says of itself, and no nsqlookupd."""

    tcp_port: int


def _read_about(body: bytes) -> _AboutNsqd:
    return decode_json(body, _AboutNsqd)


async def wrong_port(url: str, error: FetchError) -> WrongPort | None:
    """Returns an error if it is another port of NSQ that did not answer nsqlookupd's question."""
    if not isinstance(error, BadAnswer):
        name = await _protocol(url)
    elif error.status == HTTPStatus.NOT_FOUND:
        name = NSQD_HTTP_PORT if await _is_nsqd_http(url) else ""
    else:
        name = ""
    return WrongPort(f"{url}: this is {name}") if name else None


async def _is_nsqd_http(url: str) -> bool:
    parts = urlsplit(url)
    about = urlunsplit((parts.scheme, parts.netloc, "/info", "", ""))
    try:
        await ask_lookupd(about, _read_about, connect_timeout=CHECK_S, request_timeout=CHECK_S)
    except FetchError:
        return False
    return True


async def _protocol(url: str) -> str:
    for question, answer, name in _PROTOCOLS:
        if await _answers(url, question, answer):
            return name
    return ""


async def _answers(url: str, question: bytes, answer: bytes) -> bool:
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(CHECK_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                writer.write(question)
                return await reader.readexactly(len(answer)) == answer
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError, EOFError, ValueError):
        return False
