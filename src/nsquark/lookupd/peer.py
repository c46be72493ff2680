"""Reads what an nsqd says of itself in IDENTIFY, and writes the JSON of it.

It is read as NSQ reads it: keys in any letter case, unknown ones ignored, null like absent, broken text repaired. A
parser stricter than that would lock out programs that register with NSQ's nsqlookupd today.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from nsquark.web.messages import encode_json

STRING_CHARS_MAX = 1_024
"""A text that a peer says of itself has at most this many characters; more are cut off."""
INTEGER_MIN, INTEGER_MAX = -(2**63), 2**63 - 1

_SURROGATE = re.compile("[\ud800-\udfff]")


class BadJsonError(ValueError):
    """Says that the body is not the JSON of a peer."""


@dataclass(slots=True)
class PeerInfo:
    remote_address: str = ""
    hostname: str = ""
    broadcast_address: str = ""
    tcp_port: int = 0
    http_port: int = 0
    version: str = ""

    @property
    def is_complete(self) -> bool:
        return bool(self.broadcast_address and self.tcp_port and self.http_port and self.version)

    @property
    def node(self) -> str:
        """Names an nsqd as `/topic/tombstone` does. NSQ puts no brackets around an IPv6 address here."""
        return f"{self.broadcast_address}:{self.http_port}"


_STRINGS = frozenset(("remote_address", "hostname", "broadcast_address", "version"))
_INTEGERS = frozenset(("tcp_port", "http_port"))


def read_peer_info(body: bytes) -> PeerInfo:
    """Reads the peer of an IDENTIFY body; raises BadJsonError where NSQ would not read it either."""
    try:
        # Objects become tuples of pairs: of a repeated key the last value counts, but each is checked.
        document = json.loads(
            body.decode("utf-8", "surrogateescape"), object_pairs_hook=tuple, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise BadJsonError(str(error)) from error
    if document is None:
        return PeerInfo()
    if not isinstance(document, tuple):
        raise BadJsonError("not an object")
    info = PeerInfo()
    for key, value in document:
        name = key.casefold()
        if value is None:
            continue
        if name in _STRINGS:
            setattr(info, name, _string(name, value))
        elif name in _INTEGERS:
            setattr(info, name, _integer(name, value))
    return info


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadJsonError(f"{name} is not a string")
    return _SURROGATE.sub("\ufffd", value[:STRING_CHARS_MAX])


def _integer(name: str, value: Any) -> int:
    if type(value) is not int or not INTEGER_MIN <= value <= INTEGER_MAX:  # not isinstance: true is no port
        raise BadJsonError(f"{name} is not a 64-bit integer")
    return value


def _refuse_constant(word: str) -> NoReturn:
    raise BadJsonError(f"{word} is not JSON")


def peer_json(info: PeerInfo) -> bytes:
    """Writes the object that `/lookup` and `/nodes` show, its keys in NSQ's order."""
    return encode_json(
        {
            "remote_address": info.remote_address,
            "hostname": info.hostname,
            "broadcast_address": info.broadcast_address,
            "tcp_port": info.tcp_port,
            "http_port": info.http_port,
            "version": info.version,
        }
    )
