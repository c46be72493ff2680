"""Answers POST /pub and /mpub: what is published here goes the same way as a PUB or MPUB over TCP."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Final

from nsquark.broker.http.arguments import OFF_WORDS, NsqdArguments
from nsquark.broker.http.auth import HttpAuth, Rule
from nsquark.broker.http.commits import OK, LaneReplies, answered_by, not_stored, settled
from nsquark.broker.tcp.publish_commands import MESSAGE_BYTES_MIN
from nsquark.broker.topic import Topic, TopicExiting
from nsquark.kernel.http_lane import HttpLane
from nsquark.kernel.mpub import measure_lines, size_lines
from nsquark.kernel.publish import MPUB_TURN_MESSAGES_MAX, MPUB_WHOLE_MESSAGES_MAX
from nsquark.kernel.records import MPUB_BAD_SIZE, MPUB_INCOMPLETE, MPUB_TOO_BIG, measure_mpub
from nsquark.web.arguments import Refusal, int64
from nsquark.web.lane import around_length
from nsquark.web.messages import Pending, Request, Response, error
from nsquark.web.router import Router
from nsquark.wire.quote import quote
from nsquark.wire.record import COUNT_BYTES, Bytes

if TYPE_CHECKING:
    from nsquark.broker.nsqd import Nsqd

MSG_EMPTY: Final = error(400, "MSG_EMPTY")
MSG_TOO_BIG: Final = error(413, "MSG_TOO_BIG")
BAD_BODY: Final = error(413, "BAD_BODY")
BAD_MESSAGE: Final = error(413, "BAD_MESSAGE")

PUBLISH: Final = Rule("publish")

ON_WORDS: Final = ("true", "1")

Answered = Response | Pending | Coroutine[Any, Any, Response]


class PublishApi:
    """Answers the requests that publish."""

    def __init__(self, nsqd: Nsqd, auth: HttpAuth) -> None:
        self._nsqd = nsqd
        self._auth = auth

    def add_routes(self, router: Router) -> None:
        """Adds the paths; as in NSQ, publishing is not logged."""
        pub, mpub = self._auth.guarded(self.pub, PUBLISH), self._auth.guarded(self.mpub, PUBLISH)
        limit, body_limit = self._nsqd.options.max_msg_size, self._nsqd.options.max_body_size
        router.add("POST", "/pub", pub, log=False, max_body_bytes=limit, too_big="MSG_TOO_BIG", lane=self.pub_lane)
        router.add("POST", "/mpub", mpub, log=False, max_body_bytes=body_limit)

    def pub(self, request: Request) -> Response | Pending:
        body = request.body
        if not body:
            return MSG_EMPTY
        query = request.query
        try:
            # Nearly always the topic is there, and nothing else is asked for.
            topic = self._nsqd.topics.get(query.get("topic", "")) if request.query_ok else None
            if topic is None:
                topic = self._topic(request)
            if "defer" in query:
                delay_ms = self._delay_ms(query["defer"])
                if delay_ms:
                    return answered_by(topic.publish_deferred(body, delay_ms))
            return answered_by(topic.publish(body, 0, len(body)))
        except Refusal as refusal:
            return refusal.response()
        except (TopicExiting, OSError) as failure:
            return not_stored(failure)

    def pub_lane(self, request: Request, write: Callable[[bytes], object]) -> HttpLane | None:
        """Makes a lane for more requests like this one, as long as their topic is there; see web/lane.py."""
        around = around_length(request.head)
        topic = self._nsqd.topics.get(request.query.get("topic", "")) if request.query_ok else None
        if topic is None or around is None or "defer" in request.query or not self._auth.is_free(request):
            return None
        replies = LaneReplies(OK.wire(), write, None)
        return HttpLane(topic.log.tail, replies, *around, self._nsqd.options.max_msg_size)

    def mpub(self, request: Request) -> Answered:
        try:
            topic = self._topic(request)
            binary = request.query.get("binary", "false")
            if binary in OFF_WORDS:
                return self._mpub_text(topic, request.body)
            if binary not in ON_WORDS:
                shown = quote(binary.encode())[1:-1]
                self._nsqd.logger.warning(f"deprecated value '{shown}' used for /mpub binary param")
            return self._mpub_binary(topic, request.body)
        except Refusal as refusal:
            return refusal.response()
        except (TopicExiting, OSError) as failure:
            return not_stored(failure)

    def _mpub_text(self, topic: Topic, body: bytes) -> Answered:
        """Publishes a message per line."""
        count = measure_lines(body, self._nsqd.options.max_msg_size)
        if count <= 0:
            return MSG_TOO_BIG if count < 0 else OK
        if count > MPUB_WHOLE_MESSAGES_MAX:
            return _publish_parts(topic, _parts_of_lines(body))
        sized, _, _ = size_lines(body, 0, count)
        return answered_by(topic.publish_sized(sized, 0, len(sized), count))

    def _mpub_binary(self, topic: Topic, body: bytes) -> Answered:
        """Publishes a body written as in an MPUB over TCP, without the size of the whole."""
        options = self._nsqd.options
        count = int.from_bytes(body[:COUNT_BYTES], "big", signed=True)
        if len(body) < COUNT_BYTES or not 0 < count <= (options.max_body_size - COUNT_BYTES) // MESSAGE_BYTES_MIN:
            return BAD_BODY
        end, _, _, _ = measure_mpub(body, COUNT_BYTES, len(body), count, options.max_msg_size)
        if end in (MPUB_INCOMPLETE, MPUB_BAD_SIZE, MPUB_TOO_BIG):
            return BAD_MESSAGE
        if count > MPUB_WHOLE_MESSAGES_MAX:
            return _publish_parts(topic, _parts_of_sized(body[:end], count, options.max_msg_size))
        return answered_by(topic.publish_sized(body, COUNT_BYTES, end, count))

    def _topic(self, request: Request) -> Topic:
        """Returns the topic, made if it is not there, before the rest of the request is looked at, as in NSQ."""
        arguments = NsqdArguments(self._nsqd, request)
        topic = self._nsqd.topics.get(arguments.get("topic"))
        return topic if topic is not None else self._nsqd.topic(arguments.name("topic", "INVALID_TOPIC"))

    def _delay_ms(self, defer: str) -> int:
        delay_ms = int64(defer)
        if delay_ms is None or not 0 <= delay_ms <= self._nsqd.options.max_req_timeout.ms:
            raise Refusal(400, "INVALID_DEFER")
        return delay_ms


async def _publish_parts(topic: Topic, parts: Iterator[tuple[Bytes, int, int, int]]) -> Response:
    """Publishes more than one turn may write, a commit for each part. It ends with the first that fails, as in NSQ."""
    try:
        for part in parts:
            commit = topic.publish_sized(*part)
            await settled(commit)
            if commit.error is not None:
                return not_stored(commit.error)
    except (TopicExiting, OSError) as failure:
        return not_stored(failure)
    return OK


def _parts_of_lines(body: bytes) -> Iterator[tuple[Bytes, int, int, int]]:
    """Cuts lines into what `publish_sized` wants, for a turn each."""
    pos = 0
    while pos < len(body):
        sized, count, pos = size_lines(body, pos, MPUB_TURN_MESSAGES_MAX)
        if count:
            yield sized, 0, len(sized), count


def _parts_of_sized(body: bytes, left: int, size_max: int) -> Iterator[tuple[Bytes, int, int, int]]:
    """Cuts messages that have their sizes and were measured before into what `publish_sized` wants, for a turn each."""
    pos = COUNT_BYTES
    while left:
        count = min(left, MPUB_TURN_MESSAGES_MAX)
        end = measure_mpub(body, pos, len(body), count, size_max)[0]
        yield body, pos, end, count
        pos, left = end, left - count
