"""Shows the cluster at one moment, as pages, history and the attention list read it. Nothing here waits or asks
anybody.

The rows of one nsqd (`TopicOnNode`, `ChannelOnNode`) are decoded right out of its `/stats`, so field names are mapped
here and nowhere else. `assembly.build` puts a snapshot together; after it has returned, nothing of it changes any more.

Rates are per second and None where they are not known: at the first sight, or since the nsqd was started anew.
"""

from __future__ import annotations

from typing import Final

import msgspec


class Percentile(msgspec.Struct, frozen=True, gc=False):
    quantile: float
    value: float
    """The latency in nanoseconds."""

    @property
    def name(self) -> str:
        """Names a percentile as series and columns do: p50, p99, p99.9."""
        return f"p{self.quantile * 100:g}"


class Latency(msgspec.Struct, frozen=True, gc=False):
    """The latencies from publish to FIN; no percentiles where nsqd does not measure it."""

    count: int = 0
    percentiles: tuple[Percentile, ...] | None = None


NO_LATENCY: Final = Latency()


class ClientInfo(msgspec.Struct, kw_only=True, gc=False, rename={"in_flight": "in_flight_count"}):
    """A consumer of a channel, or a producer, on one nsqd."""

    node: str = ""
    topic: str = ""
    channel: str = ""
    client_id: str = ""
    hostname: str = ""
    version: str = ""
    remote_address: str = ""
    state: int = 0
    ready_count: int = 0
    in_flight: int = 0
    message_count: int = 0
    finish_count: int = 0
    requeue_count: int = 0
    connect_ts: int = 0
    sample_rate: int = 0
    deflate: bool = False
    snappy: bool = False
    user_agent: str = ""
    authed: bool = False
    auth_identity: str = ""
    auth_identity_url: str = ""
    topology_zone: str = ""
    topology_region: str = ""
    tls: bool = False
    tls_cipher_suite: str = ""
    tls_version: str = ""
    tls_negotiated_protocol: str = ""
    tls_negotiated_protocol_is_mutual: bool = False


class ChannelOnNode(
    msgspec.Struct,
    kw_only=True,
    gc=False,
    rename={
        "name": "channel_name",
        "in_flight": "in_flight_count",
        "deferred": "deferred_count",
        "messages": "message_count",
        "requeued": "requeue_count",
        "timed_out": "timeout_count",
        "client_count": "client_count",
        "latency": "e2e_processing_latency",
    },
):
    """A channel on one nsqd."""

    name: str
    depth: int
    backend_depth: int = 0
    in_flight: int = 0
    deferred: int = 0
    messages: int = 0
    """The number of messages. Counters (this, requeued, timed_out) are since the start of nsqd."""
    requeued: int = 0
    timed_out: int = 0
    client_count: int = 0
    clients: tuple[ClientInfo, ...] | None = None
    """The clients; None unless they were asked for."""
    paused: bool = False
    latency: Latency = NO_LATENCY

    node: str = ""
    rate_out: float | None = None
    """The rate of messages that left it: finished, or emptied."""
    rate_requeued: float | None = None
    rate_timed_out: float | None = None

    @property
    def waiting(self) -> int:
        """Counts all that it still has to see finished."""
        return self.depth + self.in_flight + self.deferred


class TopicOnNode(
    msgspec.Struct,
    kw_only=True,
    gc=False,
    rename={
        "name": "topic_name",
        "messages": "message_count",
        "bytes": "message_bytes",
        "latency": "e2e_processing_latency",
    },
):
    """A topic on one nsqd."""

    name: str
    channels: tuple[ChannelOnNode, ...] = ()
    depth: int
    backend_depth: int = 0
    messages: int = 0
    bytes: int = 0
    paused: bool = False
    latency: Latency = NO_LATENCY

    node: str = ""
    is_tombstoned: bool = False
    rate_in: float | None = None
    rate_bytes_in: float | None = None
    log: LogHead | None = None
    """The topic's log; of our nsqds only."""

    # Of its channels together
    channel_depth: int = 0
    in_flight: int = 0
    deferred: int = 0
    client_count: int = 0
    rate_out: float | None = None
    rate_requeued: float | None = None
    rate_timed_out: float | None = None
    is_still: bool = False
    """Tells whether it is as it was in the poll before, all rates zero."""


class Memory(msgspec.Struct, kw_only=True, gc=False):
    heap_objects: int = 0
    heap_in_use_bytes: int = 0
    gc_pause_usec_99: int = 0
    gc_total_runs: int = 0


class StatsAnswer(msgspec.Struct, kw_only=True, gc=False):
    """The answer of /stats, as far as it is used."""

    version: str = ""
    health: str = "OK"
    start_time: int = 0
    topics: tuple[TopicOnNode, ...] | None = None
    texts: tuple[bytes, ...] = ()
    """The topics as they were written, if they were read one by one."""
    memory: Memory | None = None
    producers: tuple[ClientInfo, ...] | None = None


class StatsRows(msgspec.Struct, kw_only=True, gc=False):
    """The answer of /stats with each topic as it was written: most are as they were in the last poll."""

    version: str = ""
    health: str = "OK"
    start_time: int = 0
    topics: tuple[msgspec.Raw, ...] | None = None
    memory: Memory | None = None


class RangeChannel(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """A channel that is read by range and committed, as Spark queries do."""

    channel: str
    owner: str
    position: int = 0
    ttl_s: float = 0.0
    idle_s: float = 0.0
    """The seconds since its owner last committed or said that it lives."""


class LogHead(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """A topic's log on one of our nsqds; the first message there is, the number after the last, and how many."""

    topic: str
    first: int = 0
    next: int = 0
    count: int = 0
    owned: tuple[RangeChannel, ...] = ()


class Disk(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """The disk below an nsqd's data path, and its share of it; `limit_bytes` is --max-disk-bytes, 0 for none."""

    free_bytes: int
    total_bytes: int
    used_bytes: int = 0
    limit_bytes: int = 0

    @property
    def fullness(self) -> float:
        """Returns from 0 to 1 how full it is: of the disk or of the limit, whichever is closer to its end."""
        of_disk = 1 - self.free_bytes / self.total_bytes if self.total_bytes > 0 else 0.0
        return max(of_disk, self.used_bytes / self.limit_bytes if self.limit_bytes > 0 else 0.0)


class LogHeads(msgspec.Struct, kw_only=True, gc=False):
    """The answer of our nsqds' /log/info without a topic."""

    topics: tuple[LogHead, ...] = ()
    nsqd_id: str = ""
    disk: Disk | None = None


class DescribedNsqd(msgspec.Struct, kw_only=True, frozen=True):
    """An nsqd as an nsqlookupd, or the nsqd itself, describes it."""

    address: str
    """`broadcast_address:http_port`, by which everything else names it."""
    hostname: str = ""
    broadcast_address: str = ""
    tcp_port: int = 0
    http_port: int = 0
    version: str = ""
    remote_addresses: tuple[str, ...] = ()
    """`nsqlookupd/address of nsqd there`, one for each nsqlookupd that knows it."""
    topics: tuple[str, ...] = ()
    tombstones: frozenset[str] = frozenset()


class Node(msgspec.Struct, kw_only=True, frozen=True):
    """An nsqd: what is known of it, and what it said last, if it did."""

    producer: DescribedNsqd
    failure: str = ""
    """The reason why its figures are missing or old; empty if they are neither."""
    answered: bool = False
    """Tells whether the figures below are there."""
    health: str = ""
    start_time: int = 0
    version: str = ""
    is_out_of_date: bool = False
    is_ours: bool = False
    nsqd_id: str = ""
    disk: Disk | None = None
    memory: Memory | None = None
    topics: tuple[TopicOnNode, ...] = ()
    depth: int = 0
    in_flight: int = 0
    messages: int = 0
    client_count: int = 0
    channel_count: int = 0
    rate_in: float | None = None
    rate_out: float | None = None

    @property
    def address(self) -> str:
        return self.producer.address

    @property
    def hostname(self) -> str:
        return self.producer.hostname


class ClusterChannel(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """A channel on all nsqds together."""

    topic: str
    name: str
    nodes: tuple[ChannelOnNode, ...]
    depth: int
    backend_depth: int
    in_flight: int
    deferred: int
    messages: int
    requeued: int
    timed_out: int
    client_count: int
    paused: bool
    rate_out: float | None
    rate_requeued: float | None
    rate_timed_out: float | None
    latency: tuple[Percentile, ...]
    """The latencies of the worst of the nsqds for each quantile."""
    owner: str = ""
    """The owner of a channel that is read by range."""

    @property
    def waiting(self) -> int:
        return self.depth + self.in_flight + self.deferred


class ClusterTopic(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """A topic on all nsqds together."""

    name: str
    nodes: tuple[TopicOnNode, ...]
    channels: dict[str, ClusterChannel]
    depth: int
    backend_depth: int
    total_depth: int
    """The depth with that of its channels: how much there is to do."""
    in_flight: int
    deferred: int
    messages: int
    bytes: int
    client_count: int
    paused: bool
    rate_in: float | None
    rate_bytes_in: float | None
    rate_out: float | None
    """The rate of all its channels, as the next two."""
    rate_requeued: float | None
    rate_timed_out: float | None
    latency: tuple[Percentile, ...]

    @property
    def has_log(self) -> bool:
        """Tells whether some nsqd has it as a log that can be read."""
        return any(node.log is not None for node in self.nodes)


class SparkQuery(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """A reader by range is what a Spark query is to its topic."""

    topic: str
    channel: str
    owner: str
    lag: int
    rate: float | None
    """Messages committed per second."""
    rate_in: float | None
    """Messages published to its topic per second."""
    last_commit: float
    """The time of the last commit in unix seconds, the oldest of its nsqds."""
    nodes: tuple[str, ...]

    @property
    def remaining_s(self) -> float | None:
        """Tells how long it is until the backlog is read, if both rates stay; None if it never is, or not known."""
        if self.rate is None or self.rate_in is None:
            return None
        gain = self.rate - self.rate_in
        if self.lag == 0:
            return 0.0
        return self.lag / gain if gain > 0 else None


class Failure(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """Something that could not be asked: an nsqd or an nsqlookupd."""

    kind: str
    """nsqd or nsqlookupd."""
    address: str
    text: str
    since: float
    """The time since when, in unix seconds."""


class Lookupd(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    address: str
    failure: str = ""
    node_count: int = 0


class ClusterTotals(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """The totals of the whole cluster."""

    topics: int = 0
    channels: int = 0
    nodes: int = 0
    nodes_answering: int = 0
    depth: int = 0
    in_flight: int = 0
    deferred: int = 0
    messages: int = 0
    client_count: int = 0
    rate_in: float | None = None
    rate_bytes_in: float | None = None
    rate_out: float | None = None
    rate_requeued: float | None = None
    rate_timed_out: float | None = None


class Snapshot(msgspec.Struct, kw_only=True, frozen=True):
    at: float = 0.0
    """The time of the poll in unix seconds; 0 before the first."""
    nodes: dict[str, Node] = {}
    """The nodes by address, in the order of host names."""
    topics: dict[str, ClusterTopic] = {}
    """The topics by name, in the order of names."""
    lookupds: tuple[Lookupd, ...] = ()
    failures: tuple[Failure, ...] = ()
    queries: tuple[SparkQuery, ...] = ()
    totals: ClusterTotals = ClusterTotals()

    def channel(self, topic: str, channel: str) -> ClusterChannel | None:
        found = self.topics.get(topic)
        return found.channels.get(channel) if found is not None else None


EMPTY: Final = Snapshot()


class NodeAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """What a poll got from one nsqd. `stats` may be an older answer while a newer one is awaited."""

    producer: DescribedNsqd
    stats: StatsAnswer | None = None
    heads: LogHeads | None = None
    stats_at: float = 0.0
    failure: str = ""
