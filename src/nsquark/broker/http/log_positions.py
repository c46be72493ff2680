"""Treats channels as positions: it finds where a new one starts, seeks, and commits what was read by range."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from nsquark.base.durations import NS_PER_MS
from nsquark.broker.channel import Channel, RangeChannelError
from nsquark.broker.http.arguments import NsqdArguments, require_stored, require_topic
from nsquark.broker.http.auth import Rule
from nsquark.broker.http.channel_messages import require_existing
from nsquark.broker.http.log_plan import RANGES_MAX, decoded, refused_part, require_allowed
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
COMMITS_PER_TURN = 64
"""This many commits are done before others get their turn."""

MOVE = Rule("subscribe", of_channel=True, is_ours=True)


class ChannelPositions:
    def __init__(self, api: LogApi) -> None:
        self._api = api

    async def start_position(self, topic: Topic, text: str, name: str = "start") -> int:
        """Finds what `oldest`, `newest`, a sequence number or `time:<unix ms>` means now."""
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
        """Answers POST /channel/create with `start`, which is for a new channel: one that exists stays where it is."""
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
            raise _owned_by_another(channel)
        channel.seek(position)
        return _standing(channel)

    async def preview(self, arguments: NsqdArguments, request: Request) -> dict[str, Any]:
        """Tells what a seek with the same arguments would do; nothing is changed."""
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
        """Commits for a reader by range that is done with everything below `seq`; a missing channel is made."""
        start = arguments.text("start", POSITION_CHARS_MAX) if "start" in arguments else "oldest"
        wanted = _Commit(arguments.name("topic"), arguments.number("seq", 0, INT64_MAX), start)
        return await self._commit(_Owner.read(arguments), wanted)

    async def commit_many(self, arguments: NsqdArguments, request: Request) -> dict[str, Any]:
        """Commits to one channel of many topics; each has its own answer."""
        owner = _Owner.read(arguments)
        wanted = decoded(request, _Commits).commits
        allowed = await self._api.auth.among({commit.topic for commit in wanted}, request, MOVE)
        answers: list[dict[str, Any]] = []
        for number, commit in enumerate(wanted):
            if number % COMMITS_PER_TURN == COMMITS_PER_TURN - 1:
                await asyncio.sleep(0)
            try:
                require_allowed(commit.topic, allowed)
                answers.append(await self._commit(owner, commit))
            except Refusal as refusal:
                answers.append(refused_part(commit.topic, refusal))
        return {"commits": answers}

    async def _commit(self, owner: _Owner, wanted: _Commit) -> dict[str, Any]:
        topic = require_topic(self._api.nsqd, wanted.topic)
        channel = topic.channels.get(owner.channel)
        if channel is None:
            position = await self.start_position(topic, wanted.start)
            _require_alive(topic)
            channel = topic.channel(owner.channel, position)
            is_first = False
        else:
            is_first = not channel.owner
        try:
            channel.commit(owner.name, wanted.seq, owner.ttl_ms)
        except RangeChannelError as error:
            if channel.owner:
                raise _owned_by_another(channel) from None
            raise Refusal(409, "USED_BY_SUBSCRIBERS", reason=str(error)) from None
        if is_first and wanted.seq and channel.ledger.floor > wanted.seq:
            # The channel was made before by somebody who never used it: its first owner says where it stands.
            channel.restart_at(await self.start_position(topic, str(wanted.seq)))
        return {**_standing(channel), "owner": channel.owner, "removed_to": _removed_to(topic)}


class _Owner(NamedTuple):
    """Says who commits to which channel of whatever topic."""

    channel: str
    name: str
    ttl_ms: int

    @classmethod
    def read(cls, arguments: NsqdArguments) -> _Owner:
        channel = arguments.name("channel")
        if is_ephemeral(channel):
            raise Refusal(400, "EPHEMERAL_CHANNEL", reason="a channel that is read by range must be one that is kept")
        owner = arguments.text("owner", OWNER_CHARS_MAX)
        return cls(channel, owner, int(arguments.seconds("ttl", TTL_S_MAX) * 1000))


class _Commit(msgspec.Struct):
    topic: str
    seq: Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
    start: Annotated[str, msgspec.Meta(max_length=POSITION_CHARS_MAX)] = "oldest"


class _Commits(msgspec.Struct):
    commits: Annotated[list[_Commit], msgspec.Meta(max_length=RANGES_MAX)]


def _removed_to(topic: Topic) -> int:
    return topic.log.segments.removed.to if topic.log.segments is not None else 0


def _require_alive(topic: Topic) -> None:
    """Refuses a topic that was deleted while a position in it was looked up."""
    if topic.is_exiting:
        raise Refusal(404, "TOPIC_NOT_FOUND")


def _owned_by_another(channel: Channel) -> Refusal:
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
