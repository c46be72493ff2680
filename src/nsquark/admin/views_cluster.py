"""Makes the pages of the cluster: overview, nodes, one node, counter, lookup, and Spark's queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from nsquark.admin.snapshot import ChannelOnNode, ClusterTopic, Node, SparkQuery, TopicOnNode
from nsquark.admin.sparks import spark_values
from nsquark.admin.state import AdminState
from nsquark.admin.view import Chart, Crumb, Line, PageRow, Rows, View, client_rows, series_of
from nsquark.admin.views_topics import topic_row

BUSIEST_SHOWN_MAX: Final = 8
TOPIC_ROWS_MAX: Final = 300
"""A node's page lists at most this many topics; the rest are on the page of topics."""

RATES: Final = Chart(
    "Messages per second", (Line(("cluster", "in"), "in", "in"), Line(("cluster", "out"), "out", "out")), "rate"
)
DEPTH: Final = Chart(
    "Depth and in flight",
    (Line(("cluster", "depth"), "depth", "depth"), Line(("cluster", "in_flight"), "in flight", "in_flight", 2)),
    "count",
    "count",
)
TROUBLE: Final = Chart(
    "Requeued and timed out",
    (
        Line(("cluster", "requeued"), "requeued", "requeued"),
        Line(("cluster", "timed_out"), "timed out", "timed_out"),
    ),
    "rate",
)


def overview(state: AdminState) -> View:
    snapshot = state.snapshot
    busiest = sorted(snapshot.topics.values(), key=_business, reverse=True)[:BUSIEST_SHOWN_MAX]
    charts = (RATES, DEPTH, TROUBLE)
    return View(
        template="overview.html",
        parts="overview.html",
        title="Overview",
        section="Overview",
        context={
            "totals": snapshot.totals,
            "lookupds": snapshot.lookupds,
            "failures": snapshot.failures,
            "attention": state.attention(),
            "charts": charts,
            "has_polled": snapshot.at > 0,
            "nsqd": next(iter(snapshot.nodes), "127.0.0.1:4151"),
        },
        blocks=("failures", "tiles", "attention"),
        lists=(
            Rows(
                "busiest",
                "busy_row",
                [topic_row(state, topic) for topic in busiest],
            ),
        ),
        series=series_of(charts),
        sparks=tuple(("topic", topic.name, "in") for topic in busiest),
    )


def _business(topic: ClusterTopic) -> tuple[float, int, str]:
    return ((topic.rate_in or 0.0) + (topic.rate_out or 0.0), topic.total_depth, topic.name)


@dataclass(frozen=True, slots=True)
class NodeRow:
    node: Node
    lookupds: int
    spark_in: str


def nodes(state: AdminState) -> View:
    snapshot = state.snapshot
    rows = [
        PageRow(address, NodeRow(node, len(snapshot.lookupds), spark_values(state.history, ("node", address, "in"))))
        for address, node in snapshot.nodes.items()
    ]
    return View(
        template="nodes.html",
        parts="nodes.html",
        title="Nodes",
        section="Nodes",
        context={"failures": snapshot.failures, "totals": snapshot.totals, "has_lookupds": bool(snapshot.lookupds)},
        blocks=("failures", "found"),
        lists=(Rows("nodes", "node_row", rows),),
    )


@dataclass(frozen=True, slots=True)
class NodeTopicRow:
    """Describes the row of a topic on a node, or of one of its channels below it."""

    topic: TopicOnNode
    channel: ChannelOnNode | None
    address: str
    has_lookupds: bool

    @property
    def key(self) -> str:
        return self.topic.name if self.channel is None else f"{self.topic.name}/{self.channel.name}"


def node(state: AdminState, address: str) -> View | None:
    snapshot = state.snapshot
    shown = snapshot.nodes.get(address)
    if shown is None:
        return None
    charts = (
        Chart(
            "Messages per second",
            (Line(("node", address, "in"), "in", "in"), Line(("node", address, "out"), "out", "out")),
            "rate",
        ),
        Chart(
            "Depth and in flight",
            (
                Line(("node", address, "depth"), "depth", "depth"),
                Line(("node", address, "in_flight"), "in flight", "in_flight", 2),
            ),
            "count",
            "count",
        ),
    )
    listed = sorted(shown.topics, key=lambda topic: topic.name)[:TOPIC_ROWS_MAX]
    rows = [
        NodeTopicRow(topic, channel, address, bool(snapshot.lookupds))
        for topic in listed
        for channel in (None, *topic.channels)
    ]
    return View(
        template="node.html",
        parts="node.html",
        title=address,
        section="Nodes",
        crumbs=(Crumb("Nodes", "/nodes"),),
        context={
            "node": shown,
            "failures": snapshot.failures,
            "lookupds": snapshot.lookupds,
            "charts": charts,
            "topics_shown": len(listed),
        },
        blocks=("failures", "status", "tiles", "facts"),
        lists=(
            Rows("topics", "topic_row", [PageRow(row.key, row) for row in rows]),
            client_rows(state.seen_clients("", "", address)),
        ),
        series=series_of(charts),
        client_watch=("", "", address),
    )


def counter(state: AdminState) -> View:
    snapshot = state.snapshot
    delivered = sum(channel.messages for topic in snapshot.topics.values() for channel in topic.channels.values())
    return View(
        template="counter.html",
        parts="counter.html",
        title="Counter",
        section="Counter",
        context={"delivered": delivered, "totals": snapshot.totals, "failures": snapshot.failures, "charts": (RATES,)},
        blocks=("failures", "number", "rates"),
        series=series_of((RATES,)),
        scripts=("counter.js",),
    )


def lookup(state: AdminState, inactive: Mapping[str, Sequence[str]], trouble: str) -> View:
    """Makes the page of nsqlookupds; `inactive` has the topics that they know and no nsqd has, with their channels."""
    snapshot = state.snapshot
    return View(
        template="lookup.html",
        parts="lookup.html",
        title="Lookup",
        section="Lookup",
        context={
            "lookupds": snapshot.lookupds,
            "failures": snapshot.failures,
            "inactive": dict(sorted(inactive.items())),
            "trouble": trouble,
        },
        blocks=("failures", "servers"),
    )


@dataclass(frozen=True, slots=True)
class QueryRow:
    query: SparkQuery
    spark_lag: str
    at: float


def spark(state: AdminState) -> View:
    snapshot = state.snapshot
    rows = [
        PageRow(
            f"{query.topic}/{query.channel}",
            QueryRow(query, spark_values(state.history, ("channel", query.topic, query.channel, "depth")), snapshot.at),
        )
        for query in sorted(snapshot.queries, key=lambda query: -query.lag)
    ]
    return View(
        template="spark.html",
        parts="spark.html",
        title="Spark queries",
        section="Spark",
        context={
            "failures": snapshot.failures,
            "nsqd": next((address for address, node in snapshot.nodes.items() if node.is_ours), "127.0.0.1:4151"),
        },
        blocks=("failures",),
        lists=(Rows("queries", "query_row", rows),),
        sparks=tuple(("channel", query.topic, query.channel, "depth") for query in snapshot.queries),
    )
