"""Checks auth servers that are slow, down or talk nonsense; what a connection does meanwhile, and what is never
logged.
"""

import asyncio
import json
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import AuthServer, Frame, Nsqd, Wire, body_of, eventually
from harness.auth import GRANT_ALL, granting
from harness.http_server import LocalServer, QuietHandler
from harness.upgrades import make_certificate, use_snappy
from harness.wire import HEARTBEAT, RESPONSE
from nsquark.base.logs import Level, Logger
from nsquark.broker.auth import Asker, AuthServers
from nsquark.broker.grants import Grant
from nsquark.broker.options import NsqdOptions

GRANTED = b'{"identity":"kay","identity_url":"http://kay","permission_count":1}'
SECRET = "hush-hush"
PATIENT = "--http-client-request-timeout=60s"
"""The auth servers are threads of this process, which may be held up for longer than nsqd waits by default."""


@pytest.fixture
def server() -> Iterator[AuthServer]:
    with AuthServer() as running:
        yield running


@pytest.fixture
def nsqd(make_nsqd: Callable[..., Nsqd], server: AuthServer) -> Nsqd:
    return make_nsqd(f"--auth-http-address={server.address}", PATIENT)


@pytest.fixture
def refusing_port() -> Iterator[int]:
    """Holds a port at which nobody listens, nor anybody else can."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


@pytest.mark.ours
def test_post(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], server: AuthServer) -> None:
    client = connect(make_nsqd(f"--auth-http-address={server.address}", PATIENT, "--auth-http-request-method=post"))
    client.AUTH('s3cret "&=')
    client.expect(GRANTED)
    assert server.queries == [{"common_name": "", "remote_ip": "127.0.0.1", "secret": 's3cret "&=', "tls": "false"}]
    assert server.paths == ["/auth"]


def test_what_follows_waits_in_order(nsqd: Nsqd, connect: Callable[..., Wire], server: AuthServer, topic: str) -> None:
    """Commands behind AUTH are not lost, not early and not out of order; others are not held up."""
    server.gate.clear()
    client = connect(nsqd)
    client.AUTH(SECRET)
    client.PUB(topic, b"one")
    client.MPUB(topic, [b"two", bytes(300_000)])
    client.SUB(topic, "ch")
    client.RDY(3)
    client.PUB(topic, b"four")
    eventually(lambda: server.queries)
    client.expect_silence(0.3)
    connect(nsqd).NOP()
    assert nsqd.topic_names() == set()
    server.gate.set()
    client.expect(GRANTED)
    client.expect_ok(3)
    replies = [client.read_frame() for _ in range(4)]
    assert (0, b"OK") in replies
    assert sorted(len(frame.data) for frame in replies) == [2, 29, 29, 300_026]
    assert len(server.queries) == 1


def test_replies_before_auth_keep_their_place(nsqd: Nsqd, connect: Callable[..., Wire], server: AuthServer) -> None:
    client = connect(nsqd)
    client.send(b"IDENTIFY\n" + body_of(b"{}") + b"AUTH\n" + body_of(SECRET.encode()) + b"BOGUS\n")
    client.expect_ok()
    client.expect(GRANTED)
    client.expect_error("E_INVALID invalid command BOGUS")


def test_through_compression(nsqd: Nsqd, connect: Callable[..., Wire], server: AuthServer, topic: str) -> None:
    server.gate.clear()
    client = connect(nsqd)
    client.identify(snappy=True)
    use_snappy(client)
    client.expect_ok()
    client.AUTH(SECRET)
    for _ in range(20):
        client.PUB(topic, bytes(40_000))
    eventually(lambda: server.queries)
    server.gate.set()
    client.expect(GRANTED)
    client.expect_ok(20)


def test_a_client_that_waits_is_not_cut_off_and_beats(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], server: AuthServer
) -> None:
    daemon = make_nsqd(f"--auth-http-address={server.address}", PATIENT)
    server.gate.clear()
    client = connect(daemon)
    client.identify(heartbeat_interval=1000)
    client.AUTH(SECRET)
    for _ in range(3):
        client.expect("_heartbeat_")
    server.gate.set()
    while (frame := client.read_frame()).data == HEARTBEAT:  # more of them, if this process was held up
        continue
    assert frame == Frame(RESPONSE, GRANTED)


def test_slow_server(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], server: AuthServer) -> None:
    daemon = make_nsqd(f"--auth-http-address={server.address}", "--http-client-request-timeout=2s")
    server.gate.clear()
    clients = [connect(daemon) for _ in range(100)]
    for client in clients:
        client.AUTH(SECRET)
    assert daemon.get("/ping").body == b"OK"
    for client in clients:
        client.expect_error("E_AUTH_FAILED AUTH failed")
    server.gate.set()

    def is_granted() -> bool:
        late = connect(daemon)
        late.AUTH(SECRET)
        return late.read_frame() == Frame(RESPONSE, GRANTED)

    eventually(is_granted)  # not at once if this process, and so the server, is held up for two seconds
    threads = len(list(Path(f"/proc/{daemon.pid}/task").iterdir()))
    print(f"threads after 100 clients of a slow auth server: {threads}")
    assert threads < 40


def test_a_client_that_leaves_while_it_waits(nsqd: Nsqd, connect: Callable[..., Wire], server: AuthServer) -> None:
    server.gate.clear()
    for _ in range(20):
        client = connect(nsqd)
        client.AUTH(SECRET)
        client.close()
    eventually(lambda: len(server.queries) >= 1)
    server.gate.set()
    client = connect(nsqd)
    client.AUTH(SECRET)
    client.expect(GRANTED)
    assert "Traceback" not in nsqd.log


def test_servers_that_fail_are_passed_over(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], server: AuthServer, refusing_port: int
) -> None:
    with AuthServer() as nonsense:
        nonsense.answer = b"<html>"
        daemon = make_nsqd(
            PATIENT,
            f"--auth-http-address=127.0.0.1:{refusing_port}",
            f"--auth-http-address={nonsense.address}",
            f"--auth-http-address={server.address}",
        )
        for _ in range(12):  # starting at a random one
            client = connect(daemon)
            client.AUTH(SECRET)
            client.expect(GRANTED)
        assert nonsense.queries, "always the same was asked first"
        assert len(server.queries) == 12


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"null",
        b"[]",
        b'{"ttl":"3600"}',
        b'{"ttl":1e99}',
        b"\xff\xfe",
        b'{"ttl":60,"authorizations":{}}',
        json.dumps(granting({**GRANT_ALL, "topic": "(?<!"})).encode(),
        b"[" * 100_000,
    ],
    ids=lambda answer: answer[:30].decode("latin-1"),
)
def test_nonsense(nsqd: Nsqd, connect: Callable[..., Wire], server: AuthServer, answer: bytes) -> None:
    server.answer = answer
    client = connect(nsqd)
    client.AUTH(SECRET)
    client.expect_error("E_AUTH_FAILED AUTH failed")
    server.answer = granting(GRANT_ALL)
    client = connect(nsqd)
    client.AUTH(SECRET)
    client.expect(GRANTED)


@pytest.mark.parametrize("expression", ["^[[:alpha:]]+$", r"\Aorders\z", "(?i)^ORDERS$", r"^\pL+$", "^(?U:o.*s)$"])
def test_expressions_are_those_of_go(
    nsqd: Nsqd, connect: Callable[..., Wire], server: AuthServer, expression: str
) -> None:
    server.answer = granting({**GRANT_ALL, "topic": expression})
    client = connect(nsqd)
    client.AUTH(SECRET)
    client.expect(GRANTED)
    client.publish("orders", b"x")
    client.PUB("orders-1", b"x")
    client.expect_error('E_UNAUTHORIZED AUTH failed for PUB on "orders-1" ""')


def test_an_answer_without_end(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    """Bytes that never become an answer end with the time they are given."""

    class Endless(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b" ")
                    time.sleep(0.01)
            except OSError:
                return

    with LocalServer(Endless) as endless:
        client = connect(make_nsqd(f"--auth-http-address={endless.address}", "--http-client-request-timeout=500ms"))
        client.AUTH(SECRET)
        client.expect_error("E_AUTH_FAILED AUTH failed")


def granted_for_1_s(client: Wire, server: AuthServer) -> Wire:
    server.answer = granting(GRANT_ALL, ttl=1)
    client.AUTH(SECRET)
    client.expect(GRANTED)
    return client


def test_expired_grants_are_renewed_for_commands_in_flight(
    nsqd: Nsqd, connect: Callable[..., Wire], server: AuthServer, topic: str
) -> None:
    client = granted_for_1_s(connect(nsqd), server)
    server.answer = granting(GRANT_ALL)
    client.expect_silence(1.1)
    for _ in range(50):
        client.PUB(topic, b"x")
    client.expect_ok(50)
    assert len(server.queries) == 2
    assert {query["secret"] for query in server.queries} == {SECRET}


def test_a_renewed_grant_may_allow_less(
    nsqd: Nsqd, connect: Callable[..., Wire], server: AuthServer, topic: str
) -> None:
    client = granted_for_1_s(connect(nsqd), server)
    server.answer = granting({**GRANT_ALL, "topic": "^other$"})
    client.expect_silence(1.1)
    client.SUB(topic, "ch")
    client.expect_error(f'E_UNAUTHORIZED AUTH failed for SUB on "{topic}" "ch"')


@pytest.mark.ours
def test_secrets_are_not_logged(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], server: AuthServer, refusing_port: int
) -> None:
    daemon = make_nsqd(
        PATIENT,
        f"--auth-http-address={server.address}",
        f"--auth-http-address=http://127.0.0.1:{refusing_port}/path",
        "--auth-http-address=ftp://nowhere",
        "--log-level=debug",
    )
    for status in (200, 403):
        server.status = status
        client = connect(daemon)
        client.AUTH(SECRET)
        client.read_frame()
    eventually(lambda: daemon.log.count("AUTH: auth server") >= 3)
    assert SECRET not in daemon.log


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], tmp_path: Path) -> None:
    """The server's certificate is checked against --tls-root-ca-file."""
    own = make_certificate(tmp_path)
    with AuthServer() as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*own)
        server.use_tls(context)
        address = f"--auth-http-address=https://{server.address}/auth"
        trusting = connect(make_nsqd(address, PATIENT, f"--tls-root-ca-file={own[0]}"))
        trusting.AUTH(SECRET)
        trusting.expect(GRANTED)
        doubting = connect(make_nsqd(address, data_path=tmp_path / "other"))
        doubting.AUTH(SECRET)
        doubting.expect_error("E_AUTH_FAILED AUTH failed")


@pytest.mark.ours
@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("(?=order)", "invalid perl operator: (?="),
        (r"(a)\1", r"invalid escape sequence: \1"),
        ("a{1001}", "invalid rep"),
    ],
)
def test_what_is_no_expression_of_go_is_refused_with_a_reason(
    nsqd: Nsqd, connect: Callable[..., Wire], server: AuthServer, expression: str, reason: str
) -> None:
    server.answer = granting({**GRANT_ALL, "topic": expression})
    client = connect(nsqd)
    client.AUTH(SECRET)
    client.expect_error("E_AUTH_FAILED AUTH failed")
    nsqd.wait_for_log(f"AUTH: auth server {server.address} failed - bad answer: {reason}")


def test_expressions_that_backtrack_elsewhere(nsqd: Nsqd, connect: Callable[..., Wire], server: AuthServer) -> None:
    """A name that nearly matches would take a backtracking search longer than anybody waits."""
    server.answer = granting({**GRANT_ALL, "topic": "^([a-z]+)+$"}, {**GRANT_ALL, "topic": "^(a|a)*$"})
    client = connect(nsqd)
    client.AUTH(SECRET)
    client.read_frame()
    client.PUB("a" * 63 + "1", b"x")
    client.expect_error(f'E_UNAUTHORIZED AUTH failed for PUB on "{"a" * 63}1" ""')


def test_deep_json_that_nobody_needs(nsqd: Nsqd, connect: Callable[..., Wire], server: AuthServer) -> None:
    server.answer = b'{"ttl":60,"more":' + b"[" * 100_000 + b"]" * 100_000 + b',"authorizations":[]}'
    client = connect(nsqd)
    client.AUTH(SECRET)
    assert client.read_frame().data.startswith((b"E_AUTH_FAILED", b"E_UNAUTHORIZED"))
    assert "Traceback" not in nsqd.log


def test_thousands_of_expressions(nsqd: Nsqd, connect: Callable[..., Wire], server: AuthServer) -> None:
    server.answer = granting(*({**GRANT_ALL, "topic": f"^topic-{number}$"} for number in range(4_000)))
    client = connect(nsqd)
    client.AUTH(SECRET)
    client.read_frame()
    for number in (0, 3_999, 0):
        client.publish(f"topic-{number}", b"x")
    client.PUB("topic-4000", b"x")
    client.PUB("topic-1", b"behind")
    client.expect_error('E_UNAUTHORIZED AUTH failed for PUB on "topic-4000" ""')
    assert nsqd.topic_names() == {"topic-0", "topic-3999"}


@pytest.mark.ours
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (granting({**GRANT_ALL, "channels": ["x"] * 10_000}), "10001 expressions, at most 10000 are taken"),
        (b" " * (5 << 20), "the answer is larger than 4194304 bytes"),
    ],
    ids=["expressions", "bytes"],
)
def test_answers_are_bounded(
    nsqd: Nsqd, connect: Callable[..., Wire], server: AuthServer, answer: object, reason: str
) -> None:
    server.answer = answer
    client = connect(nsqd)
    client.AUTH(SECRET)
    client.expect_error("E_AUTH_FAILED AUTH failed")
    nsqd.wait_for_log(reason)


@pytest.mark.ours
async def test_expressions_are_not_compiled_on_the_loop(server: AuthServer) -> None:
    """The CPU time of the loop's thread in one turn tells, which a busy machine does not change."""
    server.answer = granting(*({**GRANT_ALL, "topic": f"^topic-{number}-[a-z]+$"} for number in range(4_000)))
    servers = AuthServers(NsqdOptions(auth_http_address=[server.address]), Logger("", Level.FATAL))  # type: ignore[call-arg]
    asking = asyncio.create_task(servers.ask(Asker(b"", "", "127.0.0.1", False)))
    longest_s, before_s = 0.0, time.thread_time()
    while not asking.done():
        await asyncio.sleep(0)
        now_s = time.thread_time()
        longest_s, before_s = max(longest_s, now_s - before_s), now_s
    grant = await asking
    assert grant is not None
    assert not grant.decides_at_once(("publish", "topic-1-a", ""))
    started_s = time.thread_time()
    Grant(json.dumps(server.answer).encode())
    whole_s = time.thread_time() - started_s
    assert longest_s < whole_s / 3
