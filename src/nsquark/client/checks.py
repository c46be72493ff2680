"""Refuses what no nsqd would take before it is sent: nsqd closes the connection for it."""

import inspect
import numbers
import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Final

from nsquark.base.addresses import split_address
from nsquark.client.errors import ConfigError, InvalidName
from nsquark.client.options import Whole, YesNo, read
from nsquark.wire.names import NAME_LENGTH_MAX, is_valid_name

Body = bytes | bytearray | memoryview

SECONDS_MAX: Final = (2**63 - 1) // 10**9
"""nsqd counts a delay in ns, in 63 bits: a longer one would wrap, and its message come at once."""


def check_name(kind: str, name: str) -> None:
    if not isinstance(name, str):
        raise InvalidName(f"a {kind} name is a str, not {name!r}")
    if not is_valid_name(name):
        raise InvalidName(f"{kind} name {name!r} is not valid: 1 to {NAME_LENGTH_MAX} of . a-z A-Z 0-9 _ -")


def checked_body(body: Body) -> bytes:
    if type(body) is not bytes:
        if not isinstance(body, Body):
            raise TypeError(f"a message body is bytes, not {type(body).__name__}; encode it first")
        body = bytes(body)
    if not body:
        raise ValueError("a message body must not be empty: nsqd refuses it")
    return body


def checked_bodies(bodies: Any) -> list[Any]:
    """Lists the bodies of several messages, whatever they are."""
    if isinstance(bodies, str | Body) or not isinstance(bodies, Iterable):
        raise TypeError(f"multi_publish takes several bodies, such as a list, not {type(bodies).__name__}")
    return list(bodies)


def seconds_of(name: str, given: object) -> float:
    """Checks a time to wait, in seconds or as a timedelta; returns its seconds."""
    seconds: Any = given.total_seconds() if isinstance(given, timedelta) else given
    is_number = isinstance(given, numbers.Real | timedelta) and not isinstance(given, bool)
    if is_number and 0 <= seconds <= SECONDS_MAX:
        return float(seconds)
    raise ConfigError(f"a {name} of {given!r:.60}: give 0 or more seconds, at most {SECONDS_MAX}, or a timedelta")


def wait_seconds_of(timeout: object) -> float:
    """Checks how long someone waits at most; returns the seconds. What is left of a deadline that is over is 0."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, int | float) and seconds < 0:
        return 0.0
    return seconds_of("timeout", timeout)


def check_flag(name: str, given: object) -> None:
    kind = YesNo()
    read(name, given, kind.typed, kind)


def check_count(name: str, given: object, least: int) -> None:
    kind = Whole(least, None)
    read(name, given, kind.typed, kind)


def check_addresses(kind: str, given: object) -> list[str]:
    """Checks one address or several; returns a list without repetitions."""
    listed = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    for address in listed:
        if kind == "nsqd":
            _refuse_path(address)
        if not isinstance(address, str) or not address:
            raise ConfigError(f"{kind} {given!r}: give 'host:port', or several of them")
        if kind == "nsqd":
            check_address(address)
    return list(dict.fromkeys(listed))


def check_address(given: object, for_several: str = "a ProducerPool") -> str:
    """Checks one address: of an nsqd's TCP port, or the path of its unix socket."""
    _refuse_path(given)
    if not isinstance(given, str):
        raise ConfigError(
            f"nsqd {given!r}: give one 'host:port', for instance '127.0.0.1:4150'; several need {for_several}"
        )
    if "://" in given:
        raise ConfigError(f"nsqd address {given}: give the host:port of nsqd's TCP protocol, without a scheme")
    if not given.startswith("/"):  # a unix socket
        if "," in given or any(map(str.isspace, given)):
            raise ConfigError(f"nsqd address {given!r}: give each as host:port, without blanks or commas")
        try:
            split_address(given)
        except ValueError as error:
            hint = ", or the whole path of a unix socket" if "/" in given or given.endswith(".sock") else ""
            raise ConfigError(f"nsqd {error}{hint}") from None
    return given


def _refuse_path(given: object) -> None:
    if isinstance(given, os.PathLike):
        raise ConfigError(f"nsqd {given!r}: an address is a str; give host:port, or str(path) of a unix socket")


def check_dedupe(dedupe: object) -> None:
    if isinstance(dedupe, type):
        raise ConfigError(f"dedupe is a class: give a store made of it, {dedupe.__name__}()")
    if not isinstance(dedupe, bool) and not all(
        callable(getattr(dedupe, name, None)) for name in ("claim", "done", "release")
    ):
        raise ConfigError(f"dedupe is True, or a store with claim, done and release, not {dedupe!r}")


def is_async(function: Callable[..., Any]) -> bool:
    """Tells whether something is to be awaited, an object with `async def __call__` too."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
