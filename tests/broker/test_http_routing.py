"""Checks what every HTTP endpoint has in common: routes, methods, headers, connections."""

import http.client
import json
import socket
import time
from collections.abc import Callable

import pytest

from harness import Nsqd

GET_PATHS = ["/ping", "/info", "/stats"]
POST_PATHS = [
    "/pub",
    "/mpub",
    "/topic/create",
    "/topic/delete",
    "/topic/empty",
    "/topic/pause",
    "/topic/unpause",
    "/channel/create",
    "/channel/delete",
    "/channel/empty",
    "/channel/pause",
    "/channel/unpause",
]


def _raw(nsqd: Nsqd, data: bytes, *, end: bool = False) -> bytes:
    """Returns everything that nsqd answers on a connection until it closes it."""
    with socket.create_connection(nsqd.http, timeout=20) as connection:
        connection.sendall(data)
        if end:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        return answer


def test_ping(nsqd: Nsqd) -> None:
    reply = nsqd.get("/ping")
    assert (reply.status, reply.body) == (200, b"OK")
    assert "X-NSQ-Content-Type" not in reply.headers


def test_info(nsqd: Nsqd) -> None:
    reply = nsqd.get("/info")
    info = reply.json()
    assert list(info)[:10] == [
        "version",
        "broadcast_address",
        "hostname",
        "http_port",
        "tcp_port",
        "start_time",
        "max_heartbeat_interval",
        "max_output_buffer_size",
        "max_output_buffer_timeout",
        "max_deflate_level",
    ]
    assert info["version"] == "1.3.0"
    assert info["broadcast_address"] == "127.0.0.1"
    assert info["hostname"] == socket.gethostname()
    assert (info["http_port"], info["tcp_port"]) == (nsqd.http[1], nsqd.tcp[1])
    assert abs(time.time() - info["start_time"]) < 300
    assert info["max_heartbeat_interval"] == 60_000_000_000
    assert info["max_output_buffer_size"] == 65536
    assert info["max_output_buffer_timeout"] == 30_000_000_000
    assert info["max_deflate_level"] == 6
    assert reply.headers["Content-Type"] == "application/json; charset=utf-8"
    assert reply.headers["X-NSQ-Content-Type"] == "nsq; version=1.0"
    assert reply.body == json.dumps(info, separators=(",", ":")).encode()


@pytest.mark.parametrize("path", ["/", "/nothing", "/topic", "/topic/nothing", "/PINGX", "/ping/x"])
def test_unknown_path(nsqd: Nsqd, path: str) -> None:
    reply = nsqd.get(path)
    assert (reply.status, reply.body) == (404, b'{"message":"NOT_FOUND"}')
    assert reply.headers["X-NSQ-Content-Type"] == "nsq; version=1.0"


@pytest.mark.parametrize("path", GET_PATHS)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD"])
def test_wrong_method_on_a_get_path(nsqd: Nsqd, path: str, method: str) -> None:
    reply = nsqd.request(method, path)
    assert reply.status == 405
    assert reply.headers["Allow"] == "GET, OPTIONS"
    if method != "HEAD":
        assert reply.body == b'{"message":"METHOD_NOT_ALLOWED"}'


@pytest.mark.parametrize("path", POST_PATHS)
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_wrong_method_on_a_post_path(nsqd: Nsqd, path: str, method: str) -> None:
    reply = nsqd.request(method, path)
    assert (reply.status, reply.body) == (405, b'{"message":"METHOD_NOT_ALLOWED"}')
    assert reply.headers["Allow"] == "OPTIONS, POST"


@pytest.mark.parametrize(("path", "allowed"), [("/ping", "GET, OPTIONS"), ("/pub", "OPTIONS, POST")])
def test_options(nsqd: Nsqd, path: str, allowed: str) -> None:
    reply = nsqd.request("OPTIONS", path)
    assert (reply.status, reply.body, reply.headers["Allow"]) == (200, b"", allowed)


@pytest.mark.parametrize(
    ("method", "path", "location"),
    [
        ("GET", "/ping/", "/ping"),
        ("GET", "/PING", "/ping"),
        ("GET", "//ping", "/ping"),
        ("GET", "/stats/?format=json", "/stats?format=json"),
        ("POST", "/pub/?topic=t", "/pub?topic=t"),
        ("POST", "/Topic/Create?topic=t", "/topic/create?topic=t"),
    ],
)
def test_redirect_to_the_right_spelling(nsqd: Nsqd, method: str, path: str, location: str) -> None:
    """Builds of NSQ with an older router say 307 where others say 308; both make a client repeat its POST."""
    reply = nsqd.request(method, path)
    assert reply.headers["Location"] == location
    assert reply.status in ((301,) if method == "GET" else (307, 308))


def test_empty_success(nsqd: Nsqd, topic: str) -> None:
    reply = nsqd.post("/topic/create", topic=topic)
    assert (reply.status, reply.body) == (200, b"")
    assert reply.headers["Content-Length"] == "0"
    assert "Content-Type" not in reply.headers
    assert reply.headers["X-NSQ-Content-Type"] == "nsq; version=1.0"


def test_header_as_written_on_the_wire(nsqd: Nsqd) -> None:
    answer = _raw(nsqd, b"GET /info HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nX-Nsq-Content-Type: nsq; version=1.0\r\n" in answer


def test_keep_alive(nsqd: Nsqd) -> None:
    connection = http.client.HTTPConnection(*nsqd.http, timeout=20)
    connection.connect()
    port = connection.sock.getsockname()[1]
    for _ in range(5):
        connection.request("GET", "/ping")
        assert connection.getresponse().read() == b"OK"
    connection.request("GET", "/nothing")
    assert connection.getresponse().read() == b'{"message":"NOT_FOUND"}'
    connection.request("GET", "/ping")
    assert connection.getresponse().read() == b"OK"
    assert connection.sock.getsockname()[1] == port
    connection.close()


def test_connection_close_is_obeyed(nsqd: Nsqd) -> None:
    assert _raw(nsqd, b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").endswith(b"OK")


def test_http_1_0(nsqd: Nsqd) -> None:
    answer = _raw(nsqd, b"GET /ping HTTP/1.0\r\n\r\n")
    assert answer.startswith((b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 200 OK\r\n"))
    assert answer.endswith(b"\r\n\r\nOK")


def test_pipelined_requests_are_answered_in_order(nsqd: Nsqd, topic: str) -> None:
    requests = [
        b"POST /pub?topic=%s HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello" % topic.encode(),
        b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /topic/delete?topic=%s HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" % topic.encode(),
        b"GET /info HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    ]
    answer = _raw(nsqd, b"".join(requests))
    statuses = [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"200", b"404", b"200", b"200"]
    assert answer.index(b"NOT_FOUND") < answer.index(b'"version"')


def test_expect_100_continue(nsqd: Nsqd, topic: str) -> None:
    with socket.create_connection(nsqd.http, timeout=20) as connection:
        head = b"POST /pub?topic=%s HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(head % topic.encode())
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"hi")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")


def test_request_in_pieces(nsqd: Nsqd, topic: str) -> None:
    request = b"POST /pub?topic=%s HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc" % topic.encode()
    with socket.create_connection(nsqd.http, timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request:
            connection.sendall(bytes([byte]))
            time.sleep(0.0003)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
    assert nsqd.topic(topic)["message_bytes"] == 3


def test_body_cut_short_publishes_nothing(nsqd: Nsqd, topic: str) -> None:
    nsqd.post("/topic/create", topic=topic)
    _raw(
        nsqd,
        b"POST /pub?topic=%s HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc" % topic.encode(),
        end=True,
    )
    assert nsqd.topic(topic)["message_count"] == 0


@pytest.mark.parametrize("data", [b"  V2IDENTIFY\n\0\0\0\2{}", b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"])
def test_what_is_not_http_is_answered_in_http(nsqd: Nsqd, data: bytes) -> None:
    answer = _raw(nsqd, data)
    assert answer.startswith(b"HTTP/1.")
    assert answer.split()[1] in (b"400", b"505")


def test_accept_header_changes_nothing(nsqd: Nsqd) -> None:
    reply = nsqd.request("GET", "/info", headers={"Accept": "application/vnd.nsq; version=1.0"})
    assert reply.json()["version"] == "1.3.0"


def test_block_rate(nsqd: Nsqd) -> None:
    reply = nsqd.put("/debug/setblockrate", rate="x")
    assert (reply.status, reply.text) == (
        400,
        'invalid block rate : strconv.Atoi: parsing "x": invalid syntax',
    )
    reply = nsqd.put("/debug/setblockrate", rate="0")
    assert (reply.status, reply.body) == (500, b'{"message":"INTERNAL_ERROR"}')


def test_free_memory(nsqd: Nsqd) -> None:
    reply = nsqd.post("/debug/freememory")
    assert (reply.status, reply.body) == (500, b'{"message":"INTERNAL_ERROR"}')


def test_http_may_be_switched_off(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd("--http-address=")
    with daemon.connect() as client:
        client.assert_usable()
    assert " HTTP: listening on" not in daemon.log


def test_unix_sockets(make_nsqd: Callable[..., Nsqd], tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("s")
    tcp, http_path = str(directory / "tcp.sock"), str(directory / "http.sock")
    make_nsqd(f"--tcp-address={tcp}", f"--http-address={http_path}")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(tcp)
        connection.sendall(b"  V2PUB t\n\0\0\0\1x")
        assert connection.recv(100) == b"\0\0\0\x06\0\0\0\0OK"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(http_path)
        connection.sendall(b"GET /info HTTP/1.0\r\n\r\n")
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    info = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert (info["tcp_port"], info["http_port"]) == (-1, -1)
