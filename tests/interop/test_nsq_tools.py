"""Checks NSQ's own programs against an nsqd with AUTH and the default --http-auth.

PEER_TOOLS names a directory with nsqadmin, nsq_tail, nsq_to_file, nsq_stat and to_nsq of NSQ; without it nothing runs.
"""

import contextlib
import json
import os
import re
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import AuthServer, Nsqd, eventually
from harness.auth import GRANT_ALL, granting
from harness.lookupd import Nsqlookupd

TOOLS = Path(os.environ.get("PEER_TOOLS", "/nowhere"))

pytestmark = pytest.mark.skipif("PEER_TOOLS" not in os.environ, reason="PEER_TOOLS names no programs of NSQ")

SECRET = "hush-hush"
END_TIMEOUT_S = 30


@pytest.fixture
def server() -> Iterator[AuthServer]:
    with AuthServer() as running:
        running.answer = granting(GRANT_ALL)
        yield running


@pytest.fixture
def lookupd(make_lookupd: Callable[..., Nsqlookupd]) -> Nsqlookupd:
    """Runs an nsqlookupd for each test."""
    return make_lookupd()


@pytest.fixture
def nsqd(make_nsqd: Callable[..., Nsqd], server: AuthServer, lookupd: Nsqlookupd) -> Nsqd:
    daemon = make_nsqd(
        f"--auth-http-address={server.address}",
        f"--lookupd-tcp-address={lookupd.tcp_address}",
        "--broadcast-address=127.0.0.1",
    )
    eventually(lambda: json.loads(lookupd.get("/nodes").body)["producers"])
    return daemon


class Tool:
    """Is a program of NSQ's, and what it says."""

    def __init__(self, name: str, *flags: str) -> None:
        self._process = subprocess.Popen(
            [str(TOOLS / name), *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.said = ""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said += line.decode(errors="replace")

    def wait_for(self, text: str) -> re.Match[str]:
        found: re.Match[str] = eventually(lambda: re.search(text, self.said))
        return found

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.close()

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(END_TIMEOUT_S)


@pytest.fixture
def run() -> Iterator[Callable[..., Tool]]:
    with contextlib.ExitStack() as ends:

        def start(name: str, *flags: str) -> Tool:
            tool = Tool(name, *flags)
            ends.callback(tool.end)
            return tool

        yield start


def tcp(nsqd: Nsqd) -> str:
    return "--nsqd-tcp-address={}:{}".format(*nsqd.tcp)


def test_nsq_tail_and_to_nsq(nsqd: Nsqd, server: AuthServer, topic: str, run: Callable[..., Tool]) -> None:
    tail = run("nsq_tail", tcp(nsqd), f"--topic={topic}", f"--consumer-opt=auth_secret,{SECRET}")
    eventually(lambda: topic in nsqd.topic_names())
    publisher = run("to_nsq", tcp(nsqd), f"--topic={topic}", f"--producer-opt=auth_secret,{SECRET}")
    publisher.send(b"from to_nsq\n")
    tail.wait_for("from to_nsq")
    assert {query["secret"] for query in server.queries} == {SECRET}


def test_nsq_to_file(nsqd: Nsqd, lookupd: Nsqlookupd, topic: str, run: Callable[..., Tool], tmp_path: Path) -> None:
    nsqd.post("/pub", b"into a file", topic=topic)
    run(
        "nsq_to_file",
        f"--lookupd-http-address={lookupd.http_address}",
        f"--topic={topic}",
        f"--output-dir={tmp_path}",
        "--sync-interval=100ms",
        f"--consumer-opt=auth_secret,{SECRET}",
    )
    eventually(lambda: any("into a file" in path.read_text() for path in tmp_path.glob(f"{topic}*.log")))


def test_nsq_stat(nsqd: Nsqd, topic: str, run: Callable[..., Tool]) -> None:
    nsqd.post("/pub", b"x", topic=topic)
    nsqd.post("/channel/create", topic=topic, channel="ch")
    http_address = "{}:{}".format(*nsqd.http)
    stat = run(
        "nsq_stat",
        f"--nsqd-http-address={http_address}",
        f"--topic={topic}",
        "--channel=ch",
        "--interval=200ms",
        "--count=2",
    )
    stat.wait_for(r"\|\s+1\s+\d+\s+\d+\s+0\s+0 \|")


@pytest.mark.parametrize("by", ["nsqd", "lookupd"])
def test_nsqadmin(nsqd: Nsqd, lookupd: Nsqlookupd, topic: str, run: Callable[..., Tool], by: str) -> None:
    nsqd.post("/pub", b"x", topic=topic)
    nsqd.post("/channel/create", topic=topic, channel="ch")
    where = {"nsqd": "{}:{}".format(*nsqd.http), "lookupd": lookupd.http_address}[by]
    if by == "lookupd":
        eventually(lambda: lookupd.channels(topic) == {"ch"})
    admin = run("nsqadmin", "--http-address=127.0.0.1:0", f"--{by}-http-address={where}")
    address = admin.wait_for(r"HTTP: listening on (127\.0\.0\.1:\d+)")[1]

    def ask(method: str, path: str, body: dict[str, str] | None = None) -> Any:
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(f"http://{address}/api/{path}", data, method=method)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.loads(answer.read() or b"null")

    assert ask("GET", "topics")["topics"] == [topic]
    assert ask("GET", f"topics/{topic}")["depth"] + ask("GET", f"topics/{topic}/ch")["depth"] == 1
    assert len(ask("GET", "nodes")["nodes"]) == 1
    ask("POST", f"topics/{topic}/ch", {"action": "pause"})
    assert nsqd.channel(topic)["paused"]
    ask("POST", f"topics/{topic}/ch", {"action": "empty"})
    assert nsqd.channel(topic)["depth"] == 0
    if by == "lookupd":  # without one, nsqadmin makes no topics
        ask("POST", "topics", {"topic": "made", "channel": "by_nsqadmin"})
        eventually(lambda: lookupd.channels("made") == {"by_nsqadmin"})
    ask("DELETE", f"topics/{topic}/ch")
    ask("DELETE", f"topics/{topic}")
    assert topic not in nsqd.topic_names()
