"""Writes a message as JSON: as an object for the pages, and as a line of a file that is safe to show in a terminal."""

import base64
import codecs
import json
from datetime import UTC, datetime
from typing import Any, Final

from nsquark.admin.log_reader import LogMessage
from nsquark.base.durations import NS_PER_S

SECONDS_MAX: Final = 253_402_300_799
"""This is the end of the year 9999, the last that datetime can hold."""


def shown(message: LogMessage) -> dict[str, Any]:
    """Makes the object of a message. A body that is no UTF-8 is in `base64`, and its `text` is null."""
    text = _text(message.body, is_cut=message.is_cut)
    return {
        "node": message.node,
        "seq": message.seq,
        "id": message.id,
        "timestamp_ns": message.timestamp_ns,
        "time": exact_time(message.timestamp_ns),
        "bytes": message.size,
        "text": text,
        "base64": None if text is not None else base64.b64encode(message.body).decode(),
        "is_text": text is not None,
        "is_json": message.is_json,
        "is_cut": message.is_cut,
        "headers": dict(message.headers),
    }


def line(topic: str, message: LogMessage) -> bytes:
    """Writes a message as a line with everything but ASCII escaped, since some terminals obey control characters beyond
    ASCII.
    """
    text = _text(message.body, is_cut=False)
    fields = {
        "topic": topic,
        "node": message.node,
        "seq": message.seq,
        "id": message.id,
        "timestamp_ns": message.timestamp_ns,
        "time": exact_time(message.timestamp_ns),
        **({"headers": dict(message.headers)} if message.headers else {}),
        **({"body": text} if text is not None else {"body_base64": base64.b64encode(message.body).decode()}),
    }
    return json.dumps(fields, separators=(",", ":")).replace("\x7f", "\\u007f").encode() + b"\n"


def exact_time(time_ns: int) -> str:
    """Writes a time in UTC to the nanosecond. The seconds of a wrong clock are moved into the years 1970 to 9999."""
    seconds, ns = divmod(time_ns, NS_PER_S)
    moment = datetime.fromtimestamp(min(max(seconds, 0), SECONDS_MAX), UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ns:09d}Z"


def _text(body: bytes, *, is_cut: bool) -> str | None:
    """Decodes UTF-8, or returns None if it is none. A character that was cut in two at the end is left out."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(body, final=not is_cut)
    except UnicodeDecodeError:
        return None
