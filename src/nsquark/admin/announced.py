"""Reads how nsqds are announced: by themselves in /info, by an nsqlookupd in /lookup and /nodes."""

from __future__ import annotations

import msgspec

from nsquark.base.addresses import join_address
from nsquark.wire.documents import Int64


class AnnouncedNsqd(msgspec.Struct, kw_only=True):
    """Describes an nsqd as an answer announces it; each kind of answer leaves some fields out."""

    remote_address: str = ""
    hostname: str = ""
    broadcast_address: str = ""
    tcp_port: Int64 = 0
    http_port: Int64 = 0
    version: str = ""
    topics: list[str] | None = None
    tombstones: list[bool] | None = None

    @property
    def http_address(self) -> str:
        return join_address(self.broadcast_address, self.http_port)

    def is_tombstoned(self, place: int) -> bool:
        """Tells whether the topic at this index is tombstoned, so that consumers are not sent to it."""
        return place < len(self.tombstones or ()) and bool((self.tombstones or ())[place])


class AnnouncedNsqds(msgspec.Struct):
    """Holds the nsqds that an nsqlookupd answers with."""

    producers: list[AnnouncedNsqd] | None = None
