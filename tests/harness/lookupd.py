"""Runs nsqlookupd as its users have it: a process with a command line, two ports and a log on stderr."""

import json
import os
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any

from harness.closing import Closing
from nsquark import testing

REPLY_TIMEOUT_S = 20.0

MAGIC_V1 = b"  V1"


def nsqlookupd_program() -> str:
    """Finds the nsqlookupd under test: NSQLOOKUPD from the environment, else the one beside this Python."""
    return os.environ.get("NSQLOOKUPD") or str(Path(sys.executable).with_name("nsqlookupd"))


def nsqlookupd_is_ours() -> bool:
    return not os.environ.get("NSQLOOKUPD")


class Nsqlookupd(testing.Nsqlookupd):
    """Runs one nsqlookupd. Started again, it keeps the ports of its first start, as its nsqds expect."""

    def __init__(self, *flags: str, program: str | None = None):
        super().__init__(*flags, program=program or nsqlookupd_program())

    def connect(self) -> "LookupWire":
        return LookupWire(self.tcp)

    # -- what it knows -----------------------------------------------------------------------------------

    def topics(self) -> set[str]:
        return set(self.get("/topics").json()["topics"])

    def channels(self, topic: str) -> set[str]:
        return set(self.get("/channels", topic=topic).json()["channels"])

    def producers(self, topic: str) -> set[tuple[str, int]]:
        """Returns where a consumer would connect to; that is nowhere for an unknown topic."""
        answer = self.get("/lookup", topic=topic)
        peers = answer.json()["producers"] if answer.status == 200 else []
        return {(peer["broadcast_address"], peer["tcp_port"]) for peer in peers}

    def nodes(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self.get("/nodes").json()["producers"]
        return answer


class LookupWire(Closing):
    """Is a raw connection, by which a test can be an nsqd of any manners."""

    def __init__(self, address: tuple[str, int]):
        self.socket = socket.create_connection(address, timeout=REPLY_TIMEOUT_S)
        self.name = "{}:{}".format(*self.socket.getsockname())

    def close(self) -> None:
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

    def state(self) -> bytes:
        """Reads everything until the server closes."""
        received = b""
        while data := self.socket.recv(65536):
            received += data
        return received

    def identify(self, **fields: Any) -> bytes:
        """Sends the magic and IDENTIFY of an nsqd at these addresses; returns the reply."""
        return self.ask(MAGIC_V1 + identify_command(**fields))

    def _read(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            data = self.socket.recv(size - len(received))
            assert data, f"closed after {received!r}"
            received += data
        return received


def identify_command(**fields: Any) -> bytes:
    """Encodes IDENTIFY; a field given as None is left out."""
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
                connection.settimeout(REPLY_TIMEOUT_S)
                try:
                    # Not before it is asked: a reply to nothing is another fault.
                    if connection.recv(4096):
                        connection.sendall(self._answer)
                    while connection.recv(4096):
                        pass
                except OSError:
                    pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # or the thread would go on to wait, and answer once more
        self._listener.close()
