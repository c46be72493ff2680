"""nsqd as its users have it: a process with a command line, two ports and a log on stderr."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.waiting import eventually
from harness.wire import Wire

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
HTTP_TIMEOUT_S = 20.0

_LISTENING = {"tcp": "TCP: listening on ", "http": "HTTP: listening on ", "https": "HTTPS: listening on "}


def _own_program() -> Path:
    return Path(sys.executable).with_name("nsqd")


def nsqd_program() -> str:
    """The nsqd under test: NSQD from the environment, else the one installed beside this Python."""
    return os.environ.get("NSQD") or str(_own_program())


def nsqd_is_ours() -> bool:
    return Path(nsqd_program()).resolve() == _own_program().resolve()


class StartError(Exception):
    """nsqd ended instead of listening."""

    def __init__(self, exit_code: int, log: str):
        super().__init__(f"exit code {exit_code}: {log}")
        self.exit_code = exit_code
        self.log = log


@dataclass(frozen=True)
class HttpReply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


class Nsqd:
    """One data path and the processes that serve it, one after another."""

    def __init__(
        self, data_path: Path, *flags: str, program: str | None = None, environment: dict[str, str] | None = None
    ):
        """`environment` is added to this process's own."""
        self.data_path = data_path
        self.flags = list(flags)
        self.program = program or nsqd_program()
        self.environment = environment or {}
        self.process: subprocess.Popen[str] | None = None
        self._lines: list[str] = []
        self._reader: threading.Thread | None = None

    def __enter__(self) -> "Nsqd":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    # The process

    def start(self) -> "Nsqd":
        """Returns when both ports are open. Of a flag given twice the last counts, so a test's flags win."""
        command = [
            self.program,
            "--tcp-address=127.0.0.1:0",
            "--http-address=127.0.0.1:0",
            "--broadcast-address=127.0.0.1",
            f"--data-path={self.data_path}",
            *self.flags,
        ]
        self._lines = []
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **self.environment},
        )
        self._reader = threading.Thread(target=self._collect_log, args=(self.process, self._lines), daemon=True)
        self._reader.start()
        eventually(lambda: self._ended() or self._is_listening(), START_TIMEOUT_S, 0.002)
        if self._ended():
            self._reader.join(STOP_TIMEOUT_S)
            raise StartError(self.process.wait(), self.log)
        return self

    @staticmethod
    def _collect_log(process: "subprocess.Popen[str]", lines: list[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.rstrip("\n"))

    def _is_listening(self) -> bool:
        wanted = ["tcp"] if "--http-address=" in self.flags else ["tcp", "http"]
        return all(self._listening(kind) is not None for kind in wanted)

    def _listening(self, kind: str) -> str | None:
        mark = " " + _LISTENING[kind]
        return next((line.partition(mark)[2] for line in self._lines if mark in line), None)

    def _ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    @property
    def is_running(self) -> bool:
        return not self._ended()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return "\n".join(self._lines)

    def wait_for_log(self, text: str) -> None:
        eventually(lambda: text in self.log)

    def stop(self) -> int:
        """SIGTERM, as an operator does; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_TIMEOUT_S)
        assert self._reader is not None
        self._reader.join(STOP_TIMEOUT_S)
        return code

    def send_signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, as a crash does; harmless if there is no process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(STOP_TIMEOUT_S)

    def restart(self, *, crash: bool = False) -> "Nsqd":
        """A new process on the same data path, and other ports."""
        if crash:
            self.kill()
        else:
            assert self.stop() == 0, self.log
        return self.start()

    # Its ports

    @property
    def tcp(self) -> tuple[str, int]:
        return self._port("tcp")

    @property
    def http(self) -> tuple[str, int]:
        return self._port("http")

    @property
    def https(self) -> tuple[str, int]:
        return self._port("https")

    def _port(self, kind: str) -> tuple[str, int]:
        text = self._listening(kind)
        assert text is not None, f"no {kind} port in the log:\n{self.log}"
        return _address(text)

    def connect(self, **settings: Any) -> Wire:
        return Wire(self.tcp, **settings)

    def request(self, method: str, target: str, body: Any = None, headers: dict[str, str] | None = None) -> HttpReply:
        connection = http.client.HTTPConnection(*self.http, timeout=HTTP_TIMEOUT_S)
        try:
            connection.request(method, target, body, headers or {})
            answer = connection.getresponse()
            return HttpReply(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **query: Any) -> HttpReply:
        return self.request("GET", _target(path, query))

    def post(self, path: str, body: bytes = b"", **query: Any) -> HttpReply:
        return self.request("POST", _target(path, query), body)

    def put(self, path: str, body: bytes = b"", **query: Any) -> HttpReply:
        return self.request("PUT", _target(path, query), body)

    # What it says of itself

    def stats(self, **query: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.get("/stats", format="json", **query).json()
        return answer

    def topic_names(self) -> set[str]:
        return {topic["topic_name"] for topic in self.stats(include_clients="false", include_mem="false")["topics"]}

    def topic(self, topic: str) -> dict[str, Any]:
        """The topic's part of /stats; the topic must exist."""
        topics = self.stats(topic=topic)["topics"]
        assert topics, f"no topic {topic}"
        answer: dict[str, Any] = topics[0]
        return answer

    def channel(self, topic: str, channel: str = "ch") -> dict[str, Any]:
        channels = [entry for entry in self.topic(topic)["channels"] if entry["channel_name"] == channel]
        assert channels, f"no channel {channel} in topic {topic}"
        answer: dict[str, Any] = channels[0]
        return answer


def _target(path: str, query: dict[str, Any]) -> str:
    return f"{path}?{urllib.parse.urlencode(query)}" if query else path
