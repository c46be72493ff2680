"""AUTH: who may publish and subscribe, as an auth server says. Nothing here waits: a session goes on when it knows."""

from __future__ import annotations

import asyncio
import random
import re
import ssl
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlencode

import msgspec

from nsquark.broker.options import Options
from nsquark.broker.tls import client_context
from nsquark.web.fetch import FetchError, fetch
from nsquark.web.messages import encode_json
from nsquark.wire.errors import FatalClientError
from nsquark.wire.quote import quote

if TYPE_CHECKING:
    from nsquark.broker.session import Session
    from nsquark.cli.logs import Logger

QUERIES_AT_ONCE_MAX: Final = 64
"""Each query has a thread while it lasts."""


class AuthError(Exception):
    """An auth server did not answer, or not as it should; the text is for the log."""


class _Authorization(msgspec.Struct):
    topic: str = ""
    channels: list[str] | None = None
    permissions: list[Literal["subscribe", "publish"]] | None = None


class _Answer(msgspec.Struct):
    ttl: int = 0
    identity: str = ""
    identity_url: str = ""
    authorizations: list[_Authorization] | None = None


@dataclass(frozen=True, slots=True)
class _Permit:
    topic: re.Pattern[str]
    channels: list[re.Pattern[str]]
    permissions: frozenset[str]

    def allows(self, permission: str, topic: str, channel: str) -> bool:
        return (
            permission in self.permissions
            and self.topic.search(topic) is not None
            and any(pattern.search(channel) for pattern in self.channels)
        )


class Grant:
    """What an auth server allows a connection, for a time."""

    def __init__(self, body: bytes) -> None:
        try:
            answer = msgspec.json.decode(body, type=_Answer)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise AuthError(f"bad answer: {error}") from None
        if answer.ttl <= 0:
            raise AuthError(f"bad answer: a ttl of {answer.ttl} is not above 0")
        self.identity = answer.identity
        self.identity_url = answer.identity_url
        self.permits = [_permit(entry) for entry in answer.authorizations or ()]
        self._expires_at_s = time.monotonic() + answer.ttl

    @property
    def is_expired(self) -> bool:
        return time.monotonic() >= self._expires_at_s

    def allows(self, permission: str, topic: str, channel: str) -> bool:
        return any(permit.allows(permission, topic, channel) for permit in self.permits)

    def shown(self) -> bytes:
        """The answer to AUTH."""
        return encode_json(
            {
                "identity": self.identity,
                "identity_url": self.identity_url,
                "permission_count": len(self.permits),
            }
        )


def _permit(entry: _Authorization) -> _Permit:
    channels = [_compiled(pattern) for pattern in entry.channels or ()]
    return _Permit(_compiled(entry.topic), channels, frozenset(entry.permissions or ()))


def _compiled(pattern: str) -> re.Pattern[str]:
    """NSQ's auth servers write Go's syntax; what would mean something else here is refused."""
    if "[:" in pattern:
        raise AuthError(f"bad answer: classes like [:alpha:] are not known here, in the expression {pattern!r}")
    try:
        return re.compile(pattern, re.ASCII)
    except (re.error, RecursionError, OverflowError) as error:
        raise AuthError(f"bad answer: {error}, in the expression {pattern!r}") from None


class AuthServers:
    """The servers of --auth-http-address, any of which may be asked."""

    def __init__(self, options: Options, logger: Logger) -> None:
        self._addresses = options.auth_http_address
        self._method = options.auth_http_request_method.upper()
        self._connect_timeout_s = options.http_client_connect_timeout.seconds
        self._request_timeout_s = options.http_client_request_timeout.seconds
        self._logger = logger
        self._queries = asyncio.Semaphore(QUERIES_AT_ONCE_MAX)
        self._ssl_context: ssl.SSLContext | None = None
        if any(address.startswith("https:") for address in self._addresses):
            self._ssl_context = client_context(options)

    async def ask(self, query: dict[str, str | bytes]) -> Grant | None:
        """The first good answer, starting anywhere; None if there is none. The log says why, without the secret."""
        start = random.randrange(len(self._addresses))
        async with self._queries:
            for address in self._addresses[start:] + self._addresses[:start]:
                try:
                    return Grant(await self._fetch(address, query))
                except AuthError as error:
                    self._logger.error(f"AUTH: auth server {address} failed - {error}")
        return None

    async def _fetch(self, address: str, query: dict[str, str | bytes]) -> bytes:
        url = address if "://" in address else f"http://{address}/auth"
        body: bytes | None = None
        headers: dict[str, str] = {}
        if self._method == "POST":
            headers["Content-Type"] = "application/json"
            texts = {name: v if isinstance(v, str) else v.decode("utf-8", "replace") for name, v in query.items()}
            body = msgspec.json.encode({name: [value] for name, value in texts.items()})
        else:
            url = f"{url}?{urlencode(query)}"
        try:
            status, _, answer = await fetch(
                url,
                method=self._method,
                body=body,
                headers=headers,
                connect_timeout=self._connect_timeout_s,
                request_timeout=self._request_timeout_s,
                ssl_context=self._ssl_context,
            )
        except FetchError as error:
            raise AuthError(error.reason) from None
        if status != 200:
            raise AuthError(f"it answered with status {status}")
        return answer


class Guard:
    """The permissions of one connection.

    While a server is asked (`is_asking`) the session's command counts as incomplete, so that it and all after it
    wait; with the answer the session looks at it again.
    """

    def __init__(self, session: Session, servers: AuthServers) -> None:
        self._session = session
        self._servers = servers
        self._secret = b""
        self._task: asyncio.Task[None] | None = None
        self._is_answered = False
        """A server was asked, and the command that waits for it has not seen the answer yet."""
        self.grant: Grant | None = None

    @property
    def is_asking(self) -> bool:
        return self._task is not None

    def authorize(self, secret: bytes) -> bytes | None:
        """AUTH's answer; None while a server is asked."""
        if not self._is_answered:
            if self.grant is not None:
                raise FatalClientError("E_INVALID", "AUTH already set")
            self._secret = secret
            self._ask()
            return None
        grant = self._take_answer()
        if not grant.permits:
            raise FatalClientError("E_UNAUTHORIZED", "AUTH no authorizations found")
        return grant.shown()

    def allows(self, word: str, topic: str, channel: str) -> bool:
        """Whether the command `word` may go on; False while a server is asked again. What is not allowed is raised."""
        grant = self.grant
        if self._is_answered:
            grant = self._take_answer()
        elif grant is None:
            raise FatalClientError("E_AUTH_FIRST", f"AUTH required before {word}")
        elif grant.is_expired:
            self._ask()
            return False
        if not grant.allows("subscribe" if word == "SUB" else "publish", topic, channel):
            names = f"{quote(topic.encode())} {quote(channel.encode())}"
            raise FatalClientError("E_UNAUTHORIZED", f"AUTH failed for {word} on {names}")
        return True

    def cancel(self) -> None:
        """The connection is gone."""
        if self._task is not None:
            self._task.cancel()

    def _take_answer(self) -> Grant:
        self._is_answered = False
        if self.grant is None:
            raise FatalClientError("E_AUTH_FAILED", "AUTH failed")
        return self.grant

    def _ask(self) -> None:
        if self._task is None:
            session = self._session
            session.transport.pause_reading()
            self._task = session.nsqd.loop.create_task(self._query())

    async def _query(self) -> None:
        session = self._session
        query: dict[str, str | bytes] = {
            "common_name": session.tls.common_name if session.tls is not None else "",
            "remote_ip": session.remote_ip,
            "secret": self._secret,
            "tls": "true" if session.tls is not None else "false",
        }
        self.grant = await self._servers.ask(query)
        self._is_answered = True
        self._task = None
        session.go_on()
