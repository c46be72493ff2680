"""This is the message browser, which looks through a topic's log without consuming it, and publishes by hand.

GET  /messages/{t}/found.json                a page, newest first: at, older or newer, filter, node, limit, wait
GET  /messages/{t}/found.jsonl               a file of such messages, with a line for each
GET  /messages/{t}/{node}/{seq}              one message; with download=1 its bytes
POST /messages/{t}                           publishes the request's body: node, defer (milliseconds)
POST /messages/{t}/{node}/{seq}/republish    publishes a message of the log again

A page ends when its search runs out of time or bytes, and tells what was searched; the `older` of its answer goes on
from there, and `newer` steps forward. A live tail asks for `newer` with `wait`: it gets the newest of the messages that
came since, and `skipped` counts the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final
from urllib.parse import quote

from aiohttp import web

from nsquark.admin import audit, channel_view
from nsquark.admin.access import json_answer, refusal, require
from nsquark.admin.arguments import encode_cursor, known_node, name_in_path, number
from nsquark.admin.errors import UpstreamError
from nsquark.admin.filters import Everything
from nsquark.admin.log_reader import LogMessage, RemoteLog, Wanted
from nsquark.admin.message_json import line, shown
from nsquark.admin.paging import Question, ask_nodes, older_positions, ranges_of, skipped_count, wait_for_news
from nsquark.admin.places import downloading, searching, tailing
from nsquark.admin.search import Limits, SearchResult, search
from nsquark.admin.snapshot import Snapshot
from nsquark.admin.state import STATE, AdminState
from nsquark.client.envelope import new_key, unwrap, wrap
from nsquark.web.arguments import INT64_MAX

PREVIEW_BYTES: Final = 2048
"""A page has this much of each body; a message that is shown alone has more."""
DOWNLOAD_MESSAGES: Final = 10_000
DOWNLOAD_MESSAGES_MAX: Final = 1_000_000
DOWNLOAD_BYTES_MAX: Final = 1 << 30
DOWNLOAD_PAGE_MESSAGES: Final = 500
DOWNLOAD_STALL_S_MAX: Final = 120.0
"""A browser has this much time to take one page of a download."""
WHOLE_BODY: Final = 1 << 40
DEFER_MS_MAX: Final = 1 << 40


def _state(request: web.Request) -> AdminState:
    state = request.app[STATE]
    if state.options.no_message_browser:
        raise refusal(web.HTTPNotFound, "NO_MESSAGE_BROWSER", reason="nsqadmin runs with --no-message-browser")
    return state


# -- looking ---------------------------------------------------------------------------------------------


async def page(request: web.Request) -> web.StreamResponse:
    state = _state(request)
    question = Question.of(request, await state.fresh_snapshot())
    if question.wait_s:
        with tailing():
            nodes = await wait_for_news(state.cluster, question, request)
    else:
        nodes = await ask_nodes(state.cluster, question)
    async with searching():
        asked = await ranges_of(question, nodes)
        body_bytes = min(PREVIEW_BYTES, state.options.message_browser_max_bytes)
        found = await search(asked.ranges, question.filter, Limits(asked.messages_max, body_bytes))
    failures = {**nodes.failures, **asked.failures, **found.failures}
    return json_answer(
        {
            "messages": [shown(message) for message in found.messages],
            "searched": found.searched._asdict(),
            "older": encode_cursor(older_positions(question, nodes, asked, found)),
            "newer": encode_cursor(asked.newer),
            "skipped": await skipped_count(asked, found) if question.wait_s else 0,
            "failures": [{"node": node, "text": text} for node, text in failures.items()],
            "without_log": nodes.without_log,
            "message": "",
        }
    )


async def download(request: web.Request) -> web.StreamResponse:
    """Sends messages as a file, newest first."""
    state = _state(request)
    with downloading():
        return await _download(request, state)


async def _download(request: web.Request, state: AdminState) -> web.StreamResponse:
    topic = name_in_path(request, "topic")
    left = number(request, "limit", 1, DOWNLOAD_MESSAGES_MAX, DOWNLOAD_MESSAGES)
    bytes_left = DOWNLOAD_BYTES_MAX
    question = Question.of(request, await state.fresh_snapshot(), messages_max=DOWNLOAD_PAGE_MESSAGES)
    nodes = await ask_nodes(state.cluster, question)
    asked = await ranges_of(question, nodes)
    if missing := nodes.failures | asked.failures:
        raise refusal(web.HTTPBadGateway, f"UPSTREAM_ERROR: {_named(missing)}", reason="choose an nsqd that answers")
    response = web.StreamResponse(
        headers={
            "Content-Type": "application/x-ndjson",
            "Content-Disposition": f'attachment; filename="{_file_name(topic)}.jsonl"',
        }
    )
    await response.prepare(request)
    ranges = asked.ranges
    while ranges and left > 0 and bytes_left > 0:
        async with searching():
            found = await search(ranges, question.filter, Limits(min(left, DOWNLOAD_PAGE_MESSAGES), WHOLE_BODY))
            lines = await asyncio.to_thread(_lines, topic, found)
        if found.failures:
            raise UpstreamError(_named(found.failures))
        async with asyncio.timeout(DOWNLOAD_STALL_S_MAX):
            await response.write(lines)
        left -= len(found.messages)
        bytes_left -= len(lines)
        ranges = [one._replace(high=found.positions[one.log.node]) for one in ranges if one.log.node in found.positions]
    return response


def _named(failures: dict[str, str]) -> str:
    return "; ".join(f"{node}: {text}" for node, text in failures.items())


def _lines(topic: str, found: SearchResult) -> bytes:
    return b"".join(line(topic, message) for message in found.messages)


async def one(request: web.Request) -> web.StreamResponse:
    state = _state(request)
    topic = name_in_path(request, "topic")
    if request.query.get("download"):
        message = await _read_one(request, state, topic, WHOLE_BODY, opens_envelopes=False)
        name = f"{_file_name(topic)}-{message.seq}.bin"
        headers = {"Content-Disposition": f'attachment; filename="{name}"', "Content-Security-Policy": "sandbox"}
        return web.Response(body=message.body, content_type="application/octet-stream", headers=headers)
    message = await _read_one(request, state, topic, state.options.message_browser_max_bytes)
    return json_answer({**shown(message), "message": ""})


async def _read_one(
    request: web.Request, state: AdminState, topic: str, body_bytes_max: int, *, opens_envelopes: bool = True
) -> LogMessage:
    node = known_node(await state.fresh_snapshot(), request.match_info["node"])
    text = request.match_info["seq"]
    seq = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else INT64_MAX
    wanted = Wanted(Everything(), 1, body_bytes_max, opens_envelopes)
    try:
        async with searching():
            piece, _ = await RemoteLog(state.cluster, node, topic).read(seq, seq + 1, wanted)
    except UpstreamError as error:
        if error.status in (400, 404, 410):
            raise refusal(web.HTTPNotFound, "MESSAGE_NOT_FOUND") from None
        raise _upstream(error) from None
    if not piece.messages:
        raise refusal(web.HTTPNotFound, "MESSAGE_NOT_FOUND")
    return piece.messages[0]


# -- publishing ------------------------------------------------------------------------------------------


async def publish(request: web.Request) -> web.StreamResponse:
    state = _state(request)
    topic = name_in_path(request, "topic")
    require(request, "publish")
    defer_ms = number(request, "defer", 0, DEFER_MS_MAX, 0)
    body = await request.read()
    if not body:
        raise refusal(web.HTTPBadRequest, "MSG_EMPTY", reason="a message has at least one byte")
    node = _publish_to(await state.fresh_snapshot(), topic, request.query.get("node", ""))
    return await _publish(request, state, "publish", topic, node, body, defer_ms)


async def republish(request: web.Request) -> web.StreamResponse:
    """Publishes a message again. Its bytes are read from the log, so that the browser cannot have changed them."""
    state = _state(request)
    topic = name_in_path(request, "topic")
    require(request, "republish")
    message = await _read_one(request, state, topic, WHOLE_BODY, opens_envelopes=False)
    opened = unwrap(message.body)
    # Consumers that drop duplicates would drop it if it had its old key.
    body = message.body if opened.key is None else wrap(new_key(), opened.body, opened.headers)
    return await _publish(request, state, "republish", topic, message.node, body, 0)


def _publish_to(snapshot: Snapshot, topic: str, wanted: str) -> str:
    """Returns the nsqd to publish to: the wanted one, else one that answers, preferably one that has the topic."""
    if wanted:
        return known_node(snapshot, wanted)
    for address in _candidates(snapshot, topic):
        if not snapshot.nodes[address].failure:
            return address
    raise refusal(web.HTTPBadGateway, "UPSTREAM_ERROR: no nsqd answers")


def _candidates(snapshot: Snapshot, topic: str) -> Iterator[str]:
    found = snapshot.topics.get(topic)
    yield from (node.node for node in found.nodes if node.node in snapshot.nodes) if found is not None else ()
    yield from snapshot.nodes


async def _publish(
    request: web.Request, state: AdminState, action: str, topic: str, node: str, body: bytes, defer_ms: int
) -> web.Response:
    target = f"/pub?topic={quote(topic, safe='')}" + (f"&defer={defer_ms}" if defer_ms else "")
    try:
        await state.cluster.post(node, target, body)
    except UpstreamError as error:
        await audit.changed(request, action, topic=topic, node=node, result=str(error))
        raise _upstream(error) from None
    await audit.changed(request, action, topic=topic, node=node)
    return json_answer({"message": "", "node": node, "bytes": len(body)})


def _upstream(error: UpstreamError) -> web.HTTPException:
    return refusal(web.HTTPBadGateway, f"UPSTREAM_ERROR: {error}")


def _file_name(topic: str) -> str:
    return topic.replace("#", "_")


routes: Final = [
    *channel_view.routes,
    web.get("/messages/{topic}/found.json", page),
    web.get("/messages/{topic}/found.jsonl", download),
    web.get("/messages/{topic}/{node}/{seq}", one),
    web.post("/messages/{topic}", publish),
    web.post("/messages/{topic}/{node}/{seq}/republish", republish),
]
