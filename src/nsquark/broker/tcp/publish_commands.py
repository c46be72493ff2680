"""Carries out the commands that publish: messages go to the topic's log at once, the answer when the commit is settled.

PUB and MPUB mostly do not come here: the kernel publishes those to the topic that a client published to last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsquark.broker.tcp.command import UINT64_MAX, Command
from nsquark.kernel.publish import MPUB_TURN_MESSAGES_MAX, MPUB_WHOLE_MESSAGES_MAX
from nsquark.kernel.records import MPUB_BAD_SIZE, MPUB_TOO_BIG, measure_mpub
from nsquark.wire.errors import FatalClientError
from nsquark.wire.record import COUNT_BYTES, SIZE_BYTES

if TYPE_CHECKING:
    from nsquark.broker.tcp.session import Session
    from nsquark.broker.topic import Topic

MESSAGE_BYTES_MIN = SIZE_BYTES + 1
"""A message of an MPUB has at least this many bytes: its size and one byte."""


class MpubProgress:
    """Knows how far a session came with an MPUB that arrives in pieces, or is too long for one turn.

    * `measured_messages` and `measured_bytes` tell how much of it was looked at before the rest came.
    * `left` messages that have arrived are still to be published, to `topic`.
    """

    def __init__(self) -> None:
        self.measured_messages = self.measured_bytes = 0
        self.topic: Topic
        self.left = 0


def PUB(session: Session, command: Command) -> bool:
    command.require_params(2)
    name = command.topic_name(session.nsqd.topics)
    size = command.message(session.nsqd.options.max_msg_size)
    if size is None or not session.is_allowed("PUB", name):
        return False
    topic = session.nsqd.topic(name)
    session.promise(topic, topic.publish(command.data, command.next - size, size), "PUB")
    return True


def DPUB(session: Session, command: Command) -> bool:
    command.require_params(3)
    name = command.topic_name(session.nsqd.topics)
    delay_ms = command.number(2, "timeout")
    delay_max_ms = session.nsqd.options.max_req_timeout.ms
    if not 0 <= delay_ms <= delay_max_ms:
        shown = delay_ms & UINT64_MAX  # unlike RDY's count
        raise FatalClientError("E_INVALID", f"DPUB timeout {shown} out of range 0-{delay_max_ms}")
    size = command.message(session.nsqd.options.max_msg_size)
    if size is None or not session.is_allowed("DPUB", name):
        return False
    topic, start = session.nsqd.topic(name), command.next - size
    if delay_ms == 0:
        commit = topic.publish(command.data, start, size)
    else:
        commit = topic.publish_deferred(bytes(command.data[start : command.next]), delay_ms)
    session.promise(topic, commit, "DPUB")
    return True


def MPUB(session: Session, command: Command) -> bool:
    command.require_params(2)
    name = command.topic_name(session.nsqd.topics, "E_BAD_TOPIC MPUB")  # as NSQ says it
    if not session.is_allowed("MPUB", name):
        return False
    topic = session.nsqd.topic(name)
    start = command.pos + SIZE_BYTES + COUNT_BYTES
    count = _count(session, command)
    if count is None or not _measure(session, command, start, count):
        return False
    if count > MPUB_WHOLE_MESSAGES_MAX:
        session.mpub.topic, session.mpub.left = topic, count
        command.next = publish_more(session, command.data, start, command.next)
    else:
        session.promise(topic, topic.publish_sized(command.data, start, command.next, count), "MPUB", count)
    return True


def publish_more(session: Session, data: bytearray, pos: int, end: int) -> int:
    """Publishes the next messages of a long MPUB, all of which are here; returns where what follows starts."""
    mpub = session.mpub
    count = min(mpub.left, MPUB_TURN_MESSAGES_MAX)
    after = measure_mpub(data, pos, end, count, session.nsqd.options.max_msg_size)[0]
    mpub.left -= count
    replies = 0 if mpub.left else 1
    session.promise(mpub.topic, mpub.topic.publish_sized(data, pos, after, count), "MPUB", count, replies)
    return after


def _count(session: Session, command: Command) -> int | None:
    """Reads how many messages an MPUB says it has, and checks its size; returns None if that has not arrived."""
    limit = session.nsqd.options.max_body_size
    if command.size(limit, "E_BAD_BODY", "body", "body size") is None:
        return None
    count = command.i32(command.pos + SIZE_BYTES, "E_BAD_BODY", "message count")
    if count is not None and not 0 < count <= (limit - COUNT_BYTES) // MESSAGE_BYTES_MIN:
        raise FatalClientError("E_BAD_BODY", f"MPUB invalid message count {count}")
    return count


def _measure(session: Session, command: Command, start: int, count: int) -> bool:
    """Moves `next` behind the messages of an MPUB, if they all have arrived; each must have a good size.

    What was measured when less of them was here is not measured again.
    """
    mpub, limit = session.mpub, session.nsqd.options.max_msg_size
    measured, pos = mpub.measured_messages, start + mpub.measured_bytes
    mpub.measured_messages = mpub.measured_bytes = 0
    after, index, message_bytes, reached = measure_mpub(command.data, pos, command.end, count - measured, limit)
    index += measured
    if after == MPUB_BAD_SIZE:
        raise FatalClientError("E_BAD_MESSAGE", f"MPUB invalid message({index}) body size {message_bytes}")
    if after == MPUB_TOO_BIG:
        raise FatalClientError("E_BAD_MESSAGE", f"MPUB message too big {message_bytes} > {limit}")
    if after < 0:
        command.missing("E_BAD_MESSAGE", f"message({index}) body size" if message_bytes < 0 else "message body")
        mpub.measured_messages, mpub.measured_bytes = index, reached - start
        return False
    command.next = after
    return True
