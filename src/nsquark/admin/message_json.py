"""Writes a message as JSON: for pages, which escape it, and as a line of a file, which a terminal may be shown."""

import base64
import codecs
import json
from datetime import UTC, datetime
from typing import Any, Final

from nsquark.admin.log_reader import LogMessage

NS_PER_S: Final = 1_000_000_000
SECONDS_MAX: Final = 253_402_300_799
"""The end of the year 9999."""


def shown(message: LogMessage) -> dict[str, Any]:
    """Makes the object of a message; `text` is null for what is no UTF-8, which is in `base64` then."""
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
    """Writes a line with everything but ASCII escaped: some terminals obey control characters above it."""
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
    """Writes a time in UTC, to the nanosecond; whatever a publisher's clock said."""
    seconds, ns = divmod(time_ns, NS_PER_S)
    moment = datetime.fromtimestamp(min(max(seconds, 0), SECONDS_MAX), UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ns:09d}Z"


def _text(body: bytes, *, is_cut: bool) -> str | None:
    """Decodes a text; a character that was cut in two at the end is left out."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(body, final=not is_cut)
    except UnicodeDecodeError:
        return None
