"""Answers NSQ's /api with the paths, JSON and errors of nsqadmin 1.3.0.

The pages show the last poll, but /api asks the cluster anew for each request, as NSQ's does.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from functools import wraps
from typing import Any, Final, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler

from nsquark.admin import access
from nsquark.admin.actions import PLAIN_ACTIONS, ActionRefused, Outcome
from nsquark.admin.api_types import ApiCounter, ApiTopic, add_topic, plain
from nsquark.admin.changes import change
from nsquark.admin.cluster import quoted
from nsquark.admin.errors import AllFailed, UpstreamError, joined
from nsquark.admin.request_json import string_fields
from nsquark.admin.routing import v1_error, v1_json
from nsquark.admin.state import STATE, AdminState
from nsquark.web.query import parse_query

T = TypeVar("T")
Method = Callable[[web.Request, AdminState], Awaitable[T]]

BODY_BYTES_MAX: Final = 1 << 20


class ApiError(Exception):
    """Says that a request is answered with this status and code."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status


def answer_v1(method: Method[web.Response]) -> Handler:
    """Wraps a handler so that its errors have NSQ's form."""

    @wraps(method)
    async def answer(request: web.Request) -> web.StreamResponse:
        state = request.app[STATE]
        try:
            return await method(request, state)
        except ApiError as error:
            return v1_error(error.status, str(error))
        except ActionRefused as error:
            return v1_error(400, str(error))
        except AllFailed as error:
            state.logger.error(f"{request.method} {request.path}: {error}")
            return v1_error(502, f"UPSTREAM_ERROR: {error}")

    return answer


def v1(method: Method[dict[str, Any]]) -> Handler:
    """Wraps a handler that returns a value: the value is sent as JSON, and errors have NSQ's form."""

    @wraps(method)
    async def answer(request: web.Request, state: AdminState) -> web.Response:
        return v1_json(await method(request, state))

    return answer_v1(answer)


def message_of(state: AdminState, *errors: Iterable[UpstreamError]) -> str:
    """Logs partial failures and writes the message about them, which is empty if there were none."""
    texts = [joined(each) for each in map(list, errors) if each]
    for text in texts:
        state.logger.warning(text)
    return f"WARNING: {'; '.join(texts)}" if texts else ""


# -- reads -----------------------------------------------------------------------------------------------


async def ping(request: web.Request) -> web.StreamResponse:
    return web.Response(text="OK")


@v1
async def topics(request: web.Request, state: AdminState) -> dict[str, Any]:
    query, is_whole = parse_query(request.rel_url.raw_query_string.encode())
    if not is_whole:
        raise ApiError(400, _query_trouble(request.rel_url.raw_query_string))
    if query.get("inactive") == "true" and state.cluster.lookupds:
        inactive = await state.survey.inactive(state.cluster.lookupds)
        shown = {name: channels or None for name, channels in inactive.value.items()}
        return {"topics": plain(shown), "message": message_of(state, inactive.errors)}
    known = await state.survey.topics()
    if query.get("inactive") == "true":
        return {"topics": {}, "message": message_of(state, known.errors)}
    return {"topics": known.value or None, "message": message_of(state, known.errors)}


def _query_trouble(query: str) -> str:
    """Says what is wrong with a query, in the words of Go's parser."""
    bad = re.search(r"%(?![0-9A-Fa-f]{2}).{0,2}", query)
    return f"invalid URL escape {quoted(bad[0])}" if bad else "invalid semicolon separator in query"


@v1
async def topic(request: web.Request, state: AdminState) -> dict[str, Any]:
    name = request.match_info["topic"]
    producers = await state.survey.producers_of(name)
    stats = await state.survey.stats(producers.value, name, with_clients=False)
    total = ApiTopic(topic_name=name)
    for one in stats.value.topics:
        add_topic(total, one)
    return {**plain(total), "message": message_of(state, producers.errors, stats.errors)}


@v1
async def channel(request: web.Request, state: AdminState) -> dict[str, Any]:
    name = request.match_info["topic"]
    channel_name = request.match_info["channel"]
    producers = await state.survey.producers_of(name)
    stats = await state.survey.stats(producers.value, name, channel_name, with_clients=True)
    message = message_of(state, producers.errors, stats.errors)
    found = stats.value.channels.get(channel_name)
    return {**(plain(found) if found is not None else {}), "message": message}


@v1
async def nodes(request: web.Request, state: AdminState) -> dict[str, Any]:
    found = await state.survey.nodes()
    return {"nodes": plain(found.value) or None, "message": message_of(state, found.errors)}


@v1
async def node(request: web.Request, state: AdminState) -> dict[str, Any]:
    address = request.match_info["node"]
    known = await state.survey.nodes()
    chosen = [each for each in known.value if each.http_address == address]
    if not chosen:
        raise ApiError(404, "NODE_NOT_FOUND")
    stats = await state.survey.stats(chosen[:1], with_clients=True)
    found = stats.value.topics
    return {
        "node": address,
        "topics": plain(found) or None,
        "total_messages": sum(each.message_count for each in found),
        "total_clients": sum(len(one.clients or ()) for each in found for one in each.channels or ()),
        "message": message_of(state, known.errors),
    }


@v1
async def counter(request: web.Request, state: AdminState) -> dict[str, Any]:
    known = await state.survey.nodes()
    stats = await state.survey.stats(known.value, with_clients=False)
    counters: dict[str, ApiCounter] = {}
    for total in stats.value.channels.values():
        for one in total.nodes or ():
            key = f"{total.topic_name}:{total.channel_name}:{one.node}"
            if key not in counters:
                counters[key] = ApiCounter(node=one.node, topic_name=total.topic_name, channel_name=total.channel_name)
            counters[key].message_count += one.message_count
    return {"stats": plain(counters), "message": message_of(state, known.errors, stats.errors)}


# -- changes ---------------------------------------------------------------------------------------------


@v1
async def create(request: web.Request, state: AdminState) -> dict[str, Any]:
    access.require(request, "create_topic")
    fields = await _fields(request, "topic", "channel")
    return _warned(state, await change(request, "create", fields["topic"], fields["channel"]))


@v1
async def act_on_topic(request: web.Request, state: AdminState) -> dict[str, Any]:
    access.require(request, "pause_topic")
    action = (await _fields(request, "action"))["action"]
    return _warned(state, await change(request, _plain_action(action), request.match_info["topic"]))


@v1
async def act_on_channel(request: web.Request, state: AdminState) -> dict[str, Any]:
    access.require(request, "pause_channel")
    action = (await _fields(request, "action"))["action"]
    topic, channel = request.match_info["topic"], request.match_info["channel"]
    return _warned(state, await change(request, _plain_action(action), topic, channel))


@v1
async def delete_topic(request: web.Request, state: AdminState) -> dict[str, Any]:
    return _warned(state, await change(request, "delete", request.match_info["topic"]))


@v1
async def delete_channel(request: web.Request, state: AdminState) -> dict[str, Any]:
    topic, channel = request.match_info["topic"], request.match_info["channel"]
    return _warned(state, await change(request, "delete", topic, channel))


@v1
async def tombstone(request: web.Request, state: AdminState) -> dict[str, Any]:
    access.require(request, "tombstone_topic_producer")
    try:
        topic = (await _fields(request, "topic"))["topic"]
    except ApiError:
        raise ApiError(400, "INVALID_BODY") from None
    return _warned(state, await change(request, "tombstone", topic, node=request.match_info["node"]))


def _plain_action(action: str) -> str:
    if action not in PLAIN_ACTIONS:
        raise ActionRefused("INVALID_ACTION")
    return action


def _warned(state: AdminState, outcome: Outcome) -> dict[str, Any]:
    return {"message": message_of(state, outcome.errors)}


async def _fields(request: web.Request, *names: str) -> dict[str, str]:
    try:
        return string_fields(await request.content.read(BODY_BYTES_MAX), *names)
    except ValueError as error:
        raise ApiError(400, str(error)) from None


routes: list[web.RouteDef] = [
    web.get("/ping", ping),
    web.get("/api/topics", topics),
    web.post("/api/topics", create),
    web.get("/api/topics/{topic}", topic),
    web.post("/api/topics/{topic}", act_on_topic),
    web.delete("/api/topics/{topic}", delete_topic),
    web.get("/api/topics/{topic}/{channel}", channel),
    web.post("/api/topics/{topic}/{channel}", act_on_channel),
    web.delete("/api/topics/{topic}/{channel}", delete_channel),
    web.get("/api/nodes", nodes),
    web.get("/api/nodes/{node}", node),
    web.delete("/api/nodes/{node}", tombstone),
    web.get("/api/counter", counter),
]
