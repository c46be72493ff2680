"""Knows who produces what: nsqlookupd's whole database, in memory.

The same facts are stored twice, by name for `/lookup` and by producer for `/nodes` and for a disconnect, so no answer
scans the whole table. A registration costs two dictionary entries, about 110 bytes; names are shared.
"""

import time
from collections.abc import Callable, Iterator
from sys import intern

from nsquark.lookupd.peer import PeerInfo
from nsquark.wire.names import is_ephemeral


class RegistryProducer:
    """Is one identified connection of an nsqd; a second connection of the same nsqd is another producer.

    Always: `producer in key.producers` exactly if `key in producer.keys`; only those have tombstones.
    """

    __slots__ = ("id", "info", "json", "keys", "last_update_ns", "tombstones")

    def __init__(self, info: PeerInfo, json: bytes, now_ns: int) -> None:
        self.id = info.remote_address
        self.info = info
        self.json = json
        """Is the JSON that `/lookup` shows. It never changes, so it is written once instead of at every request."""
        self.last_update_ns = now_ns
        self.keys: dict[RegistryKey, None] = {}
        self.tombstones: dict[RegistryKey, int] = {}
        """Has the time when each topic was tombstoned, even if long ago."""

    def topics(self) -> list["RegistryKey"]:
        return [key for key in self.keys if not key.channel]


class RegistryKey:
    """Is a topic (no channel) or a channel, with its producers in the order they came."""

    __slots__ = ("channel", "producers", "topic")

    def __init__(self, topic: str, channel: str = "") -> None:
        self.topic = intern(topic)
        self.channel = intern(channel)
        self.producers: dict[RegistryProducer, None] = {}

    @property
    def category(self) -> str:
        return "channel" if self.channel else "topic"

    def __str__(self) -> str:
        """Names the key as NSQ's logs do."""
        return f"category:{self.category} key:{self.topic} subkey:{self.channel}"

    def add(self, producer: RegistryProducer) -> bool:
        """Adds a producer; returns False if it was there already: then nothing changes, a tombstone included."""
        if producer in self.producers:
            return False
        self.producers[producer] = None
        producer.keys[self] = None
        return True

    def remove(self, producer: RegistryProducer) -> bool:
        if producer not in self.producers:
            return False
        del self.producers[producer]
        self._forget(producer)
        return True

    def clear(self) -> None:
        for producer in self.producers:
            self._forget(producer)
        self.producers.clear()

    def _forget(self, producer: RegistryProducer) -> None:
        del producer.keys[self]
        producer.tombstones.pop(self, None)


class Registry:
    """Has all keys and producers. Times are monotonic: a step of the wall clock must not hide the cluster.

    Always: a key that lost its last producer stays listed, so that a new nsqd learns the topic's channels;
    only an `#ephemeral` key goes when UNREGISTER empties it.
    """

    def __init__(
        self,
        inactive_producer_timeout_ns: int,
        tombstone_lifetime_ns: int,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._inactive_producer_timeout_ns = inactive_producer_timeout_ns
        self._tombstone_lifetime_ns = tombstone_lifetime_ns
        self.clock_ns = clock_ns
        self.producers: dict[RegistryProducer, None] = {}
        self.topics: dict[str, RegistryKey] = {}
        # Channels stand beside topics, not below them: a channel's key outlives that of an ephemeral topic.
        self.channels: dict[str, dict[str, RegistryKey]] = {}

    # -- what connections do -----------------------------------------------------------------------------

    def identify(self, info: PeerInfo, json: bytes) -> RegistryProducer:
        producer = RegistryProducer(info, json, self.clock_ns())
        self.producers[producer] = None
        return producer

    def ping(self, producer: RegistryProducer) -> int:
        """Remembers when a producer was heard of; returns the nanoseconds since the last time."""
        before, producer.last_update_ns = producer.last_update_ns, self.clock_ns()
        return producer.last_update_ns - before

    def register(self, producer: RegistryProducer, topic: str, channel: str) -> list[RegistryKey]:
        """Registers a producer; returns the keys it was not yet registered under."""
        keys = [self._channel_key(topic, channel)] if channel else []
        keys.append(self._topic_key(topic))
        return [key for key in keys if key.add(producer)]

    def unregister_channel(self, producer: RegistryProducer, topic: str, channel: str) -> RegistryKey | None:
        key = self.channels.get(topic, {}).get(channel)
        if key is None:
            return None
        removed = key.remove(producer)
        if not key.producers and is_ephemeral(channel):
            self._drop_channel(key)
        return key if removed else None

    def unregister_topic(self, producer: RegistryProducer, topic: str) -> list[RegistryKey]:
        """Takes a producer out of a topic; returns the keys it was registered under: channels, which should have gone
        before, then the topic.
        """
        channels = self.channels.get(topic, {}).values()
        removed = [key for key in channels if key.remove(producer)]
        key = self.topics.get(topic)
        if key is not None:
            if key.remove(producer):
                removed.append(key)
            if not key.producers and is_ephemeral(topic):
                del self.topics[topic]
        return removed

    def disconnect(self, producer: RegistryProducer) -> list[RegistryKey]:
        """Forgets the producer. Keys stay, even ephemeral ones: its nsqd may be back in a moment."""
        keys = list(producer.keys)
        for key in keys:
            del key.producers[producer]
        producer.keys.clear()
        producer.tombstones.clear()
        self.producers.pop(producer, None)
        return keys

    # -- what operators do -------------------------------------------------------------------------------

    def create_topic(self, topic: str) -> None:
        self._topic_key(topic)

    def create_channel(self, topic: str, channel: str) -> None:
        self._channel_key(topic, channel)
        self._topic_key(topic)

    def delete_topic(self, topic: str) -> list[RegistryKey]:
        """Deletes a topic; returns its keys. Live nsqds are not told, and come back only with a new REGISTER."""
        removed = list(self.channels.pop(topic, {}).values())
        key = self.topics.pop(topic, None)
        if key is not None:
            removed.append(key)
        for gone in removed:
            gone.clear()
        return removed

    def delete_channel(self, topic: str, channel: str) -> bool:
        key = self.channels.get(topic, {}).get(channel)
        if key is None:
            return False
        self._drop_channel(key)
        key.clear()
        return True

    def tombstone(self, topic: str, node: str) -> None:
        key = self.topics.get(topic)
        if key is None:
            return
        now_ns = self.clock_ns()
        for producer in key.producers:
            if producer.info.node == node:
                producer.tombstones[key] = now_ns

    # -- what consumers and operators ask ----------------------------------------------------------------

    def channels_of(self, topic: str) -> list[str]:
        return list(self.channels.get(topic, ()))

    def live_producers_of(self, key: RegistryKey) -> list[RegistryProducer]:
        """Returns the producers that a consumer should connect to: heard of lately, and not
        tombstoned for this topic.
        """
        heard_after_ns = self.clock_ns() - self._inactive_producer_timeout_ns
        return [
            producer
            for producer in key.producers
            if producer.last_update_ns >= heard_after_ns
            and not (producer.tombstones and self.is_tombstoned(producer, key))
        ]

    def active_producers(self) -> list[RegistryProducer]:
        heard_after_ns = self.clock_ns() - self._inactive_producer_timeout_ns
        return [producer for producer in self.producers if producer.last_update_ns >= heard_after_ns]

    def is_tombstoned(self, producer: RegistryProducer, key: RegistryKey) -> bool:
        tombstoned_ns = producer.tombstones.get(key)
        return tombstoned_ns is not None and self.clock_ns() - tombstoned_ns < self._tombstone_lifetime_ns

    def all_keys(self) -> Iterator[RegistryKey]:
        yield from self.topics.values()
        for channels in self.channels.values():
            yield from channels.values()

    def _topic_key(self, topic: str) -> RegistryKey:
        key = self.topics.get(topic)
        if key is None:
            key = RegistryKey(topic)
            self.topics[key.topic] = key
        return key

    def _channel_key(self, topic: str, channel: str) -> RegistryKey:
        channels = self.channels.setdefault(intern(topic), {})
        key = channels.get(channel)
        if key is None:
            key = RegistryKey(topic, channel)
            channels[key.channel] = key
        return key

    def _drop_channel(self, key: RegistryKey) -> None:
        channels = self.channels[key.topic]
        del channels[key.channel]
        if not channels:
            del self.channels[key.topic]
