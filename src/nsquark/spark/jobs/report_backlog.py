"""Asks the nsqds what channels have not finished yet, for a report: consumers leave no trace in the log."""

from dataclasses import dataclass, field

import msgspec

from nsquark.spark.endpoint import Endpoint, NsqdError
from nsquark.spark.nsqd_http import Finder
from nsquark.spark.options import SourceOptions
from nsquark.spark.source.cluster import is_wanted


@dataclass(frozen=True)
class ChannelBacklog:
    """Counts what one channel has not finished, on all nsqds."""

    topic: str
    channel: str
    depth: int
    """This many messages wait to be sent."""
    in_flight: int
    deferred: int
    consumers: int

    @property
    def open(self) -> int:
        """Returns how many messages are not finished."""
        return self.depth + self.in_flight + self.deferred


@dataclass(frozen=True)
class Backlog:
    """Holds what channels have not finished, or why that is not known."""

    channels: list[ChannelBacklog] = field(default_factory=list)
    """The channels are in order, the largest backlog first."""
    addresses: dict[str, str] = field(default_factory=dict)
    """These are the addresses of the nsqds, by id."""
    unknown: str = ""
    """This says why nothing is known, if that is so."""


class _Channel(msgspec.Struct):
    channel_name: str
    depth: int = 0
    in_flight_count: int = 0
    deferred_count: int = 0
    client_count: int = 0


class _Topic(msgspec.Struct):
    topic_name: str
    channels: list[_Channel] = []


class _ChannelStats(msgspec.Struct):
    topics: list[_Topic] = []


def ask_backlog(options: SourceOptions) -> Backlog:
    """Asks all nsqds for their backlog. If that fails, the page says so: it is no reason for a report to fail."""
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
        stats = endpoint.read_as(endpoint.ask("/stats", format="json", include_clients="false"), _ChannelStats)
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
