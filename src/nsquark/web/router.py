"""Finds which handler answers a request, by NSQ's rules for unknown, misspelt and not allowed ones."""

import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from nsquark.web.lane import LaneMaker
from nsquark.web.limits import BODY_BYTES_MAX
from nsquark.web.messages import JSON_TYPE, NSQ_HEADER, Handler, Request, Response, encode_json, error, plain
from nsquark.web.query import EscapeError, parse_query, unescape

TARGETS_MAX: Final = 1024
"""The same few request lines come again and again; what they mean is remembered for this many of them."""
TARGET_URL_BYTES_MAX: Final = 512

_SEGMENT = re.compile(r"[A-Za-z0-9_.-]+")
"""A path segment of these characters may be repeated in a redirect as it is."""

BAD_REQUEST: Final = plain(400, "400 Bad Request", close=True)


@dataclass(frozen=True, slots=True)
class Route:
    handler: Handler
    log: bool = True
    max_body_bytes: int = BODY_BYTES_MAX
    too_big: str = "BODY_TOO_BIG"
    lane: LaneMaker | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Knows all that follows from a request line alone; it is shared by all requests with the same one."""

    method: str
    uri: str
    path: str
    tail: str
    query: Mapping[str, str]
    query_ok: bool
    handler: Handler
    log: bool
    max_body_bytes: int
    too_big: Response
    lane: LaneMaker | None = None


class Router:
    """Knows the routes: exact paths, or a prefix followed by one path segment, each for a method."""

    def __init__(self, refusal_of: Callable[[str, str], Response | None] = lambda method, path: None) -> None:
        """Asks `refusal_of` about the method and path of each route that is added: what it returns answers instead."""
        self._refusal_of = refusal_of
        self._exact: dict[str, dict[str, Route]] = {}
        self._prefixes: dict[str, dict[str, Route]] = {}
        self.resolved: dict[tuple[bytes, bytes], Target] = {}
        """Remembers what `resolve` returned; hot paths read it directly, to save a call."""

    def add(
        self,
        method: str,
        path: str,
        handler: Handler,
        *,
        log: bool = True,
        max_body_bytes: int = BODY_BYTES_MAX,
        too_big: str = "BODY_TOO_BIG",
        lane: LaneMaker | None = None,
    ) -> None:
        """Adds a route; a body over `max_body_bytes` is answered with 413 and the message `too_big`.

        `lane` is for a route that clients ask again and again.
        """
        self._add(self._exact, method, path, Route(handler, log, max_body_bytes, too_big, lane))

    def add_prefix(
        self,
        method: str,
        prefix: str,
        handler: Handler,
        *,
        max_body_bytes: int = BODY_BYTES_MAX,
        too_big: str = "BODY_TOO_BIG",
    ) -> None:
        """Adds a route whose `prefix` ends with a slash; the one path segment after it is `request.tail`."""
        if not prefix.endswith("/"):
            raise ValueError(f"the prefix {prefix!r} must end with a slash")
        self._add(self._prefixes, method, prefix, Route(handler, max_body_bytes=max_body_bytes, too_big=too_big))

    def resolve(self, method: bytes, url: bytes) -> Target:
        """Finds what to do with a request line. It never fails: a bad one has a handler that says so."""
        target = self.resolved.get((method, url))
        if target is None:
            target = self._resolve(method.decode("ascii"), url)
            if len(url) <= TARGET_URL_BYTES_MAX:
                if len(self.resolved) >= TARGETS_MAX:
                    self.resolved.clear()
                self.resolved[method, url] = target
        return target

    def _add(self, routes: dict[str, dict[str, Route]], method: str, path: str, route: Route) -> None:
        if method == "HEAD":
            raise ValueError("HEAD is not served by NSQ's daemons")
        refusal = self._refusal_of(method, path)
        routes.setdefault(path, {})[method] = route if refusal is None else _constant(refusal)
        self.resolved.clear()

    def _resolve(self, method: str, url: bytes) -> Target:
        raw_path, _, raw_query = _origin_form(url).partition(b"?")
        tail = ""
        try:
            path = unescape(raw_path)
            if not path.startswith("/") and path != "*":
                raise EscapeError
        except EscapeError:
            path, route = "", _constant(BAD_REQUEST)
        else:
            methods, tail = self._find(path)
            route = methods.get(method) or self._instead(method, path, raw_query, methods)
        query, query_ok = parse_query(raw_query)
        uri = url.decode("latin-1")
        too_big = error(413, route.too_big, close=True)
        limit = route.max_body_bytes
        return Target(method, uri, path, tail, query, query_ok, route.handler, route.log, limit, too_big, route.lane)

    def _find(self, path: str) -> tuple[Mapping[str, Route], str]:
        """Finds the routes of a path by method, and its tail if it is one with a prefix."""
        if path in self._exact:
            return self._exact[path], ""
        prefix, _, tail = path.rpartition("/")
        return (self._prefixes.get(prefix + "/", {}), tail) if tail else ({}, "")

    def _instead(self, method: str, path: str, raw_query: bytes, methods: Mapping[str, Route]) -> Route:
        """Makes the answer where no route has this path and method."""
        corrected = self._corrected(method, path)
        if corrected is not None:
            query = "?" + raw_query.decode("latin-1") if raw_query else ""
            location = (("Location", corrected + query),)
            return _constant(Response(301 if method == "GET" else 308, headers=location))
        if methods:
            allow = (("Allow", ", ".join(sorted({*methods, "OPTIONS"}))),)
            if method == "OPTIONS":
                return _constant(Response(headers=allow))
            return _constant(_refusal(405, "METHOD_NOT_ALLOWED", allow, method))
        return _constant(_refusal(404, "NOT_FOUND", (), method))

    def _corrected(self, method: str, path: str) -> str | None:
        """Finds the path that was probably meant: other trailing slash, other case, no doubled slashes."""
        cleaned = posixpath.normpath("/" + path.lstrip("/"))
        for candidate in (cleaned, cleaned + "/"):
            found = self._spelling(method, candidate)
            if found is not None and found != path:
                return found
        return None

    def _spelling(self, method: str, path: str) -> str | None:
        """Finds the right spelling of a path that has a route for the method, whatever the case of its letters."""
        for known, methods in self._exact.items():
            if method in methods and known.lower() == path.lower():
                return known
        for prefix, methods in self._prefixes.items():
            tail = path[len(prefix) :]
            if method in methods and path.lower().startswith(prefix.lower()) and _SEGMENT.fullmatch(tail):
                return prefix + tail
        return None


def _origin_form(url: bytes) -> bytes:
    """Cuts a request target to path and query: a proxy's client names scheme and host too, which do not matter here."""
    if url.startswith((b"http://", b"https://")):
        rest = url.partition(b"://")[2]
        start = min((at for at in (rest.find(b"/"), rest.find(b"?")) if at >= 0), default=len(rest))
        return rest[start:] if rest[start : start + 1] == b"/" else b"/" + rest[start:]
    return url


def _constant(response: Response) -> Route:
    def answer(request: Request) -> Response:
        return response

    return Route(answer)


def _refusal(status: int, code: str, headers: tuple[tuple[str, str], ...], method: str) -> Response:
    body = encode_json({"message": code})
    return Response(status, body, JSON_TYPE, (NSQ_HEADER, *headers), omit_body=method == "HEAD")
