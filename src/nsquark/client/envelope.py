"""Puts messages into envelopes: a prefix that says so, a key that all its copies share, and headers.

A producer puts its messages into envelopes when it is told to (`envelope=True`, or `copies`), and a consumer opens them
when it is told to (`envelope=True`, or `dedupe`). Everyone else sees the envelope in front of the body.

    00 "nsquark" 01  key (16 bytes)                                            body
    00 "nsquark" 02  key (16 bytes)  length (2 bytes, big-endian)  JSON object  body
"""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from nsquark.client.errors import MessageTooBig

MAGIC: Final = b"\x00nsquark"
"""Begins each envelope: no text and no usual format begins like this. The byte behind it is the envelope's version."""
KEY_ONLY: Final = MAGIC + b"\x01"
WITH_HEADERS: Final = MAGIC + b"\x02"
KEY_BYTES: Final = 16
ENVELOPE_BYTES: Final = len(KEY_ONLY) + KEY_BYTES
LENGTH_BYTES: Final = 2
HEADERS_BYTES_MAX: Final = 0xFFFF

Headers = Mapping[str, str]
NO_HEADERS: Final[Headers] = MappingProxyType({})

_decoder: Final = msgspec.json.Decoder(dict[str, str])


class Opened(NamedTuple):
    """Holds the content of an envelope. A body without one has no key and no headers, and stays as it came."""

    key: bytes | None
    headers: Headers
    body: bytes


def new_key() -> bytes:
    """Makes a random key: producers that know nothing of each other, forks among them, never meet in one."""
    return os.urandom(KEY_BYTES)


def wrap(key: bytes, body: bytes | bytearray | memoryview, headers: Headers = NO_HEADERS) -> bytes:
    """Puts the body in an envelope with this key and these headers."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"an envelope's key has {KEY_BYTES} bytes, not {len(key)}")
    if not headers:
        return b"".join((KEY_ONLY, key, body))
    packed = _packed(headers)
    return b"".join((WITH_HEADERS, key, len(packed).to_bytes(LENGTH_BYTES), packed, body))


def unwrap(body: bytes) -> Opened:
    """Opens an envelope; what only looks like one is a body without."""
    if len(body) >= ENVELOPE_BYTES:
        if body.startswith(KEY_ONLY):
            return Opened(body[len(KEY_ONLY) : ENVELOPE_BYTES], NO_HEADERS, body[ENVELOPE_BYTES:])
        if body.startswith(WITH_HEADERS):
            return _with_headers(body)
    return Opened(None, NO_HEADERS, body)


def _with_headers(body: bytes) -> Opened:
    begin = ENVELOPE_BYTES + LENGTH_BYTES
    end = begin + int.from_bytes(body[ENVELOPE_BYTES:begin])
    if end > len(body):
        return Opened(None, NO_HEADERS, body)
    try:
        headers = _decoder.decode(body[begin:end])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Opened(None, NO_HEADERS, body)
    return Opened(body[len(WITH_HEADERS) : ENVELOPE_BYTES], headers, body[end:])


def _packed(headers: Headers) -> bytes:
    if not isinstance(headers, Mapping):
        raise TypeError(f"headers are texts by name, in a dict, not in a {type(headers).__name__}")
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"headers are texts by name; {name!r} is {value!r}")
    try:
        packed = msgspec.json.encode(dict(headers))
    except UnicodeEncodeError as error:
        raise ValueError(f"headers are texts that UTF-8 can write: {error}") from None
    if len(packed) > HEADERS_BYTES_MAX:
        raise MessageTooBig(f"headers of {len(packed)} bytes; an envelope takes {HEADERS_BYTES_MAX}")
    return packed
