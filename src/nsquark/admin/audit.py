"""Reports every change with a line in the log, and with NSQ's JSON to the notification endpoint.

The line says who did what, from where, and what came of it. Text from users and peers cannot end the line or look like
another field: a value that is not a plain word is quoted.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from typing import Final

import msgspec
from aiohttp import web

from nsquark.admin.access import IDENTITY, address_of, is_secure
from nsquark.admin.accounts import basic_credentials
from nsquark.admin.cluster import ClusterClient, quoted
from nsquark.admin.errors import UpstreamError
from nsquark.admin.options import NsqadminOptions
from nsquark.admin.state import STATE
from nsquark.base.addresses import show_address
from nsquark.base.hosts import HOSTNAME
from nsquark.base.logs import Logger

NOTICES_WAITING_MAX: Final = 1000
RESULT_CHARS_MAX: Final = 1000

_PLAIN: Final = re.compile(r"[\w.:@#+*\[\]-]+", re.ASCII)


class Notice(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Describes a change with the fields of NSQ's nsqadmin and, in `result`, what came of it."""

    action: str
    topic: str
    channel: str = ""
    node: str = ""
    timestamp: int
    user: str = ""
    remote_ip: str
    user_agent: str
    url: str
    via: str
    result: str


class Audit:
    """Writes the log lines, and sends the notices one after the other. When too many wait, new ones are dropped and
    counted.
    """

    def __init__(self, options: NsqadminOptions, cluster: ClusterClient, logger: Logger) -> None:
        self._endpoint = options.notification_http_endpoint
        self._cluster = cluster
        self._logger = logger
        self._waiting: asyncio.Queue[Notice] = asyncio.Queue(NOTICES_WAITING_MAX)
        self._dropped = 0
        self._sending: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._endpoint:
            self._sending = asyncio.get_running_loop().create_task(self._send_all())

    async def stop(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sending

    def tell(self, notice: Notice) -> None:
        who, where = notice.user or "-", notice.remote_ip
        what = {"topic": notice.topic, "channel": notice.channel, "node": notice.node}
        fields = "".join(f" {name}={_plain(value)}" for name, value in what.items() if value)
        result = _plain(notice.result)
        self._logger.always(f"AUDIT: user={_plain(who)} from={where} action={notice.action}{fields} result={result}")
        if not self._endpoint:
            return
        try:
            self._waiting.put_nowait(notice)
        except asyncio.QueueFull:
            self._dropped += 1

    async def _send_all(self) -> None:
        while True:
            notice = await self._waiting.get()
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                self._logger.error(f"AUDIT: {dropped} notices dropped: {self._endpoint} does not keep up")
            try:
                await self._cluster.ask(
                    "POST",
                    self._endpoint,
                    body=msgspec.json.encode(notice),
                    headers={"Content-Type": "application/json"},
                    shows_secret=False,
                )
            except UpstreamError as error:
                self._logger.error(f"AUDIT: failed to POST notification - {error}")


async def changed(
    request: web.Request, action: str, *, topic: str = "", channel: str = "", node: str = "", result: str = "ok"
) -> None:
    """Reports a change to the log and the notification endpoint."""
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    state = request.app[STATE]
    state.audit.tell(
        Notice(
            action=action,
            topic=topic,
            channel=channel,
            node=node,
            timestamp=int(time.time()),
            user=request[IDENTITY].name or _claimed_name(request),
            remote_ip=show_address(peer) if peer else address_of(request),
            user_agent=request.headers.get("User-Agent", ""),
            url=f"{'https' if is_secure(request) else 'http'}://{request.host}{request.path_qs}",
            via=HOSTNAME,
            result=result[:RESULT_CHARS_MAX],
        )
    )


def _claimed_name(request: web.Request) -> str:
    """Returns the name that a proxy, or the client itself, claims where nobody has to log in; NSQ reports it too."""
    found = basic_credentials(request.headers.get("Authorization", ""))
    return found[0] if found is not None else ""


def _plain(value: str) -> str:
    return value if _PLAIN.fullmatch(value) else quoted(value)
