"""Surrounds every request: it writes a line to the log, answers when a handler crashes, compresses the answer, and cuts
off an answer that fails after its beginning.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler
from aiohttp.web_response import ContentCoding

from nsquark.admin.access import address_of
from nsquark.admin.errors import UpstreamError
from nsquark.admin.routing import v1_error
from nsquark.admin.state import STATE
from nsquark.base.durations import Duration

CLIENT_LEFT: Final = 499
"""The log shows this status for a request whose client did not wait for the answer, and so for every event stream."""
FORESEEN: Final = (UpstreamError, web.HTTPException, ConnectionError, TimeoutError)
"""These failures of a streamed answer are no bugs, so the log shows no traceback for them."""
RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)

BEGUN: web.RequestKey[web.StreamResponse] = web.RequestKey("BEGUN", web.StreamResponse)


@web.middleware
async def log_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Writes a line in NSQ's form to the log for every request, with the status that was really sent."""
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
    """Logs a bug with its traceback, and tells the client no more of it than NSQ does."""
    try:
        return await handler(request)
    except web.HTTPException:
        raise
    except Exception as error:
        request.app[STATE].logger.failure(f"HTTP: {request.method} {request.path} failed", error)
        return v1_error(500, "INTERNAL_ERROR")


async def remember_beginning(request: web.Request, response: web.StreamResponse) -> None:
    """Remembers the answer whose head is sent now."""
    request[BEGUN] = response


@web.middleware
async def cut_off_failures(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Cuts off an answer that fails after its beginning, so that the client notices. A second answer would be read as a
    part of the first.
    """
    try:
        response = await handler(request)
        if BEGUN in request and request[BEGUN] is not response:
            raise RuntimeError(f"the handler answered a second time, with status {response.status}")
        return response
    except asyncio.CancelledError:
        if BEGUN in request:
            _reset(request)
        raise
    except Exception as error:
        if BEGUN not in request:
            raise
        if _reset(request):
            _log_cut_off(request, error)
        return request[BEGUN]


def _reset(request: web.Request) -> bool:
    """Ends the connection at once, and returns False if the client has left already. A reset is not taken for the end
    of the answer, as a mere close is by clients of HTTP/1.0, such as many proxies.
    """
    transport = request.transport
    if transport is None or transport.is_closing():
        return False
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    transport.abort()
    return True


def _log_cut_off(request: web.Request, error: Exception) -> None:
    logger, text = request.app[STATE].logger, f"HTTP: {request.method} {request.path} was cut off"
    if isinstance(error, FORESEEN):
        logger.error(f"{text} - {error!r}")
    else:
        logger.failure(text, error)


@web.middleware
async def compress(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Compresses whole answers as the client wishes, but no streams, since their pieces should arrive at once."""
    response = await handler(request)
    if isinstance(response, web.Response) and response.body:
        response.headers.setdefault("Vary", "Accept-Encoding")
        coding = _wanted(request.headers.get("Accept-Encoding", ""))
        if coding is not None:
            response.enable_compression(coding)
    return response


def _wanted(accepted: str) -> ContentCoding | None:
    """Returns the first accepted coding that we have, as NSQ does, or None if there is none."""
    for word in accepted.split(","):
        coding = word.partition(";")[0].strip()
        if coding in ("gzip", "deflate"):
            return ContentCoding(coding)
    return None


MIDDLEWARES: Final = (log_requests, compress, answer_crashes, cut_off_failures)
