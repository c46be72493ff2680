"""Collects the numbers of /stats: their names, their order, and which are left out, as in NSQ.

A broker may have thousands of channels, so collecting lets others run in between; what is deleted meanwhile is left
out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import UNSET, UnsetType

from nsquark.base.version import NSQ_VERSION
from nsquark.broker.observe.latency import Sketch
from nsquark.broker.observe.process import MemoryStats
from nsquark.broker.topology import Closeness, is_shown
from nsquark.web.fairness import TurnPace
from nsquark.web.messages import encode_json

if TYPE_CHECKING:
    from nsquark.broker.channel import Channel
    from nsquark.broker.nsqd import Nsqd
    from nsquark.broker.tcp.session import Session
    from nsquark.broker.topic import Topic

CLIENT_VERSION: Final = "V2"
"""Is the version of the protocol, not of the client; there is no other."""

# None of these is ever part of a cycle, so the collector need not visit the thousands a large broker has (gc=False).


class PercentileStats(msgspec.Struct, gc=False):
    quantile: float
    value: int
    """Is the latency in nanoseconds."""


class LatencyStats(msgspec.Struct, gc=False):
    """Has the latencies from publish to FIN; `percentiles` is None where latency is not measured."""

    count: int = 0
    percentiles: list[PercentileStats] | None = None


NOT_MEASURED: Final = LatencyStats()


class PubCount(msgspec.Struct, gc=False):
    topic: str
    count: int


class ClientStats(msgspec.Struct, kw_only=True, gc=False):
    client_id: str
    hostname: str
    version: str = CLIENT_VERSION
    remote_address: str
    state: int
    ready_count: int = 0
    in_flight_count: int = 0
    message_count: int = 0
    finish_count: int = 0
    requeue_count: int = 0
    connect_ts: int
    sample_rate: int
    deflate: bool
    snappy: bool
    user_agent: str
    authed: bool | UnsetType = UNSET
    auth_identity: str | UnsetType = UNSET
    auth_identity_url: str | UnsetType = UNSET
    topology_zone: str | UnsetType = UNSET
    topology_region: str | UnsetType = UNSET
    pub_counts: list[PubCount] | UnsetType = UNSET
    tls: bool = False
    tls_cipher_suite: str = ""
    tls_version: str = ""
    tls_negotiated_protocol: str = ""
    tls_negotiated_protocol_is_mutual: bool = False


class ChannelStats(msgspec.Struct, kw_only=True, gc=False):
    channel_name: str
    depth: int
    backend_depth: int
    in_flight_count: int
    deferred_count: int
    message_count: int
    zone_local_msg_count: int | UnsetType = UNSET
    region_local_msg_count: int | UnsetType = UNSET
    global_msg_count: int | UnsetType = UNSET
    requeue_count: int
    timeout_count: int
    client_count: int
    clients: list[ClientStats] | None
    paused: bool
    e2e_processing_latency: LatencyStats


class TopicStats(msgspec.Struct, gc=False):
    topic_name: str
    channels: list[ChannelStats]
    depth: int
    backend_depth: int
    message_count: int
    message_bytes: int
    paused: bool
    e2e_processing_latency: LatencyStats


class NsqdStats(msgspec.Struct, kw_only=True, gc=False):
    version: str = NSQ_VERSION
    health: str
    start_time: int
    topics: list[TopicStats] | None = None
    memory: MemoryStats | UnsetType = UNSET
    producers: list[ClientStats] | None = None


async def collect_stats(nsqd: Nsqd, *, topic: str = "", channel: str = "", include_clients: bool = True) -> NsqdStats:
    """Collects all topics, or the one named; with a channel's name, only that channel and the topics that have it."""
    stats = NsqdStats(health=nsqd.health, start_time=nsqd.start_time)
    if topic and topic not in nsqd.topics:
        return stats
    chosen = [nsqd.topics[topic]] if topic else sorted(nsqd.topics.values(), key=lambda each: each.name)
    pace = TurnPace()
    stats.topics = []
    for each in chosen:
        if not each.is_exiting and (not channel or channel in each.channels):
            stats.topics.append(await _topic_stats(each, topic, channel, include_clients, pace))
        await pace.step()
    if include_clients and nsqd.producers:
        stats.producers = []
        for session in list(nsqd.producers):
            stats.producers.append(_client_stats(session, topic))
            await pace.step()
    return stats


async def stats_as_json(stats: NsqdStats) -> bytes:
    """Writes the numbers topic by topic, since the whole takes a while for a broker of many."""
    pace = TurnPace()
    written: list[msgspec.Raw] = []
    for topic in stats.topics or ():
        written.append(msgspec.Raw(encode_json(topic)))
        await pace.step()
    shown = {name: getattr(stats, name) for name in stats.__struct_fields__}
    if stats.topics is not None:
        shown["topics"] = written
    return encode_json({name: value for name, value in shown.items() if value is not UNSET})


async def _topic_stats(
    topic: Topic, topic_filter: str, channel_filter: str, include_clients: bool, pace: TurnPace
) -> TopicStats:
    names = [channel_filter] if channel_filter else sorted(topic.channels)
    channels: list[ChannelStats] = []
    for name in names:
        channel = topic.channels.get(name)
        if channel is not None:
            clients: list[ClientStats] = []
            for session in list(channel.sessions) if include_clients else ():
                clients.append(_client_stats(session, topic_filter))
                await pace.step()
            channels.append(_channel_stats(channel, clients if include_clients else None))
            await pace.step()
    return TopicStats(
        topic_name=topic.name,
        channels=channels,
        depth=topic.depth,
        backend_depth=topic.backend_depth,
        message_count=topic.message_count,
        message_bytes=topic.message_bytes,
        paused=topic.paused,
        e2e_processing_latency=latency_of(topic.nsqd, topic.channels.values()),
    )


def _channel_stats(channel: Channel, clients: list[ClientStats] | None) -> ChannelStats:
    ledger = channel.ledger
    stats = ChannelStats(
        channel_name=channel.name,
        depth=channel.depth,
        backend_depth=channel.backend_depth,
        in_flight_count=ledger.in_flight,
        deferred_count=channel.deferred_count,
        message_count=channel.message_count,
        requeue_count=ledger.requeue_count,
        timeout_count=ledger.timeout_count,
        client_count=len(channel.sessions),
        clients=clients,
        paused=channel.paused,
        e2e_processing_latency=latency_of(channel.topic.nsqd, [channel]),
    )
    if channel.topology is not None:
        sent = channel.topology.sent
        stats.zone_local_msg_count = sent[Closeness.ZONE] or UNSET
        stats.region_local_msg_count = sent[Closeness.REGION] or UNSET
        stats.global_msg_count = sent[Closeness.ELSEWHERE] or UNSET
    return stats


def latency_of(nsqd: Nsqd, channels: Iterable[Channel]) -> LatencyStats:
    """Merges the latencies of all these channels."""
    wanted = nsqd.options.e2e_processing_latency_percentile
    windows = [channel.latency for channel in channels if channel.latency is not None] if wanted else []
    if not windows:
        return NOT_MEASURED
    sketch, now_s = Sketch(), time.monotonic()
    for window in windows:
        window.add_to(sketch, now_s)
    values = zip(wanted, sketch.quantiles(wanted), strict=True)
    return LatencyStats(sketch.count, [PercentileStats(quantile, value) for quantile, value in values])


def _client_stats(session: Session, topic_filter: str) -> ClientStats:
    settings, consumer = session.settings, session.consumer
    stats = ClientStats(
        client_id=settings.client_id,
        hostname=settings.hostname,
        remote_address=session.remote_address,
        state=session.state,
        connect_ts=session.connected_at,
        sample_rate=settings.sample_rate,
        deflate=settings.deflate,
        snappy=settings.snappy,
        user_agent=settings.user_agent,
    )
    if consumer is not None:
        stats.ready_count = consumer.rdy
        stats.in_flight_count = consumer.in_flight
        stats.message_count = consumer.message_count
        stats.finish_count = consumer.finish_count
        stats.requeue_count = consumer.requeue_count
    if session.guard is not None and session.guard.grant is not None:
        stats.authed = True
        stats.auth_identity = session.guard.grant.identity or UNSET
        stats.auth_identity_url = session.guard.grant.identity_url or UNSET
    if session.tls is not None:
        stats.tls = stats.tls_negotiated_protocol_is_mutual = True
        stats.tls_cipher_suite = session.tls.cipher_suite
        stats.tls_version = session.tls.version
    if is_shown(session.nsqd.options):
        stats.topology_zone = settings.topology_zone
        stats.topology_region = settings.topology_region
    # As in NSQ one topic at most is shown: the one asked for, or any.
    published = topic_filter or next(iter(session.published), "")
    if published in session.published:
        stats.pub_counts = [PubCount(published, session.published[published])]
    return stats
