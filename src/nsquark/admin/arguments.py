"""Reads the arguments of requests to the message browser, and refuses those that are invalid."""

from __future__ import annotations

import re

from aiohttp import web

from nsquark.admin.access import refusal
from nsquark.admin.snapshot import Snapshot
from nsquark.base.durations import NS_PER_MS
from nsquark.web.arguments import INT64_MAX
from nsquark.wire.names import is_valid_name


def invalid(name: str, reason: str) -> web.HTTPException:
    return refusal(web.HTTPBadRequest, f"INVALID_ARG_{name.upper()}", reason=reason)


def number(request: web.Request, name: str, low: int, high: int, default: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    value = _decimal(text)
    if value is None or not low <= value <= high:
        raise invalid(name, f"a number from {low} to {high}")
    return value


def name_in_path(request: web.Request, name: str) -> str:
    """Reads a topic's or a channel's name from the path, and refuses anything else before it reaches an nsqd."""
    value = request.match_info[name]
    if not is_valid_name(value):
        raise refusal(web.HTTPBadRequest, f"INVALID_{name.upper()}")
    return value


def position(text: str, name: str) -> tuple[str, int]:
    """Reads oldest, newest, `time:<milliseconds>`, `seq:<number>` or a number alone, as a word and a number."""
    if text in ("oldest", "newest"):
        return text, 0
    word, _, digits = text.rpartition(":")
    value = _decimal(digits)
    if word not in ("", "time", "seq") or value is None or value > INT64_MAX // (NS_PER_MS if word == "time" else 1):
        raise invalid(name, "oldest, newest, time:<milliseconds since 1970> or seq:<number>")
    return word or "seq", value


def known_node(snapshot: Snapshot, address: str) -> str:
    """Returns the address if it is that of an nsqd of this cluster, so that nobody makes nsqadmin ask another host."""
    if address not in snapshot.nodes:
        raise refusal(web.HTTPNotFound, "NODE_NOT_FOUND")
    return address


def encode_cursor(positions: dict[str, int]) -> str | None:
    """Writes the position in each nsqd's log as one word of a URL; it returns None if there are no positions."""
    return ",".join(f"{node}~{seq}" for node, seq in sorted(positions.items())) or None


def decode_cursor(text: str, name: str) -> dict[str, int]:
    positions = {}
    for item in text.split(",") if text else ():
        node, _, digits = item.rpartition("~")
        seq = _decimal(digits)
        if not node or seq is None:
            raise invalid(name, "what an answer said")
        positions[node] = min(seq, INT64_MAX)
    return positions


def _decimal(text: str) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,19}", text) else None
