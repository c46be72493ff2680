"""Decides which part of which nsqd's log a page of the message browser is about."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final, Self

from aiohttp import web

from nsquark.admin.access import refusal
from nsquark.admin.arguments import decode_cursor, invalid, known_node, name_in_path, number, position
from nsquark.admin.cluster import ClusterClient
from nsquark.admin.errors import UpstreamError
from nsquark.admin.filters import FilterError, MessageFilter, parse_filter
from nsquark.admin.log_reader import PIECE_BYTES, LogInfo, RemoteLog
from nsquark.admin.search import SearchRange, SearchResult, infos
from nsquark.admin.snapshot import Snapshot

PAGE_MESSAGES: Final = 50
PAGE_MESSAGES_MAX: Final = 500
WINDOW_BYTES_MAX: Final = 16 * PIECE_BYTES
"""A step forward looks through at most this many bytes of one nsqd's log."""
TAIL_WAIT_S_MAX: Final = 30
TAIL_POLL_S: Final = 0.5


@dataclass(frozen=True)
class Question:
    """Holds what a request asks for, once it is checked."""

    topic: str
    nodes: tuple[str, ...]
    silent: dict[str, str]
    """These nsqds did not answer the last poll, each with the reason; they may have the topic too."""
    at: tuple[str, int]
    older: dict[str, int] | None
    newer: dict[str, int] | None
    wait_s: int
    filter: MessageFilter
    messages_max: int

    @classmethod
    def of(cls, request: web.Request, snapshot: Snapshot, messages_max: int | None = None) -> Self:
        query = request.query
        topic = name_in_path(request, "topic")
        at = position(query.get("at") or "newest", "at")
        nodes = _nodes(snapshot, topic, query.get("node", ""))
        if at[0] == "seq" and len(nodes) > 1:
            raise invalid("at", "a sequence number is of one nsqd: choose one")
        try:
            wanted = parse_filter(query.get("filter", ""))
        except FilterError as error:
            raise refusal(web.HTTPBadRequest, "INVALID_ARG_FILTER", reason=str(error), at=error.at) from None
        return cls(
            topic=topic,
            nodes=nodes,
            silent={} if query.get("node") else _silent(snapshot, nodes),
            at=at,
            older=decode_cursor(query["older"], "older") if "older" in query else None,
            newer=decode_cursor(query["newer"], "newer") if "newer" in query else None,
            wait_s=number(request, "wait", 0, TAIL_WAIT_S_MAX, 0) if "newer" in query else 0,
            filter=wanted,
            messages_max=messages_max or number(request, "limit", 1, PAGE_MESSAGES_MAX, PAGE_MESSAGES),
        )


def _nodes(snapshot: Snapshot, topic: str, wanted: str) -> tuple[str, ...]:
    """Returns the addresses to ask, which always come from the snapshot, never from a request."""
    if topic not in snapshot.topics:
        raise refusal(web.HTTPNotFound, "TOPIC_NOT_FOUND")
    if wanted:
        return (known_node(snapshot, wanted),)
    return tuple(node.node for node in snapshot.topics[topic].nodes)


def _silent(snapshot: Snapshot, asked: tuple[str, ...]) -> dict[str, str]:
    """Returns the nsqds that did not answer the last poll; asking them again would keep the page waiting."""
    return {node: found.failure for node, found in snapshot.nodes.items() if found.failure and node not in asked}


@dataclass
class Nodes:
    """Sorts a topic's nsqds by their answers about its log: they have one, they have none, or they do not answer."""

    logs: dict[str, RemoteLog] = field(default_factory=dict)
    infos: dict[str, LogInfo] = field(default_factory=dict)
    without_log: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


async def ask_nodes(cluster: ClusterClient, question: Question) -> Nodes:
    logs = {node: RemoteLog(cluster, node, question.topic) for node in question.nodes}
    nodes = Nodes(logs, failures=dict(question.silent))
    for node, answer in (await infos(list(logs.values()))).items():
        if isinstance(answer, LogInfo) and answer.is_stored:
            nodes.infos[node] = answer
        elif isinstance(answer, LogInfo) or answer.status == 404:
            nodes.without_log.append(node)
        else:
            nodes.failures[node] = str(answer)
    return nodes


async def wait_for_news(cluster: ClusterClient, question: Question, request: web.Request) -> Nodes:
    """Asks again and again until one of the logs has more, the time is over, or the client has left."""
    ends_s = time.monotonic() + question.wait_s
    seen = question.newer or {}
    while True:
        nodes = await ask_nodes(cluster, question)
        has_news = any(info.next > seen.get(node, 0) for node, info in nodes.infos.items())
        is_left = request.transport is None or request.transport.is_closing()
        if has_news or is_left or time.monotonic() + TAIL_POLL_S > ends_s:
            return nodes
        await asyncio.sleep(TAIL_POLL_S)


@dataclass
class Asked:
    """Holds the ranges to look through, and how many messages to show of them."""

    ranges: list[SearchRange]
    messages_max: int
    newer: dict[str, int]
    """This is the position at which a newer page goes on, for each nsqd."""
    failures: dict[str, str] = field(default_factory=dict)


async def ranges_of(question: Question, nodes: Nodes) -> Asked:
    asked = Asked([], question.messages_max, dict(question.newer or {}))
    is_forward = question.older is None and not question.wait_s
    is_forward = is_forward and (question.newer is not None or question.at[0] == "oldest")
    shown = 0
    window: SearchRange | None
    for node, info in nodes.infos.items():
        try:
            if is_forward:
                window, count = await _forward(question, nodes.logs[node], info)
                shown += count
            else:
                window = await _backward(question, nodes.logs[node], info)
        except UpstreamError as error:
            asked.failures[node] = str(error)
            continue
        if window is not None:
            asked.ranges.append(window)
            asked.newer[node] = window.high
    if is_forward:
        asked.messages_max = max(shown, 1)
    return asked


async def _backward(question: Question, log: RemoteLog, info: LogInfo) -> SearchRange | None:
    low, high = _start(info), info.next
    if question.older is not None:
        if log.node not in question.older:
            return None
        high = min(high, question.older[log.node])
    elif question.newer is not None:
        low = max(low, question.newer.get(log.node, 0))
    else:
        word, value = question.at
        if word == "time":
            high = await log.at_time(value + 1)
        elif word == "seq":
            high = min(high, value + 1)
    return SearchRange(log, min(low, high), high)


async def _forward(question: Question, log: RemoteLog, info: LogInfo) -> tuple[SearchRange, int]:
    """Returns the range of the next messages, at most as many as a page shows, and their number."""
    low = min(max(_start(info), (question.newer or {}).get(log.node, 0)), info.next)
    limits = f"&max_messages={question.messages_max}&max_bytes={WINDOW_BYTES_MAX}"
    plan = await log.plan(low, info.next, 1, limits)
    return SearchRange(log, low, plan.high), plan.count


def _start(info: LogInfo) -> int:
    return max(info.removed_to, min(info.first, info.next))


def older_positions(question: Question, nodes: Nodes, asked: Asked, found: SearchResult) -> dict[str, int]:
    """Returns where an older page begins on each nsqd: where the search of this page stopped, or where its range
    begins if the search went through all of it.
    """
    positions = dict(found.positions)
    for one in asked.ranges:
        node = one.log.node
        if node not in positions and one.low > _start(nodes.infos[node]):
            positions[node] = one.low
    for node, seq in (question.older or {}).items():
        if node not in nodes.infos:  # it may answer next time
            positions[node] = seq
    return positions


async def skipped_count(asked: Asked, found: SearchResult) -> int:
    """Counts the messages that a live tail passed over, because more came than it shows."""
    skipped = 0
    for one in asked.ranges:
        high = found.positions.get(one.log.node)
        if high is not None:
            skipped += (await one.log.plan(one.low, high, 1)).count
    return skipped
