"""Keeps sessions in signed cookies; nsqadmin itself remembers only the sessions that were logged out."""

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from typing import Final, NamedTuple

import msgspec

CLOCK_SKEW_S_MAX: Final = 60
"""The clocks of nsqadmins that share a key may differ by this much."""
COOKIE_CHARS_MAX: Final = 1024
LOGGED_OUT_MAX: Final = 10_000
ID_BYTES: Final = 16


class BrowserSession(NamedTuple):
    """Describes one browser's visit. It has no user unless a login began it."""

    id: bytes
    user: str
    fingerprint: bytes
    issued_s: int

    @property
    def is_logged_in(self) -> bool:
        return bool(self.user)


_decoder: Final = msgspec.msgpack.Decoder(tuple[bytes, str, bytes, int])


class BrowserSessions:
    """Makes and reads the cookies. A cookie is `<payload>.<signature>`, both in URL-safe base64."""

    def __init__(self, ttl_s: float, logged_out_max: int = LOGGED_OUT_MAX) -> None:
        self._ttl_s = ttl_s
        self._logged_out_max = logged_out_max
        self._logged_out: OrderedDict[bytes, None] = OrderedDict()

    def begin(self, user: str = "", fingerprint: bytes = b"") -> BrowserSession:
        """Begins a session, always with a new id, so that one that somebody planted in the browser before the login is
        worth nothing after it.
        """
        return BrowserSession(secrets.token_bytes(ID_BYTES), user, fingerprint, int(time.time()))

    def end(self, session: BrowserSession) -> None:
        """Ends a session: no copy of its cookie is good any more. If very many end, the oldest are forgotten."""
        self._logged_out[session.id] = None
        while len(self._logged_out) > self._logged_out_max:
            self._logged_out.popitem(last=False)

    def encode(self, session: BrowserSession, key: bytes) -> str:
        payload = _base64(msgspec.msgpack.encode(tuple(session)))
        return f"{payload}.{_sign(key, 'session', payload.encode())}"

    def decode(self, cookie: str, key: bytes) -> BrowserSession | None:
        """Returns the session of a cookie that we signed with this key and that has not ended, or None."""
        if len(cookie) > COOKIE_CHARS_MAX or not cookie.isascii():
            return None
        payload, _, signature = cookie.partition(".")
        if not hmac.compare_digest(signature, _sign(key, "session", payload.encode())):
            return None
        try:
            session = BrowserSession(*_decoder.decode(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))))
        except (binascii.Error, msgspec.MsgspecError):  # another version made the cookie
            return None
        return session if self.is_alive(session) else None

    def is_alive(self, session: BrowserSession) -> bool:
        """Tells whether a session goes on. One without a user allows nothing, so it need not end."""
        if not session.is_logged_in:
            return True
        age_s = time.time() - session.issued_s
        return -CLOCK_SKEW_S_MAX <= age_s <= self._ttl_s and session.id not in self._logged_out


def csrf_token(session: BrowserSession, key: bytes) -> str:
    """Makes the token that our pages send with each change and that a page of another site cannot know."""
    return _sign(key, "csrf", session.id)


def is_csrf_token(token: str, session: BrowserSession, key: bytes) -> bool:
    return token.isascii() and hmac.compare_digest(token, csrf_token(session, key))


def _sign(key: bytes, purpose: str, data: bytes) -> str:
    return _base64(hmac.digest(key, purpose.encode() + b"\0" + data, hashlib.sha256))


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
