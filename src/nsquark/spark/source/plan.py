"""Cuts ranges of the log into Spark's partitions, by counts and sizes that it asks the nsqds for.

How a set of ranges is cut into partitions depends on the ranges and the options alone, never on what else the logs have
by now: the idempotent sink recognises what it has written by the partition that it came from.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import msgspec

from nsquark.base.logs import library_log
from nsquark.spark.endpoint import NsqdError, Refused
from nsquark.spark.nsqd_http import RangeNsqd, Seq
from nsquark.spark.options import PARTITIONS_MAX, SourceOptions
from nsquark.spark.source.offsets import Key, Range

log = library_log("nsquark.spark")

PART_BYTES = 32 << 20
"""A partition has about this size: small enough to spread over cores, large enough to be worth a task."""

PACK_BYTES = 8 << 20
PACK_RANGES_MAX = 4096
"""At most this many small ranges are read together."""
PACKED_MESSAGE_BYTES = 256
"""A message counts for this many bytes, besides what the index of nsqd tells of a range."""

Ranges = Mapping[Key, Range]
Limits = Mapping[str, int]


class DataLost(NsqdError):
    """Says that messages which this query had to read are gone."""


class PlannedPart(msgspec.Struct, frozen=True):
    """Says what nsqd has in a range."""

    low: Seq = msgspec.field(name="from")
    high: Seq = msgspec.field(name="to")
    count: Seq
    size: Seq = msgspec.field(name="bytes")


class _Removed(msgspec.Struct, frozen=True):
    low: Seq = msgspec.field(name="from")
    high: Seq = msgspec.field(name="to")


class RangePlan(PlannedPart, frozen=True):
    """Says what nsqd has in a whole range, and into which parts it can be split."""

    settled_bytes: Seq = 0
    """This is the size of the range, or less by up to a step of nsqd's index; it depends on the range alone."""
    parts: Annotated[list[PlannedPart], msgspec.Meta(max_length=PARTITIONS_MAX)] = []
    removed: _Removed | None = None
    next: Seq = 0


class RangePartition:
    """Names a range of one topic on one nsqd, and how many messages it has."""

    def __init__(self, key: Key, address: str, low: int, high: int, count: int, topic_id: str = ""):
        self.key = key
        self.address = address
        self.low = low
        self.high = high
        self.count = count
        self.topic_id = topic_id


class PackedPartition:
    """Holds small ranges of many topics on one nsqd, which one task reads with one request."""

    def __init__(self, ranges: list[RangePartition]):
        self.ranges = ranges

    @property
    def address(self) -> str:
        return self.ranges[0].address

    @property
    def count(self) -> int:
        return sum(part.count for part in self.ranges)


Partition = RangePartition | PackedPartition


class Planner:
    """Asks the nsqds what they have in ranges, and makes partitions of them."""

    def __init__(self, options: SourceOptions):
        self._options = options

    def partitions(self, ranges: Ranges, nsqds: Mapping[str, RangeNsqd]) -> list[Partition]:
        plans = self.plans(ranges, nsqds, {key: {"part_bytes": PART_BYTES} for key in ranges})
        more = self._parts_to_reach_minimum(plans)
        if more:
            plans |= self.plans({key: ranges[key] for key in more}, nsqds, more)
        found: list[Partition] = []
        small: dict[str, list[tuple[int, RangePartition]]] = {}
        for key, plan in plans.items():
            address, topic_id = nsqds[key.nsqd_id].address, ranges[key].topic_id
            parts = [
                RangePartition(key, address, part.low, part.high, part.count, topic_id)
                for part in plan.parts
                if part.count
            ]
            if len(parts) == 1:
                weight = plan.settled_bytes + plan.count * PACKED_MESSAGE_BYTES
                small.setdefault(key.nsqd_id, []).append((weight, parts[0]))
            else:
                found += parts
        return found + list(self._packed(small))

    def _packed(self, small: Mapping[str, list[tuple[int, RangePartition]]]) -> Iterator[Partition]:
        """Puts small ranges together, as far as minPartitions allows: a task costs more than reading a small topic."""
        total = sum(weight for of_nsqd in small.values() for weight, _ in of_nsqd)
        weight_max = min(PACK_BYTES, total // self._options.partitions_min)
        for of_nsqd in small.values():
            pack: list[RangePartition] = []
            filled = 0
            for weight, part in of_nsqd:
                if pack and (filled + weight > weight_max or len(pack) >= PACK_RANGES_MAX):
                    yield _pack(pack)
                    pack, filled = [], 0
                pack.append(part)
                filled += weight
            yield _pack(pack)

    def _parts_to_reach_minimum(self, plans: Mapping[Key, RangePlan]) -> dict[Key, Limits]:
        """Finds into how many parts to split each key to make minPartitions in all, by its share of the messages."""
        minimum = self._options.partitions_min
        total = sum(plan.count for plan in plans.values())
        if sum(len(plan.parts) for plan in plans.values()) >= minimum:
            return {}
        wanted = {
            key: min(max(-(-minimum * plan.count // total), len(plan.parts)), PARTITIONS_MAX)
            for key, plan in plans.items()
            if plan.count
        }
        return {key: {"parts": parts} for key, parts in wanted.items() if parts > len(plans[key].parts)}

    def plans(
        self, ranges: Ranges, nsqds: Mapping[str, RangeNsqd], limits: Mapping[Key, Limits] | None = None
    ) -> dict[Key, RangePlan]:
        """Asks the nsqds what they have of these ranges, in one request to each. A message that is gone is an error, or
        a warning with failOnDataLoss=false.
        """
        limits = limits or {}
        by_nsqd: dict[str, list[Key]] = {}
        for key in ranges:
            by_nsqd.setdefault(key.nsqd_id, []).append(key)
        found: dict[Key, RangePlan] = {}
        for nsqd_id, keys in by_nsqd.items():
            answers = ask_plans(nsqds[nsqd_id], ((key, ranges[key], limits.get(key, {})) for key in keys))
            found |= {key: self._checked(key, ranges[key], answer) for key, answer in zip(keys, answers, strict=True)}
        return {key: found[key] for key in ranges}

    def _checked(self, key: Key, wanted: Range, answer: RangePlan | Refused) -> RangePlan:
        low, high = wanted.low, wanted.high
        if isinstance(answer, Refused):
            if answer.code not in _GONE:
                raise answer
            self.lost(key, low, high, _GONE[answer.code], answer.fields.get("lost"))
            return RangePlan(low=low, high=high, count=0, size=0, next=high)
        if answer.removed is not None:
            removed = answer.removed
            self.lost(key, removed.low, removed.high, "retention removed it, or the topic was emptied of it")
        if answer.next < high:
            self.lost(key, answer.next, high, _GONE["BEYOND_HEAD"])
        return answer

    def lost(self, key: Key, low: int, high: int, why: str, count: object = None) -> None:
        known = f" ({count} messages)" if isinstance(count, int) else ""
        self.give_up(
            f"messages {low} to {high - 1}{known} of topic {key.topic} are gone from nsqd {key.nsqd_id}: {why}"
        )

    def give_up(self, text: str) -> None:
        """Reports messages that had to be read and are lost: it raises DataLost, or warns with failOnDataLoss=false."""
        if self._options.fail_on_data_loss:
            raise DataLost(
                f"{text}. To go on without them set failOnDataLoss=false; to keep data until a query has read it, "
                "give the query a channel"
            )
        log.warning("%s; going on without them (failOnDataLoss=false)", text)


def _pack(ranges: list[RangePartition]) -> Partition:
    return PackedPartition(ranges) if len(ranges) > 1 else ranges[0]


_GONE = {
    "BEYOND_HEAD": "the log ends before it",
    "TOPIC_NOT_FOUND": "the topic was deleted",
    "REPLACED": "the topic was deleted and made again",
}

Asked = tuple[Key, Range, Limits]


def ask_plans(nsqd: RangeNsqd, asked: Iterable[Asked]) -> Iterator[RangePlan | Refused]:
    """Yields a plan for each range, whose parts lie in the range one behind the other, or the refusal of nsqd."""
    listed = list(asked)
    documents = [
        {"topic": key.topic, "from": wanted.low, "to": wanted.high, "id": wanted.topic_id, **limits}
        for key, wanted, limits in listed
    ]
    for (key, wanted, _), fields in zip(listed, nsqd.ask_many("/log/plan", "ranges", documents, "plans"), strict=True):
        if fields.get("topic") != key.topic:
            raise nsqd.wrong(f", with topic {fields.get('topic')!r} in answer to {key.topic!r}")
        yield _plan(nsqd, wanted, fields) if "message" not in fields else nsqd.refusal("/log/plan", fields)


def _plan(nsqd: RangeNsqd, wanted: Range, fields: dict[str, Any]) -> RangePlan:
    plan = nsqd.read_as(fields, RangePlan)
    place = wanted.low
    for part in (*plan.parts, PlannedPart(plan.high, plan.high, 0, 0)):
        if not place <= part.low <= part.high <= wanted.high or part.count > part.high - part.low:
            raise nsqd.wrong(f", with a plan for {part.low} to {part.high} in answer to {wanted.low} to {wanted.high}")
        place = part.high
    return plan
