"""Runs an auth server, as nsqd's --auth-http-address wants it."""

import json
import ssl
import threading
import urllib.parse
from typing import Any

from harness.closing import Closing
from harness.http_server import LocalServer, QuietHandler

GRANT_ALL = {"topic": ".*", "channels": [".*"], "permissions": ["subscribe", "publish"]}


def granting(*authorizations: dict[str, Any], ttl: int = 3600) -> dict[str, Any]:
    return {
        "ttl": ttl,
        "identity": "kay",
        "identity_url": "http://kay",
        "authorizations": list(authorizations),
    }


class AuthServer(Closing):
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
        self._server = LocalServer(self._handler()).start()
        self.address = self._server.address

    def use_tls(self, context: ssl.SSLContext) -> None:
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def close(self) -> None:
        self.gate.set()
        self._server.stop()

    def _handler(self) -> type[QuietHandler]:
        server = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                url = urllib.parse.urlsplit(self.path)
                server.paths.append(url.path)
                self._answer_query(dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True)))

            def do_POST(self) -> None:
                assert self.headers["Content-Type"] == "application/json"
                server.paths.append(self.path)
                fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer_query({name: value for name, (value,) in fields.items()})

            def _answer_query(self, query: dict[str, str]) -> None:
                assert self.headers["Accept"] == "application/vnd.nsq; version=1.0"
                server.queries.append(query)
                server.gate.wait()
                body = server.answer if isinstance(server.answer, bytes) else json.dumps(server.answer).encode()
                self.answer(server.status, body)

        return Handler
