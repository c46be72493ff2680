"""Runs nsqd and nsqlookupd for tests as real processes, on free ports of the loopback interface."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self, TypeVar

START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 30.0
HTTP_TIMEOUT_S: Final = 20.0
POLL_S: Final = 0.002

NOT_STARTED: Final = "the daemon was not started: use `with`, or call its `start`"

_LISTENING: Final = {"tcp": " TCP: listening on ", "http": " HTTP: listening on ", "https": " HTTPS: listening on "}


class StartError(Exception):
    """Says that the daemon ended instead of listening."""

    def __init__(self, exit_code: int, log: str):
        super().__init__(f"exit code {exit_code}: {log}")
        self.exit_code = exit_code
        """This is the exit code of its process."""
        self.log = log
        """These are the lines that it wrote."""


@dataclass(frozen=True)
class HttpReply:
    """Holds the answer to an HTTP request."""

    status: int
    """This is the status code, such as 200."""
    headers: http.client.HTTPMessage
    """These are the headers by name."""
    body: bytes
    """This is the body as it came."""

    @property
    def text(self) -> str:
        """Returns the body as text."""
        return self.body.decode()

    def json(self) -> Any:
        """Returns the value that the body holds as JSON."""
        return json.loads(self.body)


class Daemon:
    """Runs a program that is started and stopped as an operator does it; `with` starts it, and kills it at the end.

    flags: flags that come after those that choose addresses, and override them.
    program: the program to run instead of ours, for instance NSQ's own.
    environment: variables that are added to those of this process.
    """

    MODULE: ClassVar[str]
    """The `main` of this module is the program."""
    keeps_ports: bool = True
    """Tells whether the daemon listens where it did before when it is started again, as its clients expect."""
    _held_ports: tuple[socket.socket, ...] = ()

    def __init__(self, *flags: str, program: str | None = None, environment: dict[str, str] | None = None):
        self.flags = list(flags)
        self.program = program
        self.environment = environment or {}
        self.process: subprocess.Popen[str] | None = None
        """This is the process that was started last."""
        self._ports = {"tcp": 0, "http": 0}
        self._lines: list[str] = []
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._release_ports()

    def __del__(self) -> None:
        self._release_ports()

    # -- the process -------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Starts the daemon and returns when its ports are open, or raises StartError if it ends instead. One that runs
        goes on.
        """
        if self.is_running:
            return self
        self._lines = []
        self.process = subprocess.Popen(
            [*self._program(), *self._addresses(), *self.flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",  # logs repeat what clients sent, as it came
            env={**os.environ, **self.environment},
        )
        self._reader = threading.Thread(target=_collect, args=(self.process, self._lines), daemon=True)
        self._reader.start()
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self.is_running and not self._is_listening():
            if time.monotonic() > deadline_s:
                self.kill()
                raise AssertionError(f"not listening after {START_TIMEOUT_S} s:\n{self.log}")
            time.sleep(POLL_S)
        if not self.is_running:
            raise StartError(self._wait(), self.log)
        if self.keeps_ports:
            self._ports = {kind: self._port(kind)[1] for kind in self._ports if self._listening(kind)}
        self._release_ports()
        return self

    def _program(self) -> Sequence[str]:
        if self.program is not None:
            return [self.program]
        return [sys.executable, "-P", "-c", f"from {self.MODULE} import main; main()"]

    def _addresses(self) -> list[str]:
        listening = [f"--{kind}-address=127.0.0.1:{port}" for kind, port in self._ports.items()]
        return [*listening, "--broadcast-address=127.0.0.1"]

    def _is_listening(self) -> bool:
        wanted = ["tcp"] if "--http-address=" in self.flags else ["tcp", "http"]
        return all(self._listening(kind) for kind in wanted)

    def _listening(self, kind: str) -> str:
        mark = _LISTENING[kind]
        return next((line.partition(mark)[2] for line in self._lines if mark in line), "")

    @property
    def is_running(self) -> bool:
        """Tells whether its process is running."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """Returns the id of the process that was started last."""
        assert self.process is not None, NOT_STARTED
        return self.process.pid

    @property
    def log(self) -> str:
        """Returns what the daemon wrote since its last start."""
        return "\n".join(self._lines)

    def send_signal(self, number: int) -> None:
        """Sends a signal to its process.

        number: the number of the signal.
        """
        assert self.process is not None, NOT_STARTED
        self.process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ends the daemon as an operator does, and returns the exit code.

        number: the number of the signal.
        """
        assert self.process is not None, NOT_STARTED
        self.send_signal(number)
        return self._wait()

    def kill(self) -> None:
        """Kills the process as a crash would, with SIGKILL; it does nothing if there is no process."""
        if self.process is not None:
            self.process.kill()
            self._wait()

    def _wait(self) -> int:
        """Returns the exit code when the process has ended and its log is read to the end, and closed."""
        assert self.process is not None and self._reader is not None
        code = self.process.wait(STOP_TIMEOUT_S)
        if self.keeps_ports and not self._held_ports:
            self._hold_ports()
        self._reader.join(STOP_TIMEOUT_S)
        return code

    def _hold_ports(self) -> None:
        """Binds its ports while it is down: else another process that asks for a free port may get one of them, and so
        may a client that goes on trying to connect. A daemon that starts can listen on them all the same.
        """
        for port in filter(None, self._ports.values()):
            held = socket.socket()
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held_ports += (held,)
            with contextlib.suppress(OSError):
                held.bind(("127.0.0.1", port))

    def _release_ports(self) -> None:
        """Lets others have the ports that are held while it is down."""
        for held in self._held_ports:
            held.close()
        self._held_ports = ()

    # -- its ports ---------------------------------------------------------------------------------------

    @property
    def tcp(self) -> tuple[str, int]:
        """Returns host and port of its TCP protocol."""
        return self._port("tcp")

    @property
    def http(self) -> tuple[str, int]:
        """Returns host and port of its HTTP API."""
        return self._port("http")

    @property
    def https(self) -> tuple[str, int]:
        """Returns host and port of its HTTPS API."""
        return self._port("https")

    @property
    def tcp_address(self) -> str:
        """Returns `host:port` of its TCP protocol, for `nsqd=` of a consumer or the address of a producer."""
        return "{}:{}".format(*self.tcp)

    @property
    def http_address(self) -> str:
        """Returns `host:port` of its HTTP API; that of an nsqlookupd is for `lookupd=`."""
        return "{}:{}".format(*self.http)

    def _port(self, kind: str) -> tuple[str, int]:
        assert self.process is not None, NOT_STARTED
        text = self._listening(kind)
        assert text, f"no {kind} port in the log:\n{self.log}"
        host, _, port = text.rpartition(":")
        return host.strip("[]"), int(port)

    def request(self, method: str, target: str, body: Any = None, headers: dict[str, str] | None = None) -> HttpReply:
        """Makes one HTTP request.

        method: GET, POST or PUT.
        target: the path and its query.
        body: bytes, or an iterable of them.
        headers: headers besides the usual ones.
        """
        connection = http.client.HTTPConnection(*self.http, timeout=HTTP_TIMEOUT_S)
        try:
            connection.request(method, target, body, headers or {})
            answer = connection.getresponse()
            return HttpReply(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **query: Any) -> HttpReply:
        """Makes one GET request.

        path: the path, for instance `/stats`.
        query: the arguments of the query.
        """
        return self.request("GET", target(path, query))

    def post(self, path: str, body: bytes = b"", **query: Any) -> HttpReply:
        """Makes one POST request.

        path: the path, for instance `/pub`.
        body: the body of the request.
        query: the arguments of the query.
        """
        return self.request("POST", target(path, query), body)


class Nsqd(Daemon):
    """Runs an nsqd on its data path.

    data_path: a directory, which the test removes.
    """

    MODULE = "nsquark.broker.main"

    def __init__(
        self, data_path: Path, *flags: str, program: str | None = None, environment: dict[str, str] | None = None
    ):
        super().__init__(*flags, program=program, environment=environment)
        self.data_path = data_path

    def _addresses(self) -> list[str]:
        return [*super()._addresses(), "--https-address=127.0.0.1:0", f"--data-path={self.data_path}"]

    def restart(self, *, crash: bool = False) -> Self:
        """Ends nsqd and starts it again on the same data path.

        crash: ends it by SIGKILL.
        """
        if crash:
            self.kill()
        else:
            exit_code = self.stop()  # apart, since `python -O` leaves out the whole of an assert
            assert exit_code == 0, self.log
        return self.start()

    def stats(self, **query: Any) -> dict[str, Any]:
        """Returns what /stats says of topics, their channels and depths.

        query: the arguments of the request, for instance `topic="orders"`.
        """
        answer: dict[str, Any] = self.get("/stats", format="json", **query).json()
        return answer

    def topic_names(self) -> set[str]:
        """Returns the names of all topics."""
        return {topic["topic_name"] for topic in self.stats(include_clients="false", include_mem="false")["topics"]}

    def topic(self, topic: str) -> dict[str, Any]:
        """Returns the topic's part of /stats.

        topic: the name of the topic, which must exist.
        """
        topics = self.stats(topic=topic)["topics"]
        assert topics, f"no topic {topic}"
        answer: dict[str, Any] = topics[0]
        return answer

    def channel(self, topic: str, channel: str = "ch") -> dict[str, Any]:
        """Returns the channel's part of /stats.

        topic: the name of the topic.
        channel: the name of the channel, which must exist.
        """
        channels = [entry for entry in self.topic(topic)["channels"] if entry["channel_name"] == channel]
        assert channels, f"no channel {channel} in topic {topic}"
        answer: dict[str, Any] = channels[0]
        return answer


class Nsqlookupd(Daemon):
    """Runs an nsqlookupd, for nsqds started with `--lookupd-tcp-address=` and clients with `lookupd=`."""

    MODULE = "nsquark.lookupd.main"


def _collect(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stderr is not None
    with process.stderr as log:
        for line in log:
            lines.append(line.rstrip("\n"))


def target(path: str, query: dict[str, Any]) -> str:
    """Returns the path with these query arguments."""
    return f"{path}?{urllib.parse.urlencode(query)}" if query else path


SomeDaemon = TypeVar("SomeDaemon", bound=Daemon)


def started(kind: Callable[..., SomeDaemon]) -> Iterator[Callable[..., SomeDaemon]]:
    """Is the body of a fixture: it yields a function that makes and starts a daemon, and kills all at the end."""
    daemons: list[SomeDaemon] = []

    def make(*args: Any, **settings: Any) -> SomeDaemon:
        daemons.append(kind(*args, **settings))
        return daemons[-1].start()

    yield make
    for daemon in daemons:
        daemon.kill()
        daemon._release_ports()
