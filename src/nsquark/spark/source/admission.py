"""How much of what there is a batch takes: the limits of the options, shared out over topics and nsqds."""

import time
from collections.abc import Mapping

from nsquark.spark.endpoint import Unreachable
from nsquark.spark.options import SourceOptions
from nsquark.spark.source.cluster import Cluster
from nsquark.spark.source.offsets import Key
from nsquark.spark.source.plan import Plan, Planner

Ranges = Mapping[Key, tuple[int, int]]


class Admission:
    def __init__(self, options: SourceOptions, cluster: Cluster, planner: Planner):
        self._options = options
        self._cluster = cluster
        self._planner = planner
        self._admitted_at = time.monotonic()
        self._planned: tuple[Ranges, dict[Key, Plan]] = ({}, {})

    def admit(self, ranges: Ranges, *, limited: bool, may_wait: bool) -> dict[Key, int] | None:
        """Up to where each range is taken; None: too few messages, so wait for more."""
        options = self._options
        if not limited:
            return {key: high for key, (_, high) in ranges.items()}
        plans = self._plans(ranges)
        messages = sum(plan.count for plan in plans.values())
        if may_wait and options.messages_min and messages < options.messages_min:
            waited_s = time.monotonic() - self._admitted_at
            if not messages or waited_s < options.trigger_delay_s:
                return None
        self._admitted_at = time.monotonic()
        size = sum(plan.size for plan in plans.values())
        is_over = (options.messages_max and messages > options.messages_max) or (
            options.bytes_max and size > options.bytes_max
        )
        if not is_over:
            return {key: ranges[key][1] for key in plans}
        return {key: self._cut(key, ranges[key], plan, messages, size) for key, plan in plans.items()}

    def _cut(self, key: Key, wanted: tuple[int, int], plan: Plan, messages: int, size: int) -> int:
        """A share by backlog, and at least one message, so that a small topic is not starved by a large one."""
        limits = {}
        if self._options.messages_max:
            limits["max_messages"] = max(self._options.messages_max * plan.count // max(messages, 1), 1)
        if self._options.bytes_max:
            limits["max_bytes"] = max(self._options.bytes_max * plan.size // max(size, 1), 1)
        nsqd = self._cluster.nsqds().get(key.nsqd_id)
        if nsqd is None or not plan.count:
            return wanted[0] if nsqd is None else wanted[1]
        return self._planner.plan(nsqd, key, plan.low, plan.high, **limits).high

    def _plans(self, ranges: Ranges) -> dict[Key, Plan]:
        """Remembered for the polls of a query that waits for its minimum."""
        if self._planned[0] != ranges:
            plans: dict[Key, Plan] = {}
            nsqds = self._cluster.nsqds()
            for key, (low, high) in ranges.items():
                nsqd = nsqds.get(key.nsqd_id)
                if nsqd is None:
                    continue
                try:
                    plans[key] = self._planner.plan(nsqd, key, low, high)
                except Unreachable as error:
                    self._cluster.mark_silent(error)
            self._planned = (dict(ranges), plans)
        return self._planned[1]
