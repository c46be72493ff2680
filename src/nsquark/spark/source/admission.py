"""Decides how much a batch reads: it shares out the limits of the options over topics and nsqds."""

import time
from collections.abc import Mapping

from nsquark.spark.endpoint import Unreachable
from nsquark.spark.options import SourceOptions
from nsquark.spark.source.cluster import Cluster
from nsquark.spark.source.offsets import Key
from nsquark.spark.source.plan import Planner, RangePlan, Ranges


class Admission:
    """Applies the limits of a query's options to its batches."""

    def __init__(self, options: SourceOptions, cluster: Cluster, planner: Planner):
        self._options = options
        self._cluster = cluster
        self._planner = planner
        self._admitted_at = time.monotonic()
        self._planned: tuple[Ranges, dict[Key, RangePlan]] = ({}, {})

    def admit(self, ranges: Ranges, *, limited: bool, may_wait: bool) -> dict[Key, int] | None:
        """Returns up to where a batch reads each range, or None if the query has to wait for more messages."""
        options = self._options
        if not limited:
            return {key: wanted.high for key, wanted in ranges.items()}
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
            return {key: ranges[key].high for key in plans}
        return self._cut(ranges, plans, messages, size)

    def _cut(self, ranges: Ranges, plans: Mapping[Key, RangePlan], messages: int, size: int) -> dict[Key, int]:
        """Gives each key a share by backlog, and at least one message, so that a small topic is not starved by a large
        one.
        """
        options, nsqds = self._options, self._cluster.nsqds()
        limits: dict[Key, dict[str, int]] = {}
        for key, plan in plans.items():
            if plan.count and key.nsqd_id in nsqds:
                limits[key] = {}
                if options.messages_max:
                    limits[key]["max_messages"] = max(options.messages_max * plan.count // max(messages, 1), 1)
                if options.bytes_max:
                    limits[key]["max_bytes"] = max(options.bytes_max * plan.size // max(size, 1), 1)
        asked = {key: ranges[key]._replace(low=plans[key].low, high=plans[key].high) for key in limits}
        cut = {key: plan.high for key, plan in self._planner.plans(asked, nsqds, limits).items()}
        ends = {key: ranges[key].low if plan.count else ranges[key].high for key, plan in plans.items()}
        return {**ends, **cut}

    def _plans(self, ranges: Ranges) -> dict[Key, RangePlan]:
        """Returns the plans of ranges. They are remembered, since a query that waits for its minimum keeps asking."""
        if self._planned[0] != ranges:
            plans: dict[Key, RangePlan] = {}
            nsqds = self._cluster.nsqds()
            for nsqd_id, nsqd in nsqds.items():
                of_nsqd = {key: wanted for key, wanted in ranges.items() if key.nsqd_id == nsqd_id}
                try:
                    plans |= self._planner.plans(of_nsqd, {nsqd_id: nsqd})
                except Unreachable as error:
                    self._cluster.mark_silent(error)
            self._planned = (dict(ranges), plans)
        return self._planned[1]
