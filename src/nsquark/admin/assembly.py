"""Builds the snapshot of a poll from its answers: it sums up the rows of the nsqds, and makes rates of counters."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from nsquark.admin.snapshot import (
    EMPTY,
    ChannelOnNode,
    ClusterChannel,
    ClusterTopic,
    ClusterTotals,
    Failure,
    Latency,
    Lookupd,
    Node,
    NodeAnswer,
    Percentile,
    Snapshot,
    SparkQuery,
    StatsAnswer,
    StatsRows,
    TopicOnNode,
)
from nsquark.wire.documents import decode_json


def build(
    at: float,
    answers: Iterable[NodeAnswer],
    lookupds: Iterable[Lookupd] = (),
    failures: Iterable[Failure] = (),
    previous: Mapping[str, NodeAnswer] | None = None,
    last: Snapshot = EMPTY,
) -> Snapshot:
    """Makes the snapshot of a poll. `previous` has the answers of the poll before, from which rates are computed, and
    `last` is its snapshot, whose unchanged topics are used again.
    """
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
    topics = {name: _topic(name, by_topic[name], last.topics.get(name)) for name in sorted(by_topic)}
    failed = tuple(failures)
    is_told = not failed or any(node.answered for node in nodes.values())
    return Snapshot(
        at=at,
        nodes=nodes,
        topics=topics,
        lookupds=tuple(lookupds),
        failures=failed,
        queries=tuple(_queries(at, topics)),
        totals=_totals(nodes, topics) if is_told else ClusterTotals(nodes=len(nodes)),
    )


def version_key(version: str) -> tuple[int, ...]:
    """Makes a key that sorts semantic versions, a pre-release before its release; what is no version comes first."""
    numbers, dash, _ = version.partition("-")
    try:
        return (*(int(number) for number in numbers.split(".")), 0 if dash else 1)
    except ValueError:
        return ()


# -- rates, and what /stats leaves to be added -----------------------------------------------------------


def read_rows(rows: StatsRows, last: StatsAnswer | None) -> StatsAnswer:
    """Reads the topics of an answer; a topic whose text is the same as in the last answer is taken from there. It
    raises ValueError if a topic cannot be read.
    """
    known = dict(zip(last.texts, last.topics or (), strict=False)) if last is not None else {}
    found = {text: known.get(text) or decode_json(text, TopicOnNode) for text in map(bytes, rows.topics or ())}
    return StatsAnswer(
        version=rows.version,
        health=rows.health,
        start_time=rows.start_time,
        topics=None if rows.topics is None else tuple(found.values()),
        texts=tuple(found),
        memory=rows.memory,
    )


def _complete(answer: NodeAnswer, before: NodeAnswer | None) -> None:
    """Adds the nsqd's address, the state of its log and the rates of its counters to the rows of its answer."""
    stats = answer.stats
    if stats is None or stats.topics is None:
        return
    old = before.stats if before is not None else None
    if old is stats:
        return  # the same answer as in the last poll, complete already
    old_topics: dict[str, TopicOnNode] = {}
    seconds = 0.0
    if old is not None and before is not None and old.start_time == stats.start_time:
        old_topics = {topic.name: topic for topic in old.topics or ()}
        seconds = answer.stats_at - before.stats_at
    heads = {head.topic: head for head in answer.heads.topics} if answer.heads is not None else {}
    tombstones = answer.producer.tombstones
    completed = []
    for topic in stats.topics:
        earlier = old_topics.get(topic.name)
        log = heads.get(topic.name)
        is_tombstoned = topic.name in tombstones
        if not (topic is earlier and topic.is_still and topic.log == log and topic.is_tombstoned == is_tombstoned):
            if topic.node:
                # A snapshot shows this row already and must not change, so a copy is completed.
                topic = replace(topic, channels=tuple(map(replace, topic.channels)))
            topic.node, topic.log, topic.is_tombstoned = answer.producer.address, log, is_tombstoned
            _complete_topic(topic, earlier, seconds)
        completed.append(topic)
    stats.topics = tuple(completed)


def _complete_topic(topic: TopicOnNode, earlier: TopicOnNode | None, seconds: float) -> None:
    topic.rate_in = topic.rate_bytes_in = None
    then_by_name: dict[str, ChannelOnNode] = {}
    if earlier is not None and seconds > 0:
        topic.rate_in = _rate(topic.messages - earlier.messages, seconds)
        topic.rate_bytes_in = _rate(topic.bytes - earlier.bytes, seconds)
        then_by_name = {channel.name: channel for channel in earlier.channels}
    is_still = topic.rate_in == 0 == topic.rate_bytes_in
    depth = in_flight = deferred = client_count = 0
    for channel in topic.channels:
        channel.node = topic.node
        then = then_by_name.get(channel.name)
        if then is None:
            channel.rate_out = channel.rate_requeued = channel.rate_timed_out = None
            is_still = False
        else:
            left = channel.messages - then.messages - (channel.waiting - then.waiting)
            channel.rate_out = max(0.0, left / seconds)
            channel.rate_requeued = _rate(channel.requeued - then.requeued, seconds)
            channel.rate_timed_out = _rate(channel.timed_out - then.timed_out, seconds)
            is_still = is_still and channel.rate_out == 0 == channel.rate_requeued and channel.rate_timed_out == 0
        depth += channel.depth
        in_flight += channel.in_flight
        deferred += channel.deferred
        client_count += channel.client_count
    topic.channel_depth, topic.in_flight, topic.deferred, topic.client_count = depth, in_flight, deferred, client_count
    topic.rate_out = _sum([channel.rate_out for channel in topic.channels])
    topic.rate_requeued = _sum([channel.rate_requeued for channel in topic.channels])
    topic.rate_timed_out = _sum([channel.rate_timed_out for channel in topic.channels])
    topic.is_still = is_still


def _rate(more: int, seconds: float) -> float | None:
    """Returns how fast a counter rises. A counter that went back is a new one (its topic was deleted and made again),
    so its rate is not known.
    """
    return more / seconds if more >= 0 else None


def _sum(rates: Iterable[float | None]) -> float | None:
    """Sums the rates that are known; it returns None if none is."""
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


# -- rows of one nsqd put together -----------------------------------------------------------------------


def _node(answer: NodeAnswer, newest: tuple[int, ...]) -> Node:
    stats, heads, producer = answer.stats, answer.heads, answer.producer
    version = stats.version if stats is not None and stats.version else producer.version
    out_of_date = bool(newest) and version_key(producer.version) < newest
    if stats is None:
        return Node(producer=producer, failure=answer.failure, version=version, is_out_of_date=out_of_date)
    topics = stats.topics or ()
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
        depth=sum(topic.depth + topic.channel_depth for topic in topics),
        in_flight=sum(topic.in_flight for topic in topics),
        messages=sum(topic.messages for topic in topics),
        client_count=sum(topic.client_count for topic in topics),
        channel_count=sum(len(topic.channels) for topic in topics),
        rate_in=_sum(topic.rate_in for topic in topics),
        rate_out=_sum(topic.rate_out for topic in topics),
    )


def _topic(name: str, nodes: list[TopicOnNode], last: ClusterTopic | None) -> ClusterTopic:
    if last is not None and len(last.nodes) == len(nodes) and all(map(operator.is_, last.nodes, nodes)):
        return last
    by_channel: dict[str, list[ChannelOnNode]] = defaultdict(list)
    owners: dict[str, str] = {}
    for node in nodes:
        for channel in node.channels:
            by_channel[channel.name].append(channel)
        if node.log is not None:
            owners.update({owned.channel: owned.owner for owned in node.log.owned})
    channels = {each: _channel(name, each, by_channel[each], owners.get(each, "")) for each in sorted(by_channel)}
    depth = sum(node.depth for node in nodes)
    return ClusterTopic(
        name=name,
        nodes=tuple(nodes),
        channels=channels,
        depth=depth,
        backend_depth=sum(node.backend_depth for node in nodes),
        total_depth=depth + sum(node.channel_depth for node in nodes),
        in_flight=sum(node.in_flight for node in nodes),
        deferred=sum(node.deferred for node in nodes),
        messages=sum(node.messages for node in nodes),
        bytes=sum(node.bytes for node in nodes),
        client_count=sum(node.client_count for node in nodes),
        paused=any(node.paused for node in nodes),
        rate_in=_sum([node.rate_in for node in nodes]),
        rate_bytes_in=_sum([node.rate_bytes_in for node in nodes]),
        rate_out=_sum([node.rate_out for node in nodes]),
        rate_requeued=_sum([node.rate_requeued for node in nodes]),
        rate_timed_out=_sum([node.rate_timed_out for node in nodes]),
        latency=_worst([node.latency for node in nodes]),
    )


def _channel(topic: str, name: str, nodes: list[ChannelOnNode], owner: str) -> ClusterChannel:
    """Sums up a channel over its nsqds in one pass, since there are many channels."""
    depth = backend_depth = in_flight = deferred = messages = requeued = timed_out = client_count = 0
    paused = False
    for node in nodes:
        depth += node.depth
        backend_depth += node.backend_depth
        in_flight += node.in_flight
        deferred += node.deferred
        messages += node.messages
        requeued += node.requeued
        timed_out += node.timed_out
        client_count += node.client_count
        paused = paused or node.paused
    return ClusterChannel(
        topic=topic,
        name=name,
        nodes=tuple(nodes),
        depth=depth,
        backend_depth=backend_depth,
        in_flight=in_flight,
        deferred=deferred,
        messages=messages,
        requeued=requeued,
        timed_out=timed_out,
        client_count=client_count,
        paused=paused,
        rate_out=_sum([node.rate_out for node in nodes]),
        rate_requeued=_sum([node.rate_requeued for node in nodes]),
        rate_timed_out=_sum([node.rate_timed_out for node in nodes]),
        latency=_worst([node.latency for node in nodes]),
        owner=owner,
    )


def _worst(latencies: list[Latency]) -> tuple[Percentile, ...]:
    if not any(latency.percentiles for latency in latencies):
        return ()
    worst: dict[float, float | None] = {}
    for latency in latencies:
        for percentile in latency.known:
            known = [value for value in (worst.get(percentile.quantile), percentile.value) if value is not None]
            worst[percentile.quantile] = max(known, default=None)
    return tuple(Percentile(quantile, worst[quantile]) for quantile in sorted(worst, reverse=True))


def _queries(at: float, topics: Mapping[str, ClusterTopic]) -> Iterable[SparkQuery]:
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


def _totals(nodes: Mapping[str, Node], topics: Mapping[str, ClusterTopic]) -> ClusterTotals:
    return ClusterTotals(
        topics=len(topics),
        channels=sum(len(topic.channels) for topic in topics.values()),
        nodes=len(nodes),
        nodes_answering=sum(1 for node in nodes.values() if node.answered and not node.failure),
        depth=sum(topic.total_depth for topic in topics.values()),
        in_flight=sum(topic.in_flight for topic in topics.values()),
        deferred=sum(topic.deferred for topic in topics.values()),
        messages=sum(topic.messages for topic in topics.values()),
        client_count=sum(topic.client_count for topic in topics.values()),
        rate_in=_sum(topic.rate_in for topic in topics.values()),
        rate_bytes_in=_sum(topic.rate_bytes_in for topic in topics.values()),
        rate_out=_sum(topic.rate_out for topic in topics.values()),
        rate_requeued=_sum(topic.rate_requeued for topic in topics.values()),
        rate_timed_out=_sum(topic.rate_timed_out for topic in topics.values()),
    )
