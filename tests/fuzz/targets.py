"""Knows where inputs go: to the sockets of real daemons, and to the parsers in this process. A target counts what it
sends.

An input is all that one client sends on one connection. Its client then says that it will send no more, and whatever it
sent, the daemon has to end the connection; a connection that stays open is a finding like a crash.
"""

import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from fuzz import grammar
from harness.wire import MAGIC

CORPUS = Path(__file__).parent / "corpus"
MAGIC_V1 = b"  V1"
END_TIMEOUT_S = 60.0
IDS_MAX = 200
_ID = re.compile(rb"[0-9a-f]{16}")

Address = tuple[str, int]
Make = Callable[[Random], tuple[bytes, int]]
"""Is an input, and how many commands or requests are in it."""


@dataclass
class Tally:
    inputs: int = 0
    connections: int = 0
    hangs: list[bytes] = field(default_factory=list)


class SocketTarget:
    """Sends what `make` gives to an address, behind `hello`."""

    def __init__(self, name: str, address: Address, make: Make, hello: bytes = b"") -> None:
        self.name = name
        self.tally = Tally()
        self._address = address
        self._make = make
        self._hello = hello

    def run(self, random: Random) -> None:
        data, count = self._make(random)
        self.send(data if random.random() < 0.03 else self._hello + data, random)
        self.tally.inputs += count

    def replay(self) -> None:
        for path in sorted((CORPUS / self.name).glob("*")):
            self.send(path.read_bytes(), Random(0))
            self.tally.inputs += 1

    def send(self, data: bytes, random: Random) -> None:
        self.tally.connections += 1
        with socket.create_connection(self._address, END_TIMEOUT_S) as connection:
            try:
                self._converse(connection, data, random)
            except TimeoutError:
                self.tally.hangs.append(data)
            except OSError:
                pass  # the daemon may end the connection whenever it likes

    def _converse(self, connection: socket.socket, data: bytes, random: Random) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in grammar.pieces(data, random):
            connection.sendall(piece)
        if random.random() < 0.05:  # gone without a word
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        connection.shutdown(socket.SHUT_WR)
        while answer := connection.recv(1 << 16):
            self.answered(answer)

    def answered(self, data: bytes) -> None:
        pass


class NsqdTarget(SocketTarget):
    """Sends to nsqd over TCP, and remembers which ids it saw, for its answers."""

    def __init__(self, name: str, address: Address) -> None:
        self._ids: list[bytes] = []
        super().__init__(name, address, lambda random: grammar.commands(random, self._ids), MAGIC)

    def answered(self, data: bytes) -> None:
        self._ids = (self._ids + _ID.findall(data)[:20])[-IDS_MAX:]


class CompressedTarget(NsqdTarget):
    """Sends to nsqd through snappy or deflate; some of it is broken after it was encoded."""

    def run(self, random: Random) -> None:
        plain, count = self._make(random)
        word = random.choice(("snappy", "deflate"))
        encoded = grammar.snappy(plain) if word == "snappy" else grammar.deflate(plain)
        if random.random() < 0.2:
            encoded = grammar.mutated(random, encoded)
        document = b'{"feature_negotiation":true,"%b":true}' % word.encode()
        self.send(MAGIC + b"IDENTIFY\n" + struct.pack(">I", len(document)) + document + encoded, random)
        self.tally.inputs += count

    def _converse(self, connection: socket.socket, data: bytes, random: Random) -> None:
        """Waits for the answer to IDENTIFY before it sends the rest: nsqd drops what comes too early."""
        head_bytes = data.index(b"}") + 1
        head, rest = data[:head_bytes], data[head_bytes:]
        connection.sendall(head)
        received = b""
        while b"}" not in received or not received.partition(b"}")[2]:
            answer = connection.recv(1 << 16)
            if not answer:
                return
            received += answer
        super()._converse(connection, rest, random)


def nsqd_targets(tcp: Address, http: Address) -> list[SocketTarget]:
    return [
        NsqdTarget("nsqd-tcp", tcp),
        CompressedTarget("nsqd-compressed", tcp),
        SocketTarget("nsqd-http", http, lambda random: grammar.requests(random, grammar.NSQD_PATHS)),
    ]


def lookupd_targets(tcp: Address, http: Address) -> list[SocketTarget]:
    return [
        SocketTarget("nsqlookupd-tcp", tcp, grammar.lookup_commands, MAGIC_V1),
        SocketTarget("nsqlookupd-http", http, lambda random: grammar.requests(random, grammar.LOOKUPD_PATHS)),
    ]
