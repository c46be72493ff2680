"""Checks signed cookies: only ours are good, for as long as they say."""

import time

import pytest

from nsquark.admin import sessions as module
from nsquark.admin.sessions import CLOCK_SKEW_S_MAX, BrowserSession, BrowserSessions, csrf_token, is_csrf_token

SESSION_S_MAX = 3600.0
KEY, OTHER_KEY = b"k" * 32, b"o" * 32


@pytest.fixture
def sessions() -> BrowserSessions:
    return BrowserSessions(SESSION_S_MAX)


def test_a_cookie_comes_back_as_what_it_was(sessions: BrowserSessions) -> None:
    session = sessions.begin("alice", b"fingerprint")
    assert sessions.decode(sessions.encode(session, KEY), KEY) == session
    assert session.is_logged_in
    assert not sessions.begin().is_logged_in


def test_every_session_has_its_own_id(sessions: BrowserSessions) -> None:
    assert len({sessions.begin("alice").id for _ in range(100)}) == 100


def test_no_character_of_a_cookie_can_be_changed(sessions: BrowserSessions) -> None:
    cookie = sessions.encode(sessions.begin("bob", b"fingerprint"), KEY)
    for place in range(len(cookie)):
        other = "B" if cookie[place] == "A" else "A"
        changed = cookie[:place] + other + cookie[place + 1 :]
        # The last character of the signature has two bits that mean nothing in base64, and is compared as text.
        assert sessions.decode(changed, KEY) is None, changed


@pytest.mark.parametrize("cookie", ["", ".", "a", "a.b", "x" * 5000, "é.é", "\0", "." * 1000])
def test_garbage_is_no_cookie(sessions: BrowserSessions, cookie: str) -> None:
    assert sessions.decode(cookie, KEY) is None


def test_what_is_signed_but_no_session_is_no_cookie(sessions: BrowserSessions) -> None:
    payload = module._base64(b"\xc1")
    assert sessions.decode(f"{payload}.{module._sign(KEY, 'session', payload.encode())}", KEY) is None


def test_a_cookie_of_another_key_is_not_ours(sessions: BrowserSessions) -> None:
    assert sessions.decode(sessions.encode(sessions.begin("alice"), OTHER_KEY), KEY) is None


def test_a_session_ends(sessions: BrowserSessions) -> None:
    now = time.time()
    for issued_s, is_good in [
        (now - SESSION_S_MAX + 60, True),
        (now - SESSION_S_MAX - 1, False),
        (now + CLOCK_SKEW_S_MAX // 2, True),
        (now + CLOCK_SKEW_S_MAX + 60, False),
    ]:
        session = BrowserSession(b"i" * 16, "alice", b"", int(issued_s))
        assert (sessions.decode(sessions.encode(session, KEY), KEY) is not None) is is_good
        visit = session._replace(user="")
        assert sessions.decode(sessions.encode(visit, KEY), KEY) == visit


def test_after_logout_no_copy_of_the_cookie_is_good(sessions: BrowserSessions) -> None:
    session = sessions.begin("alice")
    cookie = sessions.encode(session, KEY)
    sessions.end(session)
    assert sessions.decode(cookie, KEY) is None


def test_only_the_last_that_logged_out_are_remembered() -> None:
    sessions = BrowserSessions(SESSION_S_MAX, logged_out_max=10)
    for _ in range(20):
        sessions.end(sessions.begin())
    assert len(sessions._logged_out) == 10


def test_a_token_is_good_for_its_session_alone(sessions: BrowserSessions) -> None:
    mine, other = sessions.begin("alice"), sessions.begin("alice")
    token = csrf_token(mine, KEY)
    assert is_csrf_token(token, mine, KEY)
    assert not is_csrf_token(token, other, KEY)
    assert not is_csrf_token(token, mine, OTHER_KEY)
    assert not is_csrf_token("", mine, KEY)
    assert not is_csrf_token("é", mine, KEY)
