"""nsqlookupd as its users have it: a process with a command line, two ports and a log on stderr."""

import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.nsqd import HttpReply, StartError
from harness.waiting import eventually

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
REPLY_TIMEOUT_S = 20.0

MAGIC_V1 = b"  V1"
_LISTENING = {"tcp": " TCP: listening on ", "http": " HTTP: listening on "}


def nsqlookupd_program() -> str:
    """The nsqlookupd under test: NSQLOOKUPD from the environment, else the one beside this Python."""
    return os.environ.get("NSQLOOKUPD") or str(Path(sys.executable).with_name("nsqlookupd"))


def nsqlookupd_is_ours() -> bool:
    return not os.environ.get("NSQLOOKUPD")


class Nsqlookupd:
    """One nsqlookupd. Started again, it keeps the ports of its first start, as its nsqds expect."""

    def __init__(self, *flags: str, program: str | None = None):
        self.flags = flags
        self.program = program or nsqlookupd_program()
        self.process: subprocess.Popen[str] | None = None
        self._ports = {"tcp": 0, "http": 0}
        self._lines: list[str] = []
        self._reader: threading.Thread | None = None

    def __enter__(self) -> "Nsqlookupd":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    # The process

    def start(self) -> "Nsqlookupd":
        """Returns when both ports are open."""
        command = [
            self.program,
            f"--tcp-address=127.0.0.1:{self._ports['tcp']}",
            f"--http-address=127.0.0.1:{self._ports['http']}",
            "--broadcast-address=127.0.0.1",
            *self.flags,
        ]
        self._lines = []
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",  # NSQ's logs repeat what clients sent, as it came
        )
        self._reader = threading.Thread(target=self._collect_log, args=(self.process, self._lines), daemon=True)
        self._reader.start()
        eventually(lambda: not self.is_running or self._is_listening(), START_TIMEOUT_S, 0.002)
        if not self.is_running:
            self._reader.join(STOP_TIMEOUT_S)
            raise StartError(self.process.wait(), self.log)
        self._ports = {kind: int(self._listening(kind).rpartition(":")[2]) for kind in _LISTENING}
        return self

    @staticmethod
    def _collect_log(process: "subprocess.Popen[str]", lines: list[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.rstrip("\n"))

    def _is_listening(self) -> bool:
        return all(self._listening(kind) for kind in _LISTENING)

    def _listening(self, kind: str) -> str:
        mark = _LISTENING[kind]
        return next((line.partition(mark)[2] for line in self._lines if mark in line), "")

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def log(self) -> str:
        return "\n".join(self._lines)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(STOP_TIMEOUT_S)
        assert self._reader is not None
        self._reader.join(STOP_TIMEOUT_S)
        return code

    def kill(self) -> None:
        """SIGKILL, as a crash does; harmless if there is no process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(STOP_TIMEOUT_S)

    # Its ports

    @property
    def tcp(self) -> tuple[str, int]:
        return "127.0.0.1", self._ports["tcp"]

    @property
    def tcp_address(self) -> str:
        return f"127.0.0.1:{self._ports['tcp']}"

    @property
    def http(self) -> tuple[str, int]:
        return "127.0.0.1", self._ports["http"]

    @property
    def http_address(self) -> str:
        return f"127.0.0.1:{self._ports['http']}"

    def connect(self) -> "LookupWire":
        return LookupWire(self.tcp)

    def request(self, method: str, target: str, body: bytes | None = None) -> HttpReply:
        connection = http.client.HTTPConnection(*self.http, timeout=REPLY_TIMEOUT_S)
        try:
            connection.request(method, target, body)
            answer = connection.getresponse()
            return HttpReply(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **query: str) -> HttpReply:
        return self.request("GET", _target(path, query))

    def post(self, path: str, **query: str) -> HttpReply:
        return self.request("POST", _target(path, query))

    # What it knows

    def topics(self) -> set[str]:
        return set(self.get("/topics").json()["topics"])

    def channels(self, topic: str) -> set[str]:
        return set(self.get("/channels", topic=topic).json()["channels"])

    def producers(self, topic: str) -> set[tuple[str, int]]:
        """Where a consumer would connect to; nobody for an unknown topic."""
        answer = self.get("/lookup", topic=topic)
        peers = answer.json()["producers"] if answer.status == 200 else []
        return {(peer["broadcast_address"], peer["tcp_port"]) for peer in peers}

    def nodes(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self.get("/nodes").json()["producers"]
        return answer


class LookupWire:
    """A raw connection, to be an nsqd of any manners."""

    def __init__(self, address: tuple[str, int]):
        self.socket = socket.create_connection(address, timeout=REPLY_TIMEOUT_S)
        self.name = "{}:{}".format(*self.socket.getsockname())

    def __enter__(self) -> "LookupWire":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def half_close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def reply(self) -> bytes:
        (size,) = struct.unpack(">i", self._read(4))
        return self._read(size)

    def ask(self, data: bytes) -> bytes:
        self.send(data)
        return self.reply()

    def rest(self) -> bytes:
        """All until the server closes."""
        received = b""
        while data := self.socket.recv(65536):
            received += data
        return received

    def identify(self, **fields: Any) -> bytes:
        """Magic and IDENTIFY of an nsqd at these addresses; the reply."""
        return self.ask(MAGIC_V1 + identify_command(**fields))

    def _read(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            data = self.socket.recv(size - len(received))
            assert data, f"closed after {received!r}"
            received += data
        return received


def identify_command(**fields: Any) -> bytes:
    """A field given as None is left out."""
    known = {
        "broadcast_address": "10.0.0.1",
        "tcp_port": 4150,
        "http_port": 4151,
        "version": "1.3.0",
        "hostname": "h",
    }
    body = {name: value for name, value in {**known, **fields}.items() if value is not None}
    return identify_raw(json.dumps(body).encode())


def identify_raw(body: bytes) -> bytes:
    return b"IDENTIFY\n" + struct.pack(">i", len(body)) + body


def _target(path: str, query: dict[str, str]) -> str:
    return f"{path}?{urllib.parse.urlencode(query)}" if query else path


class Impostor:
    """Answers everything with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with connection:
                connection.settimeout(5)
                try:
                    connection.sendall(self._answer)
                    while connection.recv(4096):
                        pass
                except OSError:
                    pass

    def close(self) -> None:
        self._listener.close()
