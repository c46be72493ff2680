"""Carries out AUTH for HTTP: auth servers are asked as for TCP, about `Authorization: Bearer <secret>`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from nsquark.broker.auth import Asker
from nsquark.broker.grants import Grant, Permission, Question
from nsquark.web.arguments import Refusal
from nsquark.web.messages import Answer, Handler, Pending, Request, Response

if TYPE_CHECKING:
    from nsquark.broker.nsqd import Nsqd

SECRET_BYTES_MAX: Final = 4096
GRANTS_MAX: Final = 1024
ASKING_MAX: Final = 1024
REFUSED_S: Final = 1.0
"""A refusal is remembered this long: a client that goes on trying does not reach the auth servers each time."""

SCHEME: Final = b"bearer"

Refuse = Callable[[Refusal], Response]


@dataclass(frozen=True, slots=True)
class Rule:
    """Says what a request needs: a permission, or with none just to be known to an auth server."""

    permission: Permission | None = None
    of_channel: bool = False
    """Tells whether the permission is for the channel that the request names; else the channel is empty, as for PUB."""
    is_ours: bool = False
    """Tells whether NSQ lacks this request, so that none of its programs has to make it without a secret."""

    def question(self, permission: Permission, request: Request) -> Question:
        query = request.query
        return permission, query.get("topic", ""), query.get("channel", "") if self.of_channel else ""


class HttpAuth:
    """Decides about requests. Where AUTH or --http-auth is off, handlers are left as they are."""

    def __init__(self, nsqd: Nsqd) -> None:
        self._mode = nsqd.options.http_auth
        self._servers = nsqd.auth if self._mode != "off" else None
        self._grants: dict[Asker, Grant] = {}
        self._refused_until_s: dict[Asker, float] = {}
        self._asking: dict[Asker, asyncio.Task[Grant | None]] = {}

    def is_free(self, request: Request) -> bool:
        """Tells whether one of NSQ's requests is served without asking an auth server."""
        return self._servers is None or (self._mode != "required" and not _secret_of(request))

    def guarded(self, handler: Handler, rule: Rule, refuse: Refuse | None = None) -> Handler:
        """Wraps a handler so that only permitted requests reach it; `refuse` answers the others in its style."""
        if self._servers is None:
            return handler
        refused = refuse or Refusal.response

        def guard(request: Request) -> Answer | Pending | Coroutine[Any, Any, Answer]:
            try:
                asker = self._asker(request, rule)
                if asker is not None:
                    grant = self._grants.get(asker)
                    if grant is None or grant.is_expired or not _decides_at_once(grant, rule, request):
                        return self._later(asker, request, rule, handler, refused)
                    _check(grant, rule, request)
            except Refusal as refusal:
                return refused(refusal)
            return handler(request)

        return guard

    async def among(self, names: Iterable[str], request: Request, rule: Rule) -> set[str]:
        """Returns the topics that the request may be told of; raises Refusal if no auth server vouches for it."""
        topics = set(names)
        asker = self._asker(request, rule) if self._servers is not None else None
        if asker is None or rule.permission is None:
            return topics
        grant, permission = await self._grant_of(asker), rule.permission
        channel = request.query.get("channel", "") if rule.of_channel else ""
        return await asyncio.to_thread(lambda: {name for name in topics if grant.allows((permission, name, channel))})

    def _asker(self, request: Request, rule: Rule) -> Asker | None:
        """Returns whom to ask about, or None where no secret was shown and none is needed."""
        secret = _secret_of(request)
        if not secret:
            if self._mode == "optional" or (self._mode != "required" and not rule.is_ours):
                return None
            if not request.client_name:
                raise Refusal(401, "AUTH_REQUIRED", reason="send Authorization: Bearer <secret>")
        elif len(secret) > SECRET_BYTES_MAX:
            raise _failed()
        return Asker(secret, request.client_name, request.remote.rpartition(":")[0].strip("[]"), request.https)

    async def _later(self, asker: Asker, request: Request, rule: Rule, handler: Handler, refused: Refuse) -> Answer:
        try:
            grant = await self._grant_of(asker)
            await asyncio.to_thread(_check, grant, rule, request)
        except Refusal as refusal:
            return refused(refusal)
        return await _awaited(handler(request))

    async def _grant_of(self, asker: Asker) -> Grant:
        grant = self._grants.get(asker)
        if grant is None or grant.is_expired:
            grant = await self._ask(asker)
        if grant is None:
            raise _failed()
        return grant

    async def _ask(self, asker: Asker) -> Grant | None:
        """Asks the auth servers; requests that come at once share one question."""
        if time.monotonic() < self._refused_until_s.get(asker, 0.0):
            return None
        task = self._asking.get(asker)
        if task is None:
            if len(self._asking) >= ASKING_MAX:
                return None
            task = self._asking[asker] = asyncio.get_running_loop().create_task(self._query(asker))
        return await asyncio.shield(task)

    async def _query(self, asker: Asker) -> Grant | None:
        assert self._servers is not None
        try:
            grant = await self._servers.ask(asker)
        finally:
            del self._asking[asker]
        self._grants.pop(asker, None)
        self._refused_until_s.pop(asker, None)
        if grant is not None:
            _remember(self._grants, asker, grant)
        else:
            _remember(self._refused_until_s, asker, time.monotonic() + REFUSED_S)
        return grant


def _remember(answers: dict[Asker, Any], asker: Asker, value: Any) -> None:
    if len(answers) >= GRANTS_MAX:
        del answers[next(iter(answers))]  # the oldest goes; about its asker the servers are asked again
    answers[asker] = value


def _failed() -> Refusal:
    return Refusal(403, "AUTH_FAILED", reason="no auth server vouches for this secret or certificate")


def _secret_of(request: Request) -> bytes:
    scheme, _, secret = request.headers.get(b"authorization", b"").partition(b" ")
    return secret.strip() if scheme.lower() == SCHEME else b""


def _decides_at_once(grant: Grant, rule: Rule, request: Request) -> bool:
    return rule.permission is None or grant.decides_at_once(rule.question(rule.permission, request))


def _check(grant: Grant, rule: Rule, request: Request) -> None:
    permission = rule.permission
    if permission is None:
        if not grant.permits:
            raise Refusal(403, "UNAUTHORIZED", reason="the auth server allows nothing")
    elif not grant.allows(rule.question(permission, request)):
        what = "topic and channel" if rule.of_channel else "topic"
        raise Refusal(403, "UNAUTHORIZED", reason=f"the auth server does not allow to {_VERBS[permission]} this {what}")


_VERBS: Final = {"publish": "publish to", "subscribe": "read from", "admin": "administer"}


async def _awaited(answer: Answer | Pending | Coroutine[Any, Any, Answer]) -> Answer:
    if isinstance(answer, Coroutine):
        return await answer
    if not isinstance(answer, Pending):
        return answer
    given: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    answer.when_resolved(given.set_result)
    return await given
