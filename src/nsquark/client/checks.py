"""Refuses what no nsqd would take before it is sent: nsqd closes the connection for it."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from nsquark.client.errors import ConfigError, InvalidName
from nsquark.wire.names import NAME_LENGTH_MAX, is_valid_name

Body = bytes | bytearray | memoryview


def check_name(kind: str, name: str) -> None:
    if not isinstance(name, str):
        raise InvalidName(f"a {kind} name is a str, not {name!r}")
    if not is_valid_name(name):
        raise InvalidName(f"{kind} name {name!r} is not valid: 1 to {NAME_LENGTH_MAX} of . a-z A-Z 0-9 _ -")


def checked_body(body: Body) -> bytes:
    if not isinstance(body, bytes):
        if not isinstance(body, bytearray | memoryview):
            raise TypeError(f"a message body is bytes, not {type(body).__name__}; encode it first")
        body = bytes(body)
    if not body:
        raise ValueError("a message body must not be empty: nsqd refuses it")
    return body


def check_addresses(kind: str, given: object) -> list[str]:
    """Checks one address or several; returns a list without repetitions."""
    listed = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    for address in listed:
        if not isinstance(address, str) or not address:
            raise ConfigError(f"{kind} {given!r}: give 'host:port', or several of them")
    return list(dict.fromkeys(listed))


def check_address(given: object) -> str:
    """Checks one address: of an nsqd's TCP port, or the path of its unix socket."""
    if not isinstance(given, str):
        raise ConfigError(
            f"nsqd {given!r}: give one 'host:port', for instance '127.0.0.1:4150'; several need a ProducerPool"
        )
    return given


def check_dedupe(dedupe: object) -> None:
    if not isinstance(dedupe, bool) and not all(
        callable(getattr(dedupe, name, None)) for name in ("claim", "done", "release")
    ):
        raise ConfigError(f"dedupe is True, or a store with claim, done and release, not {dedupe!r}")


def is_async(function: Callable[..., Any]) -> bool:
    """Tells whether something is to be awaited, an object with `async def __call__` too."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
