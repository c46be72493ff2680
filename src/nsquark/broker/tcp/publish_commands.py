"""The commands that publish."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from nsquark.broker.tcp.session_state import FOR_COMMIT, INCOMPLETE, UINT64_MAX, SessionState, decimal_of, text_of
from nsquark.broker.topic import Topic, TopicExiting
from nsquark.kernel.publish import MPUB_TURN_MESSAGES_MAX, MPUB_WHOLE_MESSAGES_MAX, Intake
from nsquark.kernel.records import MPUB_BAD_SIZE, MPUB_TOO_BIG, measure_mpub
from nsquark.kernel.tail import Commit
from nsquark.wire.errors import FatalClientError
from nsquark.wire.names import is_valid_name
from nsquark.wire.quote import quote

if TYPE_CHECKING:
    from nsquark.broker.tcp.session import Session


class PublishingCommands(SessionState):
    """PUB, MPUB and DPUB: into the topic's log now, answered when its commit is settled."""

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
        self._published(topic, 1, lambda: topic.publish(self._data, pos + 4, size), "PUB")
        return pos + 4 + size

    def MPUB(self, params: list[bytes], pos: int, end: int, at_eof: bool) -> int:
        if len(params) < 2:
            raise FatalClientError("E_INVALID", "MPUB insufficient number of parameters")
        name = text_of(params[1])
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
        measured, done = self._measured_messages, self._measured_bytes
        after, index, message_bytes, reached = measure_mpub(
            self._data, pos + 8 + done, end, count - measured, options.max_msg_size
        )
        index += measured
        self._measured_messages = self._measured_bytes = 0
        if after == MPUB_BAD_SIZE:
            raise FatalClientError("E_BAD_MESSAGE", f"MPUB invalid message({index}) body size {message_bytes}")
        if after == MPUB_TOO_BIG:
            raise FatalClientError("E_BAD_MESSAGE", f"MPUB message too big {message_bytes} > {options.max_msg_size}")
        if after < 0:
            if at_eof and message_bytes < 0:
                raise FatalClientError("E_BAD_MESSAGE", f"MPUB failed to read message({index}) body size")
            if at_eof:
                raise FatalClientError("E_BAD_MESSAGE", "MPUB failed to read message body")
            self._measured_messages, self._measured_bytes = index, reached - pos - 8
            return INCOMPLETE
        if count > MPUB_WHOLE_MESSAGES_MAX:
            self._unpublished = (topic, count)
            return self._publish_more(pos + 8, after)
        self._published(topic, count, lambda: topic.publish_sized(self._data, pos + 8, after, count), "MPUB")
        return after

    def _publish_more(self, pos: int, end: int) -> int:
        """The next messages of a long MPUB, all of which are here; where the rest or the next command starts."""
        assert self._unpublished is not None
        topic, left = self._unpublished
        count = min(left, MPUB_TURN_MESSAGES_MAX)
        after = measure_mpub(self._data, pos, end, count, self.nsqd.options.max_msg_size)[0]
        self._unpublished = (topic, left - count) if left > count else None
        replies = 0 if self._unpublished else 1
        self._published(topic, count, lambda: topic.publish_sized(self._data, pos, after, count), "MPUB", replies)
        return after

    def DPUB(self, params: list[bytes], pos: int, end: int, at_eof: bool) -> int:
        if len(params) < 3:
            raise FatalClientError("E_INVALID", "DPUB insufficient number of parameters")
        name = self._topic_name(params[1], "DPUB")
        delay_ms = decimal_of(params[2])
        if delay_ms is None:
            raise FatalClientError("E_INVALID", f"DPUB could not parse timeout {text_of(params[2])}")
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

    def _topic(self, name: str, word: str) -> Topic:
        try:
            return self.nsqd.topic(name)
        except OSError as error:
            raise FatalClientError(f"E_{word}_FAILED", f"{word} failed {error}") from None

    def _published(self, topic: Topic, count: int, publish: Callable[[], Commit], word: str, replies: int = 1) -> None:
        try:
            commit = publish()
        except (TopicExiting, OSError) as error:
            raise FatalClientError(f"E_{word}_FAILED", f"{word} failed {error}") from None
        self._promise(topic, commit, word, count, replies)

    def _promise(self, topic: Topic, commit: Commit, word: str, messages: int, replies: int) -> None:
        if topic.name in self.published:
            self.published[topic.name] += messages
        else:
            self.published[topic.name] = messages
            self.nsqd.producers[cast("Session", self)] = None
        if commit.is_settled and self.channel is not None:
            self.channel.persist()  # the answer goes out now, and tells that what was sent before is noted
        self._replies.promise(commit, word, replies)
        if topic.log.is_congested and not commit.is_settled:
            self._congested()
        if self.guard is None and (self._intake is None or self._intake.log is not topic.log):
            options = self.nsqd.options
            self._intake = Intake(
                topic.name,
                topic.log,
                self._replies,
                self.published,
                self._congested,
                options.max_msg_size,
                options.max_body_size,
            )

    def _congested(self) -> None:
        """A commit is waited for, and no more is read until it is settled."""
        if not self._waits & FOR_COMMIT:
            self._replies.after = self._settled
            self.wait_for(FOR_COMMIT)
