"""Heads that were read before are not parsed again: nothing may be answered differently for that."""

import itertools
import random
import socket

import pytest
from webserver import ServerThread

from nsquark.web.server import Request, Response, Router, text

BODIES = (b"", b"a", b"bb", b"\r\n\r\n", b"GET /x HTTP/1.1\r\n\r\n")
PATHS = (b"/pub", b"/pub?topic=a", b"/pub?topic=b", b"/nope")
END = b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


def _answer(request: Request) -> Response:
    return text(repr((request.method, request.uri, request.body, sorted(request.headers.items()), request.query)))


def _request(choose: random.Random) -> bytes:
    body, path, kind = choose.choice(BODIES), choose.choice(PATHS), choose.random()
    if kind < 0.7:
        return b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (path, len(body), body)
    if kind < 0.8:
        return b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
    chunk = body or b"q"
    head = b"POST /pub HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(chunk), chunk)


def _exchange(port: int, pieces: list[bytes]) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            client.sendall(piece)
        answer = b""
        while more := client.recv(65536):
            answer += more
        return answer


@pytest.mark.parametrize("seed", range(40))
def test_repeated_requests_are_answered_alike(seed: int) -> None:
    choose = random.Random(seed)
    stream = b"".join(_request(choose) for _ in range(12)) + END
    cuts = sorted({choose.randrange(len(stream)) for _ in range(8)} | {0, len(stream)})
    in_pieces = [stream[start:end] for start, end in itertools.pairwise(cuts)]
    router = Router()
    router.add("POST", "/pub", _answer, log=False, max_body_bytes=50)
    router.add("GET", "/x", _answer, log=False)
    with ServerThread(router) as server:
        first = _exchange(server.port, [stream])
        assert first.startswith(b"HTTP/1.1 ")
        for pieces in ([stream], in_pieces, [stream]):
            assert _exchange(server.port, pieces) == first
