"""Asks nsqds for the clients of the channels that somebody looks at, since all clients would be too many to poll."""

from __future__ import annotations

import asyncio
import time
from typing import Final
from urllib.parse import quote_plus

from nsquark.admin.cluster import ClusterClient
from nsquark.admin.errors import UpstreamError
from nsquark.admin.snapshot import ClientInfo, Snapshot, StatsAnswer

WATCHED_MAX: Final = 64
WATCHED_S: Final = 10.0
"""Clients are asked for until this long after somebody last looked."""
ANSWER_S_MAX: Final = 0.8
CLIENTS_MAX: Final = 2000
"""At most this many clients of one channel, or of one nsqd, are shown."""

Place = tuple[str, str, str]
"""This is a topic, a channel and an nsqd. Without an nsqd all are meant; an nsqd alone means all of its channels."""


class Clients:
    """Keeps the clients of each watched place as they were at the last poll."""

    def __init__(self, cluster: ClusterClient) -> None:
        self._cluster = cluster
        self._seen: dict[Place, tuple[ClientInfo, ...]] = {}
        self._watched_at: dict[Place, float] = {}
        self._asking: dict[Place, asyncio.Task[None]] = {}

    def watch(self, topic: str, channel: str, node: str = "") -> None:
        """Makes each poll ask for these clients, for the next `WATCHED_S`."""
        place = topic, channel, node
        self._watched_at.pop(place, None)
        if len(self._watched_at) >= WATCHED_MAX:
            self._forget(next(iter(self._watched_at)))
        self._watched_at[place] = time.monotonic()

    def seen(self, topic: str, channel: str, node: str = "") -> tuple[ClientInfo, ...]:
        """Returns the clients of the last poll, in the order of host names."""
        return self._seen.get((topic, channel, node), ())

    async def fetch(self, snapshot: Snapshot, topic: str, channel: str, node: str = "") -> tuple[ClientInfo, ...]:
        """Asks for the clients as they are now, and watches them."""
        place = topic, channel, node
        self.watch(*place)
        await self._asked(snapshot, place)
        return self.seen(*place)

    async def refresh(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        for place in [each for each, at in self._watched_at.items() if now - at > WATCHED_S]:
            self._forget(place)
        await asyncio.gather(*(self._asked(snapshot, place) for place in list(self._watched_at)))

    async def stop(self) -> None:
        for task in self._asking.values():
            task.cancel()

    def _forget(self, place: Place) -> None:
        self._watched_at.pop(place, None)
        self._seen.pop(place, None)

    async def _asked(self, snapshot: Snapshot, place: Place) -> None:
        """Asks for the clients of a place, or waits for the request that does so already."""
        task = self._asking.get(place)
        if task is None:
            task = self._asking[place] = asyncio.create_task(self._ask(snapshot, place))
            task.add_done_callback(lambda _: self._asking.pop(place, None))
        await asyncio.shield(task)

    async def _ask(self, snapshot: Snapshot, place: Place) -> None:
        topic, channel, _ = place
        target = "/stats?format=json&include_mem=false"
        if topic:
            target += f"&topic={quote_plus(topic)}&channel={quote_plus(channel)}"
        answers = await asyncio.gather(*(self._of_node(address, target) for address in _nodes(snapshot, place)))
        found = [client for clients in answers for client in clients]
        found.sort(key=lambda client: (client.hostname, client.node, client.remote_address))
        if place in self._watched_at:
            self._seen[place] = tuple(found[:CLIENTS_MAX])

    async def _of_node(self, address: str, target: str) -> list[ClientInfo]:
        """Asks one nsqd for its clients. It returns none if the nsqd does not answer: the page says so elsewhere."""
        try:
            stats = await self._cluster.get(address, target, StatsAnswer, timeout_s=ANSWER_S_MAX)
        except UpstreamError:
            return []
        clients = []
        for topic in stats.topics or ():
            for channel in topic.channels:
                for client in channel.clients or ():
                    client.node, client.topic, client.channel = address, topic.name, channel.name
                    clients.append(client)
        return clients


def _nodes(snapshot: Snapshot, place: Place) -> list[str]:
    topic, channel, node = place
    if node:
        return [node] if node in snapshot.nodes else []
    found = snapshot.channel(topic, channel)
    return [each.node for each in found.nodes] if found is not None else []
