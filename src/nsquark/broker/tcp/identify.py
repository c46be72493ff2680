"""Carries out IDENTIFY and AUTH: what a client says of itself and asks for is checked as NSQ does."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from nsquark.base.version import NSQ_VERSION
from nsquark.broker.options import NsqdOptions
from nsquark.broker.tcp import upgrade
from nsquark.broker.tcp.command import STATE_INIT, Command, text_of
from nsquark.broker.tcp.waits import FOR_THREAD
from nsquark.broker.topology import is_shown
from nsquark.wire.compression import DEFLATE_LEVEL_DEFAULT
from nsquark.wire.documents import read_fields_as_go
from nsquark.wire.errors import FatalClientError
from nsquark.wire.frames import FrameType, frame

if TYPE_CHECKING:
    from asyncio import Future

    from nsquark.broker.tcp.session import Session

HEARTBEAT_MS_DEFAULT = 30_000
HEARTBEAT_MS_MIN = 1_000
OUTPUT_BUFFER_BYTES_DEFAULT = 16_384
OUTPUT_BUFFER_BYTES_MIN = 64
MSG_TIMEOUT_MS_MIN = 1_000
SAMPLE_RATE_MAX = 99
INT32_END = 1 << 31
INT64_END = 1 << 63
IDENTITY_CHARS_MAX = 1_024
"""A string that a client says of itself has at most this many characters; more are cut off."""
SHORT_BYTES_MAX = 16 << 10
"""Bodies longer than this are read in a thread, and no objects are made of what is not asked for."""
LOGGED_BYTES_MAX = 4_096
"""At most this much of a body is logged."""

SEARCHED_CHARS = 64 << 10
SPACE_CHARS_MAX = 64
"""More space than this between a name and its colon is not looked for in a long body."""
NAME_CHARS_MAX = 32 + SPACE_CHARS_MAX
"""A name with its quotes, space and colon has at most this many characters."""

_STRINGS = ("client_id", "hostname", "user_agent", "topology_region", "topology_zone")
_OWN = ("show_limits", "requeue_uncounted")
_BOOLEANS = ("feature_negotiation", "tls_v1", "snappy", "deflate", *_OWN)
_INTEGERS = (
    "heartbeat_interval",
    "output_buffer_size",
    "output_buffer_timeout",
    "deflate_level",
    "sample_rate",
    "msg_timeout",
)
_ZEROS: dict[str, Any] = {
    **dict.fromkeys(_STRINGS, ""),
    **dict.fromkeys(_BOOLEANS, False),
    **dict.fromkeys(_INTEGERS, 0),
}
_Values = msgspec.defstruct("_Values", [(name, msgspec.Raw, msgspec.Raw(b"null")) for name in _ZEROS])
"""Has the values of the known fields, undecoded."""


_KNOWN_NAME = re.compile(f'"(?:{"|".join(_ZEROS)})"[ \\t\\r\\n]{{0,{SPACE_CHARS_MAX}}}:', re.IGNORECASE | re.ASCII)


@dataclass(slots=True)
class ClientSettings:
    """Has the settings of one connection, at first those of a client that does not IDENTIFY."""

    client_id: str
    hostname: str
    msg_timeout_ms: int
    output_buffer_timeout_ms: int
    user_agent: str = ""
    heartbeat_ms: int = HEARTBEAT_MS_DEFAULT
    output_buffer_bytes: int = OUTPUT_BUFFER_BYTES_DEFAULT
    sample_rate: int = 0
    feature_negotiation: bool = False
    tls_v1: bool = False
    snappy: bool = False
    deflate: bool = False
    deflate_level: int = DEFLATE_LEVEL_DEFAULT
    topology_region: str = ""
    topology_zone: str = ""
    requeue_uncounted: bool = False


def IDENTIFY(session: Session, command: Command) -> bool:
    if session.state != STATE_INIT:
        raise FatalClientError("E_INVALID", "cannot IDENTIFY in current state")
    body = command.body(session.nsqd.options.max_body_size)
    fields = _fields_of(session, body) if body is not None else None
    if fields is None:
        return False
    answer = frame(FrameType.RESPONSE, identify(fields, session.settings, session.nsqd.options))
    session.identified()
    if upgrade.is_wanted(session):
        session.replies.send_then(answer, upgrade.Upgrade(session, session.fail).begin)
        command.next = command.end  # as in NSQ, what was sent too early is lost
    else:
        session.replies.send(answer)
    return True


def AUTH(session: Session, command: Command) -> bool:
    if session.state != STATE_INIT:
        raise FatalClientError("E_INVALID", "cannot AUTH in current state")
    if len(command.params) != 1:
        raise FatalClientError("E_INVALID", "AUTH invalid number of parameters")
    secret = command.body(session.nsqd.options.max_body_size)
    if secret is None:
        return False
    if session.guard is None:
        raise FatalClientError("E_AUTH_DISABLED", "AUTH disabled")
    answer = session.guard.authorize(secret)
    if answer is None:
        return False
    session.replies.send(frame(FrameType.RESPONSE, answer))
    return True


def _fields_of(session: Session, body: bytes) -> dict[str, Any] | None:
    """Reads what a body says; returns None while a thread reads a long one, after which IDENTIFY is looked at again."""
    reading, session.reading_fields = session.reading_fields, None
    if reading is not None:
        return reading.result()
    session.nsqd.logger.info(f"[{session.remote_address}] IDENTIFY: {text_of(body[:LOGGED_BYTES_MAX])}")
    if len(body) <= SHORT_BYTES_MAX:
        return read_fields(body)
    session.waits.begin(FOR_THREAD)

    def read(reading: Future[dict[str, Any]]) -> None:
        reading.exception()  # nobody may be left to look at it
        session.waits.end(FOR_THREAD)

    session.reading_fields = session.nsqd.loop.run_in_executor(None, read_fields, body)
    session.reading_fields.add_done_callback(read)
    return None


def identify(fields: dict[str, Any], settings: ClientSettings, options: NsqdOptions) -> bytes:
    """Applies what IDENTIFY said to the settings, and returns the answer, which is OK without feature negotiation."""
    settings.client_id = fields["client_id"]
    settings.hostname = fields["hostname"]
    settings.user_agent = fields["user_agent"]
    settings.topology_region = fields["topology_region"]
    settings.topology_zone = fields["topology_zone"]
    _set_heartbeat(settings, fields["heartbeat_interval"], options.max_heartbeat_interval.ms)
    _set_output_buffer(settings, fields["output_buffer_timeout"], fields["output_buffer_size"], options)
    _set_sample_rate(settings, fields["sample_rate"])
    _set_msg_timeout(settings, fields["msg_timeout"], options)
    settings.feature_negotiation = fields["feature_negotiation"]
    settings.requeue_uncounted = settings.feature_negotiation and fields["requeue_uncounted"]
    if not settings.feature_negotiation:
        return b"OK"
    settings.tls_v1 = fields["tls_v1"] and bool(options.tls_cert)
    settings.deflate = fields["deflate"] and options.deflate
    settings.snappy = fields["snappy"] and options.snappy
    asked_level = fields["deflate_level"] if settings.deflate else 0
    settings.deflate_level = min(asked_level if asked_level > 0 else DEFLATE_LEVEL_DEFAULT, options.max_deflate_level)
    if settings.deflate and settings.snappy:
        raise FatalClientError("E_IDENTIFY_FAILED", "cannot enable both deflate and snappy compression")
    return _answer(settings, options, fields["show_limits"])


def _answer(settings: ClientSettings, options: NsqdOptions, show_limits: bool) -> bytes:
    """Writes the answer: NSQ's fields in NSQ's order; ours only for a client that asks."""
    answer: dict[str, Any] = {
        "max_rdy_count": options.max_rdy_count,
        "version": NSQ_VERSION,
        "max_msg_timeout": options.max_msg_timeout.ms,
        "msg_timeout": settings.msg_timeout_ms,
        "tls_v1": settings.tls_v1,
        "deflate": settings.deflate,
        "deflate_level": settings.deflate_level,
        "max_deflate_level": options.max_deflate_level,
        "snappy": settings.snappy,
        "sample_rate": settings.sample_rate,
        "auth_required": bool(options.auth_http_address),
        "output_buffer_size": settings.output_buffer_bytes,
        "output_buffer_timeout": settings.output_buffer_timeout_ms,
    }
    if is_shown(options):
        answer["topology_region"] = options.topology_region
        answer["topology_zone"] = options.topology_zone
    if show_limits:
        answer["max_msg_size"] = options.max_msg_size
        answer["max_body_size"] = options.max_body_size
    if settings.requeue_uncounted:
        answer["requeue_uncounted"] = True
    return msgspec.json.encode(answer)


def read_fields(body: bytes) -> dict[str, Any]:
    """Reads the known fields of an IDENTIFY body by their lower-case names, with zeros for what is absent."""
    fields = dict(_ZEROS)
    try:
        found = read_fields_as_go(body) if len(body) <= SHORT_BYTES_MAX else _known_values(body)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        raise _bad("failed to decode JSON body") from None
    for name, value in found:
        if name in _OWN:  # NSQ ignores them, whatever they are
            fields[name] = value is True
        elif name in fields:
            if type(value) is not type(_ZEROS[name]) or (name in _INTEGERS and not _fits(name, value)):
                raise _bad("failed to decode JSON body")
            fields[name] = value[:IDENTITY_CHARS_MAX] if name in _STRINGS else value
    return fields


def _fits(name: str, value: int) -> bool:
    """Tells whether NSQ's variable for this field can hold the number."""
    end = INT32_END if name == "sample_rate" else INT64_END
    return -end <= value < end


def _known_values(body: bytes) -> list[tuple[str, Any]]:
    """Reads the known fields of a long body, with no objects for what is not asked for."""
    values = msgspec.json.decode(_with_names_in_lower_case(body.decode("utf-8", "replace")), type=_Values)
    found = [(name, _scalar(memoryview(getattr(values, name)))) for name in _ZEROS]
    return [(name, value) for name, value in found if value is not None]


def _with_names_in_lower_case(text: str) -> str:
    """Spells known names in lower case, since NSQ accepts any. A quote within a string is escaped, so what is found is
    a name.

    It searches one piece at a time, so that the event loop may run in between: a search does not let go of the
    interpreter.
    """
    pieces: list[str] = []
    pos = done = 0
    while pos < len(text):
        found = _KNOWN_NAME.search(text, pos, pos + SEARCHED_CHARS)
        if found is None:
            pos += SEARCHED_CHARS - NAME_CHARS_MAX
            continue
        pieces += (text[done : found.start()], found.group().lower())
        pos = done = found.end()
    return "".join((*pieces, text[done:]))


def _scalar(value: memoryview) -> Any:
    """Reads a value; an empty list stands for every list or object, which is wrong whatever is in it."""
    return [] if value[0] in b"[{" else msgspec.json.decode(value)


def _bad(reason: str) -> FatalClientError:
    return FatalClientError("E_BAD_BODY", f"IDENTIFY {reason}")


def _set_heartbeat(settings: ClientSettings, asked_ms: int, max_ms: int) -> None:
    if asked_ms == -1:
        settings.heartbeat_ms = 0
    elif HEARTBEAT_MS_MIN <= asked_ms <= max_ms:
        settings.heartbeat_ms = asked_ms
    elif asked_ms != 0:
        raise _bad(f"heartbeat interval ({asked_ms}) is invalid")


def _set_output_buffer(settings: ClientSettings, timeout_ms: int, size: int, options: NsqdOptions) -> None:
    """Sets size and time of the output buffer. Both are upper bounds: output is sent at the end of every turn."""
    if timeout_ms == -1:
        settings.output_buffer_timeout_ms = 0
    elif options.min_output_buffer_timeout.ms <= timeout_ms <= options.max_output_buffer_timeout.ms:
        settings.output_buffer_timeout_ms = timeout_ms
    elif timeout_ms != 0:
        raise _bad(f"output buffer timeout ({timeout_ms}) is invalid")
    if size == -1:
        settings.output_buffer_bytes = 1
        settings.output_buffer_timeout_ms = 0
    elif OUTPUT_BUFFER_BYTES_MIN <= size <= options.max_output_buffer_size:
        settings.output_buffer_bytes = size
    elif size != 0:
        raise _bad(f"output buffer size ({size}) is invalid")


def _set_sample_rate(settings: ClientSettings, rate: int) -> None:
    if not 0 <= rate <= SAMPLE_RATE_MAX:
        raise _bad(f"sample rate ({rate}) is invalid")
    settings.sample_rate = rate


def _set_msg_timeout(settings: ClientSettings, asked_ms: int, options: NsqdOptions) -> None:
    if MSG_TIMEOUT_MS_MIN <= asked_ms <= options.max_msg_timeout.ms:
        settings.msg_timeout_ms = asked_ms
    elif asked_ms != 0:
        raise _bad(f"msg timeout ({asked_ms}) is invalid")
