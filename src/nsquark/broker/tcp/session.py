"""Serves one TCP client: what it sends is cut into commands here, and what it is owed leaves in order.

Each command is a function of the same name, in publish_commands.py, consume_commands.py and identify.py.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, cast

from nsquark.base.addresses import show_peer
from nsquark.base.clock import now_ms
from nsquark.broker.auth import Guard
from nsquark.broker.channel import Channel
from nsquark.broker.options import TlsRequired
from nsquark.broker.tcp.command import STATE_INIT, STATE_SUBSCRIBED, Command, failed, text_of
from nsquark.broker.tcp.consume_commands import CLS, FIN, NOP, RDY, REQ, SUB, TOUCH
from nsquark.broker.tcp.identify import AUTH, IDENTIFY, ClientSettings
from nsquark.broker.tcp.publish_commands import DPUB, MPUB, PUB, MpubProgress, publish_more
from nsquark.broker.tcp.tls import TlsState
from nsquark.broker.tcp.waits import FOR_COMMIT, FOR_READER, Waits
from nsquark.broker.topic import Topic, TopicExiting
from nsquark.kernel.answers import acknowledge
from nsquark.kernel.commits import Commit
from nsquark.kernel.connection import Connection
from nsquark.kernel.publish import Intake
from nsquark.kernel.replies import ReplyQueue
from nsquark.web.fairness import TURN_NS_MAX
from nsquark.wire.errors import ClientError, FatalClientError
from nsquark.wire.frames import HEARTBEAT, MAGIC_V2, OK, FrameType, frame
from nsquark.wire.quote import quote

if TYPE_CHECKING:
    from nsquark.broker.nsqd import Nsqd

LINE_BYTES_MAX = 16_384
PARTIAL_BYTES_MIN = 4_096
WRITE_BUFFER_BYTES_MAX = 256 << 10
"""A client that leaves more than this unread gets no more messages until it reads, nor is it listened to."""
CLOSE_TIMEOUT_S = 5.0
NOP_LINE = b"NOP\n"


class FrameReplies(ReplyQueue):
    """Writes the replies to one TCP client as frames; the session says what they are written to,
    and that may change.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        super().__init__(OK, None, close)

    def refusal(self, word: str, error: Exception) -> bytes:
        return frame(FrameType.ERROR, failed(word, error).payload())


class Session(Connection, asyncio.BufferedProtocol):
    """Serves a client. Commands come in as bytes of `_data`; what is not a whole command yet waits for the rest."""

    def __init__(self, nsqd: Nsqd) -> None:
        self.use_buffer(nsqd.read_buffer, nsqd.read_view)
        self.nsqd = nsqd
        self.remote_address = ""
        self.remote_ip = ""
        self.tls: TlsState | None = None
        self.guard: Guard | None = None
        """Has the permissions that AUTH gave, or is None if all is allowed."""
        self.settings: ClientSettings
        self.state = STATE_INIT
        self.channel: Channel | None = None
        self.connected_at = int(time.time())
        self.published: dict[str, int] = {}
        self.sample_rate = 0
        self.replies = FrameReplies(self._close)
        self.waits = Waits(nsqd.loop, self._go_on)
        self.mpub = MpubProgress()
        self.reading_fields: asyncio.Future[dict[str, Any]] | None = None
        """Is the work of a thread that reads what a long IDENTIFY says."""
        self._commands: Mapping[bytes, Callable[[Session, Command], bool]] | BeforeTls = COMMANDS
        self._got_magic = False
        self._identified = False
        self._interval_ms = 0
        """Is the time between heartbeats, or 0 while there are none."""
        self._silent_ms = 0
        self._heartbeat: asyncio.TimerHandle | None = None
        self._reader_watch: asyncio.TimerHandle | None = None

    # -- the connection ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.use(cast(asyncio.Transport, transport))
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        self.remote_address = show_peer(transport)
        self.remote_ip = host = self.remote_address.rpartition(":")[0].strip("[]")
        options = self.nsqd.options
        self.settings = ClientSettings(host, host, options.msg_timeout.ms, options.output_buffer_timeout.ms)
        if not self.nsqd.admit(self, transport):
            self._close()
            return
        if options.tls_required is not TlsRequired.NO:
            self._commands = BEFORE_TLS
        if self.nsqd.auth is not None:
            self.guard = Guard(self, self.nsqd.auth)
        self._heartbeat = self.nsqd.loop.call_later(options.max_heartbeat_interval.seconds, self.abort)
        self.nsqd.logger.info(f"TCP: new client({self.remote_address})")

    def use(self, transport: asyncio.Transport) -> None:
        """Reaches the client by this transport from now on."""
        self.transport = self.waits.transport = transport
        self.replies.write = transport.write

    def connection_lost(self, error: Exception | None) -> None:
        self._stop()
        for timer in (self._heartbeat, self._reader_watch):
            if timer is not None:
                timer.cancel()
        if self.guard is not None:
            self.guard.cancel()
        if self.channel is not None:
            self.channel.remove(self)
        self._partial = None
        self.nsqd.forget(self)
        self.nsqd.logger.info(f"PROTOCOL(V2): [{self.remote_address}] exiting ioloop")

    def eof_received(self) -> bool:
        """Answers an unfinished command as such, since the client sends no more; then all is closed in order."""
        if self._partial_bytes and not self._is_closed and self._got_magic and self._partial is not None:
            self._data = self._partial
            self._run(0, self._partial_bytes, at_eof=True)
        if not self._is_closed:
            self.replies.send_last(b"")
        return True

    def pause_writing(self) -> None:
        self._write_paused_at_ms = now_ms()
        if self._reader_watch is None:
            self._watch_reader(self._reader_patience_ms)

    def resume_writing(self) -> None:
        self._write_paused_at_ms = 0
        self.waits.end(FOR_READER)
        if self.channel is not None:
            self.channel.wake()

    def _close(self) -> None:
        """Sends what is written and closes; a client that does not read it is cut off."""
        self._stop()
        self.transport.close()
        self.nsqd.loop.call_later(CLOSE_TIMEOUT_S, self.transport.abort)

    def shut_down(self) -> None:
        """Ends the connection when nsqd stops: what is answered goes out before."""
        if not self._is_closed:
            self.replies.flush()
            self._close()

    def abort(self) -> None:
        """Closes without a word, as NSQ does when a channel is deleted."""
        self._stop()
        self.transport.abort()

    def _stop(self) -> None:
        self._is_closed = True
        self.replies.stop()

    # -- receiving ---------------------------------------------------------------------------------------

    def received(self, pos: int, end: int) -> None:
        """Handles what the kernel left at `_data[pos:end]`: any command but a PUB or MPUB to the last topic."""
        if not self._got_magic:
            if end < len(MAGIC_V2):
                self._keep_partial(0, end)
                return
            if not self._read_magic():
                return
            pos = len(MAGIC_V2)
        pos = self._run(pos, end)
        if not self._is_closed and (pos < end or self._partial is not None):
            self._keep_partial(pos, end)

    def _read_magic(self) -> bool:
        magic = bytes(self._data[: len(MAGIC_V2)])
        if magic != MAGIC_V2:
            self.nsqd.logger.error(f"CLIENT({self.remote_address}): bad protocol magic {quote(magic)}")
            self.replies.send_last(frame(FrameType.ERROR, b"E_BAD_PROTOCOL"))
            return False
        self.nsqd.logger.info(f"CLIENT({self.remote_address}): desired protocol magic '  V2'")
        self._got_magic = True
        self._schedule_heartbeat()
        return True

    def _keep_partial(self, pos: int, end: int) -> None:
        """Keeps an incomplete command; its buffer grows only as its bytes arrive."""
        left = end - pos
        if left == 0:
            self._partial, self._partial_bytes = None, 0
            return
        if self._partial is None or left == len(self._partial):
            room = max(PARTIAL_BYTES_MIN, 2 * left)
            if left > self.nsqd.partial_bytes_max and not self.waits.reasons:
                self.fail(FatalClientError("E_BAD_MESSAGE", "MPUB failed to read message body"))
                return
            partial = bytearray(room)
            partial[:left] = self._data[pos:end]
            self._partial = partial
        elif pos > 0:
            self._partial[:left] = self._partial[pos:end]
        self._partial_bytes = left

    def _go_on(self) -> None:
        """Goes on with an incomplete or waiting command, then reads more: nothing is waited for any more."""
        if self._is_closed:
            return
        self._was_heard = True
        if self._partial is not None:
            self._data, end = self._partial, self._partial_bytes
            pos = self._run(0, end)
            if not self._is_closed:
                self._keep_partial(pos, end)
        if not self._is_closed:
            self.waits.resume_reading()

    def give_way(self) -> None:
        """Lets the session go on when the others had their turn."""
        self.waits.give_way()

    def not_published(self, error: OSError) -> None:
        """Is told that the kernel could not publish an MPUB."""
        self.fail(failed("MPUB", error))

    def _run(self, pos: int, end: int, *, at_eof: bool = False) -> int:
        """Carries out the commands in `_data[pos:end]`; returns where one that is incomplete or waits starts."""
        until_ns, waits = 0, self.waits
        while pos < end and not self._is_closed and not waits.reasons:
            if not self.mpub.left:
                pos = self._run_in_kernel(pos, end)
                if pos == end or self._is_closed or waits.reasons:
                    break
            try:
                after = self._next(pos, end, at_eof)
            except ClientError as error:
                if self.fail(error):
                    break
                after = self._data.index(b"\n", pos) + 1
            if after == pos:
                break
            pos = after
            now_ns = monotonic_ns()
            if not until_ns:
                until_ns = now_ns + TURN_NS_MAX
            elif now_ns > until_ns and pos < end:
                self.give_way()
        if self.channel is not None:
            self.channel.wake()
        return pos

    def _run_in_kernel(self, pos: int, end: int) -> int:
        """Lets the kernel do what it does by itself; returns where the first other thing starts."""
        if self.consumer is not None and self.channel is not None:
            pos = acknowledge(self.channel.ledger, self.consumer, self._data, pos, end, now_ms())
            if pos == end:
                return pos
        if self._write_paused_at_ms and not self._data.startswith(NOP_LINE, pos, end):
            self.waits.begin(FOR_READER)  # no answer is made that would not be read
        elif self._intake is not None and not self.mpub.measured_messages:
            pos = self.publish(pos, end)
        return pos

    def _next(self, pos: int, end: int, at_eof: bool) -> int:
        """Carries out one command, or a part of a long one; returns where the next starts, or `pos` to wait."""
        if self.mpub.left:
            try:
                return publish_more(self, self._data, pos, end)
            except (TopicExiting, OSError) as error:
                raise failed("MPUB", error) from None
        line_end = self._data.find(b"\n", pos, min(end, pos + LINE_BYTES_MAX))
        if line_end < 0:
            if end - pos >= LINE_BYTES_MAX:
                self.abort()
            return pos
        line = bytes(self._data[pos:line_end])
        command = Command(line[:-1] if line.endswith(b"\r") else line, self._data, line_end + 1, end, at_eof)
        carry_out = self._commands.get(command.params[0])
        if carry_out is None:
            raise FatalClientError("E_INVALID", f"invalid command {command.word}")
        try:
            return command.next if carry_out(self, command) else pos
        except (TopicExiting, OSError) as error:
            raise failed(command.word, error) from None

    def fail(self, error: ClientError) -> bool:
        """Answers with an error frame; returns True if that ends the connection."""
        self.nsqd.logger.error(f"[{self.remote_address}] - {text_of(error.payload())}")
        data = frame(FrameType.ERROR, error.payload())
        if self.channel is not None:
            self.channel.persist()  # a client that sees this answer may rely on what was finished before
        if error.fatal:
            self.transport.pause_reading()
            self.replies.send_last(data)
        else:
            self.replies.send(data)
        return error.fatal

    # -- what commands do --------------------------------------------------------------------------------

    def is_allowed(self, word: str, topic: str, channel: str = "") -> bool:
        """Returns True if AUTH allows the command, and False while that is not known; raises if it is not allowed."""
        return self.guard is None or self.guard.allows(word, topic, channel)

    def identified(self) -> None:
        """Is told that the client has said what it asks for."""
        if not self._identified or not self._interval_ms:  # as in NSQ the first interval stays
            self._identified = True
            self._schedule_heartbeat()

    def secured(self, tls: TlsState) -> None:
        """Is told that the connection uses TLS from now on."""
        self.tls = tls
        self._commands = COMMANDS

    def subscribe(self, channel: Channel) -> None:
        """Lets the client consume from this channel from now on."""
        self.consumer = channel.ledger.join(self.nsqd.options.max_rdy_count, self.settings.msg_timeout_ms)
        self.sample_rate = self.settings.sample_rate
        self.channel = channel
        self.state = STATE_SUBSCRIBED
        channel.add(self)
        if self.replies.are_owed:  # no message may come before the OK of SUB
            self._awaits_ok = True
            self.replies.after = self._settled
        self.replies.send(OK)

    def promise(self, topic: Topic, commit: Commit, word: str, messages: int = 1, replies: int = 1) -> None:
        """Answers the client when the commit is settled; the kernel handles what it publishes to this topic next."""
        if topic.name in self.published:
            self.published[topic.name] += messages
        else:
            self.published[topic.name] = messages
            self.nsqd.producers[self] = None
        if commit.is_settled and self.channel is not None:
            self.channel.persist()  # the answer goes out now, and tells that what was sent before is noted
        self.replies.promise(commit, word, replies)
        if topic.log.is_congested and not commit.is_settled:
            self._congested()
        if self.guard is None and (self._intake is None or self._intake.tail is not topic.log.tail):
            options = self.nsqd.options
            self._intake = Intake(
                topic.name,
                topic.log.tail,
                self.replies,
                self.published,
                self._congested,
                options.max_msg_size,
                options.max_body_size,
            )

    def _congested(self) -> None:
        """Waits for a commit; no more is read until it is settled."""
        if not self.waits.reasons & FOR_COMMIT:
            self.replies.after = self._settled
            self.waits.begin(FOR_COMMIT)

    def _settled(self) -> None:
        """Is told that a commit was answered: what waited for that goes on."""
        self.waits.end(FOR_COMMIT)
        if self._awaits_ok and self.channel is not None and not self.replies.are_owed:
            self._awaits_ok = False
            self.channel.wake()
        if not self._awaits_ok:
            self.replies.after = None

    # -- sending -----------------------------------------------------------------------------------------

    def draws(self) -> bool:
        """Tells whether a sampled client gets a message: as in NSQ, a draw from 0 to 99 not above the rate."""
        return random.randrange(100) <= self.sample_rate

    # -- heartbeats --------------------------------------------------------------------------------------

    def _schedule_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            self._heartbeat = None
        self._interval_ms = self.settings.heartbeat_ms
        if self._interval_ms > 0:
            self._heartbeat = self.nsqd.loop.call_later(self._interval_ms / 1000, self._beat)

    def _beat(self) -> None:
        """Sends a heartbeat; a client silent for two intervals is cut off."""
        is_waiting_for_us = self.guard is not None and self.guard.is_asking
        self._silent_ms = 0 if self._was_heard or is_waiting_for_us else self._silent_ms + self._interval_ms
        self._was_heard = False
        if self._silent_ms >= 2 * self.settings.heartbeat_ms > 0:
            self.nsqd.logger.error(f"[{self.remote_address}] - no answer to heartbeats, closing")
            self.abort()
            return
        self.send(HEARTBEAT)
        self._heartbeat = self.nsqd.loop.call_later(self._interval_ms / 1000, self._beat)

    @property
    def _reader_patience_ms(self) -> int:
        """Tells how long a client may leave unread what waits for it: one heartbeat interval, or
        the longest there is.
        """
        return self._interval_ms or self.nsqd.options.max_heartbeat_interval.ms

    def _watch_reader(self, delay_ms: int) -> None:
        self._reader_watch = self.nsqd.loop.call_later(delay_ms / 1000, self._check_reader)

    def _check_reader(self) -> None:
        """Cuts off a client that does not read. The timer outlives short pauses, which are frequent."""
        self._reader_watch = None
        if not self._write_paused_at_ms or self._is_closed:
            return
        left_ms = self._write_paused_at_ms + self._reader_patience_ms - now_ms()
        if left_ms > 0:
            self._watch_reader(left_ms)
            return
        self.nsqd.logger.error(f"[{self.remote_address}] - answers and messages are not read, closing")
        self.abort()


COMMANDS: dict[bytes, Callable[[Session, Command], bool]] = {
    function.__name__.encode(): function
    for function in (IDENTIFY, AUTH, SUB, PUB, MPUB, DPUB, RDY, FIN, REQ, TOUCH, CLS, NOP)
}
"""Has the commands of the protocol; each is a function of the same name."""


class BeforeTls:
    """Has the commands of a client that must use TLS and does not yet: IDENTIFY; every other word is refused."""

    def get(self, word: bytes) -> Callable[[Session, Command], bool]:
        if word != b"IDENTIFY":
            raise FatalClientError("E_INVALID", f"cannot {text_of(word)} in current state (TLS required)")
        return IDENTIFY


BEFORE_TLS = BeforeTls()
