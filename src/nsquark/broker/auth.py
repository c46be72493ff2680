"""Carries out AUTH: an auth server says who may publish and subscribe. Nothing here blocks: a session goes on when the
answer is known.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlencode

import msgspec

from nsquark.broker.grants import AuthError, Grant, Question
from nsquark.broker.options import NsqdOptions
from nsquark.broker.tcp.tls import client_context
from nsquark.broker.tcp.waits import FOR_AUTH
from nsquark.web.fetch import FetchError, fetch
from nsquark.wire.errors import FatalClientError
from nsquark.wire.quote import quote

if TYPE_CHECKING:
    from nsquark.base.logs import Logger
    from nsquark.broker.tcp.session import Session

QUERIES_AT_ONCE_MAX: Final = 64
"""At most this many queries run at once: each has a thread while it lasts."""
ANSWER_BYTES_MAX: Final = 4 << 20


class Asker(NamedTuple):
    """Says who asks for a permission, as auth servers are told."""

    secret: bytes
    common_name: str
    """Is the common name of the client's certificate, if it showed one."""
    remote_ip: str
    is_tls: bool

    def query(self) -> dict[str, str | bytes]:
        return {
            "common_name": self.common_name,
            "remote_ip": self.remote_ip,
            "secret": self.secret,
            "tls": "true" if self.is_tls else "false",
        }


class AuthServers:
    """Asks the servers of --auth-http-address, any of which may be asked."""

    def __init__(self, options: NsqdOptions, logger: Logger) -> None:
        self._addresses = options.auth_http_address
        self._method = options.auth_http_request_method.upper()
        self._connect_timeout_s = options.http_client_connect_timeout.seconds
        self._request_timeout_s = options.http_client_request_timeout.seconds
        self._logger = logger
        self._queries = asyncio.Semaphore(QUERIES_AT_ONCE_MAX)
        self._ssl_context: ssl.SSLContext | None = None
        if any(address.startswith("https:") for address in self._addresses):
            self._ssl_context = client_context(options)

    async def ask(self, asker: Asker) -> Grant | None:
        """Returns the first good answer, asking from a random server on, or None if there is none. The log says why,
        without the secret.
        """
        query = asker.query()
        start = random.randrange(len(self._addresses))
        async with self._queries:
            for address in self._addresses[start:] + self._addresses[:start]:
                try:
                    return await asyncio.to_thread(Grant, await self._fetch(address, query))
                except AuthError as error:
                    self._logger.error(f"AUTH: auth server {address} failed - {error}")
                except Exception as error:  # such as no thread left: the client is answered all the same
                    self._logger.error(f"AUTH: auth server {address} failed - {type(error).__name__}")
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
                response_bytes_max=ANSWER_BYTES_MAX,
                ssl_context=self._ssl_context,
            )
        except FetchError as error:
            raise AuthError(error.reason) from None
        if status != 200:
            raise AuthError(f"it answered with status {status}")
        return answer


class Guard:
    """Keeps the permissions of one connection.

    While a server is asked (`is_asking`) the session's command counts as incomplete, so that it and all after it
    wait; with the answer the session looks at it again.
    """

    def __init__(self, session: Session, servers: AuthServers) -> None:
        self._session = session
        self._servers = servers
        self._secret = b""
        self._task: asyncio.Task[None] | None = None
        self._is_answered = False
        """Tells whether a server was asked, and the command that waits for the answer has not seen it yet."""
        self.grant: Grant | None = None

    @property
    def is_asking(self) -> bool:
        return self._task is not None

    def authorize(self, secret: bytes) -> bytes | None:
        """Returns AUTH's answer, or None while a server is asked."""
        if not self._is_answered:
            if self.grant is not None:
                raise FatalClientError("E_INVALID", "AUTH already set")
            self._secret = secret
            self._ask()
            return None
        grant = self._answer()
        if not grant.permits:
            raise FatalClientError("E_UNAUTHORIZED", "AUTH no authorizations found")
        return grant.shown()

    def allows(self, word: str, topic: str, channel: str) -> bool:
        """Returns True if the command `word` may go on, and False while that is being found out; raises
        FatalClientError if it is not allowed.
        """
        grant = self.grant
        question: Question = ("subscribe" if word == "SUB" else "publish", topic, channel)
        if self._is_answered:
            grant = self._answer()
        elif grant is None:
            raise FatalClientError("E_AUTH_FIRST", f"AUTH required before {word}")
        elif grant.is_expired:
            self._ask()
            return False
        if not grant.decides_at_once(question):
            self._wait_for(asyncio.to_thread(grant.allows, question))
            return False
        if not grant.allows(question):
            names = f"{quote(topic.encode())} {quote(channel.encode())}"
            raise FatalClientError("E_UNAUTHORIZED", f"AUTH failed for {word} on {names}")
        return True

    def cancel(self) -> None:
        """Stops asking: the connection is gone."""
        if self._task is not None:
            self._task.cancel()

    def _answer(self) -> Grant:
        self._is_answered = False
        if self.grant is None:
            raise FatalClientError("E_AUTH_FAILED", "AUTH failed")
        return self.grant

    def _ask(self) -> None:
        session = self._session
        name = session.tls.common_name if session.tls is not None else ""
        self._wait_for(self._query(Asker(self._secret, name, session.remote_ip, session.tls is not None)))

    async def _query(self, asker: Asker) -> None:
        self.grant = None
        try:
            self.grant = await self._servers.ask(asker)
        finally:
            self._is_answered = True

    def _wait_for(self, work: Coroutine[Any, Any, object]) -> None:
        self._session.waits.begin(FOR_AUTH)
        self._task = self._session.nsqd.loop.create_task(self._go_on_after(work))

    async def _go_on_after(self, work: Coroutine[Any, Any, object]) -> None:
        """Lets a command that waits be answered, whatever becomes of the work."""
        try:
            await work
        finally:
            self._task = None
            self._session.waits.end(FOR_AUTH)
