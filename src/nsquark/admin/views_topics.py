"""Makes the pages of topics: the list of all, one topic, one channel, and a topic's messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from nsquark.admin.snapshot import ChannelOnNode, ClusterChannel, ClusterTopic, Percentile, TopicOnNode
from nsquark.admin.sparks import spark_values
from nsquark.admin.state import AdminState
from nsquark.admin.urls import topic_path
from nsquark.admin.view import (
    CLIENT_ROWS_MAX,
    Chart,
    Crumb,
    Line,
    PageRow,
    Rows,
    SeriesKey,
    View,
    client_rows,
    series_of,
)

ROWS_MAX: Final = 100
"""One page of the list has at most this many topics."""

TOPICS: Final = Crumb("Topics", "/topics")

SORTS: Final[dict[str, Callable[[ClusterTopic], float]]] = {
    "depth": lambda topic: topic.total_depth,
    "in": lambda topic: topic.rate_in or 0.0,
    "out": lambda topic: topic.rate_out or 0.0,
    "in_flight": lambda topic: topic.in_flight,
    "messages": lambda topic: topic.messages,
    "channels": lambda topic: len(topic.channels),
    "clients": lambda topic: topic.client_count,
}
"""The list can be in one of these orders, largest first; otherwise it is by name."""


@dataclass(frozen=True, slots=True)
class TopicRow:
    topic: ClusterTopic
    spark_in: str
    spark_depth: str


def topic_row(state: AdminState, topic: ClusterTopic) -> PageRow:
    """Makes the row of a topic in a list, with its sparklines."""
    rate = spark_values(state.history, ("topic", topic.name, "in"))
    depth = spark_values(state.history, ("topic", topic.name, "depth"))
    return PageRow(topic.name, TopicRow(topic, rate, depth))


def streams(state: AdminState, query: Mapping[str, str]) -> View:
    snapshot = state.snapshot
    wanted = query.get("q", "").strip()
    found = [topic for name, topic in snapshot.topics.items() if wanted.lower() in name.lower()]
    sort = query.get("sort", "")
    if sort in SORTS:
        found.sort(key=SORTS[sort], reverse=True)
    pages = max(1, -(-len(found) // ROWS_MAX))
    page = min(max(1, _whole(query.get("page", "1"))), pages)
    shown = found[(page - 1) * ROWS_MAX : page * ROWS_MAX]
    rows = [topic_row(state, topic) for topic in shown]
    return View(
        template="streams.html",
        parts="streams.html",
        title="Topics",
        section="Topics",
        context={
            "failures": snapshot.failures,
            "totals": snapshot.totals,
            "found": len(found),
            "wanted": wanted,
            "sort": sort,
            "page": page,
            "pages": pages,
            "first": (page - 1) * ROWS_MAX + 1,
            "last": (page - 1) * ROWS_MAX + len(shown),
        },
        blocks=("failures", "found"),
        lists=(Rows("topics", "topic_row", rows),),
        sparks=tuple(("topic", each.name, "in") for each in shown),
        scripts=("streams.js",),
    )


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 7 else 1


@dataclass(frozen=True, slots=True)
class ChannelRow:
    channel: ClusterChannel
    spark_depth: str


@dataclass(frozen=True, slots=True)
class TopicNodeRow:
    """Describes the row of a topic or channel on one nsqd, with the name of that nsqd's host."""

    on_node: TopicOnNode | ChannelOnNode
    hostname: str
    topic: str


def topic(state: AdminState, name: str) -> View | None:
    snapshot = state.snapshot
    shown = snapshot.topics.get(name)
    if shown is None:
        return None
    key: SeriesKey = ("topic", name)
    charts = (
        Chart("Messages per second", (Line((*key, "in"), "in", "in"), Line((*key, "out"), "out", "out")), "rate"),
        _depth_chart(key),
        *_latency_charts(key, shown.latency),
    )
    return View(
        template="topic.html",
        parts="topic.html",
        title=name,
        section="Topics",
        crumbs=(TOPICS,),
        context={
            "topic": shown,
            "failures": snapshot.failures,
            "charts": charts,
            "browser": has_browser(state, shown),
            "tab": "overview",
        },
        blocks=("failures", "status", "tiles", "node_totals"),
        lists=(
            Rows(
                "channels",
                "channel_row",
                [
                    PageRow(
                        each.name, ChannelRow(each, spark_values(state.history, ("channel", name, each.name, "depth")))
                    )
                    for each in shown.channels.values()
                ],
            ),
            Rows("nodes", "node_row", _node_rows(state, name, shown.nodes)),
        ),
        series=series_of(charts),
        sparks=tuple(("channel", name, each, "depth") for each in shown.channels),
    )


def _node_rows(
    state: AdminState, topic: str, on_nodes: Sequence[TopicOnNode] | Sequence[ChannelOnNode]
) -> list[PageRow]:
    nodes = state.snapshot.nodes
    return [
        PageRow(each.node, TopicNodeRow(each, nodes[each.node].hostname if each.node in nodes else each.node, topic))
        for each in on_nodes
    ]


def _depth_chart(key: SeriesKey) -> Chart:
    lines = (Line((*key, "depth"), "depth", "depth"), Line((*key, "in_flight"), "in flight", "in_flight", 2))
    return Chart("Depth and in flight", lines, "count", "count")


def _latency_charts(key: SeriesKey, percentiles: tuple[Percentile, ...]) -> tuple[Chart, ...]:
    """Makes a chart of the highest and the lowest percentile that nsqd measures, if it measures any."""
    if not percentiles:
        return ()
    chosen = dict.fromkeys((percentiles[0].name, percentiles[-1].name))
    lines = (Line((*key, name), name, kind) for name, kind in zip(chosen, ("latency", "latency2"), strict=False))
    return (Chart("Latency from publish to finish", tuple(lines), "seconds"),)


def has_browser(state: AdminState, shown: ClusterTopic) -> bool:
    return shown.has_log and not state.options.no_message_browser


def channel(state: AdminState, topic_name: str, name: str) -> View | None:
    snapshot = state.snapshot
    shown = snapshot.channel(topic_name, name)
    if shown is None:
        return None
    key: SeriesKey = ("channel", topic_name, name)
    charts = (
        Chart(
            "Messages per second",
            (Line(("topic", topic_name, "in"), "in", "in"), Line((*key, "out"), "out", "out")),
            "rate",
        ),
        _depth_chart(key),
        Chart(
            "Requeued and timed out",
            (Line((*key, "requeued"), "requeued", "requeued"), Line((*key, "timed_out"), "timed out", "timed_out")),
            "rate",
        ),
        *_latency_charts(key, shown.latency),
    )
    clients = state.seen_clients(topic_name, name)
    return View(
        template="channel.html",
        parts="channel.html",
        title=name,
        section="Topics",
        crumbs=(TOPICS, Crumb(topic_name, topic_path(topic_name))),
        context={
            "channel": shown,
            "topic": snapshot.topics[topic_name],
            "failures": snapshot.failures,
            "charts": charts,
            "has_log": snapshot.topics[topic_name].has_log,
            "client_count": len(clients),
            "clients_shown": min(len(clients), CLIENT_ROWS_MAX),
        },
        blocks=("failures", "status", "tiles", "node_totals", "clients_note"),
        lists=(
            Rows("nodes", "node_row", _node_rows(state, topic_name, shown.nodes)),
            client_rows(clients),
        ),
        series=series_of(charts),
        client_watch=(topic_name, name),
        scripts=("seek.js", "channel.js"),
    )


def messages(state: AdminState, name: str) -> View | None:
    shown = state.snapshot.topics.get(name)
    if shown is None or state.options.no_message_browser:
        return None
    return View(
        template="messages.html",
        parts="topic.html",
        title="Messages",
        section="Topics",
        crumbs=(TOPICS, Crumb(name, topic_path(name))),
        context={
            "topic": shown,
            "failures": state.snapshot.failures,
            "browser": has_browser(state, shown),
            "tab": "messages",
            "nodes": sorted(each.node for each in shown.nodes if each.log is not None),
        },
        blocks=("failures", "status"),
        scripts=("messages.js", "publish.js"),
    )
