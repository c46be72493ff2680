"""Finds the problems that need a person, by comparing snapshots: the worst first, each with its start and its page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from nsquark.admin.format import plural
from nsquark.admin.snapshot import ClusterChannel, Node, Snapshot, SparkQuery
from nsquark.admin.trends import Trend, Trends
from nsquark.admin.urls import channel_path, node_path, topic_path

Severity = Literal["critical", "warning", "info"]

SEVERITIES: Final[tuple[Severity, ...]] = ("critical", "warning", "info")
ATTENTION_MAX: Final = 100
"""At most this many findings are shown; the rest are only counted."""
DISK_WARNING: Final = 0.85
DISK_CRITICAL: Final = 0.95
GROWING_S: Final = 30.0
"""A depth that has grown for less time than this may be a burst."""
GROWING_WAITING_MIN: Final = 100
GROWING_RATE_MIN: Final = 0.5
REQUEUES_RATE_MIN: Final = 0.5
"""Fewer requeues or timeouts a second than this are never reported."""
ABOVE_NORMAL: Final = 3.0
SILENT_QUERY_S: Final = 300.0
"""A Spark query reports at least every 30 s that it is alive, so one that is silent for this long is in trouble."""


class Attention(msgspec.Struct, kw_only=True, frozen=True):
    severity: Severity
    text: str
    since: float
    """This is when the problem began, in unix seconds."""
    path: str
    """This is the page to look at, relative to the base path."""


class Trouble(msgspec.Struct, frozen=True):
    """Describes something that is wrong now. `key` stays the same as long as the same thing is wrong."""

    key: tuple[str, ...]
    severity: Severity
    text: str
    path: str
    weight: float = 0.0
    """Among findings of the same severity, the heavier one is worse."""
    since: float = 0.0
    """This is when the problem began, in unix seconds, or 0 if only the time when it was found is known."""


class Watch:
    """Remembers when each finding began."""

    def __init__(self) -> None:
        self._trends = Trends()
        self._since: dict[tuple[str, ...], float] = {}

    def update(self, snapshot: Snapshot) -> tuple[Attention, ...]:
        """Returns the findings of a new snapshot; it is called after each poll."""
        self._trends.update(snapshot)
        found = sorted(findings(snapshot, self._trends), key=_rank)
        self._since = {finding.key: finding.since or self._since.get(finding.key, snapshot.at) for finding in found}
        told = [
            Attention(severity=each.severity, text=each.text, since=self._since[each.key], path=each.path)
            for each in found[:ATTENTION_MAX]
        ]
        if len(found) > ATTENTION_MAX:
            more = f"{len(found) - ATTENTION_MAX:,} more of the kind above"
            told.append(Attention(severity=told[-1].severity, text=more, since=snapshot.at, path="/topics"))
        return tuple(told)


def _rank(finding: Trouble) -> tuple[int, float]:
    return SEVERITIES.index(finding.severity), -finding.weight


def findings(snapshot: Snapshot, trends: Trends) -> Iterator[Trouble]:
    """Yields everything that is wrong in this snapshot."""
    yield from _silent(snapshot)
    for node in snapshot.nodes.values():
        yield from _of_node(node, snapshot)
    yield from _of_versions(snapshot)
    for topic in snapshot.topics.values():
        if topic.depth and not topic.channels:
            text = f"topic {topic.name} has no channel: {_waiting(topic.depth)} for one"
            yield Trouble(("no channel", topic.name), "info", text, topic_path(topic.name), topic.depth)
        if topic.paused:
            yield Trouble(("paused", topic.name), "info", f"topic {topic.name} is paused", topic_path(topic.name))
        for channel in topic.channels.values():
            yield from _of_channel(channel, trends)
    for query in snapshot.queries:
        yield from _of_query(query, snapshot.at, trends)


def _silent(snapshot: Snapshot) -> Iterator[Trouble]:
    for failure in snapshot.failures:
        path = node_path(failure.address) if failure.kind == "nsqd" else "/lookup"
        text = f"{failure.kind} {failure.address} does not answer: {_reason(failure.text)}"
        yield Trouble(("silent", failure.kind, failure.address), "critical", text, path, 1000.0, failure.since)


def _reason(text: str) -> str:
    """Returns the reason of a failure without its URL, since the finding names the address already."""
    return text.rpartition('": ')[2] or text


def _of_node(node: Node, snapshot: Snapshot) -> Iterator[Trouble]:
    path = node_path(node.address)
    if node.answered and node.health != "OK":
        text = f"nsqd {node.address} is not healthy: {node.health}"
        yield Trouble(("health", node.address), "critical", text, path, 900.0)
    if node.disk is not None and node.disk.fullness >= DISK_WARNING:
        severity: Severity = "critical" if node.disk.fullness >= DISK_CRITICAL else "warning"
        text = f"disk of nsqd {node.address} is {node.disk.fullness:.0%} full"
        yield Trouble(("disk", node.address), severity, text, path, 800.0 + node.disk.fullness)
    told = {remote.partition("/")[0] for remote in node.producer.remote_addresses}
    missing = [lookupd.address for lookupd in snapshot.lookupds if not lookupd.failure and lookupd.address not in told]
    if missing and told:
        text = f"nsqd {node.address} is not registered with nsqlookupd {', '.join(missing)}"
        yield Trouble(("unregistered", node.address), "warning", text, path, 100.0)


def _of_versions(snapshot: Snapshot) -> Iterator[Trouble]:
    versions = sorted({node.version for node in snapshot.nodes.values() if node.version})
    if len(versions) > 1:
        text = f"nsqds run {len(versions)} versions: {', '.join(versions[:5])}"
        yield Trouble(("versions",), "info", text, "/nodes", 10.0)


def _of_channel(channel: ClusterChannel, trends: Trends) -> Iterator[Trouble]:
    place = channel.topic, channel.name
    name = "/".join(place)
    if channel.paused:
        yield Trouble(("paused", *place), "info", f"channel {name} is paused", channel_path(*place))
    elif not channel.client_count and not channel.owner and channel.waiting:
        text = f"channel {name} has no consumers: {_waiting(channel.waiting)}"
        yield Trouble(("no consumers", *place), "warning", text, channel_path(*place), channel.waiting)
    trend = trends.get(*place)
    if trend is None:
        return
    if trend.growing_since and _grows(trend) and channel.waiting >= GROWING_WAITING_MIN and not channel.owner:
        text = f"depth of {name} grows by {trend.growth:,.1f}/s: {_waiting(channel.waiting)}"
        key = ("growing", *place)
        yield Trouble(key, "warning", text, channel_path(*place), channel.waiting, trend.growing_since)
    for word, rate, usual in (
        ("requeues", trend.requeued, trend.usual_requeued or 0.0),
        ("timeouts", trend.timed_out, trend.usual_timed_out or 0.0),
    ):
        if rate >= REQUEUES_RATE_MIN and rate >= ABOVE_NORMAL * usual:
            text = f"{name} has {rate:,.1f} {word}/s, usually {usual:,.1f}/s"
            yield Trouble((word, *place), "warning", text, channel_path(*place), rate)


def _of_query(query: SparkQuery, now: float, trends: Trends) -> Iterator[Trouble]:
    name = f"Spark query {query.owner} on {query.topic}/{query.channel}"
    silent_s = now - query.last_commit
    if silent_s > SILENT_QUERY_S:
        text = f"{name} has not been heard of for {silent_s / 60:.0f} minutes: {_waiting(query.lag)}"
        key = ("query silent", query.topic, query.channel)
        yield Trouble(key, "critical" if query.lag else "info", text, "/spark", query.lag, query.last_commit)
        return
    trend = trends.get(query.topic, query.channel)
    if trend is not None and _grows(trend) and query.lag >= GROWING_WAITING_MIN:
        text = f"{name} falls behind by {trend.growth:,.1f}/s: {query.lag:,} messages"
        key = ("query behind", query.topic, query.channel)
        yield Trouble(key, "warning", text, "/spark", query.lag, trend.growing_since)


def _grows(trend: Trend) -> bool:
    is_lasting = trend.growing_since > 0 and trend.at - trend.growing_since >= GROWING_S
    return is_lasting and trend.growth >= GROWING_RATE_MIN


def _waiting(count: int) -> str:
    return plural(count, "message waits", "messages wait")
