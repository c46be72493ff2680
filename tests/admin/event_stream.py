"""Reads what a tab has open: the stream of server-sent events of one page."""

import http.client
import json
import urllib.parse
from collections.abc import Callable
from typing import Any

from harness.closing import Closing
from harness.nsqadmin import Nsqadmin

READ_TIMEOUT_S = 30.0


class EventStream(Closing):
    """Is open from `with` on; the first line has been read then."""

    def __init__(self, admin: Nsqadmin, page: str, headers: dict[str, str] | None = None) -> None:
        self._connection = http.client.HTTPConnection(*admin.http, timeout=READ_TIMEOUT_S)
        self._target = f"/events?{urllib.parse.urlencode({'page': page})}"
        self._headers = headers or {}

    def __enter__(self) -> "EventStream":
        self._connection.request("GET", self._target, headers=self._headers)
        self.answer = self._connection.getresponse()
        assert self.answer.status == 200, self.answer.read()
        assert self.answer.readline() == b"retry: 3000\n"
        return self

    def close(self) -> None:
        self._connection.close()

    def next(self) -> tuple[str, dict[str, Any]]:
        """Returns the name and the data of the next event."""
        name = ""
        while line := self.answer.readline().decode().rstrip("\n"):
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                return name, json.loads(value)
        return self.next() if not self.answer.closed else ("", {})

    def until(self, condition: Callable[[str, dict[str, Any]], bool]) -> dict[str, Any]:
        """Returns the data of the first event of which this is true."""
        while True:
            name, data = self.next()
            if condition(name, data):
                return data
