"""Checks AUTH by HTTP: which requests need a secret, which permission, and that a secret stays one."""

import http.client
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness import AuthServer, Nsqd, eventually
from harness.auth import GRANT_ALL, granting
from harness.nsqd import HttpReply
from harness.upgrades import make_certificate, trusting_anything

pytestmark = pytest.mark.ours

SECRET = "hush-hush"
ALL = {"topic": ".*", "channels": [".*"], "permissions": ["admin", "subscribe", "publish"]}

REQUESTS: list[tuple[str, str, str, bool]] = [
    ("POST", "/pub?topic={topic}", "publish", False),
    ("POST", "/mpub?topic={topic}", "publish", False),
    ("POST", "/topic/create?topic={topic}", "admin", False),
    ("POST", "/topic/pause?topic={topic}", "admin", False),
    ("POST", "/topic/unpause?topic={topic}", "admin", False),
    ("POST", "/channel/create?topic={topic}&channel=ch", "admin", False),
    ("POST", "/channel/pause?topic={topic}&channel=ch", "admin", False),
    ("POST", "/channel/unpause?topic={topic}&channel=ch", "admin", False),
    ("POST", "/channel/empty?topic={topic}&channel=ch", "admin", False),
    ("GET", "/config/log_level", "admin", False),
    ("GET", "/debug/pprof/cmdline", "admin", False),
    ("GET", "/info", "", False),
    ("GET", "/stats", "", False),
    ("GET", "/metrics", "", False),
    ("GET", "/log/info?topic={topic}", "subscribe", True),
    ("GET", "/log/info", "subscribe", True),
    ("GET", "/log/at?topic={topic}&ts=0", "subscribe", True),
    ("GET", "/log/plan?topic={topic}&from=0&to=0", "subscribe", True),
    ("GET", "/log/read?topic={topic}&from=0&to=0", "subscribe", True),
    ("POST", "/channel/seek?topic={topic}&channel=ch&to=newest", "subscribe", True),
    ("GET", "/channel/seek?topic={topic}&channel=ch&to=newest", "subscribe", True),
    ("GET", "/channel/messages?topic={topic}&channel=ch&state=in_flight", "subscribe", True),
    ("POST", "/channel/commit?topic={topic}&channel=own&owner=o&seq=0", "subscribe", True),
    ("POST", "/log/stage?topic={topic}&token=t&part=0", "publish", True),
    ("POST", "/log/abort?topic={topic}&token=t", "publish", True),
    ("POST", "/channel/delete?topic={topic}&channel=ch", "admin", False),
    ("POST", "/topic/empty?topic={topic}", "admin", False),
    ("POST", "/topic/delete?topic={topic}", "admin", False),
]
"""Has of every kind of request its method and path, the permission it needs, and whether NSQ has none like it."""
STAGED = b"\0\0\0\1\0\0\0\1x"


@pytest.fixture
def server() -> Iterator[AuthServer]:
    with AuthServer() as running:
        running.answer = granting(ALL)
        yield running


@pytest.fixture
def nsqd(make_nsqd: Callable[..., Nsqd], server: AuthServer) -> Nsqd:
    # The server is a thread of this process, which may be held up for longer than nsqd waits by default.
    return make_nsqd(f"--auth-http-address={server.address}", "--http-client-request-timeout=60s")


def ask(nsqd: Nsqd, method: str, target: str, secret: str = "", body: bytes | None = None) -> HttpReply:
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    if body is None:
        body = STAGED if "/log/stage" in target else b"x" if method == "POST" else None
    return nsqd.request(method, target, body, headers)


def is_served(reply: HttpReply) -> bool:
    """Tells whether a request is answered; a range may have been removed, which is an answer too."""
    return reply.status in (200, 410)


def code(reply: HttpReply) -> Any:
    return json.loads(reply.body)["message"]


def test_by_default_only_what_nsq_has_is_free(nsqd: Nsqd, server: AuthServer, topic: str) -> None:
    for method, target, _, is_ours in REQUESTS:
        reply = ask(nsqd, method, target.format(topic=topic))
        if is_ours:
            assert (reply.status, code(reply)) == (401, "AUTH_REQUIRED"), target
            assert reply.headers["WWW-Authenticate"] == "Bearer"
        else:
            assert is_served(reply), (target, reply.body)
    assert nsqd.get("/ping").status == 200
    assert server.queries == []


@pytest.mark.parametrize("mode", ["", "required", "optional"])
def test_a_secret_is_checked_wherever_it_is_shown(
    make_nsqd: Callable[..., Nsqd], server: AuthServer, topic: str, mode: str
) -> None:
    nsqd = make_nsqd(f"--auth-http-address={server.address}", *([f"--http-auth={mode}"] if mode else []))
    assert ask(nsqd, "POST", f"/channel/create?topic={topic}&channel=ch", "good").status == 404
    for method, target, _, _ in REQUESTS:
        assert is_served(ask(nsqd, method, target.format(topic=topic), "good")), target
    server.status = 403
    for method, target, _, _ in REQUESTS:
        reply = ask(nsqd, method, target.format(topic=topic), "bad")
        assert (reply.status, code(reply)) == (403, "AUTH_FAILED"), target
    assert ask(nsqd, "GET", "/ping", "bad").status == 200
    assert nsqd.get("/stats?format=json").status == (401 if mode == "required" else 200)


@pytest.mark.parametrize("permission", ["publish", "subscribe", "admin"])
def test_each_request_needs_its_permission(
    make_nsqd: Callable[..., Nsqd], server: AuthServer, topic: str, permission: str
) -> None:
    nsqd = make_nsqd(f"--auth-http-address={server.address}", "--http-auth=required")
    assert ask(nsqd, "POST", f"/pub?topic={topic}", "all").status == 200
    assert ask(nsqd, "POST", f"/channel/create?topic={topic}&channel=ch", "all").status == 200
    server.answer = granting({**ALL, "permissions": [permission]})
    for method, target, needed, _ in REQUESTS:
        if target.endswith("delete?topic={topic}"):
            continue
        reply = ask(nsqd, method, target.format(topic=topic), "some")
        if target == "/log/info":
            assert [entry["topic"] for entry in reply.json()["topics"]] == [topic] * (permission == needed)
        elif needed in ("", permission):
            assert is_served(reply), (target, reply.body)
        else:
            assert (reply.status, code(reply)) == (403, "UNAUTHORIZED"), target


def test_required_of_all_but_ping(make_nsqd: Callable[..., Nsqd], server: AuthServer, topic: str) -> None:
    nsqd = make_nsqd(f"--auth-http-address={server.address}", "--http-auth=required")
    for method, target, _, _ in REQUESTS:
        reply = ask(nsqd, method, target.format(topic=topic))
        assert (reply.status, code(reply)) == (401, "AUTH_REQUIRED"), target
    assert nsqd.get("/ping").status == 200
    assert server.queries == []


@pytest.mark.parametrize("flags", [("--http-auth=off",), ("--http-auth=optional",)])
def test_not_required(make_nsqd: Callable[..., Nsqd], server: AuthServer, topic: str, flags: tuple[str, ...]) -> None:
    nsqd = make_nsqd(f"--auth-http-address={server.address}", *flags)
    for method, target, _, _ in REQUESTS:
        assert is_served(ask(nsqd, method, target.format(topic=topic))), target
    server.status = 403
    expected = 200 if "off" in flags[0] else 403
    assert ask(nsqd, "GET", "/info", "bad").status == expected


def test_required_without_auth_servers(make_nsqd: Callable[..., Nsqd]) -> None:
    with pytest.raises(Exception, match="--http-auth=required needs --auth-http-address"):
        make_nsqd("--http-auth=required")


def test_without_auth_servers_a_secret_means_nothing(make_nsqd: Callable[..., Nsqd], topic: str) -> None:
    nsqd = make_nsqd()
    for method, target, _, _ in REQUESTS:
        assert is_served(ask(nsqd, method, target.format(topic=topic), "any")), target


def test_names_are_those_of_the_request(nsqd: Nsqd, server: AuthServer) -> None:
    for name in ("orders", "orders-2", "other"):
        ask(nsqd, "POST", f"/pub?topic={name}")
        ask(nsqd, "POST", f"/channel/create?topic={name}&channel=mine")
    server.answer = granting(
        {"topic": "^orders", "channels": ["^mine$", "^$"], "permissions": ["subscribe", "publish", "admin"]}
    )
    assert ask(nsqd, "POST", "/pub?topic=orders", SECRET).status == 200
    assert ask(nsqd, "POST", "/pub?topic=other", SECRET).status == 403
    assert ask(nsqd, "POST", "/pub?topic=other&topic=orders", SECRET).status == 403
    assert ask(nsqd, "GET", "/log/info?topic=orders", SECRET).status == 200
    assert ask(nsqd, "GET", "/log/info?topic=other", SECRET).status == 403
    assert [entry["topic"] for entry in ask(nsqd, "GET", "/log/info", SECRET).json()["topics"]] == [
        "orders",
        "orders-2",
    ]
    seek = "/channel/seek?topic=orders&to=oldest&channel="
    assert ask(nsqd, "POST", seek + "mine", SECRET).status == 200
    assert ask(nsqd, "POST", seek + "others", SECRET).status == 403
    server.answer = granting({"topic": "^orders$", "channels": ["^mine$"], "permissions": ["admin"]})
    assert ask(nsqd, "POST", "/channel/empty?topic=orders&channel=mine", "other").status == 200
    assert ask(nsqd, "POST", "/channel/create?topic=orders&channel=theirs", "other").status == 403
    # A channel that the request does not need does not help it.
    assert ask(nsqd, "POST", "/topic/delete?topic=orders&channel=mine", "other").status == 403
    assert ask(nsqd, "PUT", "/config/log_level?topic=orders&channel=mine", "other", b"debug").status == 403


def test_what_is_asked_and_for_how_long_it_holds(nsqd: Nsqd, server: AuthServer, topic: str) -> None:
    server.answer = granting(ALL, ttl=4)
    for _ in range(5):
        assert ask(nsqd, "POST", f"/pub?topic={topic}", SECRET).status == 200
    assert server.queries[0] == {"common_name": "", "remote_ip": "127.0.0.1", "secret": SECRET, "tls": "false"}
    before = len(server.queries)
    assert before <= 2  # so much time may have passed
    server.answer = granting({**ALL, "permissions": ["subscribe"]})
    eventually(lambda: ask(nsqd, "POST", f"/pub?topic={topic}", SECRET).status == 403)
    assert len(server.queries) == before + 1


def test_who_ask_at_once_share_a_question(nsqd: Nsqd, server: AuthServer, topic: str) -> None:
    server.gate.clear()
    with ThreadPoolExecutor(20) as pool:
        replies = [pool.submit(ask, nsqd, "POST", f"/pub?topic={topic}", SECRET) for _ in range(20)]
        eventually(lambda: bool(server.queries))
        assert nsqd.get("/ping").status == 200
        server.gate.set()
        assert {reply.result().status for reply in replies} == {200}
    assert len(server.queries) == 1
    assert nsqd.topic(topic)["message_count"] == 20


def test_an_auth_server_that_is_down_is_not_asked_for_every_request(nsqd: Nsqd, server: AuthServer, topic: str) -> None:
    server.status = 500
    for _ in range(30):
        assert code(ask(nsqd, "POST", f"/pub?topic={topic}", SECRET)) == "AUTH_FAILED"
    assert len(server.queries) < 30
    server.status = 200
    eventually(lambda: ask(nsqd, "POST", f"/pub?topic={topic}", SECRET).status == 200)


def test_repeated_publishes_are_checked_each_time(nsqd: Nsqd, server: AuthServer, topic: str) -> None:
    """On one connection, repeated publishes would take a short way, see test_http_repeated."""
    server.answer = granting(GRANT_ALL, ttl=1)
    connection = http.client.HTTPConnection(*nsqd.http, timeout=20)

    def publish(headers: dict[str, str]) -> int:
        connection.request("POST", f"/pub?topic={topic}", b"x", headers)
        reply = connection.getresponse()
        reply.read()
        return reply.status

    for _ in range(5):
        assert publish({}) == 200
    for _ in range(5):
        assert publish({"Authorization": f"Bearer {SECRET}"}) == 200
    server.answer = granting({**GRANT_ALL, "permissions": ["subscribe"]})
    eventually(lambda: publish({"Authorization": f"Bearer {SECRET}"}) == 403)
    for _ in range(5):
        assert publish({"Authorization": f"Bearer {SECRET}"}) == 403
    connection.close()


@pytest.mark.parametrize(
    ("header", "secret"),
    [
        ("bearer hush", "hush"),
        ("BEARER   hush  ", "hush"),
        ("Bearer a b", "a b"),
        ("Bearer", None),
        ("Bearer ", None),
        ("Basic aHVzaA==", None),
        ("hush", None),
        ("Bearer \u00e9", "\ufffd"),
    ],
)
def test_forms_of_the_header(nsqd: Nsqd, server: AuthServer, header: str, secret: str | None) -> None:
    assert nsqd.request("GET", "/info", None, {"Authorization": header}).status == 200
    assert [query["secret"] for query in server.queries] == ([] if secret is None else [secret])


def test_secrets_stay_secret(make_nsqd: Callable[..., Nsqd], server: AuthServer, topic: str) -> None:
    nsqd = make_nsqd(f"--auth-http-address={server.address}", "--log-level=debug", "--auth-http-request-method=post")
    for status in (200, 403):
        server.status = status
        for method, target, _, _ in REQUESTS:
            ask(nsqd, method, target.format(topic=topic), f"{SECRET}{status}")
    for answer in (nsqd.get("/stats"), nsqd.get("/metrics"), nsqd.get("/debug/pprof/cmdline")):
        assert SECRET not in answer.text
    nsqd.wait_for_log("it answered with status 403")
    assert SECRET not in nsqd.log
    assert "Traceback" not in nsqd.log


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_the_name_in_a_certificate_is_asked_about(
    make_nsqd: Callable[..., Nsqd], server: AuthServer, tmp_path: Path, topic: str
) -> None:
    own = make_certificate(tmp_path, rsa=True)
    client = make_certificate(tmp_path, "kay", signed_by=own)
    nsqd = make_nsqd(
        f"--auth-http-address={server.address}",
        f"--tls-cert={own[0]}",
        f"--tls-key={own[1]}",
        f"--tls-root-ca-file={own[0]}",
        "--tls-client-auth-policy=require-verify",
    )
    context = trusting_anything()
    context.load_cert_chain(*client)
    assert nsqd.https is not None
    connection = http.client.HTTPSConnection(*nsqd.https, timeout=20, context=context)
    for expected in (b'{"topics":[],', b'{"topics":[],'):
        connection.request("GET", "/log/info")
        assert connection.getresponse().read().startswith(expected)
    connection.request("POST", "/log/abort?topic=t&token=t")
    assert connection.getresponse().status == 404  # there is no such topic
    connection.close()
    assert server.queries == [{"common_name": "kay", "remote_ip": "127.0.0.1", "secret": "", "tls": "true"}]
