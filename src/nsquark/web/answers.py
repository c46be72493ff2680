"""Keeps the place of an answer in the order of a connection's answers, and sends one whose length is unknown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec

from nsquark.web.messages import Answer, Request, StreamResponse, encode_head
from nsquark.web.reader import Persistence


class AnswerSlot(msgspec.Struct, eq=False):
    """Keeps the place of one answer in the order of answers."""

    request: Request
    persistence: Persistence
    started_ns: int
    """Is 0 if the request is not to be logged."""
    answer: Answer | None = None
    task: asyncio.Task[None] | None = None
    """Is the handler, if it waits for something, or the sending of a long answer."""
    weight: int = 0
    """This much of `waiting_handlers` is used while its handler waits: a change uses all, since changes keep order."""


async def stream(
    response: StreamResponse,
    transport: asyncio.Transport,
    wait_writable: Callable[[], Awaitable[None]],
    *,
    chunked: bool,
    close: bool,
) -> None:
    """Sends the whole response as fast as the peer reads it, and no faster.

    Without chunks (HTTP/1.0) its end is the end of the connection.
    """
    encoding = (("Transfer-Encoding", "chunked"),) if chunked else ()
    connection = "close" if close else ""
    transport.write(encode_head(response.status, response.content_type, response.headers + encoding, connection))
    try:
        async for chunk in response.chunks:
            # An empty chunk would be the end of the body.
            if len(chunk):
                # Not `writelines`: asyncio's own, in Python 3.12 and 3.13.0, never tells when its buffer is full.
                for part in (b"%x\r\n" % len(chunk), chunk, b"\r\n") if chunked else (chunk,):
                    transport.write(part)
                await wait_writable()
            # A source that never waits, read by a fast peer, must not keep the loop from everybody else.
            await asyncio.sleep(0)
    finally:
        if isinstance(response.chunks, AsyncGenerator):
            await response.chunks.aclose()
    if chunked:
        transport.write(b"0\r\n\r\n")
