"""Answers as NSQ's router does to requests that fit no route: 404, 405, OPTIONS, and a redirect to the right path."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from nsquark.web.messages import JSON_TYPE, NSQ_HEADER, TEXT_TYPE, encode_json

_VARIABLE = re.compile(r"\{(\w+)\}")
_ANYTHING = "[^/]+"


def v1_error(status: int, code: str, headers: dict[str, str] | None = None) -> web.Response:
    """Makes an error in NSQ's form, which has its code in JSON."""
    return v1_json({"message": code}, status, headers)


def v1_json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    name, version = NSQ_HEADER
    return web.Response(
        body=encode_json(value),
        status=status,
        headers={name: version, "Content-Type": JSON_TYPE, **(headers or {})},
    )


def v1_text(text: str) -> web.Response:
    name, version = NSQ_HEADER
    headers = {name: version, **({"Content-Type": TEXT_TYPE} if text else {})}
    response = web.Response(body=text.encode() or None, headers=headers)
    if not text:
        # Otherwise aiohttp would send application/octet-stream, where NSQ sends no type.
        response.headers.popall("Content-Type", None)
    return response


def for_aiohttp(path: str) -> str:
    """Makes a path whose variables take any text, as NotFoundRules do: without this, aiohttp refuses braces."""
    return _VARIABLE.sub(rf"{{\1:{_ANYTHING}}}", path)


class NotFoundRules:
    """Answers requests that fit none of the routes, which it knows as methods and paths with `{name}` for any text."""

    def __init__(self, routes: Sequence[tuple[str, str]]) -> None:
        self._routes = [(method, path, _pattern(path)) for method, path in routes]

    @property
    def middleware(self) -> Middleware:
        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            error = request.match_info.http_exception
            if error is None:
                return await handler(request)
            if isinstance(error, web.HTTPMethodNotAllowed):
                allowed = {"Allow": ", ".join(sorted({*error.allowed_methods, "OPTIONS"}))}
                if request.method == "OPTIONS":
                    return web.Response(headers=allowed)
                return v1_error(405, "METHOD_NOT_ALLOWED", allowed)
            return self._redirect(request) or v1_error(404, "NOT_FOUND")

        return answer

    def _redirect(self, request: web.Request) -> web.Response | None:
        """Redirects to the path that was probably meant: without doubled or trailing slashes, in the right case."""
        wanted = re.sub(r"/+", "/", request.rel_url.raw_path).rstrip("/") or "/"
        for method, path, pattern in self._routes:
            found = pattern.fullmatch(wanted) if method == request.method else None
            if found is not None:
                corrected = path.format(**found.groupdict())
                query = request.rel_url.raw_query_string
                location = f"{corrected}?{query}" if query else corrected
                if method != "GET":
                    return web.Response(status=308, headers={"Location": location})
                link = f'<a href="{html.escape(location)}">Moved Permanently</a>.\n\n'
                return web.Response(status=301, headers={"Location": location}, text=link, content_type="text/html")
        return None


def _pattern(path: str) -> re.Pattern[str]:
    pieces = _VARIABLE.split(path)
    # Every second piece is the name of a variable.
    return re.compile(
        "".join(f"(?P<{piece}>{_ANYTHING})" if place % 2 else re.escape(piece) for place, piece in enumerate(pieces)),
        re.IGNORECASE,
    )
