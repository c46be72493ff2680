"""What the commands of a session share: its state, and how the bodies behind a command's line are read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from nsquark.broker.auth import Guard
from nsquark.broker.channel import Channel
from nsquark.broker.identify import ClientSettings
from nsquark.broker.replies import Replies
from nsquark.kernel.ledger import Consumer
from nsquark.kernel.publish import Intake
from nsquark.wire.errors import FatalClientError
from nsquark.wire.names import is_valid_name
from nsquark.wire.quote import quote

if TYPE_CHECKING:
    from nsquark.broker.daemon import Nsqd

UINT64_MAX = (1 << 64) - 1

STATE_INIT, STATE_SUBSCRIBED, STATE_CLOSING = 0, 3, 4
INCOMPLETE = -1
"""What a command returns, instead of where the next one starts, if not all of it is there."""


class SessionState:
    """Set by the session; `_data` holds the bytes that the commands point into."""

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
    _is_congested: bool
    _awaits_ok: bool

    def _settled(self) -> None:
        """A commit was answered: what waited for that goes on."""
        if self._is_congested and (self.guard is None or not self.guard.is_asking):
            self._is_congested = False
            self.transport.resume_reading()
        if self._awaits_ok and self.channel is not None and not self._replies.are_owed:
            self._awaits_ok = False
            self.channel.wake()
        if not self._is_congested and not self._awaits_ok:
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
    value = 0
    for digit in raw:
        value = (value * 10 + digit - 48) & UINT64_MAX
    return value - (1 << 64) if value >= 1 << 63 else value
