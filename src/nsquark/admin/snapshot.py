"""Describes the cluster at one moment, as pages, history and the attention list read it, without any I/O.

The rows of one nsqd (`TopicOnNode`, `ChannelOnNode`) are decoded directly from its `/stats`, so field names are mapped
here and nowhere else. `assembly.build` puts a snapshot together; after it has returned, nothing of it changes any more.

Rates are per second, and None where they are not known: after the first poll, or after the nsqd was restarted.
"""

from __future__ import annotations

from typing import Final

import msgspec

from nsquark.wire.documents import Int64


class Percentile(msgspec.Struct, frozen=True, gc=False):
    quantile: float
    value: float | None
    """This is the latency in nanoseconds; None if nothing was measured lately."""

    @property
    def name(self) -> str:
        """Returns the name of the percentile in series and columns: p50, p99, p99.9."""
        return f"p{self.quantile * 100:g}"


class Latency(msgspec.Struct, frozen=True, gc=False):
    """Holds the latency from publish to FIN; it has no percentiles where nsqd does not measure it."""

    count: Int64 = 0
    percentiles: tuple[Percentile, ...] | None = None

    @property
    def known(self) -> tuple[Percentile, ...]:
        """Returns the percentiles without their values where nothing was finished lately: nsqd says 0 then."""
        percentiles = self.percentiles or ()
        return percentiles if self.count else tuple(Percentile(each.quantile, None) for each in percentiles)


NO_LATENCY: Final = Latency()


class ClientInfo(msgspec.Struct, kw_only=True, gc=False, rename={"in_flight": "in_flight_count"}):
    """Describes a consumer of a channel, or a producer, on one nsqd."""

    node: str = ""
    topic: str = ""
    channel: str = ""
    client_id: str = ""
    hostname: str = ""
    version: str = ""
    remote_address: str = ""
    state: Int64 = 0
    ready_count: Int64 = 0
    in_flight: Int64 = 0
    message_count: Int64 = 0
    finish_count: Int64 = 0
    requeue_count: Int64 = 0
    connect_ts: Int64 = 0
    sample_rate: Int64 = 0
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
    """Describes a channel on one nsqd."""

    name: str
    depth: Int64
    backend_depth: Int64 = 0
    in_flight: Int64 = 0
    deferred: Int64 = 0
    messages: Int64 = 0
    """Counts messages since the start of nsqd, as `requeued` and `timed_out` do."""
    requeued: Int64 = 0
    timed_out: Int64 = 0
    client_count: Int64 = 0
    clients: tuple[ClientInfo, ...] | None = None
    """This is None unless the clients were asked for."""
    paused: bool = False
    latency: Latency = NO_LATENCY

    node: str = ""
    rate_out: float | None = None
    """This is the rate of messages that left the channel: those that were finished or emptied."""
    rate_requeued: float | None = None
    rate_timed_out: float | None = None

    @property
    def waiting(self) -> int:
        """Counts the messages of the channel that are not finished."""
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
    """Describes a topic on one nsqd."""

    name: str
    channels: tuple[ChannelOnNode, ...] = ()
    depth: Int64
    backend_depth: Int64 = 0
    messages: Int64 = 0
    bytes: Int64 = 0
    paused: bool = False
    latency: Latency = NO_LATENCY

    node: str = ""
    is_tombstoned: bool = False
    rate_in: float | None = None
    rate_bytes_in: float | None = None
    log: LogHead | None = None
    """This is the topic's log, which only our nsqds have."""

    # These sum up its channels.
    channel_depth: Int64 = 0
    in_flight: Int64 = 0
    deferred: Int64 = 0
    client_count: Int64 = 0
    rate_out: float | None = None
    rate_requeued: float | None = None
    rate_timed_out: float | None = None
    is_still: bool = False
    """Tells whether the topic is as it was in the poll before, with all rates zero."""


class Memory(msgspec.Struct, kw_only=True, gc=False):
    heap_objects: Int64 = 0
    heap_in_use_bytes: Int64 = 0
    gc_pause_usec_99: Int64 = 0
    gc_total_runs: Int64 = 0


class StatsAnswer(msgspec.Struct, kw_only=True, gc=False):
    """Holds what is used of the answer of /stats."""

    version: str = ""
    health: str = "OK"
    start_time: Int64 = 0
    topics: tuple[TopicOnNode, ...] | None = None
    texts: tuple[bytes, ...] = ()
    """This is the JSON of each topic, if they were decoded one by one."""
    memory: Memory | None = None
    producers: tuple[ClientInfo, ...] | None = None


class StatsRows(msgspec.Struct, kw_only=True, gc=False):
    """Holds the answer of /stats with the JSON of each topic, most of which need no decoding: they are as they were in
    the last poll.
    """

    version: str = ""
    health: str = "OK"
    start_time: Int64 = 0
    topics: tuple[msgspec.Raw, ...] | None = None
    memory: Memory | None = None


class RangeChannel(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """Describes a channel that is read by range and committed, as Spark queries do."""

    channel: str
    owner: str
    position: Int64 = 0
    idle_s: float = 0.0
    """Counts the seconds since its owner last committed or said that it is alive."""


class LogHead(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """Describes a topic's log on one of our nsqds: its first message, the number after the last, and their count."""

    topic: str
    first: Int64 = 0
    next: Int64 = 0
    count: Int64 = 0
    owned: tuple[RangeChannel, ...] = ()


class Disk(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """Describes the disk of an nsqd's data path, and what the nsqd uses of it. `limit_bytes` is --max-disk-bytes, or 0
    if there is no limit.
    """

    free_bytes: Int64
    total_bytes: Int64
    used_bytes: Int64 = 0
    limit_bytes: Int64 = 0

    @property
    def fullness(self) -> float:
        """Returns how full the disk is, or how much of the limit is used if that is more, from 0 to 1."""
        of_disk = 1 - self.free_bytes / self.total_bytes if self.total_bytes > 0 else 0.0
        return max(of_disk, self.used_bytes / self.limit_bytes if self.limit_bytes > 0 else 0.0)


class LogHeads(msgspec.Struct, kw_only=True, gc=False):
    """Holds the answer of our nsqds' /log/info without a topic."""

    topics: tuple[LogHead, ...] = ()
    nsqd_id: str = ""
    disk: Disk | None = None


class DescribedNsqd(msgspec.Struct, kw_only=True, frozen=True):
    """Holds what nsqlookupds, or the nsqd itself, say about an nsqd."""

    address: str
    """This is `broadcast_address:http_port`, by which everything else names the nsqd."""
    hostname: str = ""
    broadcast_address: str = ""
    tcp_port: int = 0
    http_port: int = 0
    version: str = ""
    remote_addresses: tuple[str, ...] = ()
    """There is one `nsqlookupd/address of nsqd there` for each nsqlookupd that knows the nsqd."""
    topics: tuple[str, ...] = ()
    tombstones: frozenset[str] = frozenset()


class Node(msgspec.Struct, kw_only=True, frozen=True):
    """Describes an nsqd: what is known of it, and what it said last, if it answered."""

    producer: DescribedNsqd
    failure: str = ""
    """This is why its figures are missing or old; it is empty if they are neither."""
    answered: bool = False
    """Tells whether the figures below are there; without an answer none of them is known."""
    health: str = ""
    start_time: int = 0
    version: str = ""
    is_out_of_date: bool = False
    is_ours: bool = False
    nsqd_id: str = ""
    disk: Disk | None = None
    memory: Memory | None = None
    topics: tuple[TopicOnNode, ...] = ()
    depth: int | None = None
    in_flight: int | None = None
    messages: int | None = None
    client_count: int | None = None
    channel_count: int | None = None
    rate_in: float | None = None
    rate_out: float | None = None

    @property
    def address(self) -> str:
        return self.producer.address

    @property
    def hostname(self) -> str:
        return self.producer.hostname


class ClusterChannel(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """Sums up a channel over all nsqds."""

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
    """This is the worst latency of all nsqds for each quantile."""
    owner: str = ""
    """This is the owner of a channel that is read by range, and empty for other channels."""

    @property
    def waiting(self) -> int:
        return self.depth + self.in_flight + self.deferred


class ClusterTopic(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """Sums up a topic over all nsqds."""

    name: str
    nodes: tuple[TopicOnNode, ...]
    channels: dict[str, ClusterChannel]
    depth: int
    backend_depth: int
    total_depth: int
    """This is the depth of the topic and its channels together: how much there is to do."""
    in_flight: int
    deferred: int
    messages: int
    bytes: int
    client_count: int
    paused: bool
    rate_in: float | None
    rate_bytes_in: float | None
    rate_out: float | None
    """This and the next two are the rates of all its channels."""
    rate_requeued: float | None
    rate_timed_out: float | None
    latency: tuple[Percentile, ...]

    @property
    def has_log(self) -> bool:
        """Tells whether some nsqd has a log of the topic that can be read."""
        return any(node.log is not None for node in self.nodes)


class SparkQuery(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """Describes a Spark query, which reads a topic by range and commits to a channel that it owns."""

    topic: str
    channel: str
    owner: str
    lag: int
    rate: float | None
    """This is how many messages it commits per second."""
    rate_in: float | None
    """This is how many messages are published to its topic per second."""
    last_commit: float
    """This is when it last committed or said that it is alive, in unix seconds, on the nsqd where that was earliest."""
    nodes: tuple[str, ...]

    @property
    def remaining_s(self) -> float | None:
        """Returns how long the backlog takes to read if both rates stay, or None if that is never or not known."""
        if self.rate is None or self.rate_in is None:
            return None
        gain = self.rate - self.rate_in
        if self.lag == 0:
            return 0.0
        return self.lag / gain if gain > 0 else None


class Failure(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """Describes an nsqd or nsqlookupd that gave no answer."""

    kind: str
    """This is nsqd or nsqlookupd."""
    address: str
    text: str
    since: float
    """This is when it began to fail, in unix seconds."""


class Lookupd(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    address: str
    failure: str = ""
    node_count: int | None = None
    """This is None if it did not answer."""


class ClusterTotals(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """Sums up the whole cluster. What nobody could tell, since something fails and no nsqd answered, is None."""

    nodes: int = 0
    nodes_answering: int = 0
    topics: int | None = None
    channels: int | None = None
    depth: int | None = None
    in_flight: int | None = None
    deferred: int | None = None
    messages: int | None = None
    client_count: int | None = None
    rate_in: float | None = None
    rate_bytes_in: float | None = None
    rate_out: float | None = None
    rate_requeued: float | None = None
    rate_timed_out: float | None = None


class Snapshot(msgspec.Struct, kw_only=True, frozen=True):
    at: float = 0.0
    """This is the time of the poll in unix seconds, or 0 before the first."""
    nodes: dict[str, Node] = {}
    """These are the nsqds by address, in the order of host names."""
    topics: dict[str, ClusterTopic] = {}
    """These are the topics by name, in the order of names."""
    lookupds: tuple[Lookupd, ...] = ()
    failures: tuple[Failure, ...] = ()
    queries: tuple[SparkQuery, ...] = ()
    totals: ClusterTotals = ClusterTotals()

    def channel(self, topic: str, channel: str) -> ClusterChannel | None:
        found = self.topics.get(topic)
        return found.channels.get(channel) if found is not None else None


EMPTY: Final = Snapshot()


class NodeAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """Holds what a poll got from one nsqd. `stats` may be an older answer while a newer one is awaited."""

    producer: DescribedNsqd
    stats: StatsAnswer | None = None
    heads: LogHeads | None = None
    stats_at: float = 0.0
    failure: str = ""
