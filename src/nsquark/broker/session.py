"""One TCP client: its commands, its window, its replies. Each command of the protocol is a method of the same name."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from nsquark.broker import upgrade
from nsquark.broker.auth import Guard
from nsquark.broker.channel import REFILL_RDY_MIN, Channel
from nsquark.broker.clock import now_ms
from nsquark.broker.identify import ClientSettings, identify
from nsquark.broker.options import TlsRequired
from nsquark.broker.replies import Replies
from nsquark.broker.tls import TlsState
from nsquark.broker.topic import Topic, TopicExiting
from nsquark.discovery.addresses import show_address
from nsquark.kernel.arena import MPUB_BAD_SIZE, MPUB_TOO_BIG, measure_mpub
from nsquark.kernel.ledger import DONE, NOT_OWNER, Consumer, sequence_of
from nsquark.log.commit import Commit
from nsquark.wire.errors import ClientError, FatalClientError
from nsquark.wire.frames import CLOSE_WAIT, HEARTBEAT, MAGIC_V2, OK, FrameType, frame
from nsquark.wire.names import is_valid_name
from nsquark.wire.quote import quote

if TYPE_CHECKING:
    from nsquark.broker.daemon import Nsqd

LINE_BYTES_MAX = 16_384
HELD_BYTES_MIN = 4_096
WRITE_BUFFER_BYTES_MAX = 256 << 10
"""A client that leaves more than this unread gets no more messages until it reads."""
CLOSE_TIMEOUT_S = 5.0
MESSAGE_ID_BYTES = 16
UINT64_MAX = (1 << 64) - 1

STATE_INIT, STATE_SUBSCRIBED, STATE_CLOSING = 0, 3, 4
INCOMPLETE = -1


class Session(asyncio.BufferedProtocol):
    """Commands come in as bytes of `_data`; what is not a whole command yet is held until the rest arrives.

    Bytes are read into a buffer all sessions share, since it is used up before the next read; only an incomplete
    command is moved into a buffer of its own, so an idle connection holds none.
    """

    def __init__(self, nsqd: Nsqd) -> None:
        self.nsqd = nsqd
        self.transport: asyncio.Transport
        self.remote_address = ""
        self.remote_ip = ""
        self.tls: TlsState | None = None
        self.guard: Guard | None = None
        """What AUTH allows; None if all is allowed."""
        self.settings: ClientSettings
        self.state = STATE_INIT
        self.channel: Channel | None = None
        self.consumer: Consumer | None = None
        self.connected_at = int(time.time())
        self.published: dict[str, int] = {}
        self.sample_rate = 0
        self._replies = Replies(self._write, self._close)
        self._data: bytearray = nsqd.read_buffer
        self._held: bytearray | None = None
        self._held_bytes = 0
        self._commands: Mapping[bytes, Command] | BeforeTls = COMMANDS
        self._recent: Topic | None = None
        self._recent_line = b""
        self._is_congested = False
        self._awaits_ok = False
        self._got_magic = False
        self._identified = False
        self._is_closed = False
        self._write_paused_at_ms = 0
        self._received_at_ms = now_ms()
        self._heartbeat: asyncio.TimerHandle | None = None

    # -- the connection ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        peer = self.transport.get_extra_info("peername")
        self.remote_address = show_address(peer) if isinstance(peer, tuple) else "@"
        self.remote_ip = host = self.remote_address.rpartition(":")[0].strip("[]")
        options = self.nsqd.options
        self.settings = ClientSettings(host, host, options.msg_timeout.ms, options.output_buffer_timeout.ms)
        if not self.nsqd.admit(self):
            self._close()
            return
        if options.tls_required is not TlsRequired.NO:
            self._commands = BEFORE_TLS
        if self.nsqd.auth is not None:
            self.guard = Guard(self, self.nsqd.auth)
        self._heartbeat = self.nsqd.loop.call_later(options.max_heartbeat_interval.seconds, self.abort)
        self.nsqd.logger.info(f"TCP: new client({self.remote_address})")

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closed = True
        if self._heartbeat is not None:
            self._heartbeat.cancel()
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
            self._run(0, self._held_bytes, now_ms(), at_eof=True)
        if not self._is_closed:
            self._replies.send_last(b"")
        return True

    def pause_writing(self) -> None:
        self._write_paused_at_ms = now_ms()

    def resume_writing(self) -> None:
        self._write_paused_at_ms = 0
        if self.channel is not None:
            self.channel.wake()

    def _write(self, data: bytes | memoryview) -> None:
        if data and not self._is_closed:
            self.transport.write(data)

    def _close(self) -> None:
        """Sends what is written and closes; a client that does not read it is cut off."""
        self._is_closed = True
        self.transport.close()
        self.nsqd.loop.call_later(CLOSE_TIMEOUT_S, self.transport.abort)

    def shut_down(self) -> None:
        """nsqd stops: what is answered goes out, then the connection ends."""
        if not self._is_closed:
            self._replies.flush()
            self._close()

    def abort(self) -> None:
        """Closes without a word, as NSQ does when a channel is deleted."""
        self._is_closed = True
        self.transport.abort()

    # -- receiving ---------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._held is not None:
            return memoryview(self._held)[self._held_bytes :]
        return self.nsqd.read_view

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_closed:
            return
        self._received_at_ms = now = now_ms()
        if self._held is None:
            self._data, end = self.nsqd.read_buffer, nbytes
        else:
            self._data, end = self._held, self._held_bytes + nbytes
        pos = 0
        if not self._got_magic:
            if end < len(MAGIC_V2):
                self._hold(0, end)
                return
            if not self._take_magic():
                return
            pos = len(MAGIC_V2)
        pos = self._run(pos, end, now)
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
            if left > self.nsqd.held_bytes_max:
                self._fail(FatalClientError("E_BAD_MESSAGE", "MPUB failed to read message body"))
                return
            held = bytearray(room)
            held[:left] = self._data[pos:end]
            self._held = held
        elif pos > 0:
            self._held[:left] = self._held[pos:end]
        self._held_bytes = left

    def _run(self, pos: int, end: int, now: int, *, at_eof: bool = False) -> int:
        """Carries out the commands in `_data[pos:end]`; where the first incomplete one starts."""
        while pos < end and not self._is_closed:
            if self.consumer is not None and self.channel is not None:
                pos = self.channel.ledger.acknowledge(self.consumer, self._data, pos, end, now)
                if pos == end:
                    break
            if self._recent is not None:
                pubs = self._recent.publish_pubs(self._data, pos, end, self._recent_line)
                if pubs is not None:
                    commit, count, pos = pubs
                    self._promise(self._recent, commit, "PUB", count, count)
                    if pos == end:
                        break
            line_end = self._data.find(b"\n", pos, min(end, pos + LINE_BYTES_MAX))
            if line_end < 0:
                if end - pos >= LINE_BYTES_MAX:
                    self.abort()
                break
            line = bytes(self._data[pos:line_end])
            try:
                after = self._execute(line[:-1] if line.endswith(b"\r") else line, line_end + 1, end, at_eof)
            except ClientError as error:
                if self._fail(error):
                    break
                after = line_end + 1
            if after == INCOMPLETE:
                break
            pos = after
        if self.channel is not None:
            self.channel.wake()
        return pos

    def _execute(self, line: bytes, pos: int, end: int, at_eof: bool) -> int:
        """One command whose body, if it has one, starts at `pos`; where the next command starts."""
        params = line.split(b" ")
        command = self._commands.get(params[0])
        if command is None:
            raise FatalClientError("E_INVALID", f"invalid command {_text(params[0])}")
        return command(self, params, pos, end, at_eof)

    def _fail(self, error: ClientError) -> bool:
        """Answers with an error frame; True if that ends the connection."""
        self.nsqd.logger.error(f"[{self.remote_address}] - {_text(error.payload())}")
        data = frame(FrameType.ERROR, error.payload())
        if self.channel is not None:
            self.channel.persist()  # who sees this answer may rely on what was finished before
        if error.fatal:
            self.transport.pause_reading()
            self._replies.send_last(data)
        else:
            self._replies.send(data)
        return error.fatal

    def _body_size(self, pos: int, end: int, at_eof: bool, code: str, what: str) -> int | None:
        """The size before a body; None if it has not arrived."""
        if pos + 4 > end:
            if at_eof:
                raise FatalClientError(code, f"{what} size")
            return None
        return int.from_bytes(self._data[pos : pos + 4], "big", signed=True)

    # -- commands that publish ---------------------------------------------------------------------------

    def PUB(self, params: list[bytes], pos: int, end: int, at_eof: bool) -> int:
        if len(params) < 2:
            raise FatalClientError("E_INVALID", "PUB insufficient number of parameters")
        name = self._topic_name(params[1], "PUB")
        size = self._message_size(pos, end, at_eof, "PUB")
        if size is None:
            return INCOMPLETE
        if self.guard is not None and not self.guard.allows("PUB", name, ""):
            return INCOMPLETE
        topic = self._topic(name, "PUB")
        if self.guard is None:
            self._recent, self._recent_line = topic, b"PUB %s\n" % params[1]
        self._published(topic, 1, lambda: topic.publish(self._data, pos + 4, size), "PUB")
        return pos + 4 + size

    def MPUB(self, params: list[bytes], pos: int, end: int, at_eof: bool) -> int:
        if len(params) < 2:
            raise FatalClientError("E_INVALID", "MPUB insufficient number of parameters")
        name = _text(params[1])
        if name not in self.nsqd.topics and not is_valid_name(name):
            raise FatalClientError("E_BAD_TOPIC", f"E_BAD_TOPIC MPUB topic name {quote(params[1])} is not valid")
        if self.guard is not None and not self.guard.allows("MPUB", name, ""):
            return INCOMPLETE
        topic = self._topic(name, "MPUB")
        options = self.nsqd.options
        size = self._body_size(pos, end, at_eof, "E_BAD_BODY", "MPUB failed to read body")
        if size is None:
            return INCOMPLETE
        if size <= 0:
            raise FatalClientError("E_BAD_BODY", f"MPUB invalid body size {size}")
        if size > options.max_body_size:
            raise FatalClientError("E_BAD_BODY", f"MPUB body too big {size} > {options.max_body_size}")
        if pos + 8 > end:
            if at_eof:
                raise FatalClientError("E_BAD_BODY", "MPUB failed to read message count")
            return INCOMPLETE
        count = int.from_bytes(self._data[pos + 4 : pos + 8], "big", signed=True)
        if count <= 0 or count > (options.max_body_size - 4) // 5:
            raise FatalClientError("E_BAD_BODY", f"MPUB invalid message count {count}")
        after, index, message_bytes = measure_mpub(self._data, pos + 8, end, count, options.max_msg_size)
        if after == MPUB_BAD_SIZE:
            raise FatalClientError("E_BAD_MESSAGE", f"MPUB invalid message({index}) body size {message_bytes}")
        if after == MPUB_TOO_BIG:
            raise FatalClientError("E_BAD_MESSAGE", f"MPUB message too big {message_bytes} > {options.max_msg_size}")
        if after < 0:
            if at_eof and message_bytes < 0:
                raise FatalClientError("E_BAD_MESSAGE", f"MPUB failed to read message({index}) body size")
            if at_eof:
                raise FatalClientError("E_BAD_MESSAGE", "MPUB failed to read message body")
            return INCOMPLETE
        self._published(topic, count, lambda: topic.publish_sized(self._data, pos + 8, after, count), "MPUB")
        return after

    def DPUB(self, params: list[bytes], pos: int, end: int, at_eof: bool) -> int:
        if len(params) < 3:
            raise FatalClientError("E_INVALID", "DPUB insufficient number of parameters")
        name = self._topic_name(params[1], "DPUB")
        delay_ms = _decimal(params[2])
        if delay_ms is None:
            raise FatalClientError("E_INVALID", f"DPUB could not parse timeout {_text(params[2])}")
        delay_max_ms = self.nsqd.options.max_req_timeout.ms
        if not 0 <= delay_ms <= delay_max_ms:
            shown = delay_ms & UINT64_MAX  # unlike RDY's count
            raise FatalClientError("E_INVALID", f"DPUB timeout {shown} out of range 0-{delay_max_ms}")
        size = self._message_size(pos, end, at_eof, "DPUB")
        if size is None:
            return INCOMPLETE
        if self.guard is not None and not self.guard.allows("DPUB", name, ""):
            return INCOMPLETE
        topic = self._topic(name, "DPUB")
        if delay_ms == 0:
            self._published(topic, 1, lambda: topic.publish(self._data, pos + 4, size), "DPUB")
        else:
            body = bytes(self._data[pos + 4 : pos + 4 + size])
            self._published(topic, 1, lambda: topic.publish_deferred(body, delay_ms), "DPUB")
        return pos + 4 + size

    def _topic_name(self, raw: bytes, word: str) -> str:
        name = _text(raw)
        if name not in self.nsqd.topics and not is_valid_name(name):
            raise FatalClientError("E_BAD_TOPIC", f"{word} topic name {quote(raw)} is not valid")
        return name

    def _topic(self, name: str, word: str) -> Topic:
        try:
            return self.nsqd.topic(name)
        except OSError as error:
            raise FatalClientError(f"E_{word}_FAILED", f"{word} failed {error}") from None

    def _message_size(self, pos: int, end: int, at_eof: bool, word: str) -> int | None:
        """The size of one message; None if not all of it is here."""
        size = self._body_size(pos, end, at_eof, "E_BAD_MESSAGE", f"{word} failed to read message body")
        if size is None:
            return None
        if size <= 0:
            raise FatalClientError("E_BAD_MESSAGE", f"{word} invalid message body size {size}")
        if size > self.nsqd.options.max_msg_size:
            raise FatalClientError("E_BAD_MESSAGE", f"{word} message too big {size} > {self.nsqd.options.max_msg_size}")
        if pos + 4 + size > end:
            if at_eof:
                raise FatalClientError("E_BAD_MESSAGE", f"{word} failed to read message body")
            return None
        return size

    def _published(self, topic: Topic, count: int, publish: Callable[[], Commit], word: str) -> None:
        try:
            commit = publish()
        except (TopicExiting, OSError) as error:
            raise FatalClientError(f"E_{word}_FAILED", f"{word} failed {error}") from None
        self._promise(topic, commit, word, count, 1)

    def _promise(self, topic: Topic, commit: Commit, word: str, messages: int, replies: int) -> None:
        if topic.name in self.published:
            self.published[topic.name] += messages
        else:
            self.published[topic.name] = messages
            self.nsqd.producers[self] = None
        if self._replies.promise(commit, word, replies):
            if commit.is_settled:
                self._replies.flush()
            else:
                commit.waiters.append(self)
                if topic.log.is_congested:
                    self._is_congested = True
                    self.transport.pause_reading()

    def committed(self, commit: Commit) -> None:
        if not self._is_closed:
            if self._is_congested and (self.guard is None or not self.guard.is_asking):
                self._is_congested = False
                self.transport.resume_reading()
            self._replies.flush()
            if self._awaits_ok and self.channel is not None and not self._replies.are_owed:
                self._awaits_ok = False
                self.channel.wake()

    # -- commands that consume ---------------------------------------------------------------------------

    def SUB(self, params: list[bytes], pos: int, end: int, at_eof: bool) -> int:
        if self.state != STATE_INIT:
            raise FatalClientError("E_INVALID", "cannot SUB in current state")
        if self.settings.heartbeat_ms <= 0:
            raise FatalClientError("E_INVALID", "cannot SUB with heartbeats disabled")
        if len(params) < 3:
            raise FatalClientError("E_INVALID", "SUB insufficient number of parameters")
        topic_name = self._topic_name(params[1], "SUB")
        channel_name = _text(params[2])
        if not is_valid_name(channel_name):
            raise FatalClientError("E_BAD_CHANNEL", f"SUB channel name {quote(params[2])} is not valid")
        if self.guard is not None and not self.guard.allows("SUB", topic_name, channel_name):
            return INCOMPLETE
        try:
            channel = self.nsqd.topic(topic_name).channel(channel_name)
        except (TopicExiting, OSError) as error:
            raise FatalClientError("E_SUB_FAILED", f"SUB failed {error}") from None
        self._join(channel)
        self._awaits_ok = self._replies.are_owed  # no message may come before the OK of SUB
        self._replies.send(OK)
        return pos

    def _join(self, channel: Channel) -> None:
        limit = self.nsqd.options.max_channel_consumers
        if limit and len(channel.sessions) >= limit:
            raise FatalClientError(
                "E_SUB_FAILED",
                f"SUB failed consumers for {channel.topic.name}:{channel.name} exceeds limit of {limit}",
            )
        if channel.owner:
            reason = f"channel {channel.name} is read by range, by {channel.owner}; subscribe to another channel"
            raise FatalClientError("E_SUB_FAILED", f"SUB failed {reason}")
        self.consumer = channel.ledger.join(self.nsqd.options.max_rdy_count, self.settings.msg_timeout_ms)
        self.sample_rate = self.settings.sample_rate
        self.channel = channel
        self.state = STATE_SUBSCRIBED
        channel.add(self)

    def RDY(self, params: list[bytes], pos: int, end: int, at_eof: bool) -> int:
        if self.state == STATE_CLOSING:
            return pos
        if self.state != STATE_SUBSCRIBED:
            raise FatalClientError("E_INVALID", "cannot RDY in current state")
        count: int | None = 1
        if len(params) > 1:
            count = _decimal(params[1])
            if count is None:
                raise FatalClientError("E_INVALID", f"RDY could not parse count {_text(params[1])}")
        assert self.consumer is not None and count is not None
        if not 0 <= count <= self.consumer.rdy_max:
            raise FatalClientError("E_INVALID", f"RDY count {count} out of range 0-{self.consumer.rdy_max}")
        self.consumer.rdy = count
        return pos

    def FIN(self, params: list[bytes], pos: int, end: int, at_eof: bool) -> int:
        seq = self._message_seq(params, 2, "FIN")
        assert self.channel is not None and self.consumer is not None
        self._check(self.channel.ledger.finish(self.consumer, seq), "FIN", params[1])
        return pos

    def REQ(self, params: list[bytes], pos: int, end: int, at_eof: bool) -> int:
        seq = self._message_seq(params, 3, "REQ")
        delay_ms = _decimal(params[2])
        if delay_ms is None:
            raise FatalClientError("E_INVALID", f"REQ could not parse timeout {_text(params[2])}")
        assert self.channel is not None and self.consumer is not None
        outcome = self.channel.ledger.requeue(self.consumer, seq, max(0, delay_ms), now_ms())
        self._check(outcome, "REQ", params[1])
        return pos

    def TOUCH(self, params: list[bytes], pos: int, end: int, at_eof: bool) -> int:
        seq = self._message_seq(params, 2, "TOUCH")
        assert self.channel is not None and self.consumer is not None
        self._check(self.channel.ledger.touch(self.consumer, seq, now_ms()), "TOUCH", params[1])
        return pos

    def _message_seq(self, params: list[bytes], count: int, word: str) -> int:
        if self.state not in (STATE_SUBSCRIBED, STATE_CLOSING):
            raise FatalClientError("E_INVALID", f"cannot {word} in current state")
        if len(params) < count:
            raise FatalClientError("E_INVALID", f"{word} insufficient number of params")
        if len(params[1]) != MESSAGE_ID_BYTES:
            raise FatalClientError("E_INVALID", "invalid message ID")
        return sequence_of(params[1])

    def _check(self, outcome: int, word: str, message_id: bytes) -> None:
        if outcome != DONE:
            reason = "client does not own message" if outcome == NOT_OWNER else "ID not in flight"
            raise ClientError(f"E_{word}_FAILED", f"{word} {_text(message_id)} failed {reason}")

    def CLS(self, params: list[bytes], pos: int, end: int, at_eof: bool) -> int:
        if self.state != STATE_SUBSCRIBED:
            raise FatalClientError("E_INVALID", "cannot CLS in current state")
        assert self.consumer is not None
        self.consumer.rdy = 0
        self.consumer.rdy_max = -1  # RDY is ignored from now on
        self.state = STATE_CLOSING
        if self.channel is not None:
            self.channel.persist()
        self._replies.send(CLOSE_WAIT)
        return pos

    def NOP(self, params: list[bytes], pos: int, end: int, at_eof: bool) -> int:
        return pos

    # -- commands about the connection -------------------------------------------------------------------

    def IDENTIFY(self, params: list[bytes], pos: int, end: int, at_eof: bool) -> int:
        if self.state != STATE_INIT:
            raise FatalClientError("E_INVALID", "cannot IDENTIFY in current state")
        size = self._command_body(pos, end, at_eof, "IDENTIFY")
        if size is None:
            return INCOMPLETE
        body = bytes(self._data[pos + 4 : pos + 4 + size])
        self.nsqd.logger.info(f"[{self.remote_address}] IDENTIFY: {_text(body)}")
        answer = frame(FrameType.RESPONSE, identify(body, self.settings, self.nsqd.options))
        if not self._identified:
            self._identified = True
            self._schedule_heartbeat()
        if upgrade.is_wanted(self):
            self._replies.send_then(answer, upgrade.Upgrade(self, self._fail).begin)
            return end  # as in NSQ, what was sent too early is lost
        self._replies.send(answer)
        return pos + 4 + size

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
        if self._is_closed or self._held is None:
            return
        self._received_at_ms = now_ms()
        self.transport.resume_reading()
        self._data, end = self._held, self._held_bytes
        pos = self._run(0, end, now_ms())
        if not self._is_closed:
            self._hold(pos, end)

    def _command_body(self, pos: int, end: int, at_eof: bool, word: str) -> int | None:
        size = self._body_size(pos, end, at_eof, "E_BAD_BODY", f"{word} failed to read body")
        if size is None:
            return None
        limit = self.nsqd.options.max_body_size
        if size > limit:
            raise FatalClientError("E_BAD_BODY", f"{word} body too big {size} > {limit}")
        if size <= 0:
            raise FatalClientError("E_BAD_BODY", f"{word} invalid body size {size}")
        if pos + 4 + size > end:
            if at_eof:
                raise FatalClientError("E_BAD_BODY", f"{word} failed to read body")
            return None
        return size

    # -- sending -----------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """How many more messages the window allows."""
        assert self.consumer is not None
        return self.consumer.rdy - self.consumer.in_flight

    @property
    def is_ready(self) -> bool:
        return self.free > 0 and not self._write_paused_at_ms and not self._is_closed and not self._awaits_ok

    @property
    def is_nearly_full(self) -> bool:
        """Most of the window is in flight, and what is free of it is little."""
        assert self.consumer is not None
        rdy = self.consumer.rdy
        return rdy > REFILL_RDY_MIN and 2 * self.consumer.in_flight >= rdy and 8 * self.free < rdy

    def draws(self) -> bool:
        """Whether a sampled client gets a message: as in NSQ, a draw from 0 to 99 not above the rate."""
        return random.randrange(100) <= self.sample_rate

    def send(self, data: bytes | memoryview) -> None:
        self._write(data)

    # -- heartbeats --------------------------------------------------------------------------------------

    def _schedule_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            self._heartbeat = None
        if self.settings.heartbeat_ms > 0:
            self._interval_ms = self.settings.heartbeat_ms
            self._heartbeat = self.nsqd.loop.call_later(self._interval_ms / 1000, self._beat)

    def _beat(self) -> None:
        """Sends a heartbeat; a client silent for two intervals, or not reading for one, is cut off."""
        now = now_ms()
        if self.guard is not None and self.guard.is_asking:
            self._received_at_ms = now  # it is not the client that keeps us waiting
        silent_ms = now - self._received_at_ms
        not_reading_ms = now - self._write_paused_at_ms if self._write_paused_at_ms else 0
        if silent_ms >= 2 * self.settings.heartbeat_ms > 0 or not_reading_ms >= self._interval_ms:
            self.nsqd.logger.error(f"[{self.remote_address}] - no answer to heartbeats, closing")
            self.abort()
            return
        self._write(HEARTBEAT)
        self._heartbeat = self.nsqd.loop.call_later(self._interval_ms / 1000, self._beat)


Command = Callable[[Session, list[bytes], int, int, bool], int]
COMMANDS: dict[bytes, Command] = {
    name.encode(): getattr(Session, name)
    for name in ("IDENTIFY", "AUTH", "SUB", "PUB", "MPUB", "DPUB", "RDY", "FIN", "REQ", "TOUCH", "CLS", "NOP")
}


class BeforeTls:
    """The commands of a client that must use TLS and does not yet: IDENTIFY; every other word is refused."""

    def get(self, word: bytes) -> Command:
        if word != b"IDENTIFY":
            raise FatalClientError("E_INVALID", f"cannot {_text(word)} in current state (TLS required)")
        return Session.IDENTIFY


BEFORE_TLS = BeforeTls()


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _decimal(raw: bytes) -> int | None:
    """Decimal digits, as NSQ reads them: none is 0, and more than 64 bits wrap around into a signed number."""
    if not raw:
        return 0
    if not raw.isdigit():
        return None
    value = 0
    for digit in raw:
        value = (value * 10 + digit - 48) & UINT64_MAX
    return value - (1 << 64) if value >= 1 << 63 else value
