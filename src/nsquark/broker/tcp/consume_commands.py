"""The commands that consume."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from nsquark.base.clock import now_ms
from nsquark.broker.channel import Channel
from nsquark.broker.tcp.session_state import (
    INCOMPLETE,
    STATE_CLOSING,
    STATE_INIT,
    STATE_SUBSCRIBED,
    SessionState,
    decimal_of,
    text_of,
)
from nsquark.broker.topic import TopicExiting
from nsquark.kernel.ledger import DONE, NOT_OWNER, sequence_of
from nsquark.wire.errors import ClientError, FatalClientError
from nsquark.wire.frames import CLOSE_WAIT, OK
from nsquark.wire.names import is_valid_name
from nsquark.wire.quote import quote

if TYPE_CHECKING:
    from nsquark.broker.tcp.session import Session

MESSAGE_ID_BYTES = 16
UNCOUNTED = b"uncounted"
"""The last word of a REQ that takes the delivery's attempt back, from a client that asked for it in IDENTIFY."""


class ConsumingCommands(SessionState):
    """SUB and what follows it. FIN, REQ, TOUCH and RDY mostly do not come here: the kernel does what is well-formed."""

    def SUB(self, params: list[bytes], pos: int, end: int, at_eof: bool) -> int:
        if self.state != STATE_INIT:
            raise FatalClientError("E_INVALID", "cannot SUB in current state")
        if self.settings.heartbeat_ms <= 0:
            raise FatalClientError("E_INVALID", "cannot SUB with heartbeats disabled")
        if len(params) < 3:
            raise FatalClientError("E_INVALID", "SUB insufficient number of parameters")
        topic_name = self._topic_name(params[1], "SUB")
        channel_name = text_of(params[2])
        if not is_valid_name(channel_name):
            raise FatalClientError("E_BAD_CHANNEL", f"SUB channel name {quote(params[2])} is not valid")
        if self.guard is not None and not self.guard.allows("SUB", topic_name, channel_name):
            return INCOMPLETE
        try:
            channel = self.nsqd.topic(topic_name).channel(channel_name)
        except (TopicExiting, OSError) as error:
            raise FatalClientError("E_SUB_FAILED", f"SUB failed {error}") from None
        self._join(channel)
        if self._replies.are_owed:  # no message may come before the OK of SUB
            self._awaits_ok = True
            self._replies.after = self._settled
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
        channel.add(cast("Session", self))

    def RDY(self, params: list[bytes], pos: int, end: int, at_eof: bool) -> int:
        if self.state == STATE_CLOSING:
            return pos
        if self.state != STATE_SUBSCRIBED:
            raise FatalClientError("E_INVALID", "cannot RDY in current state")
        count: int | None = 1
        if len(params) > 1:
            count = decimal_of(params[1])
            if count is None:
                raise FatalClientError("E_INVALID", f"RDY could not parse count {text_of(params[1])}")
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
        delay_ms = decimal_of(params[2])
        if delay_ms is None:
            raise FatalClientError("E_INVALID", f"REQ could not parse timeout {text_of(params[2])}")
        assert self.channel is not None and self.consumer is not None
        is_counted = not (self.settings.requeue_uncounted and params[3:] == [UNCOUNTED])
        outcome = self.channel.ledger.requeue(self.consumer, seq, max(0, delay_ms), now_ms(), is_counted)
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
            raise ClientError(f"E_{word}_FAILED", f"{word} {text_of(message_id)} failed {reason}")

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
