"""Pages of other sites, in the browser of somebody who can reach nsqd or nsqlookupd, get nothing from them."""

import http.client
import itertools
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import Nsqd
from harness.lookupd import Nsqlookupd
from nsquark.base.hosts import HOSTNAME

pytestmark = pytest.mark.ours

NSQD_FLAGS = ("--broadcast-address=nsqd-7.example.org", "--http-allowed-hosts=queue.example.org,*.internal.example")

OURS = [
    "127.0.0.1:4151",
    "[::1]:4151",
    "10.1.2.3",
    "[fe80::1%25eth0]:80",
    "localhost:4151",
    "LocalHost",
    "localhost.:4151",
    "nsqd:4151",
    HOSTNAME,
    "nsqd-7.example.org:4151",
    "NSQD-7.Example.org",
    "queue.example.org",
    "a.internal.example:80",
    "a.b.internal.example",
]
FOREIGN = [
    "evil.example:4151",
    "evil.example",
    "127.0.0.1.evil.example",
    "127.0.0.1.nip.io:4151",
    "internal.example",
    "evilinternal.example",
    "nsqd-7.example.org.evil.example",
    "queue.example.org@evil.example",
]
FOREIGN_PAGES = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "http://localhost:3000"},
    {"Origin": ""},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "Cross-Site", "Sec-Fetch-Mode": "navigate"},
    {"Origin": "{own}", "Sec-Fetch-Site": "cross-site"},
]
NSQD_REQUESTS = [
    ("POST", "/topic/create?topic=t"),
    ("POST", "/topic/delete?topic=t"),
    ("POST", "/pub?topic=t"),
    ("POST", "/mpub?topic=t"),
    ("PUT", "/config/log_level"),
    ("GET", "/stats"),
    ("GET", "/info"),
    ("GET", "/metrics"),
    ("GET", "/log/info"),
    ("GET", "/log/read?topic=t&from=0&to=9"),
    ("GET", "/nothing"),
    ("POST", "/ping"),
    ("OPTIONS", "/pub"),
]
LOOKUPD_REQUESTS = [("GET", "/lookup?topic=t"), ("GET", "/nodes"), ("POST", "/topic/create?topic=t"), ("GET", "/debug")]


@pytest.fixture(scope="module")
def lookupd() -> Iterator[Nsqlookupd]:
    with Nsqlookupd(*NSQD_FLAGS) as daemon:
        yield daemon


@pytest.fixture(params=["nsqd", "nsqlookupd"])
def address(request: pytest.FixtureRequest, nsqd: Nsqd, lookupd: Nsqlookupd) -> tuple[str, int]:
    host, _, port = lookupd.http_address.rpartition(":")
    return nsqd.http if request.param == "nsqd" else (host, int(port))


def ask(
    address: tuple[str, int], method: str, target: str, headers: dict[str, str]
) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection(*address, timeout=20)
    own = "http://{}:{}".format(*address)
    try:
        connection.putrequest(method, target, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value.replace("{own}", own))
        connection.putheader("Content-Length", "1" if method in ("POST", "PUT") else "0")
        connection.endheaders(b"x" if method in ("POST", "PUT") else None)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


@pytest.mark.parametrize("headers", FOREIGN_PAGES, ids=str)
def test_pages_of_other_sites(nsqd: Nsqd, lookupd: Nsqlookupd, headers: dict[str, str]) -> None:
    host, _, port = lookupd.http_address.rpartition(":")
    for address, requests in ((nsqd.http, NSQD_REQUESTS), ((host, int(port)), LOOKUPD_REQUESTS)):
        for method, target in requests:
            status, body, _ = ask(address, method, target, headers)
            assert (status, body) == (403, b'{"message":"FOREIGN_ORIGIN"}'), target
        assert ask(address, "GET", "/ping", headers)[:2] == (200, b"OK")
    assert "t" not in nsqd.topic_names()
    assert "t" not in lookupd.topics()


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "{own}"},
        {"Origin": "{own}", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "same-site"},
    ],
    ids=str,
)
def test_own_pages_and_typed_addresses(address: tuple[str, int], headers: dict[str, str]) -> None:
    assert ask(address, "GET", "/info", headers)[0] == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_names_of_others(address: tuple[str, int], host: str) -> None:
    """A page would ask so under a name that was rebound to our address."""
    for method, target in (("GET", "/info"), ("POST", "/topic/create?topic=t")):
        status, body, _ = ask(address, method, target, {"Host": host, "Origin": f"http://{host}"})
        assert status == 403
        assert body.startswith(b'{"message":"HOST_NOT_ALLOWED","reason":"if ')
        assert b"--http-allowed-hosts=" in body
    assert ask(address, "GET", "/ping", {"Host": host})[0] == 200


@pytest.mark.parametrize("host", OURS)
def test_own_names(address: tuple[str, int], host: str) -> None:
    assert ask(address, "GET", "/info", {"Host": host})[0] == 200


def test_any_name_may_be_allowed(make_nsqd: Callable[..., Nsqd]) -> None:
    nsqd = make_nsqd("--http-allowed-hosts=*")
    assert ask(nsqd.http, "GET", "/info", {"Host": "whatever.example"})[0] == 200
    assert ask(nsqd.http, "GET", "/info", {"Host": "whatever.example", "Origin": "http://other.example"})[0] == 403


@pytest.mark.parametrize("request_line", ["GET /info HTTP/1.0", "GET /info HTTP/1.1"])
def test_without_a_host(address: tuple[str, int], request_line: str) -> None:
    with socket.create_connection(address, 20) as client:
        client.sendall(f"{request_line}\r\nConnection: close\r\n\r\n".encode())
        assert client.recv(12) == b"HTTP/1.1 200"


def test_unix_sockets_have_no_names(make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> None:
    path = tmp_path / "http"
    make_nsqd(f"--http-address={path}")
    for headers, status in (
        (b"", b"200"),
        (b"Origin: http://any.example\r\n", b"200"),
        (b"Origin: http://x\r\n", b"403"),
    ):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /info HTTP/1.0\r\nHost: any.example\r\n" + headers + b"\r\n")
            assert client.recv(12) == b"HTTP/1.1 " + status


def test_every_answer_forbids_guessing_its_type(address: tuple[str, int]) -> None:
    for method, target in (("GET", "/ping"), ("GET", "/info"), ("GET", "/nothing"), ("POST", "/topic/create?topic=t")):
        assert ask(address, method, target, {})[2]["X-Content-Type-Options"] == "nosniff"
    assert ask(address, "POST", "/topic/delete?topic=t", {})[0] == 200


def test_streams_forbid_guessing_their_type(nsqd: Nsqd, topic: str) -> None:
    nsqd.post("/pub", b"x", topic=topic)
    head = nsqd.get("/log/info", topic=topic).json()
    answer = nsqd.get("/log/read", topic=topic, **{"from": head["first"], "to": head["next"]})
    assert (answer.status, answer.headers["X-Content-Type-Options"]) == (200, "nosniff")


@pytest.mark.parametrize(
    ("header", "code"),
    [(b"Origin: http://evil.example\r\n", b"FOREIGN_ORIGIN"), (b"Host: evil.example\r\n", b"HOST_NOT_ALLOWED")],
)
@pytest.mark.parametrize("before", [0, 1, 2, 5])
def test_the_short_way_of_publishes_is_no_way_around(
    nsqd: Nsqd, topic: str, header: bytes, code: bytes, before: int
) -> None:
    """Publishes that are repeated on a connection are not parsed any more, see test_http_repeated."""
    host = b"" if header.startswith(b"Host") else b"Host: 127.0.0.1\r\n"
    line = b"POST /pub?topic=%b HTTP/1.1\r\n" % topic.encode()
    honest = line + b"Host: 127.0.0.1\r\nContent-Length: 6\r\n\r\nhonest"
    hostile = line + host + header + b"Content-Length: 7\r\n\r\nhostile"
    with socket.create_connection(nsqd.http, 20) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(before):
            client.sendall(honest)
            assert client.recv(65536).endswith(b"\r\n\r\nOK")
        client.sendall(hostile)
        answer = b"".join(itertools.takewhile(bool, iter(lambda: client.recv(65536), None)))
    assert answer.startswith(b"HTTP/1.1 403")
    assert code in answer
    assert (topic in nsqd.topic_names()) == bool(before)
    if before:
        assert nsqd.topic(topic)["message_count"] == before
