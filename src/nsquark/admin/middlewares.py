"""Surrounds every request: its line in the log, an answer to a crash, compression."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web
from aiohttp.web_response import ContentCoding

from nsquark.admin.access import address_of
from nsquark.admin.routing import v1_error
from nsquark.admin.state import STATE
from nsquark.base.durations import Duration

CLIENT_LEFT: Final = 499
"""The status that the log shows of a request whose client did not wait for the answer, as that of
every event stream.
"""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def log_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Writes NSQ's access line, with the status that was really sent."""
    began_ns = time.monotonic_ns()
    status = 500
    try:
        response = await handler(request)
        status = response.status
        return response
    except web.HTTPException as answer:
        status = answer.status
        raise
    except asyncio.CancelledError:
        status = CLIENT_LEFT
        raise
    finally:
        took = Duration(time.monotonic_ns() - began_ns)
        request.app[STATE].logger.info(f"{status} {request.method} {request.path_qs} ({address_of(request)}) {took}")


@web.middleware
async def answer_crashes(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Logs a bug with its traceback, and says no more of it than NSQ does."""
    try:
        return await handler(request)
    except web.HTTPException:
        raise
    except Exception as error:
        request.app[STATE].logger.failure(f"HTTP: {request.method} {request.path} failed", error)
        return v1_error(500, "INTERNAL_ERROR")


@web.middleware
async def compress(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Compresses whole answers as the client wishes, streams never: their pieces should arrive at once."""
    response = await handler(request)
    if isinstance(response, web.Response) and response.body:
        response.headers.setdefault("Vary", "Accept-Encoding")
        coding = _wanted(request.headers.get("Accept-Encoding", ""))
        if coding is not None:
            response.enable_compression(coding)
    return response


def _wanted(accepted: str) -> ContentCoding | None:
    """Returns the first wanted coding of those we have, as in NSQ."""
    for word in accepted.split(","):
        coding = word.partition(";")[0].strip()
        if coding in ("gzip", "deflate"):
            return ContentCoding(coding)
    return None


MIDDLEWARES: Final = (log_requests, compress, answer_crashes)
