"""This is a consumer's connection to one nsqd: what is in flight on it, and the answers on their way back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from nsquark.client.config import Config
from nsquark.client.connection import NsqdConnection, RawMessage
from nsquark.client.envelope import unwrap
from nsquark.client.errors import NotConnected, NsqError
from nsquark.client.handshake import Features
from nsquark.client.logs import NamedLog
from nsquark.client.message import Message
from nsquark.wire import commands

if TYPE_CHECKING:
    from nsquark.client.outcomes import Outcomes

CLOSE_WAIT: Final = b"CLOSE_WAIT"
FIN_REFUSED: Final = "E_FIN_FAILED FIN "
"""The error of a FIN that came too late begins so; the message's id follows."""
CLOSE_WAIT_TIMEOUT_S: Final = 5.0
"""Closing waits so long: what an nsqd that does not answer any more has sent before comes again after its timeout."""
STARVED_FRACTION: Final = 0.85
OVERFLOW_TIMES: Final = 4
OVERFLOW_MIN: Final = 100
"""No honest nsqd sends more than so many times its window, and so many messages, even to one that was long blocked."""
OVERFLOW_BYTES_MAX: Final = 64 << 20
"""When more messages came than twice its window, they have at most so many bytes together."""
ERRORS_LOGGED_MAX: Final = 20
"""So many errors are logged in a second."""
ERROR_LENGTH_MAX: Final = 1000


class Subscription:
    """Receives for a `NsqdConnection` and is a `Window` of the flow.

    `in_flight` has every message that came and is neither answered nor past its deadline. FINs are gathered and leave
    as one piece with the turn's write.
    """

    def __init__(
        self,
        address: str,
        config: Config,
        outcomes: Outcomes,
        on_lost: Callable[[Subscription, NsqError], None],
        opens_envelopes: bool,
        log: NamedLog,
    ) -> None:
        self._config = config
        self._outcomes = outcomes
        self._on_lost = on_lost
        self._opens_envelopes = opens_envelopes
        """Envelopes are opened. Where they are not, they stay in front of the body: one that only looks like an
        envelope must arrive as it is.
        """
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._connection: NsqdConnection | None = None
        self._fins: list[bytes] = []
        self._timeout_s = self._timeout_s_max = 0.0
        self._can_uncount = False
        self._rdy_peak = 0
        self._errors: deque[float] = deque(maxlen=ERRORS_LOGGED_MAX)
        """Has the times when the last errors were logged."""
        self._is_draining = False
        self.is_leaving = False
        """Tells whether it is leaving: what still comes is given back."""
        self._closing: asyncio.Task[None] | None = None
        self._quiet: asyncio.Future[None] = self._loop.create_future()
        self._drained: asyncio.Future[None] = self._loop.create_future()
        self.address = address
        self.in_flight: set[Message] = set()
        self.rdy = self.rdy_max = 0
        self.round_trip_s = 0.0
        self.log = log
        self.is_accepted = False
        """Tells whether SUB was answered."""
        self.is_refused = False
        """Tells whether SUB was answered with an error."""
        self.began_at_s = self.rdy_at_s = self.last_message_at_s = self._loop.time()

    def begin(self, connection: NsqdConnection, features: Features, topic: str, channel: str) -> None:
        """Subscribes. SUB's OK is not waited for: an error ends the connection anyway."""
        self._connection = connection
        self._timeout_s = features.msg_timeout / 1000
        self._timeout_s_max = max(features.msg_timeout, features.max_msg_timeout) / 1000
        self._can_uncount = features.requeue_uncounted
        self.rdy_max = features.max_rdy_count
        self.round_trip_s = connection.round_trip_s
        connection.before_flush = self._send_fins
        connection.send(commands.sub(topic, channel))

    @property
    def is_starved(self) -> bool:
        """Tells whether it has nearly all that it may have, so that more comes only after answers."""
        return len(self.in_flight) > 0 and len(self.in_flight) >= STARVED_FRACTION * self.rdy

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    @property
    def in_flight_count(self) -> int:
        return len(self.in_flight)

    # -- messages and their answers ----------------------------------------------------------------------

    def messages_received(self, messages: list[RawMessage]) -> None:
        self.last_message_at_s = now_s = self._loop.time()
        deadline_s = now_s + self._timeout_s
        last_deadline_s = now_s + self._timeout_s_max
        received = [Message(self, deadline_s, last_deadline_s, *raw) for raw in messages]
        if self._opens_envelopes:
            for message in received:
                message.key, message.headers, message.body = unwrap(message.body)
        self.in_flight.update(received)
        if len(self.in_flight) > 2 * self._rdy_peak and self._is_too_much():
            assert self._connection is not None
            reason = f"nsqd sent {len(self.in_flight)} messages, RDY was {self._rdy_peak} at most"
            self._connection.abort(NotConnected(f"{self.address}: {reason}"))
            return
        self._outcomes.messages_received(received)

    def _is_too_much(self) -> bool:
        if len(self.in_flight) > OVERFLOW_MIN + OVERFLOW_TIMES * self._rdy_peak:
            return True
        return sum(len(message.body) for message in self.in_flight) > OVERFLOW_BYTES_MAX

    def finish(self, message: Message) -> None:
        if threading.get_ident() != self._thread:
            self._call_in_loop(self.finish, message)
            return
        is_sent = self._is_over(message)
        if is_sent:
            self._fins.append(message.id)
            self._connection.flush_soon()  # type: ignore[union-attr]
        self._outcomes.message_finished(message, is_sent)

    def requeue(self, message: Message, delay_s: float | None, backoff: bool, is_counted: bool = True) -> None:
        if threading.get_ident() != self._thread:
            self._call_in_loop(self.requeue, message, delay_s, backoff, is_counted)
            return
        is_sent = self._is_over(message)
        if is_sent:
            if delay_s is None:
                delay_s = self._requeue_delay_s(message.attempts)
            command = commands.req if is_counted or not self._can_uncount else commands.req_uncounted
            self._connection.send(command(message.id, round(delay_s * 1000)))  # type: ignore[union-attr]
        if is_counted:
            self._outcomes.message_failed(message)
        else:
            self._outcomes.message_not_handled(message, is_counted=not (is_sent and self._can_uncount))
        self._outcomes.message_requeued(message, is_sent, backoff)

    def _requeue_delay_s(self, attempts: int) -> float:
        config = self._config
        return min(config.default_requeue_delay.seconds * attempts, config.max_requeue_delay.seconds)

    def touch(self, message: Message) -> None:
        if threading.get_ident() != self._thread:
            self._call_in_loop(self.touch, message)
            return
        if self._connection is not None and message in self.in_flight:
            message.deadline_s = min(self._loop.time() + self._timeout_s, message.last_deadline_s)
            self._connection.send(commands.touch(message.id))

    def forget(self, message: Message) -> None:
        """Forgets a message that is past its deadline: nsqd has taken it back. An answer that comes all the same is
        still sent.
        """
        self._is_over(message)
        self._outcomes.message_forgotten(message)

    def expired(self, message: Message) -> None:
        """Is told that a message waited here, for a handler or for others of its batch, until nsqd took it back."""
        self._is_over(message)
        self._outcomes.message_not_handled(message, is_counted=True)
        self._outcomes.message_requeued(message, is_sent=False, backoff=False)

    def give_up(self, message: Message, reason: str) -> None:
        """Gives up a message, which is answered when the user's hook has seen it. Any thread may call it."""
        self._call_in_loop(self._outcomes.message_hopeless, message, reason)

    def _call_in_loop(self, function: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nsqd has taken the message back
            self._loop.call_soon_threadsafe(function, *arguments)

    def flush(self) -> None:
        """Sends answers at once, without waiting for the end of a turn that a handler may make long."""
        if self._connection is not None:
            self._connection.flush()

    def _is_over(self, message: Message) -> bool:
        """Answers a message; False when nobody is there to be told: nsqd gives the message to another."""
        self.in_flight.discard(message)
        if not self.in_flight and self._is_draining and not self._drained.done():
            self._drained.set_result(None)
        return self._connection is not None

    def _send_fins(self) -> None:
        if self._fins:
            assert self._connection is not None
            self._connection.send(commands.fin_all(self._fins))
            self._fins.clear()

    def set_rdy(self, count: int) -> None:
        self.rdy = count
        self._rdy_peak = max(self._rdy_peak, count)
        self.rdy_at_s = self._loop.time()
        self.log.debug("%s: RDY %d", self.address, count)
        if self._connection is not None:
            self._connection.send(commands.rdy(count))

    def response_received(self, data: bytes) -> None:
        """Is told of SUB's OK, or of CLOSE_WAIT, after which no more messages come."""
        self.is_accepted = True
        if data == CLOSE_WAIT and not self._quiet.done():
            self._quiet.set_result(None)

    def error_received(self, text: str) -> None:
        """Is told of an error, mostly that an answer came too late; what is worse ends the connection."""
        self.is_refused = not self.is_accepted
        if text.startswith(FIN_REFUSED):
            self._outcomes.finish_refused(self.address, text[len(FIN_REFUSED) :].partition(" ")[0].encode())
        now_s = self._loop.time()
        if len(self._errors) < ERRORS_LOGGED_MAX or now_s - self._errors[0] > 1:
            self._errors.append(now_s)
            self.log.error("%s: %s", self.address, text[:ERROR_LENGTH_MAX])

    # -- end ---------------------------------------------------------------------------------------------

    async def close(self, reason: NsqError, timeout_s: float) -> None:
        """Waits until it is closed; who is cancelled here does not stop that."""
        await asyncio.shield(self.begin_to_close(reason, timeout_s))

    def begin_to_close(self, reason: NsqError, timeout_s: float) -> asyncio.Task[None]:
        """Begins to close in order, which goes on by itself: else what is on its way now would wait for its timeout at
        nsqd.

        timeout_s: the time that answers of what is in flight have.
        """
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(reason, timeout_s), name=f"nsquark close {self.address}")
        return self._closing

    async def _close(self, reason: NsqError, timeout_s: float) -> None:
        """Sends CLS, waits for what is on its way, then for the answers of what is in flight, then
        closes the socket.
        """
        connection = self._connection
        if connection is None:
            return
        self.is_leaving = True
        connection.send(commands.CLS)
        try:
            await asyncio.wait([self._quiet], timeout=CLOSE_WAIT_TIMEOUT_S)
            if self.in_flight:
                self._is_draining = True
                await asyncio.wait([self._drained], timeout=timeout_s)
        finally:
            connection.close(reason)
        await connection.wait_lost()

    def connection_lost(self, reason: NsqError) -> None:
        self._connection = None
        self._fins.clear()
        self.in_flight.clear()
        for waited_for in (self._quiet, self._drained):
            if not waited_for.done():
                waited_for.set_result(None)
        self._on_lost(self, reason)
