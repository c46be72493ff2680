"""Answers GET /metrics for Prometheus. docs/metrics.md tells what each name means.

Nothing here is counted twice: the numbers are read where they arise. The labels are bounded: topics and channels
beyond ROWS_MAX are summed up in one row, so that a broker of a hundred thousand topics does not swamp its monitoring.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from nsquark import kernel
from nsquark.base.durations import NS_PER_S
from nsquark.base.exposition import Family, of_histogram, single
from nsquark.base.version import NSQ_VERSION, __version__
from nsquark.broker.observe.latency import Sketch
from nsquark.broker.observe.process import ProcessFigures, process_figures
from nsquark.broker.topology import Closeness, is_aware
from nsquark.web.fairness import TurnPace

if TYPE_CHECKING:
    from nsquark.broker.channel import Channel
    from nsquark.broker.nsqd import Nsqd
    from nsquark.broker.topic import Topic

ROWS_MAX: Final = 1_000
"""At most this many topics are shown one by one, and as many channels: those made first."""
OTHER: Final = "_other"
"""Names the topic and channel under which the rest is summed up. A topic of this name is counted there too."""
OTHER_TOPIC: Final = f'topic="{OTHER}"'
OTHER_CHANNEL: Final = f'topic="{OTHER}",channel="{OTHER}"'

T = TypeVar("T")
Column = tuple[str, str, str, Callable[[T], float]]
"""Has name, kind and help of a metric, and where its value is found."""

LATENCY_HELP: Final = "From publish to FIN; quantiles over --e2e-processing-latency-window-time."


class Table(Generic[T]):
    """Makes a family per column, with a row per topic or channel, up to ROWS_MAX, and one for all the others."""

    def __init__(self, prefix: str, columns: list[Column[T]], other_labels: str) -> None:
        self._values = [value for _, _, _, value in columns]
        self._families = [Family(prefix + name, kind, help_text) for name, kind, help_text, _ in columns]
        self._other_labels = other_labels
        self._other: list[float] = [0] * len(columns)
        self._rows = 0
        self.folded = 0

    @property
    def is_full(self) -> bool:
        return self._rows >= ROWS_MAX

    def add(self, thing: T, labels: str | None) -> None:
        """Adds a row; labels of None put it among the others."""
        values = [value(thing) for value in self._values]
        if labels is None:
            self.folded += 1
            self._other = [total + value for total, value in zip(self._other, values, strict=True)]
            return
        self._rows += 1
        self._write(values, labels)

    def families(self) -> list[Family]:
        if self.folded:
            self._write(self._other, self._other_labels)
        return self._families

    def _write(self, values: list[float], labels: str) -> None:
        for family, value in zip(self._families, values, strict=True):
            family.add(value, labels)


class Latencies:
    """Makes a summary per topic or channel."""

    def __init__(self, name: str, quantiles: list[float], other_labels: str) -> None:
        self._family = Family(name, "summary", LATENCY_HELP)
        self._quantiles = quantiles
        self._other_labels = other_labels
        self._other: list[Channel] = []
        self._now_s = time.monotonic()

    def add(self, channels: list[Channel], labels: str | None) -> None:
        if labels is None:
            self._other += channels
        else:
            self._write(channels, labels)

    def family(self) -> Family:
        if self._other:
            self._write(self._other, self._other_labels)
        return self._family

    def _write(self, channels: list[Channel], labels: str) -> None:
        sketch, count, total_ns = Sketch(), 0, 0
        for channel in channels:
            if channel.latency is not None:
                channel.latency.add_to(sketch, self._now_s)
                count += channel.latency.total_count
                total_ns += channel.latency.total_ns
        for quantile, value in zip(self._quantiles, sketch.quantiles(self._quantiles), strict=True):
            seconds = value / NS_PER_S if sketch.count else math.nan
            self._family.add(seconds, f'{labels},quantile="{quantile}"')
        self._family.add(total_ns / NS_PER_S, labels, "_sum")
        self._family.add(count, labels, "_count")


async def metrics_text(nsqd: Nsqd) -> str:
    figures = await asyncio.get_running_loop().run_in_executor(None, process_figures)
    families = [*_process(nsqd, figures), *_broker(nsqd), *await _topics_and_channels(nsqd)]
    return "".join(family.text for family in families)


async def _topics_and_channels(nsqd: Nsqd) -> list[Family]:
    topics = Table("nsqd_topic_", _topic_columns(), OTHER_TOPIC)
    channels = Table("nsqd_channel_", _channel_columns(nsqd), OTHER_CHANNEL)
    quantiles = nsqd.options.e2e_processing_latency_percentile
    topic_latency = Latencies("nsqd_topic_latency_seconds", quantiles, OTHER_TOPIC)
    channel_latency = Latencies("nsqd_channel_latency_seconds", quantiles, OTHER_CHANNEL)
    pace = TurnPace()
    for topic in list(nsqd.topics.values()):
        if topic.is_exiting:
            continue
        fold = topics.is_full or topic.name == OTHER
        labels = None if fold else f'topic="{topic.name}"'
        topics.add(topic, labels)
        if quantiles and topic.channels:
            topic_latency.add(list(topic.channels.values()), labels)
        await pace.step()
        for channel in list(topic.channels.values()):
            if channel.is_deleted:
                continue
            channel_labels = None if labels is None or channels.is_full else f'{labels},channel="{channel.name}"'
            channels.add(channel, channel_labels)
            if quantiles:
                channel_latency.add([channel], channel_labels)
            await pace.step()
    families = [*topics.families(), *channels.families()]
    if quantiles:
        families += [topic_latency.family(), channel_latency.family()]
    rows_help = f"that are summed up under the topic {OTHER}, since {ROWS_MAX} are shown one by one."
    return [
        *families,
        single("nsqd_folded_topics", "gauge", f"Topics {rows_help}", topics.folded),
        single("nsqd_folded_channels", "gauge", f"Channels {rows_help}", channels.folded),
    ]


def _topic_columns() -> list[Column[Topic]]:
    return [
        ("depth", "gauge", "Messages no channel has yet.", lambda topic: topic.depth),
        ("backend_depth", "gauge", "Of these, messages that are only on disk.", lambda topic: topic.backend_depth),
        ("messages_total", "counter", "Messages published.", lambda topic: topic.message_count),
        ("message_bytes_total", "counter", "Bytes of the bodies published.", lambda topic: topic.message_bytes),
        ("paused", "gauge", "Whether the topic is paused.", lambda topic: int(topic.paused)),
        ("log_bytes", "gauge", "Bytes of the topic's log on disk.", lambda topic: _log_bytes(topic)),
        ("log_segments", "gauge", "Files of the topic's log.", lambda topic: _log_segments(topic)),
    ]


def _channel_columns(nsqd: Nsqd) -> list[Column[Channel]]:
    columns: list[Column[Channel]] = [
        ("depth", "gauge", "Messages that wait for a consumer.", lambda channel: channel.depth),
        ("backend_depth", "gauge", "Of these, messages that are only on disk.", lambda channel: channel.backend_depth),
        ("in_flight", "gauge", "Messages sent and not answered yet.", lambda channel: channel.ledger.in_flight),
        ("deferred", "gauge", "Messages that wait for their time.", lambda channel: channel.deferred_count),
        ("messages_total", "counter", "Messages that entered the channel.", lambda channel: channel.message_count),
        ("requeues_total", "counter", "Messages consumers gave back.", lambda channel: channel.ledger.requeue_count),
        ("timeouts_total", "counter", "Messages not answered in time.", lambda channel: channel.ledger.timeout_count),
        ("clients", "gauge", "Consumers.", lambda channel: len(channel.sessions)),
        ("paused", "gauge", "Whether the channel is paused.", lambda channel: int(channel.paused)),
    ]
    if not is_aware(nsqd.options):
        return columns
    return [
        *columns,
        _sent("zone_local", Closeness.ZONE, "in nsqd's zone"),
        _sent("region_local", Closeness.REGION, "in nsqd's region"),
        _sent("global", Closeness.ELSEWHERE, "elsewhere"),
    ]


def _sent(name: str, closeness: Closeness, where: str) -> Column[Channel]:
    def value(channel: Channel) -> int:
        return channel.topology.sent[closeness] if channel.topology is not None else 0

    return f"{name}_messages_total", "counter", f"Messages sent to consumers {where}.", value


def _log_bytes(topic: Topic) -> int:
    return topic.log.segments.total_bytes if topic.log.segments is not None else 0


def _log_segments(topic: Topic) -> int:
    return len(topic.log.segments) if topic.log.segments is not None else 0


def _broker(nsqd: Nsqd) -> list[Family]:
    logs = nsqd.logs
    connections = Family("nsqd_connections", "gauge", "Open connections.")
    connections.add(len(nsqd.sessions), 'kind="tcp"')
    connections.add(nsqd.http.connection_count + nsqd.https.connection_count, 'kind="http"')
    channels = sum(len(topic.channels) for topic in nsqd.topics.values())
    compiled = "compiled" if kernel.is_compiled() else "interpreted"
    python = ".".join(str(number) for number in sys.version_info[:3])
    about = f'version="{NSQ_VERSION}",nsquark="{__version__}",python="{python}",kernel="{compiled}"'
    return [
        single("nsqd_build_info", "gauge", "Always 1; the labels tell what runs.", 1, about),
        single("nsqd_uptime_seconds", "gauge", "Time since nsqd started.", round(time.time() - nsqd.start_time, 3)),
        single("nsqd_healthy", "gauge", "1, or 0 while the disk fails.", int(nsqd.health == "OK")),
        single("nsqd_topics", "gauge", "Topics.", len(nsqd.topics)),
        single("nsqd_channels", "gauge", "Channels.", channels),
        connections,
        single("nsqd_connections_admitted_total", "counter", "TCP connections admitted.", nsqd.sessions_admitted),
        single("nsqd_producers", "gauge", "TCP connections that have published.", len(nsqd.producers)),
        single("nsqd_log_bytes", "gauge", "Bytes of all logs on disk.", sum(map(_log_bytes, nsqd.topics.values()))),
        single("nsqd_disk_bytes", "gauge", "Bytes that count in --max-disk-bytes.", logs.disk_bytes),
        single("nsqd_cache_bytes", "gauge", "Memory that holds parts of the logs.", logs.cache.used_bytes),
        single("nsqd_cache_limit_bytes", "gauge", "The most of it: --cache-bytes.", logs.cache.budget_bytes),
        of_histogram("nsqd_commit_messages", "Messages written to a log at once.", logs.commit_messages),
        of_histogram("nsqd_fsync_seconds", "Time a round of syncs took.", logs.sync_seconds),
        single("nsqd_sync_lag_seconds", "gauge", "Age of the oldest write that is not synced.", logs.syncer.lag_s),
        of_histogram("nsqd_loop_delay_seconds", "How late the event loop ran a timer.", nsqd.loop_delay.seconds),
        single("nsqd_loop_turns_total", "counter", "Turns of the event loop with work to do.", nsqd.turn.count),
    ]


def _process(nsqd: Nsqd, figures: ProcessFigures) -> list[Family]:
    """Makes the figures of the process, under the names all Prometheus clients use."""
    return [
        single("process_cpu_seconds_total", "counter", "CPU time used.", figures.cpu_seconds),
        single("process_resident_memory_bytes", "gauge", "Memory in use.", figures.resident_bytes),
        single("process_virtual_memory_bytes", "gauge", "Address space in use.", figures.virtual_bytes),
        single("process_start_time_seconds", "gauge", "When nsqd started, since 1970.", nsqd.start_time),
        single("process_open_fds", "gauge", "Open file descriptors.", figures.open_files),
        single("process_max_fds", "gauge", "The most of them.", figures.open_files_max),
        single("process_threads", "gauge", "Threads.", figures.threads),
    ]
