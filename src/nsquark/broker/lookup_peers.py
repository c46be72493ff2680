"""This is nsqd's side of discovery: it tells nsqlookupds what this nsqd carries, and asks them for a topic's channels.

Each nsqlookupd is served by a task of its own, so a dead one delays nobody. NSQ serves them in turn.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast
from urllib.parse import quote

import msgspec

from nsquark.base.addresses import join_address, split_address
from nsquark.base.logs import Logger
from nsquark.web.fetch import FetchError
from nsquark.web.lookupd import ask_lookupd
from nsquark.wire.documents import decode_json
from nsquark.wire.frames import MAGIC_V1
from nsquark.wire.lookup_answer import read_channels
from nsquark.wire.names import is_ephemeral, is_valid_name
from nsquark.wire.record import SIZE_BYTES

PING_INTERVAL_S = 15.0
EXCHANGE_TIMEOUT_S = 1.0
"""Bounds the time for connecting, and for each reply."""

RETRY_S_MIN = 1.0
"""A lost connection is tried again after this, then after twice as long, up to a ping's interval."""
COMMAND_RETRY_S_MIN = 0.25
"""With a command to send, a connection is tried again sooner, but not sooner than this: it may be refused each time."""

PIPELINE_COMMANDS_MAX = 100
"""At most this many commands are sent before their replies are awaited: a thousand topics then cost ten round trips,
not a thousand.
"""

COMMANDS_WAITING_MAX = 10_000
"""At most this many commands wait for one nsqlookupd. With more, this nsqd connects to it anew, which says in fewer
commands what it carries.
"""

Registration = tuple[str, str | None]


class LookupPeers:
    """Keeps the nsqlookupds of one nsqd. All methods belong to the event loop's thread.

    `registrations` gives what is to be announced on a new connection: (topic, channel) for each channel, and
    (topic, None) for a topic without any. Change it before calling `register` or `unregister`.
    """

    def __init__(
        self,
        logger: Logger,
        identity: Callable[[], dict[str, Any]],
        registrations: Callable[[], Iterable[Registration]],
        *,
        connect_timeout: float,
        request_timeout: float,
        max_body_bytes: int,
        ping_interval_s: float = PING_INTERVAL_S,
        retry_s_min: float = RETRY_S_MIN,
    ) -> None:
        self.logger = logger
        self.identity = identity
        self.registrations = registrations
        self.max_body_bytes = max_body_bytes
        self.ping_interval_s = ping_interval_s
        self.retry_s_min = retry_s_min
        self._connect_timeout_s = connect_timeout
        self._request_timeout_s = request_timeout
        self._peers: dict[str, LookupPeer] = {}

    @property
    def addresses(self) -> list[str]:
        return list(self._peers)

    def start(self, addresses: Iterable[str]) -> None:
        self.set_addresses(list(addresses))

    async def stop(self) -> None:
        if self._peers:
            self.logger.info("LOOKUP: closing")
        peers, self._peers = list(self._peers.values()), {}
        await asyncio.gather(*(peer.stop() for peer in peers))

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Keeps the connections to addresses that stay; an nsqlookupd that is removed forgets this nsqd."""
        for address in [address for address in self._peers if address not in addresses]:
            self.logger.info(f"LOOKUP({address}): removing peer")
            self._peers.pop(address).cancel()
        for address in addresses:
            if address not in self._peers:
                self.logger.info(f"LOOKUP({address}): adding peer")
                self._peers[address] = LookupPeer(address, self)

    def register(self, topic: str, channel: str | None) -> None:
        self._tell_all("REGISTER", topic, channel)

    def unregister(self, topic: str, channel: str | None) -> None:
        self._tell_all("UNREGISTER", topic, channel)

    async def channels_of(self, topic: str) -> set[str]:
        """Returns the topic's channels that any nsqlookupd knows, but no ephemeral ones; failures are logged."""
        hosts = {peer.http_address for peer in self._peers.values()} - {None}
        answers = await asyncio.gather(*(self._ask_channels(host, topic) for host in hosts if host))
        return {name for names in answers for name in names if is_valid_name(name) and not is_ephemeral(name)}

    def _tell_all(self, verb: str, topic: str, channel: str | None) -> None:
        text = f"{verb} {topic} {channel}" if channel else f"{verb} {topic}"
        kind = "channel" if channel else "topic"
        for peer in self._peers.values():
            self.logger.info(f"LOOKUPD({peer.address}): {kind} {text}")
            peer.tell(text)

    async def _ask_channels(self, host: str, topic: str) -> list[str]:
        url = f"http://{host}/channels?topic={quote(topic, safe='')}"
        self.logger.info(f"CI: querying nsqlookupd {url}")
        try:
            return await ask_lookupd(
                url,
                read_channels,
                connect_timeout=self._connect_timeout_s,
                request_timeout=self._request_timeout_s,
            )
        except FetchError as error:
            self.logger.warning(f"failed to query nsqlookupd for channels to pre-create for topic {topic} - {error}")
            return []


class _PeerInfo(msgspec.Struct):
    """Is what an nsqlookupd answers to IDENTIFY; absent fields are no error, as for NSQ."""

    tcp_port: int = 0
    http_port: int = 0
    version: str = ""
    broadcast_address: str = ""


class LookupPeer:
    """Talks to one nsqlookupd: it has a queue of commands, and a task that connects, sends them and pings.

    Always: what cannot be sent for want of a connection is dropped from the queue; the next connection
    begins with all registrations as they are then.
    """

    def __init__(self, address: str, peers: LookupPeers) -> None:
        self.address = address
        self.http_address: str | None = None
        """Stays set while disconnected: the HTTP port may well answer."""
        self._peers = peers
        self._logger = peers.logger
        self._commands: deque[str] = deque()
        self._connection: LookupConnection | None = None
        self._wake = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def tell(self, command: str) -> None:
        """Sends the command as soon as possible."""
        if len(self._commands) >= COMMANDS_WAITING_MAX:
            self._commands.clear()
            self._fail(f"{COMMANDS_WAITING_MAX} commands wait", "connecting anew")
        self._commands.append(command)
        self._wake.set()

    def cancel(self) -> None:
        self._task.cancel()

    async def stop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        retry_s = self._peers.retry_s_min
        try:
            while True:
                waiting = len(self._commands)
                if await self._connect():
                    connected_at = time.monotonic()
                    await self._serve()
                    if time.monotonic() - connected_at >= retry_s:
                        retry_s = self._peers.retry_s_min
                    waiting = 0
                for _ in range(min(waiting, len(self._commands))):
                    self._commands.popleft()
                await self._pause(retry_s)
                retry_s = min(2 * retry_s, self._peers.ping_interval_s)
        finally:
            self._disconnect()

    async def _serve(self) -> None:
        """Sends commands and pings until the connection fails."""
        ping_at = time.monotonic() + self._peers.ping_interval_s
        while self._connection is not None:
            if self._connection.is_lost:
                self._fail("connection", "closed by nsqlookupd")
            elif time.monotonic() >= ping_at:
                # A ping is due whatever else is sent: to nsqlookupd only PING is a sign of life.
                self._logger.debug(f"LOOKUPD({self.address}): sending heartbeat")
                await self._send(["PING"])
                ping_at = time.monotonic() + self._peers.ping_interval_s
            elif self._commands:
                count = min(len(self._commands), PIPELINE_COMMANDS_MAX)
                await self._send([self._commands.popleft() for _ in range(count)])
            else:
                await self._sleep(ping_at - time.monotonic())

    async def _pause(self, seconds: float) -> None:
        """Waits before the next connection."""
        at_least_s = min(seconds, COMMAND_RETRY_S_MIN)
        await asyncio.sleep(at_least_s)
        if not self._commands:
            await self._sleep(seconds - at_least_s)

    async def _sleep(self, seconds: float) -> None:
        """Waits for `seconds`, or until there is a command to send or the connection is lost."""
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    async def _connect(self) -> bool:
        """Connects, identifies and announces everything; returns False if that failed."""
        self._logger.info(f"LOOKUP connecting to {self.address}")
        try:
            host, port = split_address(self.address)
            async with asyncio.timeout(EXCHANGE_TIMEOUT_S):
                _, self._connection = await asyncio.get_running_loop().create_connection(
                    lambda: LookupConnection(self._peers.max_body_bytes, self._wake.set), host, port
                )
        except (OSError, ValueError) as error:
            self._fail("connect", describe(error))
            return False
        if not await self._identify():
            return False
        commands = [_register(topic, channel) for topic, channel in self._peers.registrations()]
        for command in commands:
            self._logger.info(f"LOOKUPD({self.address}): {command}")
        for start in range(0, len(commands), PIPELINE_COMMANDS_MAX):
            if not await self._send(commands[start : start + PIPELINE_COMMANDS_MAX]):
                return False
        return True

    async def _identify(self) -> bool:
        body = msgspec.json.encode(self._peers.identity())
        request = MAGIC_V1 + b"IDENTIFY\n" + len(body).to_bytes(SIZE_BYTES) + body
        assert self._connection is not None
        try:
            (reply,) = await self._connection.exchange([request])
        except OSError as error:
            self._fail("IDENTIFY", describe(error))
            return False
        try:
            info = decode_json(reply, _PeerInfo)
        except ValueError as error:
            said = reply.decode("utf-8", "backslashreplace") if reply.startswith(b"E_") else str(error)
            self._fail("IDENTIFY", said)
            return False
        self._logger.info(
            f"LOOKUPD({self.address}): peer info {{TCPPort:{info.tcp_port} HTTPPort:{info.http_port} "
            f"Version:{info.version} BroadcastAddress:{info.broadcast_address}}}"
        )
        if info.broadcast_address:
            self.http_address = join_address(info.broadcast_address, info.http_port)
        else:
            self.http_address = None
            self._logger.error(f"LOOKUPD({self.address}): no broadcast address")
        return True

    async def _send(self, commands: list[str]) -> bool:
        """Sends the commands; if one of them is refused or not answered, it disconnects and returns False."""
        if self._connection is None:  # `tell` may end it while announcing
            return False
        try:
            replies = await self._connection.exchange([f"{command}\n".encode() for command in commands])
        except OSError as error:
            self._fail(commands[0], describe(error))
            return False
        for command, reply in zip(commands, replies, strict=True):
            if reply.startswith(b"E_"):
                self._fail(command, reply.decode("utf-8", "backslashreplace"))
                return False
        return True

    def _fail(self, what: str, why: str) -> None:
        self._logger.error(f"LOOKUPD({self.address}): {what} - {why}")
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class LookupConnection(asyncio.Protocol):
    """Sends requests and gets replies in the same order; a reply is a size and that many bytes."""

    def __init__(self, reply_bytes_max: int, on_lost: Callable[[], None]) -> None:
        self._reply_bytes_max = reply_bytes_max
        self._on_lost = on_lost
        self._buffer = bytearray()
        self._replies: deque[bytes] = deque()
        self._outstanding = 0
        self._arrived = asyncio.Event()
        self._lost: OSError | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    async def exchange(self, requests: Sequence[bytes]) -> list[bytes]:
        """Returns the replies; raises OSError if one is late or too long, or the connection breaks: close it then."""
        assert self._transport is not None
        if self._lost is not None:
            raise self._lost
        self._outstanding += len(requests)
        self._transport.write(b"".join(requests))
        return [await self._next_reply() for _ in requests]

    def close(self) -> None:
        """Closes the connection without calling `on_lost`."""
        self._on_lost = _nothing
        self._abort()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but type

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= SIZE_BYTES and self._lost is None:
            size = int.from_bytes(self._buffer[:SIZE_BYTES], signed=True)
            if not 0 <= size <= self._reply_bytes_max:
                self._lose(OSError(f"reply of {size} bytes, at most {self._reply_bytes_max} are taken"))
            elif not self._outstanding:
                self._lose(OSError("a reply to nothing"))
            elif len(self._buffer) < SIZE_BYTES + size:
                return
            else:
                self._replies.append(bytes(self._buffer[SIZE_BYTES : SIZE_BYTES + size]))
                del self._buffer[: SIZE_BYTES + size]
                self._outstanding -= 1
                self._arrived.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(error if isinstance(error, OSError) else OSError("connection closed"))

    async def _next_reply(self) -> bytes:
        while not self._replies:
            if self._lost is not None:
                raise self._lost
            self._arrived.clear()
            async with asyncio.timeout(EXCHANGE_TIMEOUT_S):
                await self._arrived.wait()
        return self._replies.popleft()

    def _lose(self, error: OSError) -> None:
        if self._lost is None:
            self._lost = error
            self._abort()
            self._arrived.set()
            self._on_lost()


def _nothing() -> None:
    pass


def _register(topic: str, channel: str | None) -> str:
    return f"REGISTER {topic} {channel}" if channel else f"REGISTER {topic}"


def describe(error: Exception) -> str:
    return str(error) or ("timed out" if isinstance(error, TimeoutError) else type(error).__name__)
