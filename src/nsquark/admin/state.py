"""Holds what all parts of nsqadmin share, in one object of the application."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from nsquark.admin.accounts import Accounts
    from nsquark.admin.actions import Actions
    from nsquark.admin.attention import Attention
    from nsquark.admin.audit import Audit
    from nsquark.admin.clients import Clients
    from nsquark.admin.cluster import ClusterClient
    from nsquark.admin.events import Streams
    from nsquark.admin.history import History, Key
    from nsquark.admin.options import NsqadminOptions
    from nsquark.admin.poller import Poller
    from nsquark.admin.snapshot import ClientInfo, Failure, Snapshot
    from nsquark.admin.survey import Survey
    from nsquark.base.logs import Logger


@dataclass(frozen=True, slots=True)
class Live:
    """Holds what changes on a page: texts by the name of their place, and series to be drawn."""

    figures: dict[str, str] = field(default_factory=dict)
    series: tuple[Key, ...] = ()
    """These series are drawn as charts, with every recorded point."""


@dataclass(slots=True)
class AdminState:
    """Is shared by all parts of nsqadmin. Every poll replaces `snapshot` and never changes it, so a handler takes it
    once and reads everything from it.
    """

    options: NsqadminOptions
    logger: Logger
    base_path: str
    """This is "" or "/a/b", and stands before every path of ours."""
    cluster: ClusterClient
    survey: Survey
    actions: Actions
    history: History
    client_lists: Clients
    poller: Poller
    streams: Streams
    access: Accounts
    audit: Audit

    @property
    def snapshot(self) -> Snapshot:
        return self.poller.snapshot

    @property
    def failures(self) -> tuple[Failure, ...]:
        return self.poller.snapshot.failures

    def attention(self) -> tuple[Attention, ...]:
        """Returns the problems that need a person, the worst first, as of the last poll."""
        return self.poller.attention

    async def snapshot_after_change(self) -> Snapshot:
        """Returns a snapshot whose poll began after this call, for a caller that has just changed something."""
        return await self.poller.again()

    async def fresh_snapshot(self) -> Snapshot:
        """Returns a snapshot that is about one poll old; it asks the cluster if nobody looked for a while."""
        return await self.poller.fresh()

    def watch(self, topic: str, channel: str, node: str = "") -> None:
        """Makes each poll ask for the clients of this channel, for a while; `("", "", node)` means all clients of an
        nsqd.
        """
        self.client_lists.watch(topic, channel, node)

    async def clients(self, topic: str, channel: str, node: str = "") -> tuple[ClientInfo, ...]:
        """Asks for the clients as they are now, and watches them."""
        return await self.client_lists.fetch(self.snapshot, topic, channel, node)

    def seen_clients(self, topic: str, channel: str, node: str = "") -> tuple[ClientInfo, ...]:
        """Returns the clients of the last poll, if they were watched."""
        return self.client_lists.seen(topic, channel, node)

    def url(self, path: str) -> str:
        """Returns a path of ours with the base path, as a browser must ask for it."""
        return f"{self.base_path}{path}" if path != "/" or not self.base_path else self.base_path


STATE: web.AppKey[AdminState] = web.AppKey("STATE", AdminState)
