"""Reads what requests to nsqd may name, and makes refusals and headers of its Log API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsquark.broker.topic import Topic
from nsquark.web.arguments import CHALLENGE, Arguments, Refusal
from nsquark.web.messages import NSQ_HEADER, Request

if TYPE_CHECKING:
    from nsquark.broker.channel import Channel
    from nsquark.broker.nsqd import Nsqd

RETRY_AFTER = ("Retry-After", "1")
OFF_WORDS = ("false", "0")
"""Each of these words, as the value of an argument, switches it off, as in NSQ."""


class NsqdArguments(Arguments):
    """Reads the query of a request to nsqd, with the topics and channels that it names."""

    def __init__(self, nsqd: Nsqd, request: Request) -> None:
        super().__init__(request)
        self._nsqd = nsqd

    def topic(self) -> Topic:
        """Finds a topic that exists; an invalid name is refused first."""
        return self.topic_named(self.name("topic"))

    def topic_named(self, name: str) -> Topic:
        """Finds the topic of this name, whatever the name looks like."""
        return require_topic(self._nsqd, name)

    def stored_topic(self) -> Topic:
        topic = self.topic()
        require_stored(topic)
        return topic

    def topic_and_channel_name(self) -> tuple[Topic, str]:
        """Finds a topic that exists, and a channel's name; invalid names are refused before a missing topic."""
        topic_name, name = self.name("topic"), self.name("channel")
        return self.topic_named(topic_name), name

    def channel(self) -> Channel:
        """Finds a channel that exists."""
        topic, name = self.topic_and_channel_name()
        channel = topic.channels.get(name)
        if channel is None:
            raise Refusal(404, "CHANNEL_NOT_FOUND")
        return channel


def require_topic(nsqd: Nsqd, name: str) -> Topic:
    """Finds a topic that exists."""
    topic = find_topic(nsqd, name)
    if topic is None:
        raise Refusal(404, "TOPIC_NOT_FOUND")
    return topic


def find_topic(nsqd: Nsqd, name: str) -> Topic | None:
    """Finds a topic, or None if there is none; one whose files could not be opened is not missing, and is refused."""
    topic = nsqd.topics.get(name)
    if topic is None:
        try:
            nsqd.require_openable(name)
        except OSError as error:
            raise disk_error(error) from None
    return topic


def require_stored(topic: Topic) -> None:
    if topic.directory is None:
        raise Refusal(400, "EPHEMERAL_TOPIC", reason="an ephemeral topic has no file; use a topic that is kept")


def disk_error(error: Exception) -> Refusal:
    return Refusal(503, "DISK_ERROR", reason=str(error))


def extra_headers(nsqd_id: str, status: int) -> tuple[tuple[str, str], ...]:
    """Makes the headers of every answer: which nsqd gave it and, if it asks to try again, when."""
    identity = (NSQ_HEADER, ("X-Nsquark-Id", nsqd_id))
    if status == 401:
        return (*identity, CHALLENGE)
    return (*identity, RETRY_AFTER) if status == 503 else identity
