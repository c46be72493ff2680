"""Runs HTTP servers of a test's own making: each on a free port of the loopback interface, in a thread beside it."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

POLL_S = 0.02
"""The thread looks this often whether it is to end."""


class QuietHandler(BaseHTTPRequestHandler):
    """Handles requests, and leaves stderr to the test."""

    def answer(self, status: int, body: bytes = b"") -> None:
        """Sends a whole answer."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Drops the line that the standard library writes for each request."""


class LocalServer(ThreadingHTTPServer):
    """Listens from the start, and serves inside its `with`, or between `start` and `stop`."""

    request_queue_size = 256

    def __init__(self, handler: type[BaseHTTPRequestHandler], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.address = f"127.0.0.1:{self.server_port}"

    def start(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(POLL_S,), daemon=True).start()
        return self

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
