"""Defines the objects of NSQ's /api: their fields in order, and how those of several nsqds are added up.

They are decoded from nsqd's /stats, which has the same names; fields that it does not have are filled in here.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from nsquark.base.addresses import join_address
from nsquark.base.durations import NS_PER_S
from nsquark.wire.documents import Int64

ALL_NODES: Final = "*"


class ApiLatency(msgspec.Struct, kw_only=True):
    """Holds the latency of one nsqd, or of several if `host` is `*`."""

    count: Int64 = 0
    percentiles: list[dict[str, float]] | None = None
    topic: str = ""
    channel: str = ""
    host: str = ""


class ApiClient(msgspec.Struct, kw_only=True):
    node: str = ""
    remote_address: str = ""
    version: str = ""
    client_id: str = ""
    hostname: str = ""
    user_agent: str = ""
    connect_ts: Int64 = 0
    connected: Int64 = 0
    """Counts the nanoseconds since `connect_ts`."""
    in_flight_count: Int64 = 0
    ready_count: Int64 = 0
    finish_count: Int64 = 0
    requeue_count: Int64 = 0
    message_count: Int64 = 0
    sample_rate: Int64 = 0
    deflate: bool = False
    snappy: bool = False
    authed: bool = False
    auth_identity: str = ""
    auth_identity_url: str = ""
    tls: bool = False
    tls_cipher_suite: str = ""
    tls_version: str = ""
    tls_negotiated_protocol: str = ""
    tls_negotiated_protocol_is_mutual: bool = False


class ApiChannel(msgspec.Struct, kw_only=True):
    node: str = ""
    hostname: str = ""
    topic_name: str = ""
    channel_name: str = ""
    depth: Int64 = 0
    memory_depth: Int64 = 0
    backend_depth: Int64 = 0
    in_flight_count: Int64 = 0
    deferred_count: Int64 = 0
    requeue_count: Int64 = 0
    timeout_count: Int64 = 0
    message_count: Int64 = 0
    client_count: Int64 = 0
    nodes: list[ApiChannel] | None = None
    clients: list[ApiClient] | None = None
    paused: bool = False
    e2e_processing_latency: ApiLatency | None = None


class ApiTopic(msgspec.Struct, kw_only=True):
    node: str = ""
    hostname: str = ""
    topic_name: str = ""
    depth: Int64 = 0
    memory_depth: Int64 = 0
    backend_depth: Int64 = 0
    message_count: Int64 = 0
    nodes: list[ApiTopic] | None = None
    channels: list[ApiChannel] | None = None
    paused: bool = False
    e2e_processing_latency: ApiLatency | None = None


class ApiNodeTopic(msgspec.Struct, kw_only=True):
    topic: str
    tombstoned: bool = False


class ApiNode(msgspec.Struct, kw_only=True):
    remote_addresses: list[str] | None = None
    """Each is `nsqlookupd/address of nsqd there`; the list is None without nsqlookupds."""
    remote_address: str = ""
    hostname: str = ""
    broadcast_address: str = ""
    tcp_port: int = 0
    http_port: int = 0
    version: str = ""
    topics: list[ApiNodeTopic] | None = None
    out_of_date: bool = False

    @property
    def http_address(self) -> str:
        return join_address(self.broadcast_address, self.http_port)


class ApiCounter(msgspec.Struct, kw_only=True):
    node: str
    topic_name: str
    channel_name: str
    message_count: int = 0


# -- filling in ------------------------------------------------------------------------------------------


def complete_topic(topic: ApiTopic, node: str, hostname: str) -> None:
    """Fills in the fields of a topic that an nsqd's /stats does not have."""
    now_s = int(time.time())
    topic.node, topic.hostname, topic.nodes = node, hostname, None
    topic.memory_depth = topic.depth - topic.backend_depth
    _complete_latency(topic.e2e_processing_latency)
    for channel in topic.channels or ():
        channel.node, channel.hostname, channel.topic_name, channel.nodes = node, hostname, topic.topic_name, None
        channel.memory_depth = channel.depth - channel.backend_depth
        _complete_latency(channel.e2e_processing_latency)
        for client in channel.clients or ():
            client.node = node
            client.connected = (now_s - client.connect_ts) * NS_PER_S


def _complete_latency(latency: ApiLatency | None) -> None:
    if latency is None:
        return
    for percentile in latency.percentiles or ():
        value = percentile.get("value", 0.0)
        percentile |= {"min": value, "max": value, "average": value, "count": float(latency.count)}


# -- adding up -------------------------------------------------------------------------------------------


def add_topic(total: ApiTopic, one: ApiTopic) -> None:
    """Adds one nsqd's topic to the total. As in NSQ, the total's channels *are* those of the first nsqd, so the sums
    show in that nsqd's row too: scripts that were written for NSQ see what they saw.
    """
    total.node = ALL_NODES
    total.depth += one.depth
    total.memory_depth += one.memory_depth
    total.backend_depth += one.backend_depth
    total.message_count += one.message_count
    total.paused = total.paused or one.paused
    for channel in one.channels or ():
        known = next((each for each in total.channels or () if each.channel_name == channel.channel_name), None)
        if known is not None:
            add_channel(known, channel)
        else:
            total.channels = [*(total.channels or ()), channel]
    total.nodes = sorted([*(total.nodes or ()), one], key=lambda node: (node.hostname, node.node))
    if total.e2e_processing_latency is None:
        total.e2e_processing_latency = ApiLatency(topic=total.topic_name)
    _add_latency(total.e2e_processing_latency, one.e2e_processing_latency)


def add_channel(total: ApiChannel, one: ApiChannel) -> None:
    total.node = ALL_NODES
    total.depth += one.depth
    total.memory_depth += one.memory_depth
    total.backend_depth += one.backend_depth
    total.in_flight_count += one.in_flight_count
    total.deferred_count += one.deferred_count
    total.requeue_count += one.requeue_count
    total.timeout_count += one.timeout_count
    total.message_count += one.message_count
    total.client_count += one.client_count
    total.paused = total.paused or one.paused
    total.nodes = sorted([*(total.nodes or ()), one], key=lambda node: (node.hostname, node.node))
    if total.e2e_processing_latency is None:
        total.e2e_processing_latency = ApiLatency(topic=total.topic_name, channel=total.channel_name)
    _add_latency(total.e2e_processing_latency, one.e2e_processing_latency)
    if one.clients:
        total.clients = sorted([*(total.clients or ()), *one.clients], key=lambda client: client.hostname)


def _add_latency(total: ApiLatency, one: ApiLatency | None) -> None:
    total.host = ALL_NODES
    if one is None:
        return
    total.count += one.count
    for each in one.percentiles or ():
        quantile = each.get("quantile", 0.0)
        sums = next((known for known in total.percentiles or () if known.get("quantile") == quantile), None)
        if sums is None:
            sums = {"quantile": quantile, "max": 0.0, "count": 0.0, "average": 0.0}
            total.percentiles = [*(total.percentiles or ()), sums]
        largest = each.get("max", 0.0)
        sums["max"] = max(largest, sums["max"])
        # As in NSQ, the minimum is the maximum of the nsqd that was added last.
        sums["min"] = min(largest, sums["max"])
        sums["count"] += each.get("count", 0.0)
        if sums["count"]:
            sums["average"] += (each.get("average", 0.0) - sums["average"]) * each.get("count", 0.0) / sums["count"]
        else:
            sums["average"] = 0.0


def plain(value: Any) -> Any:
    """Turns a value into one that encodes to the JSON that Go writes: a float without a fraction becomes an integer,
    and the keys of a map are in order.
    """
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {name: plain(value[name]) for name in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return int(value)
    return value
