"""Turns what a caller publishes into the bytes that nsqd gets: encoded if asked for, and put into an envelope."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict, Unpack

from nsquark.client.checks import Body, checked_bodies, checked_body
from nsquark.client.envelope import NO_HEADERS, Headers, new_key, wrap
from nsquark.client.errors import ConfigError
from nsquark.client.typed import Encode, encoded
from nsquark.kernel.mpub import pack_bodies
from nsquark.wire.commands import MpubBody


class Packing(TypedDict, total=False):
    """Declares the keywords that every publish method takes."""

    encode: Encode | None
    """Says how the value becomes bytes: by `"json"`, `"msgpack"` or a function. Without it the body is bytes."""
    headers: Headers | None
    """Has texts by name, for a producer with `envelope=True`; `multi_publish` gives them to each of its messages."""


def packed(
    in_envelope: bool, value: Any, *, encode: Encode | None = None, headers: Headers | None = None, **unknown: object
) -> Body:
    """Makes the body of one message. An envelope gets a key of its own, which copies and retries of
    these bytes share.
    """
    if unknown:
        raise TypeError(f"publishing takes the keywords encode and headers, not {', '.join(unknown)}")
    body: Body = value if encode is None else encoded(value, encode)
    if in_envelope:
        return wrap(new_key(), checked_body(body), headers or NO_HEADERS)
    if headers:
        raise ConfigError("headers travel in an envelope: make the producer with envelope=True")
    return body


def packed_all(in_envelope: bool, values: Iterable[Any] | MpubBody, **packing: Unpack[Packing]) -> list[Body]:
    """Makes the bodies of one command, each as `packed` does."""
    if isinstance(values, MpubBody):
        raise ConfigError("these messages are packed already: give the bodies one by one to encode or envelope them")
    return [packed(in_envelope, value, **packing) for value in checked_bodies(values)]


def mpub_body(bodies: Iterable[bytes]) -> MpubBody:
    """Lays out checked bodies as one MPUB wants them."""
    listed = bodies if isinstance(bodies, list) else list(bodies)
    return MpubBody(pack_bodies(listed), len(listed))
