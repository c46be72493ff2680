"""Checks who gets in, who may do what, and what another site's page cannot make a browser do."""

import base64
import json
import re
import signal
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path

import pytest
from aiohttp import web

from admin.browser import Browser
from admin.conftest import PATIENT
from harness import HttpReply, Nsqd, StartError, eventually
from harness.holding import hold
from harness.http_server import LocalServer, QuietHandler
from harness.nsqadmin import Nsqadmin
from nsquark.admin.access import address_of
from nsquark.admin.passwords import PasswordHash, User, Users, read_users, write_users
from nsquark.admin.roles import Role
from nsquark.admin.throttle import FREE_FAILURES
from nsquark.web.fetch import fetch

PASSWORD = "correct horse"
PEOPLE = {"vera": Role.VIEWER, "otto": Role.OPERATOR, "anna": Role.ADMIN}
HASH = PasswordHash.of(PASSWORD)
CHANGE = json.dumps({"action": "pause"}).encode()


def write_people(path: Path, **people: Role) -> None:
    users = read_users(path) if path.exists() else Users()
    for name, role in people.items():
        users = users.with_user(User(name, role, HASH))
    write_users(path, users)


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("auth") / "users"
    write_people(path, **PEOPLE)
    return path


@pytest.fixture(scope="module")
def locked(nsqd: Nsqd, people: Path) -> Iterator[Nsqadmin]:
    """Runs an nsqadmin where everybody has to log in."""
    with Nsqadmin(f"--nsqd-http-address={nsqd.http_address}", f"--auth-file={people}", *PATIENT) as admin:
        yield admin
        assert admin.is_running, admin.log


@pytest.fixture(scope="module")
def open_to_all(nsqd: Nsqd) -> Iterator[Nsqadmin]:
    """Runs an nsqadmin where nobody has to say who they are, as with NSQ's."""
    flags = (f"--nsqd-http-address={nsqd.http_address}", "--http-allowed-hosts=admin.example.org")
    with Nsqadmin(*flags, *PATIENT) as admin:
        yield admin
        assert admin.is_running, admin.log


@pytest.fixture
def orders(nsqd: Nsqd, topic: str) -> str:
    nsqd.post("/topic/create", topic=topic)
    nsqd.post("/channel/create", topic=topic, channel="ch")
    return topic


def is_paused(nsqd: Nsqd, topic: str) -> bool:
    return bool(nsqd.topic(topic)["paused"])


def logged_in(admin: Nsqadmin, user: str) -> Browser:
    browser = Browser(admin)
    assert browser.log_in(user, PASSWORD).status == 303
    return browser


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


# -- logging in ------------------------------------------------------------------------------------------


def test_without_a_login_there_is_nothing_but_the_login(locked: Nsqadmin) -> None:
    browser = Browser(locked)
    answer = browser.get("/topics?x=1")
    path, _, query = answer.headers["Location"].partition("?")
    assert (answer.status, path, urllib.parse.parse_qs(query)) == (303, "/login", {"next": ["/topics?x=1"]})
    for path in ("/api/topics", "/events", "/search.json", "/config/log_level", "/nowhere", "/messages/t/found.json"):
        answer = locked.get(path)
        assert (answer.status, answer.json()["message"]) == (401, "LOGIN_REQUIRED"), path
    assert locked.post("/api/topics/t", CHANGE).status == 401
    assert locked.get("/ping").text == "OK"
    assert browser.get("/static/admin.css").status == 200
    for trick in ("/static/../topics", "/static/%2e%2e/topics", "//topics", "/login/../topics", "/ping/../api/topics"):
        assert locked.request("GET", trick).status in (301, 401, 404), trick
        assert (
            b"topics" not in locked.request("GET", trick).body or b'"topics":[' not in locked.request("GET", trick).body
        )


def test_a_login_leads_to_the_page_that_was_asked_for(locked: Nsqadmin) -> None:
    browser = Browser(locked)
    answer = browser.log_in("vera", PASSWORD, "/nodes")
    assert (answer.status, answer.headers["Location"]) == (303, "/nodes")
    assert browser.get("/nodes").status == 200
    assert browser.get("/login").headers["Location"] == "/"
    eventually(lambda: "AUDIT: login of vera from 127.0.0.1: ok" in locked.log)
    assert PASSWORD not in locked.log


@pytest.mark.parametrize(
    "onward",
    [
        "//evil.example",
        "https://evil.example",
        "/\\evil.example",
        "javascript:alert(1)",
        "/x\r\nSet-Cookie: a=b",
        "",
        "x",
    ],
)
def test_a_login_never_leads_elsewhere(locked: Nsqadmin, onward: str) -> None:
    answer = Browser(locked).log_in("vera", PASSWORD, onward)
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    assert all(line.startswith("nsqadmin_") for line in answer.headers.get_all("Set-Cookie") or ["none"])


def test_a_cookie_is_for_this_site_and_no_script(locked: Nsqadmin) -> None:
    answer = Browser(locked).log_in("vera", PASSWORD)
    (cookie,) = answer.headers.get_all("Set-Cookie")
    for attribute in ("HttpOnly", "SameSite=Lax", "Path=/", "Max-Age="):
        assert attribute in cookie
    assert "Secure" not in cookie
    browser = Browser(locked)
    browser.get("/login")
    fields = {"user": "vera", "password": PASSWORD, "csrf": browser.token("/login")}
    answer = browser.submit("/login", fields, **{"X-Forwarded-Proto": "https"})
    assert "Secure" in answer.headers["Set-Cookie"]


def test_a_wrong_password_and_an_unknown_name_look_the_same(locked: Nsqadmin) -> None:
    answers = [Browser(locked).log_in(name, "wrong password") for name in ("otto", "nobody<script>")]
    assert [answer.status for answer in answers] == [401, 401]
    texts = {re.sub(r'value="[^"]*"', "", answer.text) for answer in answers}
    assert len(texts) == 1
    assert "do not belong together" in texts.pop()
    eventually(lambda: "AUDIT: login of an unknown user from 127.0.0.1 failed" in locked.log)
    assert "nobody<script>" not in locked.log


def test_a_session_that_was_planted_before_the_login_is_worth_nothing_after_it(locked: Nsqadmin) -> None:
    victim = Browser(locked)
    victim.get("/login")
    planted = dict(victim.cookies)
    token = victim.token("/login")
    assert victim.log_in("anna", PASSWORD).status == 303
    assert victim.cookies != planted
    attacker = Browser(locked)
    attacker.cookies = planted
    for page in ("/api/topics", "/"):
        answer = attacker.get(page)
        assert (answer.status, answer.headers["Location"].partition("?")[0]) == (303, "/login")
    assert victim.post("/action", b"{}", token).json()["message"] == "STALE_PAGE"


def test_after_a_logout_no_copy_of_the_cookie_is_good(locked: Nsqadmin) -> None:
    browser = logged_in(locked, "anna")
    thief = Browser(locked)
    thief.cookies = dict(browser.cookies)
    assert thief.get("/").status == 200
    stream = thief.stream("/events?page=/")
    assert stream.readline().startswith(b"retry: ")
    assert browser.post("/logout").json()["message"] == "STALE_PAGE"
    assert browser.submit("/logout", {"csrf": browser.token()}).status == 303
    assert browser.get("/").status == 303
    assert thief.get("/").status == 303
    assert stream.read().endswith(b"\n\n")  # and then it ends
    eventually(lambda: "AUDIT: logout of anna from 127.0.0.1" in locked.log)


def test_who_is_taken_out_of_the_file_or_gets_another_role_is_out(nsqd: Nsqd, tmp_path: Path) -> None:
    path = tmp_path / "users"
    write_people(path, **PEOPLE)
    with Nsqadmin(f"--nsqd-http-address={nsqd.http_address}", f"--auth-file={path}") as admin:
        vera, otto, anna = (logged_in(admin, name) for name in PEOPLE)
        write_users(path, read_users(path).without("vera"))
        write_people(path, otto=Role.VIEWER)
        eventually(lambda: vera.get("/").status == 303)
        assert otto.get("/").status == 303
        assert anna.get("/").status == 200
        path.write_text("no such thing\n")
        eventually(lambda: anna.get("/").status == 200 and "the users are those of before" in admin.log)


def test_sessions_outlive_a_restart(nsqd: Nsqd, people: Path) -> None:
    admin = Nsqadmin(f"--nsqd-http-address={nsqd.http_address}", f"--auth-file={people}")
    with admin:
        browser = logged_in(admin, "vera")
        assert admin.stop() == 0
        admin.start()
        assert browser.get("/").status == 200


def _guess_until_refused_for(seconds: int, admin: Nsqadmin) -> float:
    """Guesses on, since checking a password may take a busy machine longer than the first waits; returns when the
    guess was sent that was refused for so long.
    """

    def is_refused() -> float | None:
        asked_s = time.monotonic()
        answer = Browser(admin).log_in("anna", "wrong again")
        wait_s = int(answer.headers["Retry-After"]) if answer.status == 429 else 0
        if 0 < wait_s < seconds:
            time.sleep(wait_s)
        return asked_s if wait_s >= seconds else None

    return eventually(is_refused)


def _asked_while_refused(admin: Nsqadmin) -> tuple[HttpReply, HttpReply] | None:
    """Asks with the right password, both ways, while guesses are refused; None if this took longer than that lasts."""
    asked_s = _guess_until_refused_for(4, admin)
    answers = (
        Browser(admin).log_in("anna", PASSWORD),
        admin.request("GET", "/api/topics", headers=basic("anna", PASSWORD)),
    )
    if time.monotonic() - asked_s < 3:
        return answers
    admin.stop()
    admin.start()  # which has forgotten that the password was right
    return None


def test_guessing_is_slowed_down(nsqd: Nsqd, people: Path) -> None:
    with Nsqadmin(f"--nsqd-http-address={nsqd.http_address}", f"--auth-file={people}") as admin:
        statuses = [Browser(admin).log_in("anna", f"wrong password {number}").status for number in range(FREE_FAILURES)]
        assert statuses == [401] * FREE_FAILURES
        answer, refused = eventually(lambda: _asked_while_refused(admin), 60)
        assert answer.status == 429
        assert "too many attempts to log in" in answer.text
        assert int(answer.headers["Retry-After"]) >= 1
        assert (refused.status, refused.json()["message"]) == (429, "TOO_MANY_LOGINS")
        assert Browser(admin).log_in("otto", PASSWORD).status == 303
        time.sleep(int(answer.headers["Retry-After"]))
        eventually(lambda: Browser(admin).log_in("anna", PASSWORD).status == 303)


@pytest.mark.parametrize(
    ("flags", "content", "reason"),
    [
        ((), None, "--auth-file {path} cannot be read: No such file or directory"),
        ((), "", "--auth-file {path} has no users: nsquark passwd {path} NAME --role admin"),
        ((), "x\n", "--auth-file {path}: line 1: there is no role"),
        (("--admin-user=x",), "", "use --auth-file or --admin-user not both"),
    ],
)
def test_nsqadmin_does_not_start_with_a_file_it_cannot_use(
    tmp_path: Path, flags: tuple[str, ...], content: str | None, reason: str
) -> None:
    path = tmp_path / "users"
    if content is not None:
        path.write_text(content)
    admin = Nsqadmin("--nsqd-http-address=127.0.0.1:1", f"--auth-file={path}", *flags)
    with pytest.raises(StartError) as caught:
        admin.start()
    assert caught.value.exit_code == 1
    assert f"failed to instantiate nsqadmin - {reason.format(path=path)}" in caught.value.log


# -- roles -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("user", "statuses"), [("vera", (403, 403)), ("otto", (200, 403)), ("anna", (200, 200))])
def test_each_role_may_do_its_own(
    locked: Nsqadmin, nsqd: Nsqd, orders: str, user: str, statuses: tuple[int, int]
) -> None:
    browser = logged_in(locked, user)
    token = browser.token()
    eventually(lambda: browser.get(f"/messages/{orders}/found.json").status == 200)
    eventually(lambda: browser.get(f"/topics/{orders}/ch/messages.json").status == 200)
    pause = browser.post("/action", json.dumps({"action": "pause", "topic": orders}).encode(), token)
    empty = browser.post("/action", json.dumps({"action": "empty", "topic": orders}).encode(), token)
    assert (pause.status, empty.status) == statuses
    assert is_paused(nsqd, orders) is (statuses[0] == 200)
    published = browser.post(f"/messages/{orders}", b"x", token)
    assert published.status == statuses[0]
    sought = browser.post(f"/topics/{orders}/ch/seek?to=oldest", b"", token)
    assert sought.status == statuses[0]
    assert browser.post("/config/log_level", b"debug", token).status == 405
    changed = browser.send("PUT", "/config/log_level", b"info", **{"Origin": locked.url, "X-CSRF-Token": token})
    assert changed.status == (200 if user == "anna" else 403)
    if statuses[0] == 200:
        eventually(lambda: f"AUDIT: user={user} from=127.0.0.1:" in locked.log)
        eventually(lambda: f"action=pause_topic topic={orders} result=ok" in locked.log)
        eventually(lambda: f"action=publish topic={orders}" in locked.log)


def test_programs_log_in_with_every_request(locked: Nsqadmin, nsqd: Nsqd, orders: str) -> None:
    target = f"/api/topics/{orders}"
    assert locked.request("POST", target, CHANGE, basic("vera", PASSWORD)).status == 403
    assert locked.request("POST", target, CHANGE, basic("otto", "wrong password")).status == 401
    for _ in range(20):  # remembered, or this would take seconds
        assert locked.request("GET", "/api/topics", headers=basic("otto", PASSWORD)).status == 200
    assert locked.request("POST", target, CHANGE, basic("otto", PASSWORD)).status == 200
    assert is_paused(nsqd, orders)


def test_the_header_of_a_proxy_is_nothing_beside_a_file(locked: Nsqadmin) -> None:
    assert locked.request("GET", "/api/topics", headers={"X-Forwarded-User": "anna"}).status == 401


# -- what another site's page cannot do ------------------------------------------------------------------

FOREIGN = {
    "a form of another site": {"Origin": "https://evil.example", "Content-Type": "application/x-www-form-urlencoded"},
    "a form without an origin": {"Origin": "null", "Content-Type": "text/plain"},
    "a form of an old browser": {"Origin": "", "Referer": "https://evil.example/page"},
    "a form of a silent browser": {"Origin": ""},
    "fetch of another site": {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
    "fetch of a neighbour": {"Sec-Fetch-Site": "same-site"},
    "a name that begins with ours": {"Origin": "{url}.evil.example"},
    "our name as a user's": {"Origin": "http://{host}@evil.example"},
}


@pytest.mark.parametrize("way", FOREIGN)
@pytest.mark.parametrize("kind", ["cookie", "open", "header"])
def test_another_sites_page_changes_nothing(
    locked: Nsqadmin, open_to_all: Nsqadmin, behind_proxy: Nsqadmin, nsqd: Nsqd, orders: str, kind: str, way: str
) -> None:
    admin = {"cookie": locked, "open": open_to_all, "header": behind_proxy}[kind]
    browser = logged_in(admin, "anna") if kind == "cookie" else Browser(admin)
    proxied = {"X-Forwarded-User": "anna"} if kind == "header" else {}
    browser.get("/", **proxied)
    headers = {name: value.format(url=admin.url, host=admin.http_address) for name, value in FOREIGN[way].items()}
    for cookies in (browser.cookies, {}):  # SameSite keeps ours from being sent, where a browser knows it
        sender = Browser(admin)
        sender.cookies = dict(cookies)
        answer = sender.post(f"/api/topics/{orders}", CHANGE, **{**headers, **proxied})
        assert answer.status in (401, 403), (way, answer.text)
        assert answer.json()["message"] in ("FOREIGN_ORIGIN", "STALE_PAGE", "LOGIN_REQUIRED")
    assert not is_paused(nsqd, orders)


@pytest.fixture(scope="module")
def behind_proxy(nsqd: Nsqd) -> Iterator[Nsqadmin]:
    """Runs an nsqadmin to which a proxy says who asks; one of them is an admin."""
    with Nsqadmin(f"--nsqd-http-address={nsqd.http_address}", "--admin-user=anna", *PATIENT) as admin:
        yield admin


def test_our_own_page_needs_its_token_too(open_to_all: Nsqadmin, nsqd: Nsqd, orders: str) -> None:
    browser, other = Browser(open_to_all), Browser(open_to_all)
    token, others = browser.token(), other.token()
    for wrong in ("", others, token[:-1], "é"):
        answer = browser.post(f"/api/topics/{orders}", CHANGE, urllib.parse.quote(wrong))
        assert (answer.status, answer.json()["message"]) == (403, "STALE_PAGE")
    assert not is_paused(nsqd, orders)
    assert browser.post(f"/api/topics/{orders}", CHANGE, token).status == 200
    assert is_paused(nsqd, orders)


def test_a_login_cannot_be_forged_either(locked: Nsqadmin) -> None:
    """If it could, a page of another site would log its visitor in as somebody who watches what they do."""
    browser = Browser(locked)
    fields = {"user": "vera", "password": PASSWORD, "csrf": browser.token("/login")}
    assert browser.submit("/login", fields, Origin="https://evil.example").status == 403
    assert browser.submit("/login", {**fields, "csrf": "x"}).status == 403
    assert browser.get("/").status == 303


def test_a_program_needs_no_token(open_to_all: Nsqadmin, behind_proxy: Nsqadmin, nsqd: Nsqd, orders: str) -> None:
    """NSQ's users have scripts for /api; they send nothing that only browsers do."""
    assert open_to_all.request("POST", f"/api/topics/{orders}", CHANGE, {"User-Agent": "curl/8.0"}).status == 200
    assert is_paused(nsqd, orders)
    unpause = json.dumps({"action": "unpause"}).encode()
    assert behind_proxy.request("POST", f"/api/topics/{orders}", unpause).status == 403
    assert behind_proxy.request("POST", f"/api/topics/{orders}", unpause, {"X-Forwarded-User": "otto"}).status == 403
    assert behind_proxy.request("POST", f"/api/topics/{orders}", unpause, {"X-Forwarded-User": "anna"}).status == 200
    assert not is_paused(nsqd, orders)
    eventually(lambda: "AUDIT: user=anna from=127.0.0.1:" in behind_proxy.log)


def test_a_proxy_may_change_the_host(open_to_all: Nsqadmin, orders: str) -> None:
    browser = Browser(open_to_all)
    token = browser.token()
    public = {"Origin": "https://admin.example.org"}
    assert browser.post(f"/api/topics/{orders}", CHANGE, token, **public).status == 403
    for said in ({"X-Forwarded-Host": "admin.example.org"}, {"Sec-Fetch-Site": "same-origin"}):
        assert browser.post(f"/api/topics/{orders}", CHANGE, token, **public, **said).status == 200


def test_a_name_that_was_pointed_at_us_sees_nothing(open_to_all: Nsqadmin, locked: Nsqadmin) -> None:
    for path in ("/", "/api/topics", "/events", "/messages/x/found.json"):
        answer = open_to_all.request("GET", path, headers={"Host": "evil.example:4171"})
        assert (answer.status, answer.json()["message"]) == (403, "HOST_NOT_ALLOWED"), path
    for host in ("admin.example.org", "localhost:4171", "127.0.0.1", "[::1]:4171", "nsqadmin"):
        assert open_to_all.request("GET", "/api/topics", headers={"Host": host}).status == 200
    # Where there is a login, its cookie is what counts.
    headers = {"Host": "queue.example.org", **basic("vera", PASSWORD)}
    assert locked.request("GET", "/api/topics", headers=headers).status == 200


# -- what every answer says ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/login", "/api/topics", "/nowhere", "/static/main.js", "/ping", "/api/nodes/x"])
def test_every_answer_has_its_guards(open_to_all: Nsqadmin, locked: Nsqadmin, path: str) -> None:
    for admin in (open_to_all, locked):
        headers = Browser(admin).get(path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "aiohttp" not in headers["Server"]


def test_only_pages_with_buttons_set_a_cookie(open_to_all: Nsqadmin) -> None:
    for path in ("/ping", "/api/topics", "/static/main.js"):
        assert "Set-Cookie" not in open_to_all.get(path).headers


# -- below a base path -----------------------------------------------------------------------------------


def test_below_a_base_path_nothing_else_is_open(nsqd: Nsqd, people: Path) -> None:
    flags = (f"--nsqd-http-address={nsqd.http_address}", f"--auth-file={people}", "--base-path=/queue/")
    with Nsqadmin(*flags) as admin:
        browser = Browser(admin, "/queue")
        assert browser.get("/nodes").headers["Location"] == "/queue/login?next=/queue/nodes"
        answer = browser.log_in("vera", PASSWORD, "/queue/nodes")
        assert answer.headers["Location"] == "/queue/nodes"
        assert "Path=/queue" in answer.headers["Set-Cookie"]
        assert browser.get("/nodes").status == 200
        assert Browser(admin, "/queue").log_in("vera", PASSWORD, "/elsewhere").headers["Location"] == "/queue"
        for path in ("/nodes", "/ping", "/queuenodes", "/queue/ping/../nodes", "/queue//nodes", "/queue/login/x"):
            assert admin.request("GET", path).status in (301, 401, 404), path


# -- what is told ----------------------------------------------------------------------------------------


def test_a_change_is_told_also_when_its_client_left(make_nsqd: Callable[..., Nsqd]) -> None:
    """While nsqd does not answer, the client that asked for the change closes its connection."""
    own = make_nsqd()
    own.post("/topic/create", topic="t")
    with Nsqadmin(f"--nsqd-http-address={own.http_address}", *PATIENT) as admin:
        assert admin.get("/api/topics").json()["topics"] == ["t"]
        hold(own.pid)
        with socket.create_connection(admin.http) as raw:
            head = f"POST /api/topics/t HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(CHANGE)}\r\n\r\n"
            raw.sendall(head.encode() + CHANGE)
            assert admin.get("/ping").text == "OK"  # and so the change has begun
        own.send_signal(signal.SIGCONT)
        eventually(lambda: "action=pause_topic topic=t result=ok" in admin.log)
        assert is_paused(own, "t")


def test_no_level_of_the_log_hides_a_change(nsqd: Nsqd, orders: str) -> None:
    with Nsqadmin(f"--nsqd-http-address={nsqd.http_address}") as admin:
        assert admin.request("PUT", "/config/log_level", b"fatal").status == 200
        assert admin.post(f"/api/topics/{orders}", CHANGE).status == 200
        eventually(lambda: f"action=pause_topic topic={orders} result=ok" in admin.log)
        eventually(lambda: 'action=config result="log_level: fatal"' in admin.log)
        assert "200 POST" not in admin.log


def test_strangers_do_not_fill_the_memory(locked: Nsqadmin) -> None:
    browser = Browser(locked)
    big = {"user": "x" * 20_000, "password": PASSWORD, "csrf": browser.token("/login")}
    assert browser.submit("/login", big).json()["message"] == "LOGIN_TOO_BIG"
    endless = locked.request("POST", "/login", iter([b"user=", b"x" * 100_000]))
    assert endless.json()["message"] == "LOGIN_TOO_BIG"
    assert locked.request("POST", "/api/topics", b"x" * 1_000_000).status == 401


def test_nobody_forges_a_line(open_to_all: Nsqadmin, orders: str) -> None:
    forged = "x\nAUDIT: user=anna"
    target = f"/api/topics/{urllib.parse.quote(forged)}"
    open_to_all.request("POST", target, CHANGE)
    open_to_all.request("POST", f"/api/topics/{orders}", CHANGE, basic("eve result=ok", "x"))
    eventually(lambda: 'user="eve result=ok"' in open_to_all.log)
    assert not any(line.startswith("AUDIT") for line in open_to_all.log.splitlines())


def test_the_notification_endpoint_hears_of_it(nsqd: Nsqd, orders: str, people: Path, heard: "Heard") -> None:
    flags = (f"--nsqd-http-address={nsqd.http_address}", f"--auth-file={people}")
    with Nsqadmin(*flags, f"--notification-http-endpoint={heard.url}") as admin:
        browser = logged_in(admin, "otto")
        token = browser.token()
        eventually(lambda: browser.get(f"/topics/{orders}/ch/messages.json").status == 200)
        assert browser.post(f"/messages/{orders}", b"x", token).status == 200
        assert browser.post(f"/topics/{orders}/ch/seek?to=newest", b"", token).status == 200
        eventually(lambda: len(heard.notices) == 2)
        # Each is sent by itself, so the second may overtake the first.
        publish, seek = sorted(heard.notices, key=lambda notice: str(notice["action"]))
        told = [publish[name] for name in ("action", "topic", "user", "result")]
        assert told == ["publish", orders, "otto", "ok"]
        assert (seek["action"], seek["channel"], seek["node"]) == ("seek", "ch", nsqd.http_address)
        assert str(publish["remote_ip"]).startswith("127.0.0.1:")
        assert publish["url"] == f"{admin.url}/messages/{orders}"
        assert "channel" not in publish


def test_nsqds_secret_is_not_for_the_notification_endpoint(
    nsqd: Nsqd, orders: str, tmp_path: Path, heard: "Heard"
) -> None:
    """The endpoint does not get it even if it asks for it."""
    heard.status = 401
    (tmp_path / "secret").write_text("nsqds only")
    flags = (f"--nsqd-http-address={nsqd.http_address}", f"--auth-secret-file={tmp_path / 'secret'}")
    with Nsqadmin(*flags, f"--notification-http-endpoint={heard.url}") as admin:
        assert admin.post(f"/api/topics/{orders}", CHANGE).status == 200
        eventually(lambda: "AUDIT: failed to POST notification - got response 401" in admin.log)
    assert len(heard.notices) == 1
    assert "Authorization" not in heard.headers[0]


class Heard:
    url: str
    status = 200

    def __init__(self) -> None:
        self.notices: list[dict[str, object]] = []
        self.headers: list[Message] = []


@pytest.fixture
def heard() -> Iterator[Heard]:
    found = Heard()

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            found.notices.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            found.headers.append(self.headers)
            self.answer(found.status)

    with LocalServer(Handler) as server:
        found.url = f"http://{server.address}/notices"
        yield found


async def test_an_ipv4_peer_of_a_dual_stack_listener_is_named_by_its_ipv4_address() -> None:
    named: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        named.extend((request.remote or "", address_of(request)))
        return web.Response()

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    with socket.socket(socket.AF_INET6) as listener:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("::ffff:127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        await fetch(url, connect_timeout=30, request_timeout=30)
        await runner.cleanup()
    assert named == ["::ffff:127.0.0.1", "127.0.0.1"]
