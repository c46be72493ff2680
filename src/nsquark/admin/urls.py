"""Makes links to our own pages: names are escaped for a path, and `Urls` puts the base path before them."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, urlencode


def topic_path(topic: str) -> str:
    return f"/topics/{quote(topic, safe='')}"


def channel_path(topic: str, channel: str) -> str:
    return f"{topic_path(topic)}/{quote(channel, safe='')}"


def messages_path(topic: str) -> str:
    return f"/messages/{quote(topic, safe='')}"


def node_path(address: str) -> str:
    return f"/nodes/{quote(address, safe=':[]')}"


@dataclass(frozen=True, slots=True)
class Urls:
    """Makes links for templates."""

    base: str

    def to(self, path: str = "/", **query: object) -> str:
        arguments = {name: value for name, value in query.items() if value not in ("", None)}
        whole = f"{self.base}{path}" if path != "/" or not self.base else self.base
        return f"{whole}?{urlencode(arguments)}" if arguments else whole

    def static(self, name: str) -> str:
        return f"{self.base}/static/{name}"

    def topic(self, topic: str) -> str:
        return self.to(topic_path(topic))

    def channel(self, topic: str, channel: str) -> str:
        return self.to(channel_path(topic, channel))

    def messages(self, topic: str) -> str:
        return self.to(messages_path(topic))

    def node(self, address: str) -> str:
        return self.to(node_path(address))

    def plain_topic(self, topic: str) -> str:
        """Makes a topic's path without the base path, for scripts, which add it."""
        return topic_path(topic)
