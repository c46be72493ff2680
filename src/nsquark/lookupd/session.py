"""Serves one TCP connection to nsqlookupd: it reads lines, sends length-prefixed replies, and closes after an error."""

import asyncio
import contextlib
import socket
import time
from collections import Counter
from dataclasses import dataclass
from typing import cast

from nsquark.base.addresses import show_peer
from nsquark.base.durations import Duration
from nsquark.base.logs import Logger
from nsquark.lookupd.peer import BadJsonError, peer_json, read_peer_info
from nsquark.lookupd.registry import Registry, RegistryKey, RegistryProducer
from nsquark.web.fairness import TURN_NS_MAX
from nsquark.wire.errors import FatalClientError
from nsquark.wire.frames import MAGIC_V1
from nsquark.wire.names import is_valid_name
from nsquark.wire.record import SIZE_BYTES

LINE_BYTES_MAX = 4096
"""A line has at most this many bytes. The longest useful one, REGISTER with two names, has 140. NSQ has no limit."""

IDENTIFY_BODY_BYTES_MAX = 64 * 1024

LARGE_READ_BYTES = 64 * 1024
"""Event loops that read until a socket is empty read again at once after a read of this much."""

LINGER_S = 1.0
"""A connection that we end waits this long for the peer to read the error, which closing at once may lose."""

KEEPALIVE_IDLE_S = 15
KEEPALIVE_INTERVAL_S = 15
"""Go's runtime sets both for NSQ: a host that lost its power is noticed after two and a half minutes."""

WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
"""NSQ trims these characters from a line. str.strip() trims four control characters more."""


def reply_frame(data: bytes) -> bytes:
    """Frames a reply, success or error alike: a size, and no type."""
    return len(data).to_bytes(SIZE_BYTES) + data


OK = reply_frame(b"OK")


@dataclass(frozen=True, slots=True)
class LookupdLimits:
    """Sets the bounds for connections: no peer may use more than these."""

    stranger_idle_s: float = 60.0
    """A client that has not identified must complete a command this often, or its connection is closed."""
    stranger_check_s: float = 5.0
    """Connections that neither identified nor completed a command are looked for this often."""
    strangers: int = 4096
    """At most this many connections may not have identified; with one more, the one silent for longest is closed."""
    unread_s: float = 60.0
    """A client that leaves its replies unread for this long is cut off."""


class LookupdSessions:
    """Has what the connections of one nsqlookupd share, and limits those that never say who they are.

    Always: `strangers` are in the order of their last command, the one silent for longest first.
    """

    def __init__(self, registry: Registry, logger: Logger, limits: LookupdLimits) -> None:
        self.registry = registry
        self.limits = limits
        self.logger = logger
        self.identity = b""
        """Is the answer to IDENTIFY, which is known once the ports are."""
        self.open: set[LookupdSession] = set()
        self.strangers: dict[LookupdSession, float] = {}
        self.accepted = 0
        self.commands: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    def new_session(self) -> "LookupdSession":
        return LookupdSession(self)

    def heard_of_stranger(self, session: "LookupdSession") -> None:
        self.strangers.pop(session, None)
        self.strangers[session] = time.monotonic()
        if len(self.strangers) > self.limits.strangers:
            next(iter(self.strangers)).leave("too many connections that did not IDENTIFY")

    def close_silent_strangers(self) -> None:
        idle_s = self.limits.stranger_idle_s
        silent_since = time.monotonic() - idle_s
        for session in [session for session, heard in self.strangers.items() if heard < silent_since]:
            session.leave(f"no command for {idle_s:g} s and not identified")

    def close_all(self) -> None:
        for session in list(self.open):
            session.leave("nsqlookupd is stopping")


class LookupdSession(asyncio.Protocol):
    """Reads magic, then lines; IDENTIFY switches to reading its body and back.

    Always: unless the others have their turn or the replies are not read, at most one line or body, within its limit,
    waits in the buffer once `data_received` returns; otherwise what one read gave.
    """

    transport: asyncio.Transport
    _loop: asyncio.AbstractEventLoop

    def __init__(self, shared: LookupdSessions) -> None:
        self._shared = shared
        self._registry = shared.registry
        self._logger = shared.logger
        self._buffer = bytearray()
        self._read_next = self._read_magic
        self._producer: RegistryProducer | None = None
        self._left = False
        self._waits = False
        """Tells whether the session waits while the others have their turn."""
        self._write_paused = False
        self._abort_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self.name = ""

    # -- the connection ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but type
        self._loop = asyncio.get_running_loop()
        if transport.get_extra_info("peername") is None:  # it was reset before it could be accepted
            self._left = True
            self.transport.abort()
            return
        self.name = show_peer(transport)
        keep_alive(self.transport)
        self._shared.accepted += 1
        self._shared.open.add(self)
        self._shared.heard_of_stranger(self)
        self._logger.info(f"TCP: new client({self.name})")

    def data_received(self, data: bytes) -> None:
        if self._left:
            return
        self._buffer += data
        if not self._waits:
            self._carry_on()
        if len(data) >= LARGE_READ_BYTES and not self._waits:
            self._give_way()

    def _carry_on(self) -> None:
        """Carries out what is whole in the buffer, as far as a turn's time goes and the peer reads the replies."""
        until_ns = time.monotonic_ns() + TURN_NS_MAX
        try:
            while not self._left and not self._write_paused and self._read_next():
                if time.monotonic_ns() > until_ns:
                    self._give_way()
                    break
        except FatalClientError as error:
            self._fail(error)

    def _give_way(self) -> None:
        """Waits until the others had their turn."""
        self._waits = True
        self.transport.pause_reading()
        self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._waits = False
        if self._left or self._write_paused:
            return
        self._carry_on()
        if not (self._waits or self._write_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def eof_received(self) -> None:
        if self._left:
            return
        try:
            self._check_end()
        except FatalClientError as error:
            self._fail(error)
        else:
            self.leave("EOF")

    def connection_lost(self, error: Exception | None) -> None:
        self.leave(str(error) if error else "EOF")
        for timer in (self._abort_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        self._shared.open.discard(self)

    def pause_writing(self) -> None:
        # A client that does not read its replies is not read either, or they would pile up here.
        self._write_paused = True
        self.transport.pause_reading()
        self._unread_timer = self._loop.call_later(self._shared.limits.unread_s, self._give_up)

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        if not self._left and not self._waits:
            self._give_way()

    def _give_up(self) -> None:
        self.leave("the replies are not read")
        self.transport.abort()

    def leave(self, reason: str) -> None:
        """Ends the session once; what was written still goes out, for at most LINGER_S."""
        if self._left:
            return
        self._left = True
        self._shared.strangers.pop(self, None)
        self._buffer.clear()
        if self._read_next != self._read_magic:
            self._logger.info(f"PROTOCOL(V1): [{self.name}] exiting ioloop")
        self._forget_producer()
        self._logger.error(f"client({self.name}) - {reason}")
        if not self.transport.is_closing():
            with contextlib.suppress(OSError):
                self.transport.write_eof()
            self._abort_timer = asyncio.get_running_loop().call_later(LINGER_S, self.transport.abort)

    def _forget_producer(self) -> None:
        if self._producer is None:
            return
        for key in self._registry.disconnect(self._producer):
            self._log_key("UNREGISTER", key)
        self._logger.info(f"DB: client({self.name}) UNREGISTER category:client key: subkey:")
        self._producer = None

    def _fail(self, error: FatalClientError) -> None:
        self._shared.errors[error.code] += 1
        text = str(error)
        if error.code != "E_BAD_PROTOCOL":
            self._logger.error(f"[{self.name}] - {text}")
        self.transport.write(reply_frame(error.payload()))
        self.leave(text)

    # -- reading: a step cuts one whole thing from the buffer, or returns False --------------------------

    def _read_magic(self) -> bool:
        if len(self._buffer) < len(MAGIC_V1):
            return False
        magic = self._cut(len(MAGIC_V1))
        shown = magic.decode("utf-8", "surrogateescape")
        self._logger.info(f"CLIENT({self.name}): desired protocol magic '{shown}'")
        if magic != MAGIC_V1:
            self._logger.error(f"client({self.name}) bad protocol magic '{shown}'")
            raise FatalClientError("E_BAD_PROTOCOL")
        self._read_next = self._read_line
        return True

    def _read_line(self) -> bool:
        end = self._buffer.find(b"\n", 0, LINE_BYTES_MAX)
        if end < 0:
            if len(self._buffer) >= LINE_BYTES_MAX:
                raise FatalClientError("E_INVALID", f"line longer than {LINE_BYTES_MAX} bytes")
            return False
        words = self._cut(end + 1).decode("utf-8", "surrogateescape").strip(WHITE_SPACE).split(" ")
        command = _COMMANDS.get(words[0])
        if command is None:
            raise FatalClientError("E_INVALID", f"invalid command {words[0]}")
        self._shared.commands[words[0]] += 1
        command(self, words[1:])
        if self._producer is None:
            self._shared.heard_of_stranger(self)
        return True

    def _read_identify_body(self) -> bool:
        if len(self._buffer) < SIZE_BYTES:
            return False
        size = int.from_bytes(self._buffer[:SIZE_BYTES], signed=True)
        if size < 0:
            raise FatalClientError("E_BAD_BODY", f"IDENTIFY invalid body size {size}")
        if size > IDENTIFY_BODY_BYTES_MAX:
            raise FatalClientError("E_BAD_BODY", f"IDENTIFY body too big {size} > {IDENTIFY_BODY_BYTES_MAX}")
        if len(self._buffer) < SIZE_BYTES + size:
            return False
        body = self._cut(SIZE_BYTES + size)[SIZE_BYTES:]
        self._read_next = self._read_line
        self._identify(body)
        return True

    def _check_end(self) -> None:
        """Tells the peer of a body that was cut short; a line cut short is not told, as in NSQ."""
        if self._read_next == self._read_identify_body:
            what = "body size" if len(self._buffer) < SIZE_BYTES else "body"
            raise FatalClientError("E_BAD_BODY", f"IDENTIFY failed to read {what}")

    def _cut(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    # -- the commands ------------------------------------------------------------------------------------

    def IDENTIFY(self, words: list[str]) -> None:
        if self._producer is not None:
            raise FatalClientError("E_INVALID", "cannot IDENTIFY again")
        self._read_next = self._read_identify_body

    def REGISTER(self, words: list[str]) -> None:
        producer = self._identified()
        topic, channel = names_of("REGISTER", words)
        for key in self._registry.register(producer, topic, channel):
            self._log_key("REGISTER", key)
        self.transport.write(OK)

    def UNREGISTER(self, words: list[str]) -> None:
        producer = self._identified()
        topic, channel = names_of("UNREGISTER", words)
        if channel:
            removed = self._registry.unregister_channel(producer, topic, channel)
            if removed is not None:
                self._log_key("UNREGISTER", removed)
        else:
            for key in self._registry.unregister_topic(producer, topic):
                if key.channel:
                    self._logger.warning(f"client({self.name}) unexpected UNREGISTER {key}")
                else:
                    self._log_key("UNREGISTER", key)
        self.transport.write(OK)

    def PING(self, words: list[str]) -> None:
        if self._producer is not None:
            since = Duration(self._registry.ping(self._producer))
            self._logger.info(f"CLIENT({self.name}): pinged (last ping {since})")
        self.transport.write(OK)

    def _identify(self, body: bytes) -> None:
        try:
            info = read_peer_info(body)
        except BadJsonError as error:
            raise FatalClientError("E_BAD_BODY", "IDENTIFY failed to decode JSON body") from error
        if not info.is_complete:
            raise FatalClientError("E_BAD_BODY", "IDENTIFY missing fields")
        info.remote_address = self.name
        self._producer = self._registry.identify(info, peer_json(info))
        self._shared.strangers.pop(self, None)
        self._logger.info(
            f"CLIENT({self.name}): IDENTIFY Address:{info.broadcast_address} "
            f"TCP:{info.tcp_port} HTTP:{info.http_port} Version:{info.version}"
        )
        self._logger.info(f"DB: client({self.name}) REGISTER category:client key: subkey:")
        self.transport.write(reply_frame(self._shared.identity))

    def _identified(self) -> RegistryProducer:
        if self._producer is None:
            raise FatalClientError("E_INVALID", "client must IDENTIFY")
        return self._producer

    def _log_key(self, what: str, key: RegistryKey) -> None:
        self._logger.info(f"DB: client({self.name}) {what} {key}")


_COMMANDS = {
    "IDENTIFY": LookupdSession.IDENTIFY,
    "REGISTER": LookupdSession.REGISTER,
    "UNREGISTER": LookupdSession.UNREGISTER,
    "PING": LookupdSession.PING,
}


def names_of(command: str, words: list[str]) -> tuple[str, str]:
    """Reads topic and channel, which is empty if it is not given. Words beyond them are ignored."""
    if not words:
        raise FatalClientError("E_INVALID", f"{command} insufficient number of params")
    topic, channel = words[0], words[1] if len(words) > 1 else ""
    if not is_valid_name(topic):
        raise FatalClientError("E_BAD_TOPIC", f"{command} topic name '{topic}' is not valid")
    if channel and not is_valid_name(channel):
        raise FatalClientError("E_BAD_CHANNEL", f"{command} channel name '{channel}' is not valid")
    return topic, channel


def keep_alive(transport: asyncio.Transport) -> None:
    connection = transport.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
