"""Reads what an nsqd says of itself in IDENTIFY, and writes the JSON of it.

It is read as NSQ reads it: keys in any letter case, unknown ones ignored, null like absent, broken text repaired. A
parser stricter than that would lock out programs that register with NSQ's nsqlookupd today.
"""

from dataclasses import dataclass
from typing import Any

from nsquark.web.messages import encode_json
from nsquark.wire.documents import read_fields_as_go

STRING_CHARS_MAX = 1_024
"""A text that a peer says of itself has at most this many characters; more are cut off."""


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
    info = PeerInfo()
    try:
        for name, value in read_fields_as_go(body):
            if name in _STRINGS:
                setattr(info, name, _checked(name, value, str)[:STRING_CHARS_MAX])
            elif name in _INTEGERS:
                setattr(info, name, _checked(name, value, int))
    except ValueError as error:
        raise BadJsonError(str(error)) from error
    return info


def _checked(name: str, value: Any, kind: type) -> Any:
    if type(value) is not kind:  # not isinstance: true is no port
        raise ValueError(f"{name} is not {kind.__name__}")
    return value


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
