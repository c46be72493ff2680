"""Snapshots put together from the answers of a poll: rows of the nsqds summed up, and rates from their counters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from nsquark.admin.snapshot import (
    Channel,
    ChannelOnNode,
    Failure,
    Latency,
    Lookupd,
    Node,
    NodeAnswer,
    Percentile,
    Snapshot,
    SparkQuery,
    Topic,
    TopicOnNode,
    Totals,
)


def build(
    at: float,
    answers: Iterable[NodeAnswer],
    lookupds: Iterable[Lookupd] = (),
    failures: Iterable[Failure] = (),
    previous: Mapping[str, NodeAnswer] | None = None,
) -> Snapshot:
    """The snapshot of a poll; `previous` are the answers of the one before, from which rates are counted."""
    found = sorted(answers, key=lambda answer: (answer.producer.hostname, answer.producer.address))
    before = previous or {}
    newest = max((version_key(answer.producer.version) for answer in found), default=())
    nodes: dict[str, Node] = {}
    by_topic: dict[str, list[TopicOnNode]] = defaultdict(list)
    for answer in found:
        address = answer.producer.address
        if address in nodes:
            continue
        _complete(answer, before.get(address))
        node = nodes[address] = _node(answer, newest)
        for topic in node.topics:
            by_topic[topic.name].append(topic)
    topics = {name: _topic(name, by_topic[name]) for name in sorted(by_topic)}
    return Snapshot(
        at=at,
        nodes=nodes,
        topics=topics,
        lookupds=tuple(lookupds),
        failures=tuple(failures),
        queries=tuple(_queries(at, topics)),
        totals=_totals(nodes, topics),
    )


def version_key(version: str) -> tuple[int, ...]:
    """Semantic versions in their order; what is none sorts first. A pre-release is before its release."""
    numbers, dash, _ = version.partition("-")
    try:
        return (*(int(number) for number in numbers.split(".")), 0 if dash else 1)
    except ValueError:
        return ()


# Rates, and what /stats leaves to be added


def _complete(answer: NodeAnswer, before: NodeAnswer | None) -> None:
    """Adds to the rows of an answer who gave it and how fast its counters rise."""
    stats = answer.stats
    if stats is None or stats.topics is None:
        return
    old = before.stats if before is not None else None
    if old is stats:
        return  # the same answer as in the last poll, complete already
    if old is None or old.start_time != stats.start_time or before is None:
        old_topics: dict[str, TopicOnNode] = {}
        seconds = 0.0
    else:
        old_topics = {topic.name: topic for topic in old.topics or ()}
        seconds = answer.stats_at - before.stats_at
    heads = {head.topic: head for head in answer.heads.topics} if answer.heads is not None else {}
    for topic in stats.topics:
        topic.node = answer.producer.address
        topic.is_tombstoned = topic.name in answer.producer.tombstones
        topic.log = heads.get(topic.name)
        earlier = old_topics.get(topic.name)
        old_channels: dict[str, ChannelOnNode] = {}
        topic.rate_in = topic.rate_bytes_in = None
        if earlier is not None and seconds > 0:
            topic.rate_in = _rate(topic.messages - earlier.messages, seconds)
            topic.rate_bytes_in = _rate(topic.bytes - earlier.bytes, seconds)
            old_channels = {channel.name: channel for channel in earlier.channels}
        for channel in topic.channels:
            channel.node = topic.node
            channel.rate_out = channel.rate_requeued = channel.rate_timed_out = None
            then = old_channels.get(channel.name)
            if then is not None:
                left = channel.messages - then.messages - (channel.waiting - then.waiting)
                channel.rate_out = max(0.0, left / seconds)
                channel.rate_requeued = _rate(channel.requeued - then.requeued, seconds)
                channel.rate_timed_out = _rate(channel.timed_out - then.timed_out, seconds)


def _rate(more: int, seconds: float) -> float | None:
    """A counter that went back was made anew (a topic deleted and made again): its rate is not known."""
    return more / seconds if more >= 0 else None


def _sum(rates: Iterable[float | None]) -> float | None:
    """Of those that are known; None if none is."""
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


# Rows of one nsqd put together


def _node(answer: NodeAnswer, newest: tuple[int, ...]) -> Node:
    stats, heads, producer = answer.stats, answer.heads, answer.producer
    version = stats.version if stats is not None and stats.version else producer.version
    out_of_date = bool(newest) and version_key(producer.version) < newest
    if stats is None:
        return Node(producer=producer, failure=answer.failure, version=version, is_out_of_date=out_of_date)
    topics = stats.topics or ()
    channels = [channel for topic in topics for channel in topic.channels]
    return Node(
        producer=producer,
        failure=answer.failure,
        answered=True,
        health=stats.health,
        start_time=stats.start_time,
        version=version,
        is_out_of_date=out_of_date,
        is_ours=heads is not None,
        nsqd_id=heads.nsqd_id if heads is not None else "",
        disk=heads.disk if heads is not None else None,
        memory=stats.memory,
        topics=topics,
        depth=sum(topic.depth for topic in topics) + sum(channel.depth for channel in channels),
        in_flight=sum(channel.in_flight for channel in channels),
        messages=sum(topic.messages for topic in topics),
        client_count=sum(channel.client_count for channel in channels),
        channel_count=len(channels),
        rate_in=_sum(topic.rate_in for topic in topics),
        rate_out=_sum(channel.rate_out for channel in channels),
    )


def _topic(name: str, nodes: list[TopicOnNode]) -> Topic:
    by_channel: dict[str, list[ChannelOnNode]] = defaultdict(list)
    owners: dict[str, str] = {}
    for node in nodes:
        for channel in node.channels:
            by_channel[channel.name].append(channel)
        if node.log is not None:
            owners.update({owned.channel: owned.owner for owned in node.log.owned})
    channels = {each: _channel(name, each, by_channel[each], owners.get(each, "")) for each in sorted(by_channel)}
    depth = sum(node.depth for node in nodes)
    return Topic(
        name=name,
        nodes=tuple(nodes),
        channels=channels,
        depth=depth,
        backend_depth=sum(node.backend_depth for node in nodes),
        total_depth=depth + sum(channel.depth for channel in channels.values()),
        in_flight=sum(channel.in_flight for channel in channels.values()),
        messages=sum(node.messages for node in nodes),
        bytes=sum(node.bytes for node in nodes),
        client_count=sum(channel.client_count for channel in channels.values()),
        paused=any(node.paused for node in nodes),
        rate_in=_sum(node.rate_in for node in nodes),
        rate_bytes_in=_sum(node.rate_bytes_in for node in nodes),
        rate_out=_sum(channel.rate_out for channel in channels.values()),
        latency=_worst(node.latency for node in nodes),
    )


def _channel(topic: str, name: str, nodes: list[ChannelOnNode], owner: str) -> Channel:
    return Channel(
        topic=topic,
        name=name,
        nodes=tuple(nodes),
        depth=sum(node.depth for node in nodes),
        backend_depth=sum(node.backend_depth for node in nodes),
        in_flight=sum(node.in_flight for node in nodes),
        deferred=sum(node.deferred for node in nodes),
        messages=sum(node.messages for node in nodes),
        requeued=sum(node.requeued for node in nodes),
        timed_out=sum(node.timed_out for node in nodes),
        client_count=sum(node.client_count for node in nodes),
        paused=any(node.paused for node in nodes),
        rate_out=_sum(node.rate_out for node in nodes),
        rate_requeued=_sum(node.rate_requeued for node in nodes),
        rate_timed_out=_sum(node.rate_timed_out for node in nodes),
        latency=_worst(node.latency for node in nodes),
        owner=owner,
    )


def _worst(latencies: Iterable[Latency]) -> tuple[Percentile, ...]:
    worst: dict[float, float] = {}
    for latency in latencies:
        for percentile in latency.percentiles or ():
            worst[percentile.quantile] = max(worst.get(percentile.quantile, 0.0), percentile.value)
    return tuple(Percentile(quantile, worst[quantile]) for quantile in sorted(worst, reverse=True)) if worst else ()


def _queries(at: float, topics: Mapping[str, Topic]) -> Iterable[SparkQuery]:
    for topic in topics.values():
        for channel in topic.channels.values():
            if not channel.owner:
                continue
            owned = [
                (node.node, entry)
                for node in topic.nodes
                if node.log is not None
                for entry in node.log.owned
                if entry.channel == channel.name
            ]
            yield SparkQuery(
                topic=topic.name,
                channel=channel.name,
                owner=channel.owner,
                lag=channel.waiting,
                rate=channel.rate_out,
                rate_in=topic.rate_in,
                last_commit=at - max(entry.idle_s for _, entry in owned),
                nodes=tuple(node for node, _ in owned),
            )


def _totals(nodes: Mapping[str, Node], topics: Mapping[str, Topic]) -> Totals:
    channels = [channel for topic in topics.values() for channel in topic.channels.values()]
    return Totals(
        topics=len(topics),
        channels=len(channels),
        nodes=len(nodes),
        nodes_answering=sum(1 for node in nodes.values() if node.answered and not node.failure),
        depth=sum(topic.total_depth for topic in topics.values()),
        in_flight=sum(topic.in_flight for topic in topics.values()),
        deferred=sum(channel.deferred for channel in channels),
        messages=sum(topic.messages for topic in topics.values()),
        client_count=sum(topic.client_count for topic in topics.values()),
        rate_in=_sum(topic.rate_in for topic in topics.values()),
        rate_bytes_in=_sum(topic.rate_bytes_in for topic in topics.values()),
        rate_out=_sum(topic.rate_out for topic in topics.values()),
        rate_requeued=_sum(channel.rate_requeued for channel in channels),
        rate_timed_out=_sum(channel.rate_timed_out for channel in channels),
    )
