"""Publishes to one nsqd, as go-nsq does it: one connection, answers in order, no retry."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self, Unpack, cast

from nsquark.client.checks import (
    Body,
    check_address,
    check_count,
    check_flag,
    check_name,
    checked_bodies,
    checked_body,
    seconds_of,
)
from nsquark.client.config import Config, Options
from nsquark.client.connection import NsqdConnection, RawMessage
from nsquark.client.errors import (
    ANOTHER_LOOP,
    NO_LOOP,
    Closed,
    MessageTooBig,
    NotConnected,
    NsqError,
    ServerError,
    TooMuchOutstanding,
)
from nsquark.client.handshake import connect
from nsquark.client.logs import NamedLog
from nsquark.client.packing import Packing, mpub_body, packed, packed_all
from nsquark.wire import commands
from nsquark.wire.commands import MpubBody

OUTSTANDING_BYTES_MAX: Final = 16 << 20
OUTSTANDING_MAX: Final = 100_000
KNOWN_TOPICS_MAX: Final = 1024
CLOSE_TIMEOUT_S: Final = 10.0


class Producer:
    """Publishes to one nsqd. It connects with the first publish, and again with the next one after a loss.

    address: `host:port` of nsqd's TCP port, or the path of a unix socket.
    config: options, which `options` override.
    envelope: puts each message into an envelope, which has room for headers; other clients see it before the body.
    outstanding_bytes_max: so many bytes of publishes may wait for their answer.
    outstanding_max: so many publishes may wait for their answer.
    logger: instead of `nsquark.client`.

    Invariants: `_outstanding` has a future for each publish that has no answer yet, in the order in which they were
    sent, those whose callers have gone included, since nsqd answers them all. What is in `_unsent` is its tail: it was
    never sent, and waits for a connection. While there is a connection, `_unsent` has what came after a `_refusal`, and
    something that was sent before it has no answer yet.
    """

    def __init__(
        self,
        address: str,
        config: Config | None = None,
        *,
        envelope: bool = False,
        outstanding_bytes_max: int = OUTSTANDING_BYTES_MAX,
        outstanding_max: int = OUTSTANDING_MAX,
        logger: logging.Logger | None = None,
        **options: Unpack[Options],
    ) -> None:
        self.address = check_address(address)
        self.config = Config.merge(config, options)
        self._log = NamedLog(logger, "producer")
        check_flag("envelope", envelope)
        self.envelope = envelope
        check_count("outstanding_bytes_max", outstanding_bytes_max, 0)
        check_count("outstanding_max", outstanding_max, 0)
        self._bytes_max = outstanding_bytes_max
        self._count_max = outstanding_max
        self._connection: NsqdConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._message_bytes_max = self._body_bytes_max = sys.maxsize
        self._outstanding: deque[tuple[asyncio.Future[None], int]] = deque()
        self._outstanding_bytes = 0
        self._unsent: list[bytes] = []
        self._refusal = ""
        """Is the text of the error after which nsqd is about to close the connection."""
        self._waiting: OrderedDict[asyncio.Future[None], bytes] = OrderedDict()
        self._topics: dict[str, bytes] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def is_connected(self) -> bool:
        """Tells whether there is a connection now."""
        return self._connection is not None

    @property
    def outstanding(self) -> int:
        """Returns how many publishes have no answer yet."""
        return len(self._outstanding)

    @property
    def outstanding_bytes(self) -> int:
        """Returns how many bytes have no answer yet."""
        return self._outstanding_bytes

    # -- publishing --------------------------------------------------------------------------------------

    async def publish(self, topic: str, body: Any, **packing: Unpack[Packing]) -> None:
        """Returns when nsqd has the message. Waits first while too much is outstanding.

        topic: its name.
        body: bytes, or with `encode` any value.
        """
        await self._outcome(self._send_when_room(self._pub(topic, body, packing)))

    async def multi_publish(self, topic: str, bodies: Iterable[Any] | MpubBody, **packing: Unpack[Packing]) -> None:
        """Publishes all of the messages or none, if they are at most 65,536, in one command.

        topic: its name.
        bodies: of the messages, each as of `publish`.
        """
        await self._outcome(self._send_when_room(self._mpub(topic, bodies, packing)))

    async def deferred_publish(
        self, topic: str, delay: float | timedelta, body: Any, **packing: Unpack[Packing]
    ) -> None:
        """Publishes a message that consumers get later.

        topic: its name.
        delay: seconds, from when nsqd takes the message.
        body: as of `publish`.
        """
        await self._outcome(self._send_when_room(self._dpub(topic, delay, body, packing)))

    def publish_nowait(self, topic: str, body: Any, **packing: Unpack[Packing]) -> asyncio.Future[None]:
        """Publishes without waiting: it leaves with this turn's other publishes, and the future has the outcome.

        TooMuchOutstanding means: wait for some first.

        topic: its name.
        body: as of `publish`.
        """
        return self._send(self._pub(topic, body, packing))

    def multi_publish_nowait(
        self, topic: str, bodies: Iterable[Any] | MpubBody, **packing: Unpack[Packing]
    ) -> asyncio.Future[None]:
        """Publishes as `multi_publish` does, without waiting; the future has the outcome.

        topic: its name.
        bodies: as of `multi_publish`.
        """
        return self._send(self._mpub(topic, bodies, packing))

    def deferred_publish_nowait(
        self, topic: str, delay: float | timedelta, body: Any, **packing: Unpack[Packing]
    ) -> asyncio.Future[None]:
        """Publishes as `deferred_publish` does, without waiting; the future has the outcome.

        topic: its name.
        delay: as of `deferred_publish`.
        body: as of `publish`.
        """
        return self._send(self._dpub(topic, delay, body, packing))

    async def ping(self) -> None:
        """Connects if needed; as go-nsq's, it does not wait for an answer."""
        self._check_open()
        self._use_loop(asyncio.get_running_loop())
        if self._connection is None:
            connecting = self._connect()
            await asyncio.wait([connecting])
            self._check_open()
            connecting.result()
        if self._connection is None:
            raise NotConnected(f"{self.address}: not connected")
        self._connection.send(commands.NOP)

    # -- commands: what nsqd would refuse, and close the connection for, is refused here -----------------

    def _pub(self, topic: str, body: Any, packing: Packing) -> bytes:
        if packing or self.envelope:
            body = packed(self.envelope, body, **packing)
        if type(body) is not bytes or not 0 < len(body) <= self._message_bytes_max:
            body = self._checked(body)
        name = self._topics.get(topic) if type(topic) is str else None
        return commands.pub(name or self._topic(topic), body)

    def _mpub(self, topic: str, bodies: Iterable[Any] | MpubBody, packing: Packing) -> bytes:
        if packing or self.envelope:
            bodies = packed_all(self.envelope, bodies, **packing)
        name = self._topic(topic)
        if not isinstance(bodies, MpubBody):
            listed = checked_bodies(bodies)
            # Together they are looked at in a tenth of the time that one by one takes.
            if set(map(type, listed)) != {bytes} or max(map(len, listed)) > self._message_bytes_max:
                listed = [self._checked(body) for body in listed]
            bodies = mpub_body(cast("list[bytes]", listed))
        if not bodies.count:
            raise ValueError("multi_publish needs at least one message")
        if len(bodies.data) > self._body_bytes_max:
            raise MessageTooBig(
                f"{bodies.count} messages of {len(bodies.data)} bytes together; {self.address} takes "
                f"{self._body_bytes_max}: publish fewer at once"
            )
        return commands.mpub(name, bodies)

    def _dpub(self, topic: str, delay: float | timedelta, body: Any, packing: Packing) -> bytes:
        if packing or self.envelope:
            body = packed(self.envelope, body, **packing)
        name = self._topic(topic)
        return commands.dpub(name, round(seconds_of("delay", delay) * 1000), self._checked(body))

    def _topic(self, topic: str) -> bytes:
        """Returns a topic's name as nsqd gets it; one that is known was checked before."""
        name = self._topics.get(topic) if isinstance(topic, str) else None
        if name is None:
            check_name("topic", topic)
            if len(self._topics) >= KNOWN_TOPICS_MAX:
                self._topics.clear()
            self._topics[topic] = name = topic.encode()
        return name

    def _checked(self, body: Body) -> bytes:
        body = checked_body(body)
        if len(body) > self._message_bytes_max:
            raise MessageTooBig(f"a body of {len(body)} bytes; {self.address} takes {self._message_bytes_max}")
        return body

    # -- the order of sending and of answers -------------------------------------------------------------

    def _send(self, command: bytes) -> asyncio.Future[None]:
        if self._is_closed or self._waiting or not self._has_room(len(command)):
            self._check_room(len(command))
        future = self._new_future()
        self._enqueue(future, command)
        return future

    def _size_of(self, command: bytes) -> int:
        return len(command)

    def _check_room(self, size: int, count: int = 1) -> None:
        """Raises TooMuchOutstanding if so many publishes of this size together would be too much."""
        self._check_open()
        if self._waiting or not self._has_room(size, count):
            raise TooMuchOutstanding(f"{self.address}: {len(self._outstanding)} publishes wait for their answer")

    def _new_future(self) -> asyncio.Future[None]:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise NsqError(f"{self.address}: {NO_LOOP}") from None
        if loop is not self._loop:
            self._use_loop(loop)
        return loop.create_future()

    def _use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Goes over to another event loop, if nothing is left in the one before."""
        if loop is not self._loop:
            if self._connection is not None or self._connecting is not None or self._outstanding:
                raise NsqError(f"{self.address}: {ANOTHER_LOOP}")
            self._loop = loop

    def _send_when_room(self, command: bytes) -> asyncio.Future[None]:
        if self._is_closed:
            self._check_open()
        future = self._new_future()
        if self._waiting or not self._has_room(len(command)):
            self._waiting[future] = command
        else:
            self._enqueue(future, command)
        return future

    def _enqueue(self, future: asyncio.Future[None], command: bytes) -> None:
        self._outstanding.append((future, len(command)))
        self._outstanding_bytes += len(command)
        if self._connection is None:
            self._unsent.append(command)
            self._connect()
        elif self._refusal:
            self._unsent.append(command)
        else:
            self._connection.send(command)

    def _let_in(self) -> None:
        """Lets in those that wait longest, as far as there is room; a caller that has gone was never sent."""
        while self._waiting and self._has_room(len(self._waiting[next(iter(self._waiting))])):
            future, command = self._waiting.popitem(last=False)
            if not future.done():
                self._enqueue(future, command)

    async def _outcome(self, future: asyncio.Future[None]) -> None:
        """Waits for a publish, which is forgotten with its body if the caller goes."""
        try:
            await future
        except asyncio.CancelledError:
            self._forget(future)
            raise

    def _forget(self, future: asyncio.Future[None]) -> None:
        """Forgets a publish whose caller has gone, if it still waits; those behind it may be smaller, and fit."""
        if self._waiting.pop(future, None) is not None:
            self._let_in()

    def _has_room(self, size: int, count: int = 1) -> bool:
        """Tells whether there is room; one publish is always let through, however big."""
        waiting = len(self._outstanding) + count
        return waiting == 1 or (self._outstanding_bytes + size <= self._bytes_max and waiting <= self._count_max)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(f"{self.address}: stopped")

    def error_received(self, text: str) -> None:
        """Fails the oldest publish. nsqd closes the connection after every error that a publish can have, and reads
        nothing that was sent behind it: what comes from now on is for the next connection. Those that were sent wait
        for the close, since another nsqd may answer them all the same.
        """
        self._refusal = text
        self.response_received(b"", ServerError(text))
        if self._connection is not None and len(self._outstanding) == len(self._unsent):
            self._connection.drop(NotConnected(f"{self.address}: not used after an error"))

    def response_received(self, data: bytes, error: NsqError | None = None) -> None:
        """Gives the oldest publish its outcome: nsqd answers in the order in which they were sent."""
        if not self._outstanding:
            assert self._connection is not None
            self._connection.abort(NotConnected(f"{self.address}: nsqd answered what was not asked"))
            return
        future, size = self._outstanding.popleft()
        self._outstanding_bytes -= size
        if not future.done():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
        if error is None:
            if self._refusal and self._connection is not None:  # nsqd goes on all the same
                self._send_unsent(self._connection)
            if self._waiting:
                self._let_in()

    def messages_received(self, messages: list[RawMessage]) -> None:
        assert self._connection is not None
        self._connection.abort(NotConnected(f"{self.address}: nsqd sent messages to a producer"))

    # -- connecting and ending ---------------------------------------------------------------------------

    def _connect(self) -> asyncio.Task[None]:
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._open(), name=f"nsquark producer {self.address}")
            self._connecting.add_done_callback(self._opened)
        return self._connecting

    async def _open(self) -> None:
        connection, features = await connect(self.address, self.config, self)
        self._connection = connection
        self._log.info("%s: connected", self.address)
        self._message_bytes_max = features.max_msg_size or sys.maxsize
        self._body_bytes_max = features.max_body_size or sys.maxsize
        self._send_unsent(connection)

    def _send_unsent(self, connection: NsqdConnection) -> None:
        self._refusal = ""
        for command in self._unsent:
            connection.send(command)
        self._unsent.clear()

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._connecting = None
        if task.cancelled():
            self._fail_all(Closed(f"{self.address}: stopped"))
        elif (error := task.exception()) is not None:
            self._fail_all(error)

    def connection_lost(self, reason: NsqError) -> None:
        if self._refusal and isinstance(reason, NotConnected):
            reason = NotConnected(f"{self.address}: nsqd closed the connection after an error: {self._refusal}")
        sent_count = len(self._outstanding) - len(self._unsent)
        if not isinstance(reason, Closed):
            self._log.warning("connection lost with %d publishes unanswered - %s", sent_count, reason)
        self._connection = None
        self._fail(sent_count, reason)
        if self._unsent:
            self._connect()

    def _fail_all(self, reason: BaseException) -> None:
        """Fails what was sent, and what was to be sent with the connection that could not be made."""
        self._unsent.clear()
        self._fail(len(self._outstanding), reason)

    def _fail(self, count: int, reason: BaseException) -> None:
        """Fails the oldest publishes; those that wait for room were not sent, and go with the next connection."""
        for _ in range(count):
            future, size = self._outstanding.popleft()
            self._outstanding_bytes -= size
            if not future.done():
                # Each its own: who raises an exception writes its traceback into it.
                future.set_exception(type(reason)(*reason.args))
        if not self._is_closed:
            self._let_in()

    async def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Ends the connection when the outstanding answers have come; every publish has its outcome when it returns.

        timeout: seconds to wait for them.
        """
        timeout_s = seconds_of("timeout", timeout)
        await self.close_because("closed before nsqd answered", timeout_s)

    async def close_because(self, why: str, timeout_s: float) -> None:
        """Closes; what has no answer then fails with this reason."""
        self._use_loop(asyncio.get_running_loop())
        self._is_closed = True
        for future in self._waiting:
            if not future.done():
                future.set_exception(Closed(f"{self.address}: stopped before the message was sent"))
        self._waiting.clear()
        unanswered = [future for future, _ in self._outstanding if not future.done()]
        try:
            if unanswered:
                await asyncio.wait(unanswered, timeout=timeout_s)
        finally:  # whoever cancels this wants an end, not an open connection
            connecting, connection = self._connecting, self._connection
            self._end(Closed(f"{self.address}: {why}; it may or may not have the message"))
        if connecting is not None:
            await asyncio.wait([connecting])
        if connection is not None:
            # Those who waited for what is unsent have their outcome: a slow nsqd may not hold the end for it.
            await connection.wait_lost(self.config.write_timeout.seconds)

    def _end(self, reason: Closed) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.close(reason)
        self._fail_all(reason)
