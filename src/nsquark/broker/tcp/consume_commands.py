"""Carries out SUB and what follows it. FIN, REQ, TOUCH and RDY mostly do not come here: the kernel carries out those
that are well-formed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsquark.base.clock import now_ms
from nsquark.broker.tcp.command import STATE_CLOSING, STATE_INIT, STATE_SUBSCRIBED, Command, text_of
from nsquark.kernel.answers import sequence_of
from nsquark.kernel.ledger import DONE, NOT_OWNER, Ledger
from nsquark.kernel.share import Share
from nsquark.wire.errors import ClientError, FatalClientError
from nsquark.wire.frames import CLOSE_WAIT
from nsquark.wire.names import is_valid_name
from nsquark.wire.quote import quote
from nsquark.wire.record import ID_BYTES

if TYPE_CHECKING:
    from nsquark.broker.tcp.session import Session

UNCOUNTED = b"uncounted"
"""Ends a REQ that does not count the delivery as an attempt, from a client that asked for that in IDENTIFY."""


def SUB(session: Session, command: Command) -> bool:
    if session.state != STATE_INIT:
        raise FatalClientError("E_INVALID", "cannot SUB in current state")
    if session.settings.heartbeat_ms <= 0:
        raise FatalClientError("E_INVALID", "cannot SUB with heartbeats disabled")
    command.require_params(3)
    topic_name = command.topic_name(session.nsqd.topics)
    channel_name = text_of(command.params[2])
    if not is_valid_name(channel_name):
        raise FatalClientError("E_BAD_CHANNEL", f"SUB channel name {quote(command.params[2])} is not valid")
    if not session.is_allowed("SUB", topic_name, channel_name):
        return False
    channel = session.nsqd.topic(topic_name).channel(channel_name)
    limit = session.nsqd.options.max_channel_consumers
    if limit and len(channel.sessions) >= limit:
        reason = f"consumers for {channel.topic.name}:{channel.name} exceeds limit of {limit}"
        raise FatalClientError("E_SUB_FAILED", f"SUB failed {reason}")
    if channel.owner:
        reason = f"channel {channel.name} is read by range, by {channel.owner}; subscribe to another channel"
        raise FatalClientError("E_SUB_FAILED", f"SUB failed {reason}")
    session.subscribe(channel)
    return True


def RDY(session: Session, command: Command) -> bool:
    if session.state == STATE_CLOSING:
        return True
    if session.state != STATE_SUBSCRIBED:
        raise FatalClientError("E_INVALID", "cannot RDY in current state")
    count = command.number(1, "count") if len(command.params) > 1 else 1
    assert session.consumer is not None
    if not 0 <= count <= session.consumer.rdy_max:
        raise FatalClientError("E_INVALID", f"RDY count {count} out of range 0-{session.consumer.rdy_max}")
    session.consumer.rdy = count
    return True


def FIN(session: Session, command: Command) -> bool:
    ledger, consumer, seq = _message_of(session, command, 2)
    _require_done(ledger.finish(consumer, seq), command)
    return True


def REQ(session: Session, command: Command) -> bool:
    ledger, consumer, seq = _message_of(session, command, 3)
    delay_ms = max(0, command.number(2, "timeout"))
    is_counted = not (session.settings.requeue_uncounted and command.params[3:] == [UNCOUNTED])
    _require_done(ledger.requeue(consumer, seq, delay_ms, now_ms(), is_counted), command)
    return True


def TOUCH(session: Session, command: Command) -> bool:
    ledger, consumer, seq = _message_of(session, command, 2)
    _require_done(ledger.touch(consumer, seq, now_ms()), command)
    return True


def CLS(session: Session, command: Command) -> bool:
    if session.state != STATE_SUBSCRIBED:
        raise FatalClientError("E_INVALID", "cannot CLS in current state")
    assert session.consumer is not None and session.channel is not None
    session.consumer.rdy = 0
    session.consumer.rdy_max = -1  # RDY is ignored from now on
    session.state = STATE_CLOSING
    session.channel.persist()
    session.replies.send(CLOSE_WAIT)
    return True


def NOP(session: Session, command: Command) -> bool:
    """Answers a heartbeat; that something was heard is remembered where it is read."""
    return True


def _message_of(session: Session, command: Command, params: int) -> tuple[Ledger, Share, int]:
    """Finds what FIN, REQ and TOUCH are about: the ledger, the consumer that asks, and the
    message's sequence number.
    """
    if session.state not in (STATE_SUBSCRIBED, STATE_CLOSING):
        raise FatalClientError("E_INVALID", f"cannot {command.word} in current state")
    if len(command.params) < params:
        raise FatalClientError("E_INVALID", f"{command.word} insufficient number of params")
    if len(command.params[1]) != ID_BYTES:
        raise FatalClientError("E_INVALID", "invalid message ID")
    assert session.channel is not None and session.consumer is not None
    return session.channel.ledger, session.consumer, sequence_of(command.params[1])


def _require_done(outcome: int, command: Command) -> None:
    if outcome != DONE:
        reason = "client does not own message" if outcome == NOT_OWNER else "ID not in flight"
        raise ClientError(f"E_{command.word}_FAILED", f"{command.word} {text_of(command.params[1])} failed {reason}")
