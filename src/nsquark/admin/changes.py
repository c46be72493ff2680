"""Makes the changes of the pages and of /api: it checks that the user may make one, makes it, and reports it."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

from aiohttp import web

from nsquark.admin import access, audit
from nsquark.admin.actions import ActionRefused, Outcome
from nsquark.admin.errors import AllFailed, joined
from nsquark.admin.state import STATE, AdminState

ACTIONS: Final = ("create", "delete", "pause", "unpause", "empty", "tombstone")


async def change(request: web.Request, action: str, topic: str, channel: str = "", node: str = "") -> Outcome:
    """Makes a change and returns what came of it. It raises AllFailed, which is reported to the audit as well, and
    ActionRefused and 403, which are not.
    """
    if action not in ACTIONS:
        raise ActionRefused("INVALID_ACTION")
    words = _words(action, channel)
    for word in words:
        access.require(request, word)
    try:
        outcome = await _done(request.app[STATE], action, topic, channel, node)
    except AllFailed as error:
        await _tell(request, words, topic, channel, node, str(error))
        raise
    await _tell(request, words, topic, channel, node, joined(outcome.errors) or "ok")
    return outcome


def _words(action: str, channel: str) -> list[str]:
    """Returns the names that a change has in NSQ's notifications."""
    if action == "tombstone":
        return ["tombstone_topic_producer"]
    if action == "create":
        return ["create_topic", "create_channel"] if channel else ["create_topic"]
    return [f"{action}_channel" if channel else f"{action}_topic"]


def _done(state: AdminState, action: str, topic: str, channel: str, node: str) -> Awaitable[Outcome]:
    if action == "create":
        return state.actions.create(topic, channel)
    if action == "delete":
        return state.actions.delete(topic, channel)
    if action == "tombstone":
        return state.actions.tombstone(topic, node)
    return state.actions.plain(action, topic, channel)


async def _tell(request: web.Request, words: list[str], topic: str, channel: str, node: str, result: str) -> None:
    for word in words:
        of_channel = channel if word != "create_topic" else ""
        await audit.changed(request, word, topic=topic, channel=of_channel, node=node, result=result)
