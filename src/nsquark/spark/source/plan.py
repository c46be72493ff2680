"""From ranges of the log to Spark's partitions: real counts and splits, asked of the nsqds that have the data."""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from pyspark.sql.datasource import InputPartition

from nsquark.base.logs import library_log
from nsquark.spark.endpoint import NsqdError, Refused
from nsquark.spark.nsqd_http import Nsqd, Seq
from nsquark.spark.options import PARTITIONS_MAX, SourceOptions
from nsquark.spark.source.offsets import Key

log = library_log("nsquark.spark")

PART_BYTES = 32 << 20
"""Of a partition, about: small enough to spread over cores, large enough that a task's start does not matter."""


class DataLost(NsqdError):
    """Messages that this query had to read are gone."""


class Part(msgspec.Struct, frozen=True):
    """A range, and what nsqd has in it."""

    low: Seq = msgspec.field(name="from")
    high: Seq = msgspec.field(name="to")
    count: Seq
    size: Seq = msgspec.field(name="bytes")


class _Removed(msgspec.Struct, frozen=True):
    low: Seq = msgspec.field(name="from")
    high: Seq = msgspec.field(name="to")


class Plan(Part, frozen=True):
    parts: Annotated[list[Part], msgspec.Meta(max_length=PARTITIONS_MAX)] = []
    removed: _Removed | None = None
    next: Seq = 0


class RangePartition(InputPartition):
    """A range of one topic on one nsqd, and how many messages it holds."""

    def __init__(self, key: Key, address: str, low: int, high: int, count: int):
        self.key = key
        self.address = address
        self.low = low
        self.high = high
        self.count = count


class Planner:
    def __init__(self, options: SourceOptions):
        self._options = options

    def partitions(self, ranges: Mapping[Key, tuple[int, int]], nsqds: Mapping[str, Nsqd]) -> list[RangePartition]:
        plans = {key: self.plan(nsqds[key.nsqd_id], key, low, high) for key, (low, high) in ranges.items()}
        total_bytes = sum(plan.size for plan in plans.values())
        found: list[RangePartition] = []
        for key, plan in plans.items():
            nsqd = nsqds[key.nsqd_id]
            parts = plan.parts
            wanted = self._parts(plan.size, total_bytes)
            if wanted > 1 and plan.count > 1:
                parts = ask_plan(nsqd, key, plan.low, plan.high, parts=wanted).parts
            found += [
                RangePartition(key, nsqd.address, part.low, part.high, part.count) for part in parts if part.count
            ]
        return found

    def _parts(self, size: int, total_bytes: int) -> int:
        """Of about PART_BYTES, and enough that all keys together make minPartitions."""
        share = -(-self._options.partitions_min * size // total_bytes) if total_bytes else 1
        return min(max(share, -(-size // PART_BYTES), 1), PARTITIONS_MAX)

    def plan(self, nsqd: Nsqd, key: Key, low: int, high: int, **limits: int) -> Plan:
        """What nsqd has of this range. What it no longer has is an error, or a warning with failOnDataLoss=false."""
        try:
            plan = ask_plan(nsqd, key, low, high, **limits)
        except Refused as refused:
            if refused.code not in ("BEYOND_HEAD", "TOPIC_NOT_FOUND"):
                raise
            self.lost(key, low, high, "the topic was deleted" if refused.status == 404 else "the log ends before it")
            return Plan(low=low, high=high, count=0, size=0, next=high)
        if plan.removed is not None:
            removed = plan.removed
            self.lost(key, removed.low, removed.high, "retention removed it, or the topic was emptied of it")
        if plan.next < high:
            self.lost(key, plan.next, high, "the log ends before it")
        return plan

    def lost(self, key: Key, low: int, high: int, why: str) -> None:
        text = f"messages {low} to {high - 1} of topic {key.topic} are gone from nsqd {key.nsqd_id}: {why}"
        if self._options.fail_on_data_loss:
            raise DataLost(
                f"{text}. To go on without them set failOnDataLoss=false; to keep data until a query has read it, "
                "give the query a channel"
            )
        log.warning("%s; going on without them (failOnDataLoss=false)", text)


def ask_plan(nsqd: Nsqd, key: Key, low: int, high: int, **limits: int) -> Plan:
    """A plan whose parts lie in the range, one behind the other."""
    plan = nsqd.read_as(nsqd.ask("/log/plan", topic=key.topic, **{"from": low, "to": high}, **limits), Plan)
    place = low
    for part in (*plan.parts, Part(plan.high, plan.high, 0, 0)):
        if not place <= part.low <= part.high <= high or part.count > part.high - part.low:
            raise nsqd.wrong(f", with a plan for {part.low} to {part.high} in answer to {low} to {high}")
        place = part.high
    return plan
