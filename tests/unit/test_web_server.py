"""Checks the HTTP server as its clients see it, byte by byte where that matters."""

import asyncio
import json as stdlib_json
import re
import shutil
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from harness import eventually, until
from harness.upgrades import make_certificate
from nsquark.web.server import (
    Answer,
    Pending,
    Request,
    Response,
    Router,
    StreamResponse,
    empty,
    error,
    json,
    plain,
    text,
)
from unit.webserver import LOOPS, ServerThread

PENDING: list[Pending] = []
STREAMS_ENDED: list[int] = []


def echo(request: Request) -> Response:
    return json(
        {
            "method": request.method,
            "path": request.path,
            "tail": request.tail,
            "query": request.query,
            "query_ok": request.query_ok,
            "body": request.body.decode("latin-1"),
            "headers": {name.decode(): value.decode() for name, value in request.headers.items()},
            "remote": request.remote,
            "https": request.https,
        }
    )


def later(request: Request) -> Pending:
    PENDING.append(Pending())
    return PENDING[-1]


def crash(request: Request) -> Response:
    raise RuntimeError("a secret reason")


async def slow(request: Request) -> Answer:
    await asyncio.sleep(0.01)
    return text(request.query.get("say", ""))


async def slow_crash(request: Request) -> Answer:
    await asyncio.sleep(0)
    raise RuntimeError("a later reason")


async def count_to(end: int) -> AsyncIterator[bytes | memoryview]:
    try:
        for number in range(end):
            yield memoryview(b"%d," % number)
            yield b""
    finally:
        STREAMS_ENDED.append(end)


async def break_after(end: int) -> AsyncIterator[bytes | memoryview]:
    async for piece in count_to(end):
        yield piece
    raise RuntimeError("the source broke")


def numbers(request: Request) -> StreamResponse:
    chunks = count_to(int(request.query["end"]))
    return StreamResponse(200, "text/csv", (("X-Kind", "numbers"),), chunks)


def broken_numbers(request: Request) -> StreamResponse:
    return StreamResponse(200, "text/csv", (), break_after(3))


def make_router() -> Router:
    router = Router()
    router.add("GET", "/empty", lambda request: empty())
    router.add("GET", "/text", lambda request: text("some text"))
    router.add("GET", "/json", lambda request: json({"b": "<&>\u2028\u2029\u00e4", "a": None}))
    router.add("GET", "/ping", lambda request: plain(200, "OK"))
    router.add("GET", "/error", lambda request: error(404, "TOPIC_NOT_FOUND"))
    router.add("GET", "/echo", echo)
    router.add("POST", "/echo", echo)
    router.add("POST", "/pub", lambda request: text("OK"), log=False, max_body_bytes=100, too_big="MSG_TOO_BIG")
    router.add("GET", "/later", later)
    router.add("GET", "/slow", slow)
    router.add("GET", "/slow_crash", slow_crash)
    router.add("GET", "/crash", crash)
    router.add("GET", "/numbers", numbers)
    router.add("GET", "/broken_numbers", broken_numbers)
    router.add("GET", "/debug/pprof/", lambda request: text("index"))
    router.add_prefix("GET", "/config/", echo)
    router.add_prefix("PUT", "/config/", echo)
    return router


@pytest.fixture(scope="module", params=list(LOOPS))
def server(request: pytest.FixtureRequest) -> Iterator[ServerThread]:
    with ServerThread(make_router(), loop=request.param) as running:
        yield running


def get(path: str, headers: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode()


def post(path: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


# -- response styles -------------------------------------------------------------------------------------


def test_styles(server: ServerThread) -> None:
    sniff = "X-Content-Type-Options: nosniff\r\n"
    nsq = "X-Nsq-Content-Type: nsq; version=1.0\r\n"
    with server.connect() as client:
        client.send(get("/empty"))
        assert client.reply().head == f"HTTP/1.1 200 OK\r\n{sniff}{nsq}Content-Length: 0\r\n\r\n"
        client.send(get("/text"))
        reply = client.reply()
        kind = "Content-Type: text/plain; charset=utf-8\r\n"
        assert (reply.head, reply.body) == (
            f"HTTP/1.1 200 OK\r\n{sniff}{kind}{nsq}Content-Length: 9\r\n\r\n",
            b"some text",
        )
        client.send(get("/ping"))
        reply = client.reply()
        assert (reply.head, reply.body) == (f"HTTP/1.1 200 OK\r\n{sniff}{kind}Content-Length: 2\r\n\r\n", b"OK")
        client.send(get("/error"))
        reply = client.reply()
        kind = "Content-Type: application/json; charset=utf-8\r\n"
        assert reply.head == f"HTTP/1.1 404 Not Found\r\n{sniff}{kind}{nsq}Content-Length: 29\r\n\r\n"
        assert reply.body == b'{"message":"TOPIC_NOT_FOUND"}'


def test_json_is_escaped_as_go_does(server: ServerThread) -> None:
    body = server.ask(get("/json")).body
    assert body == b'{"b":"\\u003c\\u0026\\u003e\\u2028\\u2029\xc3\xa4","a":null}'


def test_an_empty_text_has_no_type(server: ServerThread) -> None:
    assert "Content-Type" not in server.ask(get("/slow?say=")).headers


# -- requests --------------------------------------------------------------------------------------------


def test_what_a_handler_sees(server: ServerThread) -> None:
    line = b"POST /echo?a=1&a=2&b=%20+%C3%A4&c HTTP/1.1\r\n"
    headers = b"Host: x\r\nX-Two: 1\r\nx-two: 2\r\nContent-Length: 3\r\n\r\n"
    seen = stdlib_json.loads(server.ask(line + headers + b"abc").body)
    assert seen["method"] == "POST"
    assert seen["path"] == "/echo"
    assert seen["query"] == {"a": "1", "b": "  \u00e4", "c": ""}
    assert seen["query_ok"] is True
    assert seen["body"] == "abc"
    assert seen["headers"]["x-two"] == "1"
    assert re.fullmatch(r"127\.0\.0\.1:\d+", seen["remote"])
    assert seen["https"] is False


@pytest.mark.parametrize("query", ["a=%zz", "a=%2", "%=1", "a;b", "a=1;b=2", "x=1&a=%"])
def test_a_bad_query_is_visible(server: ServerThread, query: str) -> None:
    assert stdlib_json.loads(server.ask(get(f"/echo?{query}")).body)["query_ok"] is False


def test_query_of_bytes_that_are_no_text(server: ServerThread) -> None:
    seen = stdlib_json.loads(server.ask(get("/echo?topic=%ff")).body)
    assert (seen["query"], seen["query_ok"]) == ({"topic": "\ufffd"}, True)


def test_prefix_route(server: ServerThread) -> None:
    assert stdlib_json.loads(server.ask(get("/config/log_level?x=1")).body)["tail"] == "log_level"
    assert server.ask(get("/config/")).status == 404
    assert server.ask(get("/config/a/b")).status == 404


def test_absolute_request_target(server: ServerThread) -> None:
    assert server.ask(get("http://somewhere:1/ping")).body == b"OK"


def test_chunked_body(server: ServerThread) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"3\r\nabc\r\n4;ext=1\r\ndefg\r\n0\r\nTrailer: x\r\n\r\n"
    with server.connect() as client:
        client.send(head + body + get("/ping"))
        assert stdlib_json.loads(client.reply().body)["body"] == "abcdefg"
        assert client.reply().body == b"OK"


def test_a_request_that_comes_byte_by_byte(server: ServerThread) -> None:
    with server.connect() as client:
        for byte in post("/echo?topic=t", b"abc"):
            client.send(bytes((byte,)))
        seen = stdlib_json.loads(client.reply().body)
    assert (seen["query"], seen["body"]) == ({"topic": "t"}, "abc")


def test_a_large_body(server: ServerThread) -> None:
    body = bytes(range(32, 127)) * 5000
    assert stdlib_json.loads(server.ask(post("/echo", body)).body)["body"].encode() == body


def test_expect_continue(server: ServerThread) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
    with server.connect() as client:
        client.send(head)
        assert client.reply().status == 100
        client.send(b"abc")
        assert stdlib_json.loads(client.reply().body)["body"] == "abc"


def test_an_upgrade_offer_is_ignored(server: ServerThread) -> None:
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n"
    request = b"POST /echo?n=%d HTTP/1.1\r\nHost: x\r\n" + offer + b"Content-Length: 3\r\n\r\nabc"
    with server.connect() as client:
        client.send(request % 1 + request % 2 + get("/ping"))
        for number in "12":
            seen = stdlib_json.loads(client.reply().body)
            assert (seen["query"]["n"], seen["body"]) == (number, "abc")
        assert client.reply().body == b"OK"


# -- connections -----------------------------------------------------------------------------------------


def test_connection_close(server: ServerThread) -> None:
    with server.connect() as client:
        client.send(get("/ping", "Connection: close\r\n") + b"ignored")
        reply = client.reply()
        assert (reply.body, reply.headers["Connection"]) == (b"OK", "close")
        assert client.is_closed()


def test_http_1_0(server: ServerThread) -> None:
    with server.connect() as client:
        client.send(b"GET /ping HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert client.reply().headers["Connection"] == "keep-alive"
        client.send(b"GET /ping HTTP/1.0\r\n\r\n")
        assert client.reply().headers["Connection"] == "close"
        assert client.is_closed()


def test_a_client_that_closes_its_side_gets_its_answers(server: ServerThread) -> None:
    with server.connect() as client:
        client.send(get("/slow?say=a") + get("/slow?say=b"))
        client.sock.shutdown(1)
        assert [client.reply().body, client.reply().body] == [b"a", b"b"]
        assert client.is_closed()


def test_pipelined_answers_keep_their_order(server: ServerThread) -> None:
    PENDING.clear()
    with server.connect() as client:
        client.send(get("/later") + get("/text") + get("/later") + get("/slow?say=slow") + get("/numbers?end=3"))
        client.send(get("/ping"))
        server.call(lambda: until(lambda: len(PENDING) == 2))
        server.call(lambda: PENDING[1].resolve(text("second")))
        server.call(lambda: PENDING[0].resolve(text("first")))
        bodies = [client.reply().body for _ in range(6)]
    assert bodies == [b"first", b"some text", b"second", b"slow", b"0,1,2,", b"OK"]


def test_a_router_may_refuse_routes() -> None:
    refusal = plain(403, "not here")
    router = Router(lambda method, path: refusal if method != "GET" else None)
    for method in ("GET", "POST"):
        router.add(method, "/echo", echo)
        router.add_prefix(method, "/config/", echo)
    for path in (b"/echo", b"/config/x"):
        assert router.resolve(b"GET", path).handler is echo
        handler = router.resolve(b"POST", path).handler
        assert handler is not echo
        assert handler(Request(router.resolve(b"POST", path), {}, False, b"", {}, "", False)) is refusal


def test_many_pipelined_requests(server: ServerThread) -> None:
    with server.connect() as client:
        client.send(b"".join(post(f"/echo?n={number}", b"x") for number in range(3000)))
        for number in range(3000):
            assert stdlib_json.loads(client.reply().body)["query"]["n"] == str(number)


# -- answers that take time ------------------------------------------------------------------------------


def test_stream(server: ServerThread) -> None:
    with server.connect() as client:
        client.send(get("/numbers?end=1000") + get("/ping"))
        reply = client.reply()
        assert reply.body == b"".join(b"%d," % number for number in range(1000))
        assert (reply.headers["Content-Type"], reply.headers["X-Kind"]) == ("text/csv", "numbers")
        assert client.reply().body == b"OK"


def test_stream_to_http_1_0_ends_with_the_connection(server: ServerThread) -> None:
    reply = server.ask(b"GET /numbers?end=3 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert (reply.body, reply.headers["Connection"]) == (b"0,1,2,", "close")
    assert "Transfer-Encoding" not in reply.headers


def test_a_stream_that_fails_has_no_end(server: ServerThread) -> None:
    with server.connect() as client:
        client.send(get("/broken_numbers"))
        with pytest.raises(ConnectionError):
            client.reply()
    lines: list[str] = []

    def is_logged() -> bool:
        lines.append(server.log())
        return "the source broke" in "".join(lines)

    eventually(is_logged)  # the client may see the end first


def test_a_client_that_goes_away_stops_the_stream(server: ServerThread) -> None:
    STREAMS_ENDED.clear()
    with server.connect() as client:
        client.send(get("/numbers?end=1000000000"))
        client.sock.recv(1000)
    server.call(lambda: until(lambda: STREAMS_ENDED == [1000000000]))


@pytest.mark.parametrize(("path", "reason"), [("/crash", "a secret reason"), ("/slow_crash", "a later reason")])
def test_a_crash_is_told_to_the_log_only(server: ServerThread, path: str, reason: str) -> None:
    with server.connect() as client:
        client.send(get(path) + get("/ping"))
        reply = client.reply()
        assert (reply.status, reply.body) == (500, b'{"message":"INTERNAL_ERROR"}')
        assert client.reply().body == b"OK"
    log = server.log()
    assert "Traceback" in log
    assert reason in log


# -- routing ---------------------------------------------------------------------------------------------


def test_unknown_path(server: ServerThread) -> None:
    reply = server.ask(get("/nothing"))
    assert (reply.status, reply.body) == (404, b'{"message":"NOT_FOUND"}')
    assert reply.headers["X-Nsq-Content-Type"] == "nsq; version=1.0"


def test_wrong_method(server: ServerThread) -> None:
    reply = server.ask(post("/ping", b""))
    assert (reply.status, reply.body) == (405, b'{"message":"METHOD_NOT_ALLOWED"}')
    assert reply.headers["Allow"] == "GET, OPTIONS"


def test_options(server: ServerThread) -> None:
    reply = server.ask(b"OPTIONS /config/x HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (reply.status, reply.body, reply.headers["Allow"]) == (200, b"", "GET, OPTIONS, PUT")


def test_head_is_not_allowed_and_has_no_body(server: ServerThread) -> None:
    with server.connect() as client:
        client.send(b"HEAD /ping HTTP/1.1\r\nHost: x\r\n\r\n" + get("/ping"))
        assert client.reply(has_body=False).status == 405
        assert client.reply().body == b"OK"


@pytest.mark.parametrize(
    ("request_line", "status", "location"),
    [
        ("GET /ping/", 301, "/ping"),
        ("GET /PING?a=%20b", 301, "/ping?a=%20b"),
        ("GET //ping", 301, "/ping"),
        ("GET /./ping", 301, "/ping"),
        ("GET /debug/pprof", 301, "/debug/pprof/"),
        ("GET /debug//pprof/", 301, "/debug/pprof/"),
        ("POST /Pub/?topic=t", 308, "/pub?topic=t"),
        ("PUT /config/log_level/", 308, "/config/log_level"),
    ],
)
def test_redirects(server: ServerThread, request_line: str, status: int, location: str) -> None:
    reply = server.ask(f"{request_line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert (reply.status, reply.headers["Location"]) == (status, location)


@pytest.mark.parametrize("request_line", ["POST /ping/", "GET /pub/", "GET /config/x%0d%0ay/", "GET //evil.com/ping"])
def test_no_redirect_to_what_is_not_there(server: ServerThread, request_line: str) -> None:
    assert server.ask(f"{request_line} HTTP/1.1\r\nHost: x\r\n\r\n".encode()).status == 404


# -- log -------------------------------------------------------------------------------------------------


def test_access_log(server: ServerThread) -> None:
    server.log()
    server.ask(get("/error?a=%20"))
    server.ask(get("/slow?say=x"))
    server.ask(get("/numbers?end=2"))
    server.ask(get("/nothing"))
    server.ask(post("/pub?topic=t", b"x"))
    lines = server.log().splitlines()
    assert [re.sub(r"^\S+ \S+ |:\d+\) \S+$", "", line) for line in lines] == [
        "INFO: 404 GET /error?a=%20 (127.0.0.1",
        "INFO: 200 GET /slow?say=x (127.0.0.1",
        "INFO: 200 GET /numbers?end=2 (127.0.0.1",
        "INFO: 404 GET /nothing (127.0.0.1",
    ]
    assert re.search(r"\) [0-9.]+(ns|\u00b5s|ms|s)$", lines[0])


# -- other sockets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", list(LOOPS))
def test_unix_socket(tmp_path: Path, loop: str) -> None:
    with ServerThread(make_router(), loop=loop, unix_path=str(tmp_path / "http.sock")) as server:
        assert stdlib_json.loads(server.ask(get("/echo")).body)["remote"] == "@"
        server.close()
        assert not (tmp_path / "http.sock").exists()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
@pytest.mark.parametrize("loop", list(LOOPS))
def test_tls(tmp_path: Path, loop: str) -> None:
    cert, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    trusting = ssl.create_default_context(cafile=str(cert))
    trusting.check_hostname = False
    running = ServerThread(make_router(), loop=loop, ssl_context=context)
    with running as server, server.connect() as client:
        client.sock = trusting.wrap_socket(client.sock)
        client.send(get("/echo") + get("/numbers?end=20000"))
        assert stdlib_json.loads(client.reply().body)["https"] is True
        assert client.reply().body.endswith(b"19998,19999,")
        client.send(post("/pub", b"x" * 101))
        reply = client.reply()
        assert (reply.status, reply.body) == (413, b'{"message":"MSG_TOO_BIG"}')
        assert client.is_closed()
