"""Checks the HTTP client of the daemons against real servers: ours, and sockets that misbehave."""

import asyncio
import json as stdlib_json
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.upgrades import make_certificate
from nsquark.web.fetch import Fetched, FetchError, fetch
from nsquark.web.server import Request, Response, Router, json, plain
from unit.webserver import ServerThread


def echo(request: Request) -> Response:
    headers = {name.decode(): value.decode() for name, value in request.headers.items()}
    return json({"uri": request.uri, "method": request.method, "body": request.body.decode(), "headers": headers})


def make_router() -> Router:
    router = Router()
    router.add("GET", "/echo", echo)
    router.add("POST", "/echo", echo)
    router.add("GET", "/", lambda request: plain(200, "root"))
    router.add("GET", "/forbidden", lambda request: plain(403, "no"))
    return router


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with ServerThread(make_router()) as running:
        yield running


def get(url: str, **settings: object) -> Fetched:
    asked: dict[str, object] = {"connect_timeout": 30.0, "request_timeout": 60.0, **settings}
    return asyncio.run(fetch(url, **asked))  # type: ignore[arg-type]


def test_get(server: ServerThread) -> None:
    status, headers, body = get(f"http://127.0.0.1:{server.port}/echo?topic=a%20b")
    seen = stdlib_json.loads(body)
    assert (status, seen["method"], seen["uri"]) == (200, "GET", "/echo?topic=a%20b")
    assert seen["headers"]["accept"] == "application/vnd.nsq; version=1.0"
    assert headers["x-nsq-content-type"] == "nsq; version=1.0"


def test_post_and_own_headers(server: ServerThread) -> None:
    url = f"http://127.0.0.1:{server.port}/echo"
    _, _, body = get(url, method="POST", body=b"abc", headers={"Accept": "x/y", "X-More": "1"})
    seen = stdlib_json.loads(body)
    assert (seen["method"], seen["body"], seen["headers"]["accept"]) == ("POST", "abc", "x/y")
    assert seen["headers"]["x-more"] == "1"


def test_no_path_and_other_statuses(server: ServerThread) -> None:
    assert get(f"http://127.0.0.1:{server.port}")[2] == b"root"
    assert get(f"http://127.0.0.1:{server.port}/none")[0] == 404
    assert get(f"http://127.0.0.1:{server.port}/forbidden")[0] == 403


@pytest.mark.parametrize("url", ["", "127.0.0.1:4151/x", "ftp://a/x", "http://", "http://a:b/", "http://[::1/x"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(FetchError, match="cannot fetch"):
        get(url)


def test_nobody_listens() -> None:
    with socket.socket() as held:  # so that nobody else listens there meanwhile
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with pytest.raises(FetchError, match=rf"GET http://127\.0\.0\.1:{port}/x failed - .*refused"):
            get(f"http://127.0.0.1:{port}/x")


@contextmanager
def misbehaving(behave: Callable[[socket.socket], None]) -> Iterator[int]:
    """Runs a server of one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                try:
                    behave(peer)
                except OSError:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(30)
        assert not thread.is_alive(), "the client left its connection open"


def say_nothing(peer: socket.socket) -> None:
    while peer.recv(1000):
        continue


def drip(peer: socket.socket) -> None:
    """Each byte is in time, the answer never ends."""
    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while True:
        peer.sendall(b"x")
        time.sleep(0.02)


def drip_to_the_end(peer: socket.socket) -> None:
    """The answer has no length: it would end with the connection."""
    peer.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
    while True:
        peer.sendall(b"x")
        time.sleep(0.02)


def pour(peer: socket.socket) -> None:
    peer.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
    while True:
        peer.sendall(b"x" * 1000)


def talk_nonsense(peer: socket.socket) -> None:
    peer.recv(1000)
    peer.sendall(b"E_INVALID\r\n\r\n")


def break_off(peer: socket.socket) -> None:
    peer.recv(1000)
    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")


@pytest.mark.parametrize("behave", [say_nothing, drip, drip_to_the_end])
def test_the_whole_request_has_a_time(behave: Callable[[socket.socket], None]) -> None:
    with misbehaving(behave) as port, pytest.raises(FetchError, match="timed out"):
        get(f"http://127.0.0.1:{port}/", request_timeout=0.3)


def test_an_answer_that_is_too_large_is_read_no_further() -> None:
    with misbehaving(pour) as port, pytest.raises(FetchError, match="larger than 100000 bytes") as raised:
        get(f"http://127.0.0.1:{port}/", response_bytes_max=100_000)
    assert raised.tb  # which has the frames with the connection: it is not closed by being forgotten


@pytest.mark.parametrize("behave", [talk_nonsense, break_off])
def test_broken_answers(behave: Callable[[socket.socket], None]) -> None:
    with misbehaving(behave) as port, pytest.raises(FetchError, match="GET http"):
        get(f"http://127.0.0.1:{port}/")


def test_cancelling_ends_the_connection() -> None:
    async def cancelled(port: int) -> None:
        url = f"http://127.0.0.1:{port}/"
        task = asyncio.create_task(fetch(url, connect_timeout=30.0, request_timeout=60.0))
        assert await asyncio.to_thread(asked.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asked = threading.Event()

    def wait_for_end(peer: socket.socket) -> None:
        while peer.recv(1000):
            asked.set()

    with misbehaving(wait_for_end) as port:
        asyncio.run(cancelled(port))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https_and_the_way_there_from_an_nsqd_that_requires_it(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    trusting = ssl.create_default_context(cafile=str(cert))
    with ServerThread(make_router(), ssl_context=context) as secure:
        assert get(f"https://127.0.0.1:{secure.port}/", ssl_context=trusting)[2] == b"root"
        with pytest.raises(FetchError, match="certificate"):
            get(f"https://127.0.0.1:{secure.port}/")
        refusing = Router()
        refusal = b'{"message": "TLS_REQUIRED", "https_port": %d}' % secure.port
        refusing.add("POST", "/echo", lambda request: Response(403, refusal))
        with ServerThread(refusing) as plain_only:
            url = f"http://127.0.0.1:{plain_only.port}/echo?topic=t"
            _, _, body = get(url, method="POST", body=b"abc", ssl_context=trusting)
    seen = stdlib_json.loads(body)
    assert (seen["uri"], seen["method"], seen["body"]) == ("/echo?topic=t", "POST", "abc")


def test_a_secret_is_shown_to_who_asks_for_it() -> None:
    shown: list[bytes | None] = []

    def asking(request: Request) -> Response:
        shown.append(request.headers.get(b"authorization"))
        return Response(200 if shown[-1] else 401)

    def wanting_tls(request: Request) -> Response:
        shown.append(request.headers.get(b"authorization"))
        return Response(403, b'{"message": "TLS_REQUIRED", "https_port": 1}')

    router = Router()
    router.add("GET", "/asking", asking)
    router.add("GET", "/tls", wanting_tls)
    with ServerThread(router) as server:
        url = f"http://127.0.0.1:{server.port}"
        assert get(f"{url}/asking", secret="hush \u00e9")[0] == 200
        assert shown == [None, "Bearer hush \u00e9".encode()]
        assert get(f"{url}/asking")[0] == 401
        shown.clear()
        with pytest.raises(FetchError):
            get(f"{url}/tls", secret="hush")
        assert shown == [None]
