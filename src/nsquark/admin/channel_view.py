"""Lists the messages that a channel has in flight or requeued, previews a seek of the channel, and does it.

GET  /topics/{t}/{c}/messages.json?state=in_flight|requeued     lists them, the longest in flight or the next due first
GET  /topics/{t}/{c}/seek.json?to=POSITION[&node=]              tells how many would come again or be passed over
POST /topics/{t}/{c}/seek?to=POSITION[&node=]                   seeks, on each nsqd that has the channel

A position is oldest, newest, time:<milliseconds> or, on one nsqd, a sequence number. NSQ's own nsqds can do none of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, TypeVar
from urllib.parse import quote

import msgspec
from aiohttp import web

from nsquark.admin import audit
from nsquark.admin.access import json_answer, refusal, require
from nsquark.admin.arguments import invalid, known_node, name_in_path, number, position
from nsquark.admin.cluster import decode
from nsquark.admin.errors import UpstreamError
from nsquark.admin.snapshot import Snapshot
from nsquark.admin.state import STATE, AdminState
from nsquark.wire.documents import Int64

T = TypeVar("T")

LISTED: Final = 50
LISTED_MAX: Final = 500
STATES: Final = ("in_flight", "requeued")


class Held(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Describes a message in flight or requeued, as nsqd lists it."""

    node: str = ""
    seq: Int64
    id: str
    attempts: Int64
    for_ms: Int64 | None = None
    timeout_ms: Int64 | None = None
    due_ms: Int64 | None = None
    client: str | None = None
    client_id: str | None = None


class Listing(msgspec.Struct, kw_only=True):
    count: Int64
    messages: list[Held]


class Preview(msgspec.Struct, kw_only=True, rename={"again": "come_again", "passed": "passed_over"}):
    """Describes the effect that a seek would have, as nsqd reports it."""

    position: Int64
    target: Int64
    depth: Int64
    next: Int64
    again: Int64
    passed: Int64
    in_flight: Int64
    requeued: Int64
    owner: str = ""


class ChannelStanding(msgspec.Struct, kw_only=True):
    position: Int64
    depth: Int64


async def held(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    kind = request.query.get("state", "in_flight")
    if kind not in STATES:
        raise invalid("state", " or ".join(STATES))
    limit = number(request, "limit", 1, LISTED_MAX, LISTED)
    target = _target(request, "messages", f"&state={kind}&limit={limit}")
    found, failures = await _ask_all(state, await _nodes(request), target, Listing)
    messages = [msgspec.structs.replace(message, node=node) for node in found for message in found[node].messages]
    messages.sort(key=_first_in_flight if kind == "in_flight" else _first_due)
    return json_answer(
        {
            "count": sum(listing.count for listing in found.values()),
            "messages": messages[:limit],
            "failures": _failures(failures),
            "message": "",
        }
    )


def _first_in_flight(message: Held) -> int:
    return -(message.for_ms or 0)


def _first_due(message: Held) -> int:
    return message.due_ms or 0


async def preview(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    nodes = await _nodes(request)
    to = _seek_to(request, nodes)
    found, failures = await _ask_all(state, nodes, _target(request, "seek", f"&to={to}"), Preview)
    return json_answer(
        {
            "nodes": [_shown(node, one) for node, one in found.items()],
            "again": sum(one.again for one in found.values()),
            "passed": sum(one.passed for one in found.values()),
            "failures": _failures(failures),
            "message": "",
        }
    )


def _shown(node: str, one: Preview) -> dict[str, object]:
    return {"node": node, **{name: getattr(one, name) for name in one.__struct_fields__}}


async def seek(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    require(request, "seek")
    topic, channel = name_in_path(request, "topic"), name_in_path(request, "channel")
    nodes = await _nodes(request)
    to = _seek_to(request, nodes)
    target = _target(request, "seek", f"&to={to}")
    done, failures = await _ask_all(state, nodes, target, ChannelStanding, method="POST")
    for node in nodes:
        result = f"failed: {failures[node]}" if node in failures else f"at {done[node].position}"
        await audit.changed(request, "seek", topic=topic, channel=channel, node=node, result=f"to {to}: {result}")
    if failures and not done:
        raise refusal(web.HTTPBadGateway, f"UPSTREAM_ERROR: {'; '.join(failures.values())}")
    await state.snapshot_after_change()
    results = [_result(node, True, f"at {one.position}, depth {one.depth}") for node, one in done.items()]
    results += [_result(node, False, text) for node, text in failures.items()]
    return json_answer({"ok": True, "message": "; ".join(failures.values()), "results": results})


def _result(node: str, is_done: bool, text: str) -> dict[str, object]:
    return {"address": node, "ok": is_done, "text": text}


# -- asking ----------------------------------------------------------------------------------------------


async def _nodes(request: web.Request) -> list[str]:
    """Returns the nsqds that have the channel, or the one that the request names."""
    snapshot: Snapshot = await request.app[STATE].fresh_snapshot()
    channel = snapshot.channel(name_in_path(request, "topic"), name_in_path(request, "channel"))
    if channel is None:
        raise refusal(web.HTTPNotFound, "CHANNEL_NOT_FOUND")
    wanted = request.query.get("node", "")
    return [known_node(snapshot, wanted)] if wanted else [node.node for node in channel.nodes]


def _seek_to(request: web.Request, nodes: list[str]) -> str:
    word, value = position(request.query.get("to", ""), "to")
    if word == "seq" and len(nodes) > 1:
        raise invalid("to", "a sequence number is of one nsqd: choose one")
    return {"seq": str(value), "time": f"time:{value}"}.get(word, word)


def _target(request: web.Request, verb: str, arguments: str) -> str:
    topic, channel = (quote(name_in_path(request, name), safe="") for name in ("topic", "channel"))
    return f"/channel/{verb}?topic={topic}&channel={channel}{arguments}"


async def _ask_all(
    state: AdminState, nodes: list[str], target: str, kind: type[T], method: str = "GET"
) -> tuple[dict[str, T], dict[str, str]]:
    """Returns the answers of the nsqds, and for those that gave none the reason."""

    async def ask(node: str) -> T | UpstreamError:
        try:
            return decode(await state.cluster.ask(method, f"http://{node}{target}"), kind)
        except UpstreamError as error:
            return error

    answers = dict(zip(nodes, await asyncio.gather(*map(ask, nodes)), strict=True))
    found = {node: answer for node, answer in answers.items() if not isinstance(answer, UpstreamError)}
    return found, {node: _why(answer) for node, answer in answers.items() if isinstance(answer, UpstreamError)}


def _why(error: UpstreamError) -> str:
    if error.status in (404, 405) and b"_NOT_FOUND" not in error.body:
        return "this nsqd is NSQ's own, which cannot do this"
    return str(error)


def _failures(failures: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"node": node, "text": text} for node, text in failures.items()]


routes: Final = [
    web.get("/topics/{topic}/{channel}/messages.json", held),
    web.get("/topics/{topic}/{channel}/seek.json", preview),
    web.post("/topics/{topic}/{channel}/seek", seek),
]
