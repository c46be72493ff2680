"""What channels have not yet handled, for a report: asked of the nsqds, as consumers leave no trace in the log."""

from dataclasses import dataclass, field

import msgspec

from nsquark.spark.endpoint import Endpoint, NsqdError
from nsquark.spark.nsqd_http import Finder
from nsquark.spark.options import SourceOptions
from nsquark.spark.source.cluster import is_wanted


@dataclass(frozen=True)
class ChannelBacklog:
    """Of one channel on all nsqds."""

    topic: str
    channel: str
    depth: int
    """Messages that wait to be sent."""
    in_flight: int
    deferred: int
    consumers: int

    @property
    def open(self) -> int:
        """All that is not finished."""
        return self.depth + self.in_flight + self.deferred


@dataclass(frozen=True)
class Backlog:
    channels: list[ChannelBacklog] = field(default_factory=list)
    """The largest first."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Where the nsqds are, by id."""
    unknown: str = ""
    """Why nothing is known, if that is so."""


class _Channel(msgspec.Struct):
    channel_name: str
    depth: int = 0
    in_flight_count: int = 0
    deferred_count: int = 0
    client_count: int = 0


class _Topic(msgspec.Struct):
    topic_name: str
    channels: list[_Channel] = []


class _Stats(msgspec.Struct):
    topics: list[_Topic] = []


def ask_backlog(options: SourceOptions) -> Backlog:
    """Now. What cannot be asked is told on the page: it is no reason for a report to fail."""
    found: dict[tuple[str, str], ChannelBacklog] = {}
    addresses: dict[str, str] = {}
    try:
        finder = Finder(options)
        for nsqd in finder.find().values():
            addresses[nsqd.id] = nsqd.address
            for topic in _topics(nsqd.address, options):
                for channel in topic.channels:
                    _add(found, topic.topic_name, channel)
    except NsqdError as error:
        return Backlog(unknown=str(error))
    if finder.unreachable:
        return Backlog(addresses=addresses, unknown="; ".join(finder.unreachable.values()))
    return Backlog(sorted(found.values(), key=lambda one: (-one.open, one.topic, one.channel)), addresses)


def _topics(address: str, options: SourceOptions) -> list[_Topic]:
    endpoint = Endpoint(address, options.access)
    try:
        stats = endpoint.read_as(endpoint.ask("/stats", format="json", include_clients="false"), _Stats)
    finally:
        endpoint.close()
    return [topic for topic in stats.topics if is_wanted(options, topic.topic_name)]


def _add(found: dict[tuple[str, str], ChannelBacklog], topic: str, channel: _Channel) -> None:
    before = found.get((topic, channel.channel_name), ChannelBacklog(topic, channel.channel_name, 0, 0, 0, 0))
    found[topic, channel.channel_name] = ChannelBacklog(
        topic,
        channel.channel_name,
        before.depth + channel.depth,
        before.in_flight + channel.in_flight_count,
        before.deferred + channel.deferred_count,
        before.consumers + channel.client_count,
    )
