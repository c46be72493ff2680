"""Decides whether a request may do what it asks for.

Every request passes `guard`. It refuses hosts that are not ours, finds out who asks, and lets a browser change
something only if one of our own pages asked it to. The handler of a change calls `require` for the role that it needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Final
from urllib.parse import quote, urlsplit

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from nsquark.admin.accounts import Accounts as Accounts
from nsquark.admin.accounts import TooManyLogins
from nsquark.admin.roles import Identity
from nsquark.admin.sessions import BrowserSession, is_csrf_token
from nsquark.admin.sessions import csrf_token as token_of
from nsquark.admin.state import STATE
from nsquark.base.addresses import show_host

COOKIE: Final = "nsqadmin"
TOKEN_HEADER: Final = "X-CSRF-Token"
TOKEN_FIELD: Final = "csrf"
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN_PATHS: Final = frozenset({"/ping", "/login"})
OPEN_FOLDERS: Final = ("/static/", "/fonts/")
JSON_TYPE: Final = "application/json"
LOGIN_BYTES_MAX: Final = 16 << 10

CONTENT_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Allows no inline script or style and nothing of another host, so that markup which slips through escaping does
nothing.
"""
HEADERS: Final = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    # A stricter policy would make browsers send `Origin: null` with our own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "nsqadmin",
}

IDENTITY: web.RequestKey[Identity] = web.RequestKey("IDENTITY", Identity)
_SESSION: web.RequestKey[BrowserSession] = web.RequestKey("SESSION", BrowserSession)
_COOKIE_DUE: web.RequestKey[BrowserSession] = web.RequestKey("COOKIE_DUE", BrowserSession)


# -- for handlers and templates --------------------------------------------------------------------------


def identity_of(request: web.Request) -> Identity:
    return request[IDENTITY]


def require(request: web.Request, action: str) -> None:
    """Refuses a user who may not do this action, with NSQ's code."""
    if not request[IDENTITY].may(action):
        raise refusal(web.HTTPForbidden, "FORBIDDEN")


def csrf_token(request: web.Request) -> str:
    """Makes the CSRF token of a page that has buttons. A token belongs to a session, so a browser without one gets
    one.
    """
    session = request.get(_SESSION)
    access = request.app[STATE].access
    if session is None:
        session = request[_SESSION] = request[_COOKIE_DUE] = access.sessions.begin()
    return token_of(session, access.key)


def is_still_in(request: web.Request) -> bool:
    """Tells whether the user may still see an answer that goes on for long, such as a stream of events."""
    access, session = request.app[STATE].access, request.get(_SESSION)
    if not access.needs_login:
        return True
    if session is not None and session.is_logged_in:
        return access.sessions.is_alive(session) and access.by_session(session) == request[IDENTITY]
    user = access.users.by_name.get(request[IDENTITY].name)
    return user is not None and user.role == request[IDENTITY].role


def begin_session(request: web.Request, session: BrowserSession) -> None:
    """Gives the browser this session, from the answer to this request on."""
    request[_SESSION] = request[_COOKIE_DUE] = session


def json_answer(fields: Mapping[str, object]) -> web.Response:
    """Answers with JSON for our own pages."""
    return web.Response(body=msgspec.json.encode(fields), content_type=JSON_TYPE)


def refusal(kind: type[web.HTTPException], message: str, **fields: object) -> web.HTTPException:
    text = msgspec.json.encode({"message": message, **fields}).decode()
    return kind(text=text, content_type=JSON_TYPE)


# -- requests --------------------------------------------------------------------------------------------


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    state = request.app[STATE]
    access = state.access
    path = _route(request, state.base_path)
    if path == "/ping":
        return await handler(request)
    _require_our_host(request, access)
    session = access.sessions.decode(request.cookies.get(cookie_name(request), ""), access.key)
    if session is not None:
        request[_SESSION] = session
    identity = await _identify(request, access, session)
    if identity is not None:
        request[IDENTITY] = identity
    elif path not in OPEN_PATHS and not path.startswith(OPEN_FOLDERS):
        raise _login_needed(request, state.base_path)
    if request.method in SAFE_METHODS:
        return await handler(request)
    if path == "/login" and not 0 <= (request.content_length or -1) <= LOGIN_BYTES_MAX:
        # Anybody can send a login, and must not fill the memory with it.
        raise refusal(web.HTTPBadRequest, "LOGIN_TOO_BIG")
    await _require_own_page(request, session, access)
    return await _to_its_end(handler(request))


def _route(request: web.Request, base_path: str) -> str:
    """Returns the path of the route that will answer, however the request spells it; it is empty without a route."""
    resource = request.match_info.route.resource
    return resource.canonical.removeprefix(base_path) if resource is not None else ""


async def _to_its_end(change: Awaitable[web.StreamResponse]) -> web.StreamResponse:
    """Lets a change finish when its client disconnects, so that nobody gets around its line in the audit log."""
    task = asyncio.ensure_future(change)
    _changes.add(task)
    task.add_done_callback(_changes.discard)
    return await asyncio.shield(task)


_changes: Final[set[asyncio.Future[web.StreamResponse]]] = set()


def _require_our_host(request: web.Request, access: Accounts) -> None:
    """Refuses host names that are not ours while nobody has to log in: a page of a name that was pointed at our address
    would see and do everything (DNS rebinding). With logins this is harmless, as browsers send such a name no cookies.
    """
    if not access.needs_login and not access.hosts.is_ours(request.host):
        reason = f"if {request.host} is this nsqadmin, start it with --http-allowed-hosts={request.host}"
        raise refusal(web.HTTPForbidden, "HOST_NOT_ALLOWED", reason=reason)


async def _identify(request: web.Request, access: Accounts, session: BrowserSession | None) -> Identity | None:
    if not access.needs_login:
        return access.by_header(request.headers.get(access.header, ""))
    if session is not None and session.is_logged_in:
        return access.by_session(session)
    authorization = request.headers.get("Authorization")
    if authorization is None:
        return None
    try:
        return await access.by_basic(authorization, address_of(request))
    except TooManyLogins as error:
        refused = refusal(web.HTTPTooManyRequests, "TOO_MANY_LOGINS", reason=str(error))
        refused.headers["Retry-After"] = str(error.wait_s)
        raise refused from None


def _login_needed(request: web.Request, base_path: str) -> web.HTTPException:
    if request.method in SAFE_METHODS and "text/html" in request.headers.get("Accept", ""):
        return web.HTTPSeeOther(f"{base_path}/login?next={quote(request.path_qs, safe='/')}")
    return refusal(web.HTTPUnauthorized, "LOGIN_REQUIRED")


async def _require_own_page(request: web.Request, session: BrowserSession | None, access: Accounts) -> None:
    """Refuses a browser's change unless it proves to come from one of our pages: a browser sends its cookies, and a
    proxy its header, for any page that asks it to.

    A program has no page and needs no proof; it sends none of the headers that browsers cannot leave out.
    """
    if session is None and not is_browser(request):
        return
    if not _is_same_origin(request):
        raise refusal(web.HTTPForbidden, "FOREIGN_ORIGIN")
    token = request.headers.get(TOKEN_HEADER, "")
    if not token and request.content_type == "application/x-www-form-urlencoded":
        sent = (await request.post()).get(TOKEN_FIELD, "")
        token = sent if isinstance(sent, str) else ""
    if session is None or not is_csrf_token(token, session, access.key):
        raise refusal(web.HTTPForbidden, "STALE_PAGE", reason="load the page again, then repeat it")


def is_browser(request: web.Request) -> bool:
    headers = request.headers
    return (
        any(name in headers for name in ("Origin", "Referer", "Sec-Fetch-Site", "Sec-Fetch-Mode"))
        or cookie_name(request) in request.cookies
        or headers.get("User-Agent", "").startswith("Mozilla/")
    )


def _is_same_origin(request: web.Request) -> bool:
    """Tells whether one of our pages asks, by headers that only the browser itself can set. A proxy that changes `Host`
    names the original in `X-Forwarded-Host`, which a page of another site cannot add.
    """
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = urlsplit(request.headers.get("Origin") or request.headers.get("Referer") or "").netloc.lower()
    return bool(origin) and origin in (request.host.lower(), request.headers.get("X-Forwarded-Host", "").lower())


# -- answers ---------------------------------------------------------------------------------------------


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Adds our headers, and the session's cookie if it is due, to every answer, errors too."""
    for name, value in HEADERS.items():
        if name == "Server" or name not in response.headers:
            response.headers[name] = value
    session = request.get(_COOKIE_DUE)
    if session is None:
        return
    access, base_path = request.app[STATE].access, request.app[STATE].base_path
    # The response's own cookies are in its headers already, so `set_cookie` would be too late.
    cookie = [
        f"{cookie_name(request)}={access.sessions.encode(session, access.key)}",
        f"Path={base_path or '/'}",
        "HttpOnly",
        "SameSite=Lax",
        *([f"Max-Age={access.session_s}"] if session.is_logged_in else []),
        *(["Secure"] if is_secure(request) else []),
    ]
    response.headers.add("Set-Cookie", "; ".join(cookie))


def cookie_name(request: web.Request) -> str:
    """Names the cookie by port, since browsers share cookies between the ports of a host and two nsqadmins on one host
    must not.
    """
    port = request.host.rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isdecimal() and port.isascii() else COOKIE


def is_secure(request: web.Request) -> bool:
    headers = request.headers
    return request.secure or "https" in (headers.get("X-Forwarded-Proto", ""), headers.get("X-Scheme", ""))


def address_of(request: web.Request) -> str:
    """Returns the peer's address, and not the one that a proxy forwards, which anybody could make up."""
    return show_host(request.remote or "")


# -- logging in and out ----------------------------------------------------------------------------------


async def login_page(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    if not state.access.needs_login or request.get(IDENTITY) is not None:
        raise web.HTTPSeeOther(_next_page(request.query.get("next", ""), state.base_path))
    return _login_form(request, request.query.get("next", ""))


async def log_in(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    sent = await request.post()
    name, password, onward = (str(sent.get(field, "")) for field in ("user", "password", "next"))
    try:
        user = await state.access.log_in(name, password, address_of(request))
    except TooManyLogins as error:
        answer = _login_form(request, onward, str(error), 429)
        answer.headers["Retry-After"] = str(error.wait_s)
        return answer
    if user is None:
        return _login_form(request, onward, "This name and this password do not belong together.", 401)
    begin_session(request, state.access.sessions.begin(user.name, user.fingerprint))
    raise web.HTTPSeeOther(_next_page(onward, state.base_path))


async def log_out(request: web.Request) -> web.StreamResponse:
    """Ends the session of a user, and gives the browser one without a user instead."""
    state = request.app[STATE]
    session = request.get(_SESSION)
    if session is not None and session.is_logged_in:
        state.access.sessions.end(session)
        state.logger.always(f"AUDIT: logout of {session.user} from {address_of(request)}")
        begin_session(request, state.access.sessions.begin())
    raise web.HTTPSeeOther(f"{state.base_path}/login")


def _login_form(request: web.Request, onward: str, error: str = "", status: int = 200) -> web.Response:
    from nsquark.admin import pages  # not at the top, since pages imports this module

    answer = pages.render(request, "login.html", csrf=csrf_token(request), next=onward, error=error)
    answer.set_status(status)
    return answer


def _next_page(wanted: str, base_path: str) -> str:
    """Returns the wanted page if it is one of ours, else the start page, so that no link to the login page leads to
    another host.
    """
    home = base_path or "/"
    is_ours = wanted == home or wanted.startswith(f"{base_path}/")
    if not is_ours or wanted.startswith("//") or "\\" in wanted or not wanted.isprintable():
        return home
    return wanted


routes: Final = [web.get("/login", login_page), web.post("/login", log_in), web.post("/logout", log_out)]
