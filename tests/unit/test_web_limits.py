"""Checks what the HTTP server does with peers that send too much, too slowly, or do not read."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

import pytest

from harness import eventually
from nsquark.web.server import Answer, HttpLimits, Pending, Request, Response, Router, StreamResponse, plain, text
from unit.webserver import LOOPS, WAIT_SECONDS_MAX, HttpClient, ServerThread

LIMITS = HttpLimits(header_bytes=8 * 1024, linger_seconds=0.2, close_seconds=0.5)
BIG_ANSWER_BYTES = 100_000


class App:
    """Has handlers that remember what they were asked."""

    def __init__(self) -> None:
        self.pending: list[Pending] = []
        self.big_count = 0
        self.unblock = asyncio.Event()
        self.router = Router()
        self.router.add("GET", "/ping", lambda request: plain(200, "OK"))
        self.router.add("POST", "/any", lambda request: text("OK"), max_body_bytes=1000)
        self.router.add("POST", "/pub", lambda request: text("OK"), max_body_bytes=100, too_big="MSG_TOO_BIG")
        self.router.add("GET", "/later", self.later)
        self.router.add("GET", "/big", self.big)
        self.router.add("GET", "/endless", self.endless)
        self.router.add("GET", "/blocked", self.blocked)

    def later(self, request: Request) -> Pending:
        self.pending.append(Pending())
        return self.pending[-1]

    def big(self, request: Request) -> Response:
        self.big_count += 1
        return Response(body=b"x" * BIG_ANSWER_BYTES)

    def endless(self, request: Request) -> StreamResponse:
        return StreamResponse(200, None, (), self.endlessly())

    async def endlessly(self) -> AsyncIterator[bytes]:
        while True:
            self.big_count += 1
            yield b"x" * BIG_ANSWER_BYTES

    async def blocked(self, request: Request) -> Answer:
        await self.unblock.wait()
        return text("done")


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture(params=list(LOOPS))
def server(request: pytest.FixtureRequest, app: App) -> Iterator[ServerThread]:
    limits = getattr(request.function, "limits", LIMITS)
    with ServerThread(app.router, limits, loop=request.param) as running:
        yield running


Test = TypeVar("Test", bound=Callable[..., None])


def with_limits(limits: HttpLimits) -> Callable[[Test], Test]:
    def mark(function: Test) -> Test:
        function.limits = limits  # type: ignore[attr-defined]
        return function

    return mark


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def head(path: str, header: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode()


def send_all_of(client: HttpClient, data: bytes) -> None:
    """Sends from another thread, since the server may stop reading in the middle."""

    def send() -> None:
        try:
            client.send(data)
        except OSError:
            return

    threading.Thread(target=send, daemon=True).start()


# -- garbage ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        b"  V2IDENTIFY\n\x00\x00\x00\x02{}",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /ping HTTP/9.9\r\n\r\n",
        b"GET ping HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /%zz HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /any HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /any HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /any HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        b"POST /any HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x00" * 100_000,
    ],
)
def test_garbage_is_answered_with_400_and_the_end(server: ServerThread, garbage: bytes) -> None:
    with server.connect() as client:
        send_all_of(client, garbage)
        reply = client.reply()
        assert (reply.status, reply.body, reply.headers["Connection"]) == (400, b"400 Bad Request", "close")
        assert client.is_closed()
    assert "Traceback" not in server.log()
    assert server.ask(get("/ping")).body == b"OK"


def test_garbage_after_requests_does_not_hurt_their_answers(server: ServerThread, app: App) -> None:
    with server.connect() as client:
        client.send(get("/later") + get("/ping") + b"\x00garbage")
        eventually(lambda: app.pending)
        server.call(lambda: app.pending[0].resolve(text("first")))
        assert [client.reply().body for _ in range(3)] == [b"first", b"OK", b"400 Bad Request"]
        assert client.is_closed()


def test_connect_is_refused(server: ServerThread) -> None:
    with server.connect() as client:
        client.send(b"CONNECT evil:80 HTTP/1.1\r\nHost: x\r\n\r\nabc")
        assert client.reply().status == 400


# -- size ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start",
    [
        b"GET /" + b"a" * 100,
        b"GET /ping HTTP/1.1\r\nX-Long: ",
        b"POST /any HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;ext=",
        b"POST /any HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nTrailer: ",
    ],
)
def test_endless_headers_are_cut(server: ServerThread, start: bytes) -> None:
    with server.connect() as client:
        send_all_of(client, start + b"a" * 1_000_000)
        assert client.reply().status == 431
        assert client.is_closed()


def test_many_headers_in_turn_are_cut(server: ServerThread) -> None:
    with server.connect() as client:
        send_all_of(client, b"GET /ping HTTP/1.1\r\n" + b"X: y\r\n" * 100_000)
        assert client.reply().status == 431


def test_usual_headers_are_not_cut(server: ServerThread) -> None:
    with server.connect() as client:
        for _ in range(20):
            client.send(b"GET /ping HTTP/1.1\r\nCookie: " + b"c" * 6000 + b"\r\n\r\n")
            assert client.reply().body == b"OK"


@pytest.mark.parametrize(("path", "allowed", "code"), [("/pub", 100, "MSG_TOO_BIG"), ("/any", 1000, "BODY_TOO_BIG")])
def test_bodies_over_the_limit_of_their_route(server: ServerThread, path: str, allowed: int, code: str) -> None:
    refused = f'{{"message":"{code}"}}'.encode()
    with server.connect() as client:
        client.send(head(path, f"Content-Length: {allowed}") + b"x" * allowed)
        assert client.reply().status == 200
        # Said before the body is sent, and without asking for it.
        client.send(head(path, f"Content-Length: {allowed + 1}\r\nExpect: 100-continue"))
        reply = client.reply()
        assert (reply.status, reply.body, reply.headers["Connection"]) == (413, refused, "close")
        assert client.is_closed()
    with server.connect() as client:
        client.send(head(path, "Transfer-Encoding: chunked"))
        client.send(b"10\r\n" + b"x" * 16 + b"\r\n")
        send_all_of(client, (b"40\r\n" + b"x" * 64 + b"\r\n") * 100)
        reply = client.reply()
        assert (reply.status, reply.body, reply.headers["Connection"]) == (413, refused, "close")


def test_a_client_still_sending_can_read_the_refusal(server: ServerThread) -> None:
    with server.connect() as client:
        send_all_of(client, head("/pub", "Content-Length: 5000000") + b"x" * 5_000_000)
        time.sleep(0.1)  # Lets the kernel's buffers fill: the case in which a careless close loses the answer.
        assert client.reply().body == b'{"message":"MSG_TOO_BIG"}'


# -- time ------------------------------------------------------------------------------------------------


@with_limits(HttpLimits(request_seconds=1, linger_seconds=0.2))
def test_a_slow_request_is_cut(server: ServerThread) -> None:
    with server.connect() as client:
        client.send(b"POST /any HTTP/1.1\r\nContent-Length: 100\r\n\r\n")
        started = time.monotonic()
        # Each byte alone is in time.
        while time.monotonic() - started < WAIT_SECONDS_MAX:
            client.send(b"x")
            client.sock.settimeout(0.2)
            try:
                reply = client.reply()
                break
            except TimeoutError:
                continue
        assert reply.status == 408


@with_limits(HttpLimits(idle_seconds=3))
def test_an_idle_connection_is_closed_and_a_busy_one_is_not(server: ServerThread, app: App) -> None:
    for _ in range(10):
        with server.connect() as idle, server.connect() as busy:
            spoke_s = time.monotonic()
            try:
                busy.send(get("/later"))
                idle.send(get("/ping"))
                assert idle.reply().body == b"OK"
                assert idle.is_closed()
                spoke_s = time.monotonic()
                server.call(lambda: app.pending[-1].resolve(text("patience")))
                assert busy.reply().body == b"patience"
                busy.send(get("/ping"))
                assert busy.reply().body == b"OK"
                return
            except ConnectionError:
                if time.monotonic() - spoke_s < 2.9:  # else it was this process that was idle for so long
                    raise
    pytest.fail("held up each time")


# -- number ----------------------------------------------------------------------------------------------


@with_limits(HttpLimits(pipelined_requests=5))
def test_requests_being_answered_are_bounded(server: ServerThread, app: App) -> None:
    with server.connect() as client:
        client.send(get("/later") * 500)
        for number in range(500):
            eventually(lambda number=number: len(app.pending) > number)
            assert len(app.pending) - number <= 5
            server.call(lambda number=number: app.pending[number].resolve(text(str(number))))
            assert client.reply().body == str(number).encode()


@with_limits(HttpLimits(connections=2, linger_seconds=0.2))
def test_connections_are_bounded(server: ServerThread) -> None:
    with server.connect() as first, server.connect() as second:
        for client in (first, second):
            client.send(get("/ping"))
            assert client.reply().body == b"OK"
        with server.connect() as third:
            assert third.reply().status == 503
            assert third.is_closed()
    eventually(lambda: server.http.connection_count == 0)
    assert server.ask(get("/ping")).body == b"OK"


# -- peers that do not read ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/big", "/endless"])
def test_a_peer_that_does_not_read_stops_the_work_done_for_it(server: ServerThread, app: App, path: str) -> None:
    with server.connect() as client:
        send_all_of(client, get(path) * 5000)
        eventually(lambda: app.big_count)
        before = -1
        while before != app.big_count:
            before = app.big_count
            time.sleep(0.3)
        # What the kernel's buffers take, and a little more; far from all.
        assert 0 < app.big_count < 500
        # And it goes on when the peer reads.
        client.sock.recv(1 << 20)
        eventually(lambda: client.sock.recv(1 << 20) and app.big_count > before)


@with_limits(HttpLimits(write_stall_seconds=1))
def test_a_peer_that_never_reads_is_dropped(server: ServerThread, app: App) -> None:
    with server.connect() as client:
        send_all_of(client, get("/big") * 5000)
        eventually(lambda: app.big_count)
        eventually(lambda: server.http.connection_count == 0)


# -- closing ---------------------------------------------------------------------------------------------


def test_close_ends_idle_connections_and_listening(server: ServerThread) -> None:
    with server.connect() as client:
        client.send(get("/ping"))
        assert client.reply().body == b"OK"
        server.close()
        assert client.is_closed()
    with pytest.raises(OSError, match="refused"):
        server.connect()


@with_limits(HttpLimits(close_seconds=10))
def test_close_waits_for_what_is_being_answered(server: ServerThread, app: App) -> None:
    with server.connect() as client:
        client.send(get("/later") + get("/blocked"))
        eventually(lambda: app.pending)
        closing = asyncio.run_coroutine_threadsafe(server.http.close(), server.loop)
        server.call(lambda: app.pending[0].resolve(text("last words")))
        assert client.reply().body == b"last words"
        server.call(app.unblock.set)
        assert client.reply().body == b"done"
        assert client.is_closed()
        closing.result(WAIT_SECONDS_MAX)


def test_close_does_not_wait_for_ever(server: ServerThread) -> None:
    with server.connect() as client, server.connect() as other:
        client.send(get("/blocked"))
        other.send(get("/endless"))
        other.sock.recv(1)
        server.close()
        with pytest.raises(ConnectionError):
            client.reply()
