"""Answers /log/plan: what is in ranges of logs, and where to split them, for one in the query or many in a document."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from nsquark.broker.http.arguments import NsqdArguments, find_topic, require_stored
from nsquark.broker.http.auth import Rule
from nsquark.broker.topic import Topic
from nsquark.log.range_plan import PARTS_MAX, Part, plan
from nsquark.log.segments import Segments
from nsquark.web.arguments import INT64_MAX, Refusal, invalid
from nsquark.web.fairness import TurnPace
from nsquark.web.messages import Request
from nsquark.wire.documents import decode_json

if TYPE_CHECKING:
    from nsquark.broker.http.log_read import LogApi
    from nsquark.broker.nsqd import Nsqd

T = TypeVar("T")

RANGES_MAX = 4096
"""A request has at most this many ranges."""
TOPIC_ID_CHARS_MAX = 64

Number = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
READ = Rule("subscribe", is_ours=True)


class LogRange(msgspec.Struct, frozen=True):
    """Names a range of one topic's log; `id` is the incarnation of the topic that it must be of, if that matters."""

    topic: str
    low: Number = msgspec.field(name="from")
    high: Number = msgspec.field(name="to")
    id: str = ""

    def found(self, nsqd: Nsqd) -> tuple[Topic, Segments]:
        """Finds the topic and its files; refuses another incarnation, no files, or a range beyond the log."""
        topic = find_topic(nsqd, self.topic)
        if topic is None or (self.id and self.id != topic.id):
            lost = nsqd.deleted_topics.count_from(self.topic, self.id, self.low) if self.id else None
            known = {"lost": lost} if lost is not None else {}
            if topic is None:
                raise Refusal(404, "TOPIC_NOT_FOUND", **known)
            raise Refusal(410, "REPLACED", id=topic.id, **known)
        require_stored(topic)
        head, segments = topic.log.head, topic.log.segments
        assert segments is not None
        if self.low > head:
            raise Refusal(400, "BEYOND_HEAD", next=head, reason=f"the log ends at {head}; from={self.low} is beyond it")
        if self.high < self.low:
            raise invalid("to", f"a number from {self.low} on")
        return topic, segments


class LogRanges(msgspec.Struct):
    ranges: Annotated[list[LogRange], msgspec.Meta(max_length=RANGES_MAX)]
    bodies: bool = True


class PlannedRange(LogRange, frozen=True):
    messages_max: Number = msgspec.field(name="max_messages", default=0)
    bytes_max: Number = msgspec.field(name="max_bytes", default=0)
    parts: Annotated[int, msgspec.Meta(ge=1, le=PARTS_MAX)] = 1
    part_bytes: Number = 0


class _PlannedRanges(msgspec.Struct):
    ranges: Annotated[list[PlannedRange], msgspec.Meta(max_length=RANGES_MAX)]


def range_of(arguments: NsqdArguments) -> LogRange:
    topic = arguments.name("topic")
    topic_id = arguments.text("id", TOPIC_ID_CHARS_MAX) if "id" in arguments else ""
    low, high = arguments.number("from", 0, INT64_MAX), arguments.number("to", 0, INT64_MAX)
    return LogRange(topic, low, high, topic_id)


class PlanApi:
    def __init__(self, api: LogApi) -> None:
        self._api = api

    async def plan(self, arguments: NsqdArguments, request: Request) -> dict[str, Any]:
        wanted = range_of(arguments)
        return self._planned(
            PlannedRange(
                wanted.topic,
                wanted.low,
                wanted.high,
                wanted.id,
                arguments.number("max_messages", 1, INT64_MAX, 0),
                arguments.number("max_bytes", 1, INT64_MAX, 0),
                arguments.number("parts", 1, PARTS_MAX, 1),
                arguments.number("part_bytes", 1, INT64_MAX, 0),
            )
        )

    async def plan_many(self, arguments: NsqdArguments, request: Request) -> dict[str, Any]:
        """Answers for many ranges, each with a plan or the reason why there is none."""
        ranges = decoded(request, _PlannedRanges).ranges
        allowed = await self._api.auth.among({wanted.topic for wanted in ranges}, request, READ)
        plans: list[msgspec.Raw] = []  # encoded: keeping thousands of objects costs the loop 50 ms
        pace = TurnPace()
        for wanted in ranges:
            await pace.step()
            try:
                require_allowed(wanted.topic, allowed)
                plans.append(msgspec.Raw(msgspec.json.encode(self._planned(wanted))))
            except Refusal as refusal:
                plans.append(msgspec.Raw(msgspec.json.encode(refused_part(wanted.topic, refusal))))
        return {"plans": plans}

    def _planned(self, wanted: PlannedRange) -> dict[str, Any]:
        topic, segments = wanted.found(self._api.nsqd)
        removed_to = min(segments.removed.to, wanted.high)
        found = plan(
            segments,
            max(wanted.low, removed_to),
            wanted.high,
            messages_max=wanted.messages_max,
            bytes_max=wanted.bytes_max,
            parts=wanted.parts,
            part_bytes=wanted.part_bytes,
        )
        return {
            "topic": topic.name,
            "id": topic.id,
            **_part(found),
            "settled_bytes": found.settled_bytes,
            "parts": [_part(part) for part in found.parts],
            "removed": {"from": wanted.low, "to": removed_to} if wanted.low < removed_to else None,
            "first": topic.log.extents.first,
            "next": topic.log.head,
        }


def decoded(request: Request, kind: type[T]) -> T:
    """Reads the document in a request's body."""
    try:
        return decode_json(request.body, kind)
    except ValueError as error:
        raise Refusal(400, "INVALID_BODY", reason=str(error)) from None


def require_allowed(topic: str, allowed: Container[str]) -> None:
    """Refuses a topic, one of many that a request names, unless the auth servers let the request read it."""
    if topic not in allowed:
        raise Refusal(403, "UNAUTHORIZED", reason="the auth server does not allow to read from this topic")


def refused_part(topic: str, refusal: Refusal) -> dict[str, Any]:
    """Makes the answer for one topic that is refused, of many that a request names."""
    return {"topic": topic, "status": refusal.status, "message": refusal.code, **refusal.fields}


def _part(part: Part) -> dict[str, int]:
    return {"from": part.low, "to": part.high, "count": part.count, "bytes": part.size}
