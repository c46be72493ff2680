"""Runs a real HTTP server that remembers what it was asked, and answers as it is told."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

from harness.closing import Closing
from harness.http_server import LocalServer, QuietHandler


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: socket.socket

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key == name), "")


Answer = Callable[[Request], int | bytes]
"""Returns a status, or the bytes of an answer, after which the connection is closed; it may take its time."""


class HttpEndpoint(Closing):
    """Listens on a free port of the loopback interface, or on the one given."""

    def __init__(self, answer: Answer = lambda _: 200, port: int = 0) -> None:
        self.answer = answer
        self.requests: list[Request] = []
        """Requests that were answered with success come into `taken`, too."""
        self.taken: list[Request] = []
        endpoint = self

        class Handler(QuietHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                request = Request(
                    self.command, self.path, self.headers.items(), self.rfile.read(length), self.connection
                )
                endpoint.requests.append(request)
                status = endpoint.answer(request)
                if isinstance(status, bytes):
                    self.wfile.write(status)
                    self.close_connection = True
                    return
                if status == 200:
                    endpoint.taken.append(request)
                body = b"" if status == 204 else b"OK"
                self.send_response(status)
                if body:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET  # noqa: N815

        self._server = _Server(Handler, port)
        self.port = self._server.server_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def close(self) -> None:
        self._server.stop()


class _Server(LocalServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing of a client that went away."""


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Yields the port of an endpoint that nobody serves, for now: only an endpoint of ours can have it meanwhile."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def slowly(seconds: float) -> Answer:
    def answer(_: Request) -> int:
        time.sleep(seconds)
        return 200

    return answer
