"""Channels as positions: where a new one starts, seeking, and committing what was read by range."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nsquark.broker.channel import Channel, RangeChannelError
from nsquark.broker.http.arguments import NsqdArguments, require_stored
from nsquark.broker.http.channel_messages import require_existing
from nsquark.broker.topic import Topic
from nsquark.web.arguments import INT64_MAX, Refusal, decimal, invalid
from nsquark.web.messages import Request, Response, empty
from nsquark.wire.names import is_ephemeral

if TYPE_CHECKING:
    from nsquark.broker.http.log_read import LogApi

OWNER_CHARS_MAX = 128
TTL_S_MAX = 10 * 365 * 86400.0
POSITION_CHARS_MAX = 32
TIME_PREFIX = "time:"
NS_PER_MS = 1_000_000


class ChannelPositions:
    def __init__(self, api: LogApi) -> None:
        self._api = api

    async def start_position(self, topic: Topic, text: str, name: str = "start") -> int:
        """What `oldest`, `newest`, a sequence number or `time:<unix ms>` means now."""
        extents = topic.log.extents
        if text == "oldest":
            return extents.first
        if text == "newest":
            return topic.log.head
        if text.startswith(TIME_PREFIX):
            time_ms = decimal(text.removeprefix(TIME_PREFIX))
            if time_ms is not None and time_ms <= INT64_MAX // NS_PER_MS:
                require_stored(topic)
                return await self._api.first_at_time(topic, time_ms * NS_PER_MS)
        seq = decimal(text)
        if seq is None:
            raise invalid(name, "oldest, newest, a sequence number or time:<milliseconds since 1970>")
        return min(max(seq, extents.first), topic.log.head)

    async def create(self, topic: Topic, name: str, start: str) -> Response:
        """POST /channel/create with `start`, which is for a new channel: one that exists stays where it is."""
        try:
            position = await self.start_position(topic, start)
            _require_alive(topic)
            topic.channel(name, position)
        except Refusal as refusal:
            return self._api.refuse(refusal)
        return empty()

    async def seek(self, arguments: NsqdArguments, request: Request) -> dict[str, Any]:
        """Empties a channel and sets it somewhere else."""
        channel = arguments.channel()
        owner = arguments.text("owner", OWNER_CHARS_MAX) if "owner" in arguments else ""
        position = await self.start_position(channel.topic, arguments.text("to", POSITION_CHARS_MAX), "to")
        require_existing(channel)
        if channel.owner and channel.owner != owner:
            raise _owned(channel)
        channel.empty()
        channel.restart_at(position)
        return _standing(channel)

    async def preview(self, arguments: NsqdArguments, request: Request) -> dict[str, Any]:
        """What a seek to the same place would do; nothing is changed."""
        channel = arguments.channel()
        topic = channel.topic
        target = await self.start_position(topic, arguments.text("to", POSITION_CHARS_MAX), "to")
        require_existing(channel)
        come_again, passed_over = channel.seek_counts(target)
        return {
            **_standing(channel),
            "target": topic.log.extents.at_or_after(target),
            "come_again": come_again,
            "passed_over": passed_over,
            "in_flight": channel.ledger.in_flight,
            "requeued": channel.ledger.queued + channel.ledger.deferred,
            "owner": channel.owner,
        }

    async def commit(self, arguments: NsqdArguments, request: Request) -> dict[str, Any]:
        """A reader by range has done with everything below `seq`; its channel is made if it is not there."""
        topic = arguments.topic()
        name = arguments.name("channel")
        if is_ephemeral(name):
            raise Refusal(400, "EPHEMERAL_CHANNEL", reason="a channel that is read by range must be one that is kept")
        owner = arguments.text("owner", OWNER_CHARS_MAX)
        seq = arguments.number("seq", 0, INT64_MAX)
        ttl_ms = int(arguments.seconds("ttl", TTL_S_MAX) * 1000)
        channel = topic.channels.get(name)
        if channel is None:
            start = arguments.text("start", POSITION_CHARS_MAX) if "start" in arguments else "oldest"
            position = await self.start_position(topic, start)
            _require_alive(topic)
            channel = topic.channel(name, position)
        try:
            channel.commit(owner, seq, ttl_ms)
        except RangeChannelError as error:
            if channel.owner:
                raise _owned(channel) from None
            raise Refusal(409, "USED_BY_SUBSCRIBERS", reason=str(error)) from None
        return {**_standing(channel), "owner": channel.owner}


def _require_alive(topic: Topic) -> None:
    """A topic may be deleted while a position in it is looked up."""
    if topic.is_exiting:
        raise Refusal(404, "TOPIC_NOT_FOUND")


def _owned(channel: Channel) -> Refusal:
    return Refusal(409, "OWNED", owner=channel.owner, reason="commit as its owner, or to another channel")


def _standing(channel: Channel) -> dict[str, Any]:
    topic = channel.topic
    return {
        "topic": topic.name,
        "channel": channel.name,
        "position": topic.log.extents.at_or_after(channel.ledger.floor),
        "depth": channel.depth,
        "next": topic.log.head,
    }
