"""Is a browser as far as nsqadmin can tell: it keeps cookies and sends the headers that pages cannot choose."""

import http.client
import re
import urllib.parse
from typing import Any

from harness import HttpReply
from harness.nsqadmin import Nsqadmin

AGENT = "Mozilla/5.0 (X11; Linux x86_64) Gecko/20100101 Firefox/140.0"
STREAM_TIMEOUT_S = 30.0


class Browser:
    def __init__(self, admin: Nsqadmin, base_path: str = "") -> None:
        self.admin = admin
        self.cookies: dict[str, str] = {}
        self._base = base_path

    def get(self, path: str, **headers: str) -> HttpReply:
        with_accept: dict[str, Any] = {"Accept": "text/html", **headers}
        return self.send("GET", path, **with_accept)

    def stream(self, path: str) -> http.client.HTTPResponse:
        """Yields an answer that goes on."""
        connection = http.client.HTTPConnection(*self.admin.http, timeout=STREAM_TIMEOUT_S)
        connection.request("GET", self._base + path, headers={"User-Agent": AGENT, "Cookie": self._cookie})
        return connection.getresponse()

    def token(self, path: str = "/") -> str:
        """Returns the token that a page of ours has in its head, or a form in a hidden field."""
        found = re.search(r'name="csrf" (?:content|value)="([^"]+)"', self.get(path).text)
        assert found is not None, f"no token on {path}"
        return found[1]

    def post(self, path: str, body: bytes = b"", token: str = "", **headers: str) -> HttpReply:
        """Sends a POST as `fetch` of one of our own pages does."""
        ours = {"Origin": self.admin.url, **({"X-CSRF-Token": token} if token else {})}
        return self.send("POST", path, body, **{**ours, **headers})

    def submit(self, path: str, fields: dict[str, str], **headers: str) -> HttpReply:
        """Sends a POST as a form of one of our own pages does."""
        form = {"Content-Type": "application/x-www-form-urlencoded", "Origin": self.admin.url}
        return self.send("POST", path, urllib.parse.urlencode(fields).encode(), **{**form, **headers})

    def log_in(self, user: str, password: str, onward: str = "") -> HttpReply:
        fields = {"user": user, "password": password, "next": onward, "csrf": self.token("/login")}
        return self.submit("/login", fields)

    def send(self, method: str, path: str, body: bytes = b"", **headers: Any) -> HttpReply:
        sent = {"User-Agent": AGENT, "Cookie": self._cookie, **headers}
        given = {name: value for name, value in sent.items() if value}
        reply = self.admin.request(method, self._base + path, body, given)
        for line in reply.headers.get_all("Set-Cookie") or ():
            name, _, value = line.partition(";")[0].partition("=")
            self.cookies[name] = value
        return reply

    @property
    def _cookie(self) -> str:
        return "; ".join(f"{name}={value}" for name, value in self.cookies.items())
