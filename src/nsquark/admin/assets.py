"""Answers `/static/<file>` with our scripts and styles, from the package or from --dev-static-dir.

They are few and small, so those of the package are read once and kept with a tag of their content: a browser asks each
time and is mostly told that nothing changed, and a new version is seen at once.
"""

from __future__ import annotations

import hashlib
import mimetypes
from functools import lru_cache
from pathlib import Path
from typing import Final

from aiohttp import web

from nsquark.admin.state import STATE

PACKAGED: Final = Path(__file__).parent / "static"
ASSET_BYTES_MAX: Final = 4 << 20
TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".woff2": "font/woff2"}


async def asset(request: web.Request) -> web.Response:
    name = request.match_info["asset"]
    directory = request.app[STATE].options.dev_static_dir
    found = _read(Path(directory), name) if directory else _packaged(name)
    if found is None:
        return web.Response(status=404, text="NOT_FOUND")
    body, tag = found
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if request.headers.get("If-None-Match") == tag:
        return web.Response(status=304, headers=headers)
    kind = TYPES.get(Path(name).suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
    charset = "utf-8" if kind.startswith("text/") else None
    return web.Response(body=body, headers=headers, content_type=kind, charset=charset)


@lru_cache(maxsize=256)
def _packaged(name: str) -> tuple[bytes, str] | None:
    return _read(PACKAGED, name)


def _read(directory: Path, name: str) -> tuple[bytes, str] | None:
    """Reads a file that is directly in the directory; it refuses names that could lead out of it."""
    if "/" in name or "\\" in name or name.startswith("."):
        return None
    try:
        with (directory / name).open("rb") as file:
            body = file.read(ASSET_BYTES_MAX)
    except (OSError, ValueError):
        return None
    return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'


routes: list[web.RouteDef] = [web.get("/static/{asset}", asset)]
