"""Serves one HTTP/1.1 connection: answers leave in the order in which their requests came, under all its limits."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from nsquark.base.addresses import show_peer
from nsquark.base.durations import Duration
from nsquark.base.logs import Level
from nsquark.web.answers import AnswerSlot, stream
from nsquark.web.certificates import common_name
from nsquark.web.fairness import TURN_NS_MAX
from nsquark.web.lane import LaneOfConnection
from nsquark.web.messages import Answer, Pending, Request, Response, StreamResponse, error, plain
from nsquark.web.outgoing import Outgoing
from nsquark.web.reader import INTERNAL_ERROR, KEEP, Persistence, RequestReader
from nsquark.web.router import BAD_REQUEST, Target

if TYPE_CHECKING:
    from nsquark.web.server import HttpServer

FEED_BYTES_MAX: Final = 16 * 1024
"""The parser cannot stop in the middle of what it is fed, so it is fed no more than this at a time: that bounds how
many tiny requests are read before the limits are looked at again.
"""
LARGE_READ_BYTES: Final = 64 * 1024
"""Event loops that read until a socket is empty read again at once after a read of this much."""

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
TOO_SLOW: Final = plain(408, "408 Request Timeout", close=True)
TOO_MANY_CONNECTIONS: Final = error(503, "TOO_MANY_CONNECTIONS", close=True)
UNREADABLE: Final = Target("", "", "", "", {}, False, lambda request: BAD_REQUEST, False, 0, BAD_REQUEST)
"""This target stands for a request line that could not be read."""


class HttpConnection(asyncio.Protocol):
    """Serves the requests of one connection. Always:

    * Requests are in one of four places, oldest first: `_slots` (with a handler, answer not sent), `_postponed`
      (read, waiting because too much is being answered or sent), `_reader` (half read), `_unread` (bytes).
    * Reading is paused while `_postponed` or `_unread` is not empty, the peer does not read what is sent, or the others
      have their turn.
    * While a lane owes answers no other request is given to its handler, so that answers keep their order.
    * Between turns of the loop `_out` is empty; within one (`_busy`) answers gather there for one write.
    """

    __slots__ = (
        "_busy",
        "_data_tick",
        "_ended",
        "_eof",
        "_https",
        "_lane",
        "_limits",
        "_lingering",
        "_logger",
        "_out",
        "_postponed",
        "_reader",
        "_reading",
        "_refused",
        "_remote",
        "_request_tick",
        "_server",
        "_slots",
        "_transport",
        "_turn_due",
        "_unread",
        "_until_ns",
        "_weights",
    )

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._limits = server.limits
        self._logger = server.logger
        self._transport: asyncio.Transport
        self._reader: RequestReader
        self._remote = ""
        self._unread = b""
        self._postponed: deque[tuple[Request, Persistence]] = deque()
        self._slots: deque[AnswerSlot] = deque()
        self._weights = 0
        self._lane = LaneOfConnection(self._lane_answered)
        self._out: Outgoing
        self._busy = False
        self._eof = False
        """Tells whether the peer or the server is closing: then only the answers that are due are sent."""
        self._refused = False
        """Tells whether a request was refused, whose rest is not wanted."""
        self._ended = False
        """Tells whether the last answer has been given."""
        self._lingering = False
        self._reading = True
        # These say when this turn's time is over, 0 before its first request, and whether the next turn is waited for.
        self._until_ns = 0
        self._turn_due = False
        # These say, by the server's clock, when data came last, and when a half read request began.
        self._data_tick = server.tick
        self._request_tick = 0

    # -- the transport's side ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._out = Outgoing(self._transport)
        self._transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        self._remote = show_peer(transport)
        self._https = transport.get_extra_info("sslcontext") is not None
        self._reader = RequestReader(
            self._server.router,
            self._server.browsers,
            self._limits,
            self._logger,
            self._remote,
            self._https,
            common_name(transport.get_extra_info("peercert")),
            self._accept,
            self._send_continue,
        )
        if not self._server.admit(self):
            self._refuse(TOO_MANY_CONNECTIONS)
        elif not self._server.descriptors.admits(transport):
            self._transport.abort()  # an answer would keep the descriptor open

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if reader.stopped:
            return
        self._data_tick = self._server.tick
        lane = self._lane.open
        if (
            lane is not None
            and not (self._slots or self._postponed or self._unread or self._out.is_paused or reader.has_begun)
            and lane.handle(data)
        ):
            return
        if self._unread:
            self._unread += data
        elif len(data) <= FEED_BYTES_MAX and not self._postponed:
            self._until_ns = 0
            self._feed(data)
        else:
            self._unread = data
            self._go_on()
            if len(data) >= LARGE_READ_BYTES:
                self._give_way()

    def eof_received(self) -> bool:
        """Goes on answering a client that has closed only its own side; with TLS there is no such half."""
        self._eof = True
        for slot in self._slots:
            if slot.request.on_left is not None:
                slot.request.on_left()
        return self._is_answering and not self._ended and not self._https

    def pause_writing(self) -> None:
        self._out.pause(self._server.tick)
        self._set_reading()

    def resume_writing(self) -> None:
        self._out.resume()
        if not self._busy:
            self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.forget(self)
        self._end()
        self._lane.stop()
        self._out.lost()
        for slot in self._slots:
            # A change that has begun goes on without its client; what only reads ends with it.
            if slot.task is not None and (slot.request.method == "GET" or slot.answer is not None):
                slot.task.cancel()
        self._slots.clear()
        self._reader.release()

    # -- receiving ---------------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        self._busy = True
        refusal: Response | None
        try:
            refusal = self._reader.feed(data)
        except Exception as failure:
            self._logger.failure(f"HTTP: ({self._remote}) failed", failure)
            refusal = INTERNAL_ERROR
        if refusal is not None:
            self._refuse(refusal)
        self._busy = False
        if self._out.gathered_bytes or self._ended or self._eof:
            self._flush()
        if self._reader.url and not self._request_tick:
            self._request_tick = self._server.tick
        if self._postponed:
            self._set_reading()

    def _accept(self, request: Request, persistence: Persistence) -> None:
        self._request_tick = 0
        if self._postponed or (
            (self._slots or self._out.gathered_bytes or self._out.is_paused or self._lane.open is not None)
            and self._is_full()
        ):
            self._postponed.append((request, persistence))
        elif self._is_time_over():
            self._postponed.append((request, persistence))
            self._give_way()
        else:
            self._dispatch(request, persistence)

    def _send_continue(self) -> None:
        # An earlier answer must come first; the client then sends the body after a while without being told.
        if not self._slots and not self._postponed and not self._lane.is_busy:
            self._out.add(CONTINUE)

    def _is_full(self) -> bool:
        limits = self._limits
        return (
            self._out.is_paused
            or self._lane.is_busy
            or self._out.gathered_bytes > limits.write_buffer_bytes
            or len(self._slots) >= limits.pipelined_requests
            or self._weights >= limits.waiting_handlers
        )

    def _is_time_over(self) -> bool:
        now_ns = time.monotonic_ns()
        if not self._until_ns:
            self._until_ns = now_ns + TURN_NS_MAX
        return now_ns > self._until_ns

    def _give_way(self) -> None:
        """Reads and answers no more until the others had their turn."""
        if not self._turn_due and not self._ended:
            self._turn_due = True
            asyncio.get_running_loop().call_soon(self._next_turn)
            self._set_reading()

    def _next_turn(self) -> None:
        self._turn_due = False
        if not self._transport.is_closing():
            self._go_on()

    @property
    def _is_answering(self) -> bool:
        """Tells whether requests that came, whole or as bytes, wait for their answers."""
        return bool(self._slots or self._postponed or self._unread or self._lane.is_busy)

    def _lane_answered(self) -> None:
        """Goes on with what came behind the lane's requests."""
        if self._postponed or self._unread:
            self._go_on()
        if self._eof:
            self._flush()

    def _go_on(self) -> None:
        """Goes on with what was postponed, as far as the limits and this turn's time allow."""
        self._until_ns = 0
        while not self._ended and not self._is_full() and not self._turn_due:
            if (self._postponed or self._unread) and self._is_time_over():
                self._give_way()
            elif self._postponed:
                self._busy = True
                self._dispatch(*self._postponed.popleft())
                self._busy = False
                self._flush()
            elif self._unread and not self._reader.stopped:
                data, self._unread = self._unread[:FEED_BYTES_MAX], self._unread[FEED_BYTES_MAX:]
                self._feed(data)
            else:
                break
        self._set_reading()

    def _set_reading(self) -> None:
        if self._transport.is_closing():
            return
        # What is sent after a refusal is read, to be thrown away.
        reading = self._refused or not (self._postponed or self._unread or self._out.is_paused or self._turn_due)
        if reading != self._reading:
            self._reading = reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    # -- answering ---------------------------------------------------------------------------------------

    def _dispatch(self, request: Request, persistence: Persistence) -> None:
        target = request.target
        if target.lane is not None:
            self._lane.saw(request, target.lane, self._transport.write)
        started_ns = time.perf_counter_ns() if target.log else 0
        try:
            result = target.handler(request)
        except Exception as failure:
            self._logger.failure(f"HTTP: {request.method} {request.uri} failed", failure)
            result = INTERNAL_ERROR
        if type(result) is Response and not self._slots:
            if started_ns:
                self._log(request, result.status, started_ns)
            self._send(result, persistence)
            return
        slot = AnswerSlot(request, persistence, started_ns)
        self._slots.append(slot)
        if isinstance(result, Pending):
            result.when_resolved(partial(self._answer_came, slot))
        elif isinstance(result, (Response, StreamResponse)):
            self._answer_came(slot, result)
        else:
            slot.weight = 1 if request.method == "GET" else self._limits.waiting_handlers
            self._weights += slot.weight
            slot.task = self._server.run(result, partial(self._answer_came, slot), request)

    def _answer_came(self, slot: AnswerSlot, answer: Answer) -> None:
        self._weights -= slot.weight
        if self._ended:
            return
        if slot.started_ns and isinstance(answer, Response):
            self._log(slot.request, answer.status, slot.started_ns)
        slots = self._slots
        if (
            len(slots) == 1
            and slot.persistence is KEEP
            and type(answer) is Response
            and not (answer.close or self._busy or self._postponed or self._unread or self._eof)
        ):
            # This is by far the most frequent case: nothing is before it, and nothing after.
            slots.clear()
            self._transport.write(answer.keep_alive_wire or answer.wire())
            return
        slot.answer = answer
        if slots[0] is slot:
            self._advance()

    def _advance(self) -> None:
        """Sends the answers that are ready, up to the first that is not."""
        while self._slots and not self._ended:
            slot = self._slots[0]
            if slot.answer is None:
                break
            if isinstance(slot.answer, StreamResponse):
                slot.task = self._server.spawn(self._stream(slot, slot.answer))
                break
            self._slots.popleft()
            self._send(slot.answer, slot.persistence)
        if not self._busy:
            self._flush()
            if self._postponed or self._unread:
                self._go_on()

    async def _stream(self, slot: AnswerSlot, response: StreamResponse) -> None:
        chunked = slot.persistence in (Persistence.KEEP, Persistence.CLOSE)
        close = slot.persistence is not Persistence.KEEP
        try:
            await stream(response, self._transport, self._out.wait_writable, chunked=chunked, close=close)
        except asyncio.CancelledError:
            self._transport.abort()
            raise
        except Exception as failure:
            # The status has left already: a body without an end is the only way left to say that it failed.
            self._logger.failure(f"HTTP: {slot.request.method} {slot.request.uri} failed", failure)
            self._transport.abort()
            return
        if slot.started_ns:
            self._log(slot.request, response.status, slot.started_ns)
        if self._ended:
            return
        self._slots.popleft()
        if close:
            self._end()
        self._advance()

    def _send(self, response: Response, persistence: Persistence) -> None:
        if persistence is KEEP and not response.close:
            wire = response.keep_alive_wire or response.wire()
        elif persistence is Persistence.KEEP_1_0 and not response.close:
            wire = response.encode("keep-alive")
        else:
            wire = response.encode("close")
            self._end()
        self._out.add(wire)

    def _flush(self) -> None:
        self._out.write()
        if self._ended or (self._eof and not self._is_answering):
            self._hang_up()

    def _refuse(self, response: Response) -> None:
        """Answers, behind earlier ones, a request whose rest is not wanted, and ends the connection."""
        self._reader.stopped = self._refused = True
        self._unread = b""
        target = dataclasses.replace(self._reader.target or UNREADABLE, handler=lambda request: response)
        self._accept(Request(target, {}, False, b"", {}, self._remote, self._https), Persistence.CLOSE)
        if not self._busy:
            self._flush()

    # -- ending ------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Ends the connection: the last answer is on its way, and nothing after it counts."""
        self._ended = self._reader.stopped = True
        self._postponed.clear()
        self._unread = b""

    def _hang_up(self) -> None:
        if self._lingering or self._transport.is_closing():
            return
        if not self._refused or self._eof:
            self._transport.close()
            return
        # Closing while the peer still sends would reset the connection and lose the answer.
        self._lingering = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._set_reading()
        asyncio.get_running_loop().call_later(self._limits.linger_seconds, self._transport.close)

    def shut_down(self) -> None:
        """Closes with the server: what is being answered is finished, nothing more is accepted."""
        self._reader.stopped = self._eof = True
        self._unread = b""
        self._flush()

    def abort(self) -> None:
        self._transport.abort()

    def check_time(self, tick: int) -> None:
        """Ends what lasts too long; it is called once a second."""
        limits = self._limits
        if self._out.is_paused or self._ended:
            if self._out.is_stalled(tick, limits.write_stall_seconds):
                self._transport.abort()
        elif self._request_tick:
            if self._reading and tick - self._request_tick > limits.request_seconds:
                self._refuse(TOO_SLOW)
        elif self._slots or self._lane.is_busy:
            # A connection is idle from its last answer on, not from its last request.
            self._data_tick = tick
        elif tick - self._data_tick > limits.idle_seconds:
            self._transport.close()

    def _log(self, request: Request, status: int, started_ns: int) -> None:
        if self._logger.level <= Level.INFO:
            elapsed = Duration(time.perf_counter_ns() - started_ns)
            self._logger.info(f"{status} {request.method} {request.uri} ({self._remote}) {elapsed}")
