"""Reads what an nsqlookupd answers: the nsqds that it knows, or the channels of a topic."""

from __future__ import annotations

import contextlib
from typing import Final

import msgspec

from nsquark.base.addresses import join_address
from nsquark.wire.documents import decode_json

PRODUCERS_MAX: Final = 10_000
CHANNELS_MAX: Final = 10_000
ERROR_CHARS_MAX: Final = 200


class Found(msgspec.Struct, frozen=True):
    """Describes an nsqd as an nsqlookupd knows it. Its topics are left out: reading thousands takes long."""

    broadcast_address: str
    tcp_port: int
    http_port: int = 0
    hostname: str = ""
    remote_address: str = ""
    version: str = ""
    topology_region: str = ""
    topology_zone: str = ""

    @property
    def address(self) -> str:
        return join_address(self.broadcast_address, self.tcp_port)

    @property
    def http_address(self) -> str:
        return join_address(self.broadcast_address, self.http_port)


class _FoundList(msgspec.Struct):
    producers: list[Found] | None


class _LookupAnswer(msgspec.Struct):
    """Has the producers of an answer, which stand at its top, or in `data` as before NSQ 1.0."""

    producers: list[Found] | msgspec.UnsetType | None = msgspec.UNSET
    status_code: int = 200
    status_txt: str = ""
    data: _FoundList | None = None


class _TopicNames(msgspec.Struct):
    topics: list[str] | None


class _ChannelNames(msgspec.Struct):
    channels: list[str]


class _LookupRefusal(msgspec.Struct):
    message: str
    reason: str = ""


def read_producers(body: bytes) -> list[Found]:
    """Reads the nsqds in an answer to /lookup or /nodes; a ValueError says what is wrong with it."""
    try:
        answer = decode_json(body, _LookupAnswer)
    except ValueError as error:
        raise ValueError(f"this is no answer of an nsqlookupd: {error}") from None
    if answer.producers is not msgspec.UNSET:
        found = answer.producers or []
    elif answer.data is not None:
        found = answer.data.producers or []
    else:
        raise ValueError(f"{answer.status_code} {answer.status_txt or 'no producers in the answer'}")
    if len(found) > PRODUCERS_MAX:
        raise ValueError(f"{len(found)} nsqds, more than {PRODUCERS_MAX}")
    return found


def read_topics(body: bytes) -> list[str]:
    """Reads the names in an answer to /topics; ValueError says what is wrong with it."""
    return decode_json(body, _TopicNames).topics or []


def read_channels(body: bytes) -> list[str]:
    """Reads the names in an answer to /channels; a ValueError says what is wrong with it."""
    channels = decode_json(body, _ChannelNames).channels
    if len(channels) > CHANNELS_MAX:
        raise ValueError(f"{len(channels)} channels, more than {CHANNELS_MAX}")
    return channels


def read_refusal(body: bytes) -> str:
    """Returns, in few words, the reason that an answer other than a 200 gives in its body."""
    with contextlib.suppress(ValueError):
        refusal = decode_json(body, _LookupRefusal)
        return ": ".join(filter(None, (refusal.message, refusal.reason)))[:ERROR_CHARS_MAX]
    return body[:ERROR_CHARS_MAX].decode(errors="replace")
