"""An auth server, as nsqd's --auth-http-address wants it."""

import json
import ssl
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

GRANT_ALL = {"topic": ".*", "channels": [".*"], "permissions": ["subscribe", "publish"]}


def granting(*authorizations: dict[str, Any], ttl: int = 3600) -> dict[str, Any]:
    return {
        "ttl": ttl,
        "identity": "kay",
        "identity_url": "http://kay",
        "authorizations": list(authorizations),
    }


class AuthServer:
    """Answers every query with `.status` and `.answer`, and keeps the queries it saw.

    While `.gate` is cleared queries wait for it, as at a server that is slow.
    """

    def __init__(self) -> None:
        self.status = 200
        self.answer: Any = granting(GRANT_ALL)
        self.queries: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def use_tls(self, context: ssl.SSLContext) -> None:
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def __enter__(self) -> "AuthServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urllib.parse.urlsplit(self.path)
                server.paths.append(url.path)
                self._answer(dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True)))

            def do_POST(self) -> None:
                assert self.headers["Content-Type"] == "application/json"
                server.paths.append(self.path)
                fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer({name: value for name, (value,) in fields.items()})

            def _answer(self, query: dict[str, str]) -> None:
                assert self.headers["Accept"] == "application/vnd.nsq; version=1.0"
                server.queries.append(query)
                server.gate.wait()
                body = server.answer if isinstance(server.answer, bytes) else json.dumps(server.answer).encode()
                self.send_response(server.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        return Handler
