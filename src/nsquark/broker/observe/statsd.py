"""Pushes to a statsd: keys, order and packing are NSQ's, so that existing dashboards go on working.

Each push opens its own socket, since the address behind a name may change, and keeps it until the next one: what the
network says of a datagram comes back later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from nsquark.base.addresses import split_address
from nsquark.broker.http.config import statsd_prefix
from nsquark.broker.observe.process import MemoryStats, memory_stats
from nsquark.broker.observe.stats import ChannelStats, LatencyStats, NsqdStats, TopicStats, collect_stats
from nsquark.web.fairness import TurnPace
from nsquark.wire.names import is_ephemeral

if TYPE_CHECKING:
    from nsquark.broker.nsqd import Nsqd

INTERVAL_S_MIN: Final = 0.1
"""A shorter --statsd-interval becomes this; NSQ does not survive one of a second or less."""
QUIET_S: Final = 1.0
"""The datagrams of a push are spread over the interval less this."""


class StatsdSocket(asyncio.DatagramProtocol):
    """Sends one push, and listens for nothing but errors."""

    def __init__(self, pusher: StatsdPusher) -> None:
        self._pusher = pusher

    def error_received(self, error: Exception) -> None:
        self._pusher.failed(error)


class StatsdPusher:
    """Pushes the figures. A counter is sent as its rise since the last push; `_last` has what it was then."""

    def __init__(self, nsqd: Nsqd) -> None:
        options = nsqd.options
        self._nsqd = nsqd
        self._interval_s = max(options.statsd_interval.seconds, INTERVAL_S_MIN)
        self._last: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._transport: asyncio.DatagramTransport | None = None
        self._reported = ""
        self._has_failed = False

    async def run(self) -> None:
        """Pushes until cancelled. A push that takes longer than the interval delays the next one."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        try:
            while True:
                due_s = max(due_s + self._interval_s, loop.time())
                await asyncio.sleep(due_s - loop.time())
                try:
                    await self._push(loop)
                except Exception as error:
                    self.failed(error)
        finally:
            self._close()

    async def _push(self, loop: asyncio.AbstractEventLoop) -> None:
        address = self._nsqd.options.statsd_address
        self._close()
        self._nsqd.logger.info(f"STATSD: pushing stats to {address}")
        self._transport, _ = await loop.create_datagram_endpoint(
            lambda: StatsdSocket(self), remote_addr=split_address(address)
        )
        packets = pack(await self._lines(), self._nsqd.options.statsd_udp_packet_size)
        pause_s = max(self._interval_s - QUIET_S, 0) / max(len(packets), 1)
        for packet in packets:
            self._transport.sendto(packet)
            await asyncio.sleep(pause_s)

    def failed(self, error: Exception) -> None:
        """Logs a failure once, and again only after a push that went well."""
        self._has_failed = True
        if str(error) != self._reported:
            self._reported = str(error)
            address = self._nsqd.options.statsd_address
            self._nsqd.logger.error(f"STATSD: failed to push stats to {address} - {error}; check --statsd-address")

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None
            if not self._has_failed:
                self._reported = ""
        self._has_failed = False

    # -- what is sent ------------------------------------------------------------------------------------

    async def _lines(self) -> list[bytes]:
        prefix = statsd_prefix(self._nsqd)
        stats = await collect_stats(self._nsqd, include_clients=False)
        memory = memory_stats() if self._nsqd.options.statsd_mem_stats else None
        lines: list[bytes] = []
        pace = TurnPace()
        for line in self._keys(stats, memory):
            lines.append(f"{prefix}{line}\n".encode())
            await pace.step()
        self._last, self._seen = self._seen, {}
        return lines

    def _keys(self, stats: NsqdStats, memory: MemoryStats | None) -> Iterator[str]:
        without_ephemeral = self._nsqd.options.statsd_exclude_ephemeral
        for topic in stats.topics or ():
            if not (without_ephemeral and is_ephemeral(topic.topic_name)):
                yield from self._topic(topic, without_ephemeral)
        if memory is not None:
            yield from self._memory(memory)

    def _topic(self, topic: TopicStats, without_ephemeral: bool) -> Iterator[str]:
        key = f"topic.{topic.topic_name}"
        yield self._counter(f"{key}.message_count", topic.message_count)
        yield self._counter(f"{key}.message_bytes", topic.message_bytes)
        yield _gauge(f"{key}.depth", topic.depth)
        yield _gauge(f"{key}.backend_depth", topic.backend_depth)
        yield from _latency(key, topic.e2e_processing_latency)
        for channel in topic.channels:
            if not (without_ephemeral and is_ephemeral(channel.channel_name)):
                yield from self._channel(f"{key}.channel.{channel.channel_name}", channel)

    def _channel(self, key: str, channel: ChannelStats) -> Iterator[str]:
        yield self._counter(f"{key}.message_count", channel.message_count)
        yield _gauge(f"{key}.depth", channel.depth)
        yield _gauge(f"{key}.backend_depth", channel.backend_depth)
        yield _gauge(f"{key}.in_flight_count", channel.in_flight_count)
        yield _gauge(f"{key}.deferred_count", channel.deferred_count)
        yield self._counter(f"{key}.requeue_count", channel.requeue_count)
        yield self._counter(f"{key}.timeout_count", channel.timeout_count)
        yield _gauge(f"{key}.clients", channel.client_count)
        yield from _latency(key, channel.e2e_processing_latency)

    def _memory(self, memory: MemoryStats) -> Iterator[str]:
        yield _gauge("mem.heap_objects", memory.heap_objects)
        yield _gauge("mem.heap_idle_bytes", memory.heap_idle_bytes)
        yield _gauge("mem.heap_in_use_bytes", memory.heap_in_use_bytes)
        yield _gauge("mem.heap_released_bytes", memory.heap_released_bytes)
        yield _gauge("mem.gc_pause_usec_100", memory.gc_pause_usec_100)
        yield _gauge("mem.gc_pause_usec_99", memory.gc_pause_usec_99)
        yield _gauge("mem.gc_pause_usec_95", memory.gc_pause_usec_95)
        yield _gauge("mem.next_gc_bytes", memory.next_gc_bytes)
        yield self._counter("mem.gc_runs", memory.gc_total_runs)

    def _counter(self, key: str, value: int) -> str:
        """Writes a counter's rise; one that is less than last time began anew: its topic was deleted and made again."""
        self._seen[key] = value
        last = self._last.get(key, 0)
        return f"{key}:{value - last if value >= last else value}|c"


def _gauge(key: str, value: int) -> str:
    return f"{key}:{value}|g"


def _latency(key: str, latency: LatencyStats) -> Iterator[str]:
    for percentile in latency.percentiles or ():
        yield _gauge(f"{key}.e2e_processing_latency_{percentile.quantile * 100:.0f}", percentile.value)


def pack(lines: Iterable[bytes], packet_bytes_max: int) -> list[bytes]:
    """Puts whole lines together in as few packets as keep to the size; a line longer than that goes alone."""
    packets: list[bytes] = []
    packet = b""
    for line in lines:
        if packet and len(packet) + len(line) > packet_bytes_max:
            packets.append(packet)
            packet = b""
        packet += line
    if packet:
        packets.append(packet)
    return packets
