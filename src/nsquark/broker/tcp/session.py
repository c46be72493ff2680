"""One TCP client: its commands, its window, its replies. Each command of the protocol is a method of the same name."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, cast

from nsquark.base.addresses import show_address
from nsquark.base.clock import now_ms
from nsquark.broker.auth import Guard
from nsquark.broker.channel import Channel
from nsquark.broker.options import TlsRequired
from nsquark.broker.tcp import upgrade
from nsquark.broker.tcp.consume_commands import ConsumingCommands
from nsquark.broker.tcp.identify import SHORT_BYTES_MAX, ClientSettings, identify, read_fields
from nsquark.broker.tcp.publish_commands import PublishingCommands
from nsquark.broker.tcp.replies import Replies
from nsquark.broker.tcp.session_state import FOR_AUTH, FOR_READER, FOR_THREAD, FOR_TURN, INCOMPLETE, STATE_INIT, text_of
from nsquark.broker.tcp.tls import TlsState
from nsquark.kernel.connection import Connection
from nsquark.web.fairness import TURN_NS_MAX
from nsquark.wire.errors import ClientError, FatalClientError
from nsquark.wire.frames import HEARTBEAT, MAGIC_V2, FrameType, frame
from nsquark.wire.quote import quote

if TYPE_CHECKING:
    from nsquark.broker.nsqd import Nsqd

LINE_BYTES_MAX = 16_384
HELD_BYTES_MIN = 4_096
WRITE_BUFFER_BYTES_MAX = 256 << 10
"""A client that leaves more than this unread gets no more messages until it reads, nor is it listened to."""
CLOSE_TIMEOUT_S = 5.0
NOP_LINE = b"NOP\n"
IDENTIFY_LOGGED_BYTES_MAX = 4_096


class Session(Connection, PublishingCommands, ConsumingCommands, asyncio.BufferedProtocol):
    """Commands come in as bytes of `_data`; what is not a whole command yet is held until the rest arrives."""

    def __init__(self, nsqd: Nsqd) -> None:
        self.share(nsqd.read_buffer, nsqd.read_view)
        self.nsqd = nsqd
        self.remote_address = ""
        self.remote_ip = ""
        self.tls: TlsState | None = None
        self.guard: Guard | None = None
        """What AUTH allows; None if all is allowed."""
        self.settings: ClientSettings
        self.state = STATE_INIT
        self.channel: Channel | None = None
        self.connected_at = int(time.time())
        self.published: dict[str, int] = {}
        self.sample_rate = 0
        self._replies = Replies(self._close)
        self._commands: Mapping[bytes, Command] | BeforeTls = COMMANDS
        self._waits = 0
        self._measured_messages = self._measured_bytes = 0
        self._unpublished = None
        self._reading_fields: asyncio.Future[dict[str, Any]] | None = None
        self._got_magic = False
        self._identified = False
        self._interval_ms = 0
        """Between heartbeats; 0 while there are none."""
        self._silent_ms = 0
        self._heartbeat: asyncio.TimerHandle | None = None
        self._reader_watch: asyncio.TimerHandle | None = None

    # -- the connection ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.use(cast(asyncio.Transport, transport))
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        peer = self.transport.get_extra_info("peername")
        self.remote_address = show_address(peer) if isinstance(peer, tuple) else "@"
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
        """From now on the client is reached by this."""
        self.transport = transport
        self._replies.write = transport.write

    def connection_lost(self, error: Exception | None) -> None:
        self._stop()
        for timer in (self._heartbeat, self._reader_watch):
            if timer is not None:
                timer.cancel()
        if self.guard is not None:
            self.guard.cancel()
        if self.channel is not None:
            self.channel.remove(self)
        self._held = None
        self.nsqd.forget(self)
        self.nsqd.logger.info(f"PROTOCOL(V2): [{self.remote_address}] exiting ioloop")

    def eof_received(self) -> bool:
        """The client sends no more: an unfinished command is answered as such, then all is closed in order."""
        if self._held_bytes and not self._is_closed and self._got_magic and self._held is not None:
            self._data = self._held
            self._run(0, self._held_bytes, at_eof=True)
        if not self._is_closed:
            self._replies.send_last(b"")
        return True

    def pause_writing(self) -> None:
        self._write_paused_at_ms = now_ms()
        if self._reader_watch is None:
            self._watch_reader(self._reader_patience_ms)

    def resume_writing(self) -> None:
        self._write_paused_at_ms = 0
        self.waited_for(FOR_READER)
        if self.channel is not None:
            self.channel.wake()

    def _close(self) -> None:
        """Sends what is written and closes; a client that does not read it is cut off."""
        self._stop()
        self.transport.close()
        self.nsqd.loop.call_later(CLOSE_TIMEOUT_S, self.transport.abort)

    def shut_down(self) -> None:
        """nsqd stops: what is answered goes out, then the connection ends."""
        if not self._is_closed:
            self._replies.flush()
            self._close()

    def abort(self) -> None:
        """Closes without a word, as NSQ does when a channel is deleted."""
        self._stop()
        self.transport.abort()

    def _stop(self) -> None:
        self._is_closed = True
        self._replies.stop()

    # -- receiving ---------------------------------------------------------------------------------------

    def received(self, pos: int, end: int) -> None:
        """What is not a publish to the topic of the last one."""
        if not self._got_magic:
            if end < len(MAGIC_V2):
                self._hold(0, end)
                return
            if not self._take_magic():
                return
            pos = len(MAGIC_V2)
        pos = self._run(pos, end)
        if not self._is_closed and (pos < end or self._held is not None):
            self._hold(pos, end)

    def _take_magic(self) -> bool:
        magic = bytes(self._data[: len(MAGIC_V2)])
        if magic != MAGIC_V2:
            self.nsqd.logger.error(f"CLIENT({self.remote_address}): bad protocol magic {quote(magic)}")
            self._replies.send_last(frame(FrameType.ERROR, b"E_BAD_PROTOCOL"))
            return False
        self.nsqd.logger.info(f"CLIENT({self.remote_address}): desired protocol magic '  V2'")
        self._got_magic = True
        self._schedule_heartbeat()
        return True

    def _hold(self, pos: int, end: int) -> None:
        """Keeps an incomplete command; its buffer grows only as its bytes arrive."""
        left = end - pos
        if left == 0:
            self._held, self._held_bytes = None, 0
            return
        if self._held is None or left == len(self._held):
            room = max(HELD_BYTES_MIN, 2 * left)
            if left > self.nsqd.held_bytes_max and not self._waits:
                self._fail(FatalClientError("E_BAD_MESSAGE", "MPUB failed to read message body"))
                return
            held = bytearray(room)
            held[:left] = self._data[pos:end]
            self._held = held
        elif pos > 0:
            self._held[:left] = self._held[pos:end]
        self._held_bytes = left

    def _go_on(self) -> None:
        """The others had their turn: what is held is looked at again, and then more is read."""
        self._waits &= ~FOR_TURN
        if self._is_closed or self._waits:
            return
        self._was_heard = True
        if self._held is not None:
            self._data, end = self._held, self._held_bytes
            pos = self._run(0, end)
            if not self._is_closed:
                self._hold(pos, end)
        if not self._waits and not self._is_closed and not self.transport.is_closing():
            self.transport.resume_reading()

    def not_taken(self, error: OSError) -> None:
        self._fail(FatalClientError("E_MPUB_FAILED", f"MPUB failed {error}"))

    def _run(self, pos: int, end: int, *, at_eof: bool = False) -> int:
        """Carries out the commands in `_data[pos:end]`; where the first starts that is incomplete or has to wait."""
        until_ns = 0
        while pos < end and not self._is_closed and not self._waits:
            if self._unpublished is None:
                pos = self._take_quickly(pos, end)
                if pos == end or self._is_closed or self._waits:
                    break
            try:
                after = self._next(pos, end, at_eof)
            except ClientError as error:
                if self._fail(error):
                    break
                after = self._data.index(b"\n", pos) + 1
            if after == INCOMPLETE:
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

    def _take_quickly(self, pos: int, end: int) -> int:
        """What the kernel does by itself; where the first other thing starts."""
        if self.consumer is not None and self.channel is not None:
            pos = self.channel.ledger.acknowledge(self.consumer, self._data, pos, end, now_ms())
            if pos == end:
                return pos
        if self._write_paused_at_ms and not self._data.startswith(NOP_LINE, pos, end):
            self.wait_for(FOR_READER)  # no answer is made that would not be read
        elif self._intake is not None and not self._measured_messages:
            pos = self.take(pos, end)
        return pos

    def _next(self, pos: int, end: int, at_eof: bool) -> int:
        """One command, or a part of a long one; where the next starts."""
        if self._unpublished is not None:
            return self._publish_more(pos, end)
        line_end = self._data.find(b"\n", pos, min(end, pos + LINE_BYTES_MAX))
        if line_end < 0:
            if end - pos >= LINE_BYTES_MAX:
                self.abort()
            return INCOMPLETE
        line = bytes(self._data[pos:line_end])
        return self._execute(line[:-1] if line.endswith(b"\r") else line, line_end + 1, end, at_eof)

    def _execute(self, line: bytes, pos: int, end: int, at_eof: bool) -> int:
        """One command whose body, if it has one, starts at `pos`; where the next command starts."""
        params = line.split(b" ")
        command = self._commands.get(params[0])
        if command is None:
            raise FatalClientError("E_INVALID", f"invalid command {text_of(params[0])}")
        return command(self, params, pos, end, at_eof)

    def _fail(self, error: ClientError) -> bool:
        """Answers with an error frame; True if that ends the connection."""
        self.nsqd.logger.error(f"[{self.remote_address}] - {text_of(error.payload())}")
        data = frame(FrameType.ERROR, error.payload())
        if self.channel is not None:
            self.channel.persist()  # who sees this answer may rely on what was finished before
        if error.fatal:
            self.transport.pause_reading()
            self._replies.send_last(data)
        else:
            self._replies.send(data)
        return error.fatal

    # -- commands about the connection -------------------------------------------------------------------

    def IDENTIFY(self, params: list[bytes], pos: int, end: int, at_eof: bool) -> int:
        if self.state != STATE_INIT:
            raise FatalClientError("E_INVALID", "cannot IDENTIFY in current state")
        size = self._command_body(pos, end, at_eof, "IDENTIFY")
        if size is None:
            return INCOMPLETE
        fields = self._identify_fields(pos + 4, pos + 4 + size)
        if fields is None:
            return INCOMPLETE
        answer = frame(FrameType.RESPONSE, identify(fields, self.settings, self.nsqd.options))
        if not self._identified or not self._interval_ms:  # as in NSQ the first interval stays
            self._identified = True
            self._schedule_heartbeat()
        if upgrade.is_wanted(self):
            self._replies.send_then(answer, upgrade.Upgrade(self, self._fail).begin)
            return end  # as in NSQ, what was sent too early is lost
        self._replies.send(answer)
        return pos + 4 + size

    def _identify_fields(self, pos: int, end: int) -> dict[str, Any] | None:
        """What a body says; None while a thread reads it, after which IDENTIFY is looked at again."""
        reading, self._reading_fields = self._reading_fields, None
        if reading is not None:
            return reading.result()
        body = bytes(memoryview(self._data)[pos:end])
        self.nsqd.logger.info(f"[{self.remote_address}] IDENTIFY: {text_of(body[:IDENTIFY_LOGGED_BYTES_MAX])}")
        if len(body) <= SHORT_BYTES_MAX:
            return read_fields(body)
        self.wait_for(FOR_THREAD)
        self._reading_fields = self.nsqd.loop.run_in_executor(None, read_fields, body)
        self._reading_fields.add_done_callback(self._fields_read)
        return None

    def _fields_read(self, reading: asyncio.Future[dict[str, Any]]) -> None:
        reading.exception()  # nobody may be left to look at it
        self.waited_for(FOR_THREAD)

    def secured(self, tls: TlsState) -> None:
        """The connection uses TLS from now on."""
        self.tls = tls
        self._commands = COMMANDS

    def AUTH(self, params: list[bytes], pos: int, end: int, at_eof: bool) -> int:
        if self.state != STATE_INIT:
            raise FatalClientError("E_INVALID", "cannot AUTH in current state")
        if len(params) != 1:
            raise FatalClientError("E_INVALID", "AUTH invalid number of parameters")
        size = self._command_body(pos, end, at_eof, "AUTH")
        if size is None:
            return INCOMPLETE
        if self.guard is None:
            raise FatalClientError("E_AUTH_DISABLED", "AUTH disabled")
        answer = self.guard.authorize(bytes(self._data[pos + 4 : pos + 4 + size]))
        if answer is None:
            return INCOMPLETE
        self._replies.send(frame(FrameType.RESPONSE, answer))
        return pos + 4 + size

    def go_on(self) -> None:
        """The auth server has answered: the command that waits for it is looked at again, then those behind it."""
        self.waited_for(FOR_AUTH)

    # -- sending -----------------------------------------------------------------------------------------

    def draws(self) -> bool:
        """Whether a sampled client gets a message: as in NSQ, a draw from 0 to 99 not above the rate."""
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
        """How long a client may leave unread what waits for it: one heartbeat interval, or the longest there is."""
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


Command = Callable[[Session, list[bytes], int, int, bool], int]
COMMANDS: dict[bytes, Command] = {
    name.encode(): getattr(Session, name)
    for name in ("IDENTIFY", "AUTH", "SUB", "PUB", "MPUB", "DPUB", "RDY", "FIN", "REQ", "TOUCH", "CLS", "NOP")
}


class BeforeTls:
    """The commands of a client that must use TLS and does not yet: IDENTIFY; every other word is refused."""

    def get(self, word: bytes) -> Command:
        if word != b"IDENTIFY":
            raise FatalClientError("E_INVALID", f"cannot {text_of(word)} in current state (TLS required)")
        return Session.IDENTIFY


BEFORE_TLS = BeforeTls()
