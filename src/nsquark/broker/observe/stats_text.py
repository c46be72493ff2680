"""Writes /stats as text for people, to the letter as NSQ does, since scripts read it too."""

import time
from collections.abc import Iterator
from datetime import datetime

import msgspec

from nsquark.base.durations import NS_PER_MS, NS_PER_S, NS_PER_US, Duration
from nsquark.base.printable import printable
from nsquark.base.version import version_line
from nsquark.broker.observe.process import MemoryStats
from nsquark.broker.observe.stats import ChannelStats, ClientStats, LatencyStats, NsqdStats, TopicStats


def lines(stats: NsqdStats, uptime_ns: int) -> Iterator[str]:
    yield version_line("nsqd")
    yield f"start_time {_local_time(stats.start_time)}"
    yield f"uptime {Duration(uptime_ns)}"
    yield ""
    yield f"Health: {stats.health}"
    yield ""
    if isinstance(stats.memory, MemoryStats):
        yield "Memory:"
        for name, value in msgspec.structs.asdict(stats.memory).items():
            yield f"   {name:<25}\t{value}"
        yield ""
    yield "Topics:" if stats.topics else "Topics: None"
    for index, topic in enumerate(stats.topics or ()):
        if index > 0:
            yield ""
        yield from _topic_lines(topic)
    yield ""
    yield "Producers:" if stats.producers else "Producers: None"
    for producer in stats.producers or ():
        yield f"   {_client(producer)}"


def _topic_lines(topic: TopicStats) -> Iterator[str]:
    prefix = "*P " if topic.paused else "   "
    yield (
        f"{prefix}[{topic.topic_name:<15}] depth: {topic.depth:<5} be-depth: {topic.backend_depth:<5} "
        f"msgs: {topic.message_count:<8} e2e%: {_latency(topic.e2e_processing_latency)}"
    )
    for channel in topic.channels:
        yield _channel(channel)
        for client in channel.clients or ():
            yield f"        {_client(client)}"


def _channel(channel: ChannelStats) -> str:
    prefix = "   *P " if channel.paused else "      "
    return (
        f"{prefix}[{channel.channel_name:<25}] depth: {channel.depth:<5} be-depth: {channel.backend_depth:<5} "
        f"inflt: {channel.in_flight_count:<4} def: {channel.deferred_count:<4} re-q: {channel.requeue_count:<5} "
        f"timeout: {channel.timeout_count:<5} msgs: {channel.message_count:<8} "
        f"e2e%: {_latency(channel.e2e_processing_latency)}"
    )


def _client(client: ClientStats) -> str:
    port = client.remote_address.rpartition(":")[2] if ":" in client.remote_address else ""
    name = printable(f"{client.hostname}:{port} {client.user_agent}")
    age = Duration((int(time.time()) - client.connect_ts) * NS_PER_S)
    if isinstance(client.pub_counts, list):
        total = sum(published.count for published in client.pub_counts)
        topics = ",".join(f"{published.topic}={published.count}" for published in client.pub_counts)
        return f"[{client.version} {name:<21}] msgs: {total:<8} topics: {topics} connected: {age}"
    return (
        f"[{client.version} {name:<21}] state: {client.state} inflt: {client.in_flight_count:<4} "
        f"rdy: {client.ready_count:<4} fin: {client.finish_count:<8} re-q: {client.requeue_count:<8} "
        f"msgs: {client.message_count:<8} connected: {age}"
    )


def _latency(latency: LatencyStats) -> str:
    return ", ".join(_scaled(percentile.value) for percentile in latency.percentiles or ())


def _scaled(ns: int) -> str:
    for size, unit in ((NS_PER_S, "s"), (NS_PER_MS, "ms"), (NS_PER_US, "us")):
        if ns > size:
            return f"{ns / size:.1f}{unit}"
    return f"{ns:.1f}ns"


def _local_time(unix_s: int) -> str:
    """Writes a time as RFC 3339 does, where UTC is a Z."""
    shown = datetime.fromtimestamp(unix_s).astimezone().isoformat(timespec="seconds")
    return shown.replace("+00:00", "Z")
