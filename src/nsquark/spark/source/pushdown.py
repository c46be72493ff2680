"""Turns filters that Spark pushes down into bounds of what is read. Spark applies the filters to the rows again."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from nsquark.base.durations import NS_PER_US
from nsquark.spark.nsqd_http import RangeNsqd
from nsquark.spark.options import EPOCH, MICROSECOND
from nsquark.spark.source.offsets import Key, Range
from nsquark.spark.source.positions import at_times

PUSHDOWN_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"
SEQ_END = 1 << 63


def is_pushdown_worker() -> bool:
    """Tells whether this worker asks for filters: Spark refuses a reader that takes them if they are switched off."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return PUSHDOWN_WORKER in sys.modules or (main is not None and main.name == PUSHDOWN_WORKER)


@dataclass(frozen=True)
class Bounds:
    """Says which rows may pass the filters; all upper ends are exclusive."""

    topics: frozenset[str] | None = None
    topic_prefix: str = ""
    nsqds: frozenset[str] | None = None
    seq_low: int = 0
    seq_high: int = SEQ_END
    time_low_us: int | None = None
    time_high_us: int | None = None

    def narrowed(self, filters: Iterable[Filter]) -> "Bounds":
        """Returns these bounds narrowed by filters; a filter that is not understood narrows nothing."""
        bounds = self
        for found in filters:
            bounds = bounds._with(found)
        return bounds

    def _with(self, found: Filter) -> "Bounds":
        attribute: tuple[str, ...] = getattr(found, "attribute", ())
        if len(attribute) != 1:
            return self
        column, value = attribute[0].lower(), getattr(found, "value", None)
        if column == "topic" and isinstance(found, EqualTo | In):
            return replace(self, topics=_among(self.topics, found))
        if column == "nsqd" and isinstance(found, EqualTo | In):
            return replace(self, nsqds=_among(self.nsqds, found))
        if column == "topic" and isinstance(found, StringStartsWith) and len(found.value) > len(self.topic_prefix):
            return replace(self, topic_prefix=found.value)
        number = _microseconds(value) if column == "timestamp" else value
        if column not in ("seq", "timestamp") or isinstance(number, bool) or not isinstance(number, int):
            return self
        low, high = _ends(found, number)
        if column == "seq":
            seq_low = self.seq_low if low is None else max(self.seq_low, low)
            return replace(self, seq_low=seq_low, seq_high=self.seq_high if high is None else min(self.seq_high, high))
        return replace(
            self,
            time_low_us=max((end for end in (self.time_low_us, low) if end is not None), default=None),
            time_high_us=min((end for end in (self.time_high_us, high) if end is not None), default=None),
        )

    def _has(self, key: Key) -> bool:
        """Tells whether a key may have rows within the bounds."""
        return (
            (self.topics is None or key.topic in self.topics)
            and (self.nsqds is None or key.nsqd_id in self.nsqds)
            and key.topic.startswith(self.topic_prefix)
        )

    def cut(self, ranges: Mapping[Key, Range], nsqds: Mapping[str, RangeNsqd]) -> dict[Key, Range]:
        """Returns the parts of the ranges that may have rows within the bounds."""
        ranges = {key: wanted for key, wanted in ranges.items() if self._has(key)}
        lows, highs = dict.fromkeys(ranges, self.seq_low), dict.fromkeys(ranges, self.seq_high)
        if self.time_low_us is not None:
            at = at_times(ranges, nsqds, {"ts": self.time_low_us * NS_PER_US})
            lows = {key: max(low, at.get(key, low)) for key, low in lows.items()}
        if self.time_high_us is not None:
            at = at_times(ranges, nsqds, {"ts": self.time_high_us * NS_PER_US, "side": "end"})
            highs = {key: min(high, at.get(key, high)) for key, high in highs.items()}
        found = {
            key: wanted._replace(low=max(wanted.low, lows[key]), high=min(wanted.high, highs[key]))
            for key, wanted in ranges.items()
        }
        return {key: wanted for key, wanted in found.items() if wanted.low < wanted.high}


def _among(known: frozenset[str] | None, found: EqualTo | In) -> frozenset[str]:
    values = frozenset(found.value if isinstance(found, In) else [found.value])
    return values if known is None else known & values


def _ends(found: Filter, number: int) -> tuple[int | None, int | None]:
    """Returns the ends between which a filter is true, the upper one exclusive; None where it has no end."""
    if isinstance(found, EqualTo):
        return number, number + 1
    if isinstance(found, GreaterThan | GreaterThanOrEqual):
        return number + isinstance(found, GreaterThan), None
    if isinstance(found, LessThan | LessThanOrEqual):
        return None, number + isinstance(found, LessThanOrEqual)
    return None, None


def _microseconds(value: Any) -> int | None:
    """Returns a point in time as microseconds since 1970, or None if the value is no time with a zone."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    return (value - EPOCH) // MICROSECOND
