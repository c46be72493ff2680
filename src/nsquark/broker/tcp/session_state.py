"""What the commands of a session share: its state, and how the bodies behind a command's line are read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from nsquark.broker.channel import Channel
from nsquark.broker.tcp.identify import ClientSettings
from nsquark.broker.tcp.replies import Replies
from nsquark.kernel.ledger import Consumer
from nsquark.kernel.publish import Intake
from nsquark.wire.errors import FatalClientError
from nsquark.wire.names import is_valid_name
from nsquark.wire.quote import quote

if TYPE_CHECKING:
    from nsquark.broker.auth import Guard
    from nsquark.broker.nsqd import Nsqd
    from nsquark.broker.topic import Topic

UINT64_MAX = (1 << 64) - 1
DIGITS_THAT_COUNT = 64

STATE_INIT, STATE_SUBSCRIBED, STATE_CLOSING = 0, 3, 4
INCOMPLETE = -1
"""What a command returns, instead of where the next one starts, if not all of it is there."""

FOR_TURN, FOR_COMMIT, FOR_AUTH, FOR_READER, FOR_THREAD = 1, 2, 4, 8, 16
"""What a session may wait for: the others' turn, the disk, an auth server, its client to read, work in a thread."""


class SessionState:
    """Set by the session; `_data` holds the bytes that the commands point into.

    While it `_waits` for something, the session neither reads nor carries out what it has read.
    """

    nsqd: Nsqd
    transport: asyncio.Transport
    settings: ClientSettings
    guard: Guard | None
    state: int
    channel: Channel | None
    consumer: Consumer | None
    published: dict[str, int]
    sample_rate: int
    _data: bytearray
    _replies: Replies
    _intake: Intake | None
    _is_closed: bool
    _waits: int
    _measured_messages: int
    _measured_bytes: int
    """How much of an MPUB was measured before more of it came; the next time goes on there."""
    _unpublished: tuple[Topic, int] | None
    """The rest of an MPUB that is too long for one turn: how many messages are left, of those that come next."""
    _awaits_ok: bool

    @property
    def is_waiting(self) -> bool:
        return self._waits != 0

    def wait_for(self, what: int) -> None:
        if not self._waits and not self.transport.is_closing():
            self.transport.pause_reading()
        self._waits |= what

    def waited_for(self, what: int) -> None:
        """It has come; once nothing else is waited for, the session goes on in the next turn."""
        if self._waits & what:
            self._waits &= ~what
            if not self._waits:
                self.give_way()

    def give_way(self) -> None:
        """Goes on when the others had their turn."""
        if not self._waits & FOR_TURN:
            self.wait_for(FOR_TURN)
            self.nsqd.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        raise NotImplementedError

    def _settled(self) -> None:
        """A commit was answered: what waited for that goes on."""
        self.waited_for(FOR_COMMIT)
        if self._awaits_ok and self.channel is not None and not self._replies.are_owed:
            self._awaits_ok = False
            self.channel.wake()
        if not self._awaits_ok:
            self._replies.after = None

    def _body_size(self, pos: int, end: int, at_eof: bool, code: str, what: str) -> int | None:
        """The size before a body; None if it has not arrived."""
        if pos + 4 > end:
            if at_eof:
                raise FatalClientError(code, f"{what} size")
            return None
        return int.from_bytes(self._data[pos : pos + 4], "big", signed=True)

    def _topic_name(self, raw: bytes, word: str) -> str:
        name = text_of(raw)
        if name not in self.nsqd.topics and not is_valid_name(name):
            raise FatalClientError("E_BAD_TOPIC", f"{word} topic name {quote(raw)} is not valid")
        return name

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


def text_of(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def decimal_of(raw: bytes) -> int | None:
    """Decimal digits, as NSQ reads them: none is 0, and more than 64 bits wrap around into a signed number."""
    if not raw:
        return 0
    if not raw.isdigit():
        return None
    # Ten to the power of 64 is a multiple of two to the power of 64: digits before those change nothing.
    value = int(raw[-DIGITS_THAT_COUNT:]) & UINT64_MAX
    return value - (1 << 64) if value >= 1 << 63 else value
