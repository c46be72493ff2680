"""Asks all nsqlookupds or nsqds at once, as NSQ's nsqadmin does for its /api.

A result has the answers of those that gave one, together with the errors of the others. AllFailed is raised if none
answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar
from urllib.parse import quote_plus

import msgspec

from nsquark.admin.announced import AnnouncedNsqd, AnnouncedNsqds
from nsquark.admin.api_types import ApiChannel, ApiNode, ApiNodeTopic, ApiTopic, add_channel, complete_topic
from nsquark.admin.assembly import version_key
from nsquark.admin.cluster import ClusterClient
from nsquark.admin.errors import AllFailed, UpstreamError
from nsquark.base.addresses import join_address, split_address

T = TypeVar("T")

ASKED_AT_ONCE_MAX: Final = 64
INACTIVE_TOPICS_MAX: Final = 10_000


@dataclass(slots=True)
class Answers(Generic[T]):
    """Holds what was answered, and the errors of those that did not answer."""

    value: T
    errors: list[UpstreamError] = field(default_factory=list)


class _TopicList(msgspec.Struct):
    topics: list[str] | None = None


class _Channels(msgspec.Struct):
    channels: list[str] | None = None


class _StatsTopics(msgspec.Struct):
    """Decodes only the names of topics from /stats."""

    class Named(msgspec.Struct):
        topic_name: str = ""

    topics: list[Named] | None = None

    def names(self) -> list[str]:
        return [topic.topic_name for topic in self.topics or ()]


class _StatsAnswer(msgspec.Struct):
    topics: list[ApiTopic] | None = None


@dataclass(slots=True)
class StatsOfAll:
    topics: list[ApiTopic]
    channels: dict[str, ApiChannel]
    """These are summed up over the nsqds; the key is the name, or `topic:channel` if all topics were asked for."""


class Survey:
    """Asks all nsqlookupds or nsqds, at most ASKED_AT_ONCE_MAX at the same time."""

    def __init__(self, cluster: ClusterClient) -> None:
        self._cluster = cluster
        self._places = asyncio.Semaphore(ASKED_AT_ONCE_MAX)

    async def topics(self) -> Answers[list[str]]:
        if self._cluster.lookupds:
            said = await self._all("nsqlookupd", self._cluster.lookupds, self._lookupd_topics)
        else:
            said = await self._all("nsqd", self._cluster.nsqds, self._nsqd_topics)
        return Answers(sorted({name for _, names in said.value for name in names}), said.errors)

    async def _channels(self, lookupds: Sequence[str], topic: str) -> list[str]:
        """Returns the channels of a topic that nsqlookupds know, without the errors of those that do not answer."""

        async def ask(address: str) -> list[str]:
            target = f"/channels?topic={quote_plus(topic)}"
            return (await self._cluster.get(address, target, _Channels)).channels or []

        said = await self._each(lookupds, ask)
        return sorted({name for _, names in said.value for name in names})

    async def inactive(self, lookupds: Sequence[str]) -> Answers[dict[str, list[str]]]:
        """Returns topics that these nsqlookupds know and no nsqd produces, with their channels. Those that do not tell
        their topics are not asked about each of them.
        """
        said = await self._all("nsqlookupd", lookupds, self._lookupd_topics)
        answering = [address for address, _ in said.value]

        async def channels_if_inactive(topic: str) -> list[str] | None:
            try:
                producers = (await self._lookup(answering, topic)).value
            except AllFailed:
                return None  # nobody tells, and somebody may have it
            return None if producers else await self._channels(answering, topic)

        names = sorted({name for _, topics in said.value for name in topics})[:INACTIVE_TOPICS_MAX]
        found = await asyncio.gather(*map(channels_if_inactive, names))
        inactive = {name: channels for name, channels in zip(names, found, strict=True) if channels is not None}
        return Answers(inactive, said.errors)

    async def nodes(self) -> Answers[list[ApiNode]]:
        if not self._cluster.lookupds:
            said = await self._all("nsqd", self._cluster.nsqds, self._describe_nsqd)
            return Answers([node for _, node in said.value], said.errors)
        heard = await self._all("nsqlookupd", self._cluster.lookupds, self._lookupd_nodes)
        by_address: dict[str, ApiNode] = {}
        for lookupd, peers in heard.value:
            for peer in peers:
                key = join_address(peer.broadcast_address, peer.tcp_port)
                if key not in by_address:
                    node = by_address[key] = _node(peer)
                    node.remote_addresses = []
                    (node.topics or []).sort(key=lambda each: each.topic)
                remotes = by_address[key].remote_addresses
                assert remotes is not None
                remotes.append(f"{lookupd}/{peer.remote_address or 'N/A'}")
        newest = max((version_key(node.version) for node in by_address.values()), default=())
        for node in by_address.values():
            node.out_of_date = version_key(node.version) < newest
        return Answers(sorted(by_address.values(), key=lambda node: node.hostname), heard.errors)

    async def producers_of(self, topic: str) -> Answers[list[ApiNode]]:
        if not self._cluster.lookupds:
            return await self._nsqds_producing(topic)
        return await self._lookup(self._cluster.lookupds, topic)

    async def _lookup(self, lookupds: Sequence[str], topic: str) -> Answers[list[ApiNode]]:
        async def ask(address: str) -> list[AnnouncedNsqd]:
            target = f"/lookup?topic={quote_plus(topic)}"
            return (await self._cluster.get(address, target, AnnouncedNsqds)).producers or []

        said = await self._all("nsqlookupd", lookupds, ask)
        found: dict[str, ApiNode] = {}
        for _, peers in said.value:
            for peer in peers:
                found.setdefault(peer.http_address, _node(peer))
        return Answers(list(found.values()), said.errors)

    async def stats(
        self, nodes: Sequence[ApiNode], topic: str = "", channel: str = "", *, with_clients: bool
    ) -> Answers[StatsOfAll]:
        target = "/stats?format=json"
        if topic:
            target += f"&topic={quote_plus(topic)}" + (f"&channel={quote_plus(channel)}" if channel else "")
        if not with_clients:
            target += "&include_clients=false"
        hostnames = {node.http_address: node.hostname for node in nodes}

        async def ask(address: str) -> list[ApiTopic]:
            return (await self._cluster.get(address, target, _StatsAnswer)).topics or []

        said = await self._all("nsqd", [node.http_address for node in nodes], ask)
        found = StatsOfAll([], {})
        for address, topics in said.value:
            for each in topics:
                if topic and each.topic_name != topic:
                    continue
                complete_topic(each, address, hostnames[address])
                found.topics.append(each)
                for one in each.channels or ():
                    key = one.channel_name if topic else f"{each.topic_name}:{one.channel_name}"
                    if key not in found.channels:
                        found.channels[key] = ApiChannel(
                            node=address, topic_name=each.topic_name, channel_name=one.channel_name
                        )
                    add_channel(found.channels[key], one)
        found.topics.sort(key=lambda each: (each.hostname, each.node))
        return Answers(found, said.errors)

    async def post_each(self, addresses: Iterable[str], target: str) -> Answers[list[tuple[str, bytes]]]:
        return await self._each(list(addresses), lambda address: self._cluster.post(address, target))

    # -- one nsqlookupd or nsqd --------------------------------------------------------------------------

    async def _lookupd_topics(self, address: str) -> list[str]:
        return (await self._cluster.get(address, "/topics", _TopicList)).topics or []

    async def _nsqd_topics(self, address: str) -> list[str]:
        return (await self._cluster.get(address, "/stats?format=json", _StatsTopics)).names()

    async def _lookupd_nodes(self, address: str) -> list[AnnouncedNsqd]:
        return (await self._cluster.get(address, "/nodes", AnnouncedNsqds)).producers or []

    async def _describe_nsqd(self, address: str) -> ApiNode:
        info = await self._cluster.get(address, "/info", AnnouncedNsqd)
        info.topics = (
            await self._cluster.get(address, "/stats?format=json&include_clients=false", _StatsTopics)
        ).names()
        return _node(info)

    async def describe(self, address: str) -> ApiNode:
        """Asks the nsqd at this address to describe itself. It raises AllFailed if the nsqd does not."""
        said = await self._all("nsqd", [address], self._describe_nsqd)
        return said.value[0][1]

    async def _nsqds_producing(self, topic: str) -> Answers[list[ApiNode]]:
        async def ask(address: str) -> ApiNode | None:
            target = f"/stats?format=json&topic={quote_plus(topic)}&include_clients=false"
            names = (await self._cluster.get(address, target, _StatsTopics)).names()
            if topic not in names:
                return None
            info = await self._cluster.get(address, "/info", AnnouncedNsqd)
            info.topics = names
            if not info.broadcast_address:
                info.broadcast_address, info.http_port = split_address(address)
            info.hostname = info.hostname or split_address(address)[0]
            return _node(info)

        said = await self._all("nsqd", self._cluster.nsqds, ask)
        return Answers([node for _, node in said.value if node is not None], said.errors)

    # -- all of a kind -----------------------------------------------------------------------------------

    async def _all(
        self, kind: str, addresses: Sequence[str], ask: Callable[[str], Awaitable[T]]
    ) -> Answers[list[tuple[str, T]]]:
        said = await self._each(addresses, ask)
        if len(said.errors) == len(addresses):
            raise AllFailed(kind, said.errors)
        return said

    async def _each(self, addresses: Sequence[str], ask: Callable[[str], Awaitable[T]]) -> Answers[list[tuple[str, T]]]:
        async def one(address: str) -> T | UpstreamError:
            async with self._places:
                try:
                    return await ask(address)
                except UpstreamError as error:
                    error.address = address
                    return error

        said: Answers[list[tuple[str, T]]] = Answers([])
        for address, answer in zip(addresses, await asyncio.gather(*map(one, addresses)), strict=True):
            if isinstance(answer, UpstreamError):
                said.errors.append(answer)
            else:
                said.value.append((address, answer))
        return said


def _node(announced: AnnouncedNsqd) -> ApiNode:
    topics = [
        ApiNodeTopic(topic=topic, tombstoned=announced.is_tombstoned(place))
        for place, topic in enumerate(announced.topics or ())
    ]
    return ApiNode(
        remote_address=announced.remote_address,
        hostname=announced.hostname,
        broadcast_address=announced.broadcast_address,
        tcp_port=announced.tcp_port,
        http_port=announced.http_port,
        version=announced.version,
        topics=topics or None,
    )
