"""Runs an HTTP server of ours in a thread, on the loop a test asks for, and a raw client that sees every byte."""

import asyncio
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvloop

from harness.closing import Closing
from nsquark.base.addresses import listen_anywhere
from nsquark.base.logs import Level, LineWriter, Logger
from nsquark.web.browsers import BrowserGuard
from nsquark.web.server import HttpLimits, HttpServer, Router

WAIT_SECONDS_MAX = 20.0
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


class ServerThread:
    """Listens on a free port inside `with ServerThread(...) as server:`; `server.call` runs things on its loop."""

    def __init__(
        self,
        router: Router,
        limits: HttpLimits | None = None,
        *,
        loop: str = "uvloop",
        ssl_context: ssl.SSLContext | None = None,
        unix_path: str | None = None,
    ) -> None:
        self._router = router
        self._limits = limits or HttpLimits()
        self._ssl_context = ssl_context
        self._unix_path = unix_path
        self._log_read_fd, self._log_write_fd = os.pipe()
        self.logger = Logger("", Level.INFO, LineWriter(self._log_write_fd))
        self.loop = LOOPS[loop]()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.http: HttpServer
        self.port = 0

    def __enter__(self) -> "ServerThread":
        self._thread.start()
        self.call(self._start)
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_SECONDS_MAX)
        self.loop.close()
        os.close(self._log_read_fd)
        os.close(self._log_write_fd)

    def call(self, work: Callable[[], Any]) -> Any:
        async def run() -> Any:
            result = work()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(WAIT_SECONDS_MAX)

    def close(self) -> None:
        self.call(self.http.close)

    def log(self) -> str:
        """Returns all lines since it was last asked."""
        self.logger.info("END-OF-LOG")
        raw = b""
        while not raw.endswith(b"END-OF-LOG\n"):  # a read may end within a line, and within a character
            raw += os.read(self._log_read_fd, 1 << 16)
        text = raw.decode()
        return text[: text.rindex("\n", 0, text.index("END-OF-LOG")) + 1] if "\n" in text[:-1] else ""

    def connect(self) -> "HttpClient":
        if self._unix_path is not None:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(WAIT_SECONDS_MAX)
            sock.connect(self._unix_path)
        else:
            sock = socket.create_connection(("127.0.0.1", self.port), WAIT_SECONDS_MAX)
        return HttpClient(sock)

    def ask(self, request: bytes) -> "Reply":
        with self.connect() as client:
            client.send(request)
            return client.reply()

    async def _start(self) -> None:
        self.http = HttpServer(self._router, BrowserGuard("test", ()), self._limits, self.logger)
        listener = listen_anywhere(self._unix_path or "127.0.0.1:0")
        await self.http.serve(listener, self._ssl_context)
        self.port = listener.port

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    head: str


class HttpClient(Closing):
    """Is a connection that reads answers by the rules of HTTP and nothing else."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = b""

    def close(self) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def reply(self, *, has_body: bool = True) -> Reply:
        head = self._until(b"\r\n\r\n").decode("latin-1")
        lines = head.split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        status = int(lines[0].split(" ")[1])
        if not has_body:
            body = b""
        elif headers.get("Transfer-Encoding") == "chunked":
            body = self._chunks()
        elif "Content-Length" in headers:
            body = self._exactly(int(headers["Content-Length"]))
        elif status == 100:
            body = b""
        else:
            body = self.state()
        return Reply(status, headers, body, head)

    def state(self) -> bytes:
        """Reads everything until the server closes."""
        while piece := self.sock.recv(1 << 16):
            self.buffer += piece
        data, self.buffer = self.buffer, b""
        return data

    def is_closed(self) -> bool:
        return self.buffer == b"" and self.sock.recv(1) == b""

    def _chunks(self) -> bytes:
        body = b""
        while size := int(re.sub(rb"\r\n$", b"", self._until(b"\r\n")), 16):
            body += self._exactly(size)
            assert self._exactly(2) == b"\r\n"
        assert self._exactly(2) == b"\r\n"
        return body

    def _until(self, mark: bytes) -> bytes:
        while mark not in self.buffer:
            self._more()
        at = self.buffer.index(mark) + len(mark)
        data, self.buffer = self.buffer[:at], self.buffer[at:]
        return data

    def _exactly(self, size: int) -> bytes:
        while len(self.buffer) < size:
            self._more()
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return data

    def _more(self) -> None:
        piece = self.sock.recv(1 << 16)
        if not piece:
            raise ConnectionError(f"closed by the server after {self.buffer!r}")
        self.buffer += piece
