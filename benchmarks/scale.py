"""`python -m benchmarks.scale`: how nsqd's memory, start and CPU grow with what it holds, one kind at a time.

The figures of docs/scale.md. Each row is a fresh nsqd with nothing else in it.
"""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.report import Table, machine
from benchmarks.wire import LoadError

START_SECONDS_MAX = 60
IDLE_SECONDS = 3.0
BODY_BYTES = 200
BATCH = 1000
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

STEPS: dict[str, list[int]] = {
    "messages of backlog": [100_000, 1_000_000, 5_000_000],
    "topics": [100, 1_000],
    "channels of one topic": [100, 1_000],
    "idle subscribers of one channel": [100, 1_000],
}


@dataclass(frozen=True)
class Row:
    kind: str
    count: int
    memory_bytes: int
    restart_seconds: float
    idle_cpu: float
    disk_bytes: int


class Daemon:
    """An nsqd that can be started again on its data."""

    def __init__(self, program: Path, directory: Path) -> None:
        self._program = program
        self._directory = directory
        self.start_seconds = 0.0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()

    def start(self) -> None:
        started = time.monotonic()
        log = self._directory / "log"
        command = [self._program, f"--data-path={self._directory}", "--tcp-address=127.0.0.1:0"]
        with log.open("wb") as sink:
            self._process = subprocess.Popen([*command, "--http-address=127.0.0.1:0"], stdout=sink, stderr=sink)
        while time.monotonic() - started < START_SECONDS_MAX:
            text = log.read_text(errors="replace")
            tcp, http = (re.search(rf"{name}: listening on \S+:(\d+)", text) for name in ("TCP", "HTTP"))
            if tcp and http:
                self.tcp_port, self.http_port = int(tcp[1]), int(http[1])
                self.ask("/ping")
                self.start_seconds = time.monotonic() - started
                return
            time.sleep(0.005)
        raise LoadError(f"{self._program} does not listen")

    def crash_and_start(self) -> float:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self.start()
        return self.start_seconds

    def ask(self, path: str, body: bytes | None = None) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", body, timeout=30) as answer:
            return bytes(answer.read())

    def memory_bytes(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024

    def idle_cpu(self) -> float:
        """The share of a core that it takes while nothing happens."""
        before = self._cpu_seconds()
        time.sleep(IDLE_SECONDS)
        return (self._cpu_seconds() - before) / IDLE_SECONDS

    def _cpu_seconds(self) -> float:
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        fields = stat[stat.rindex(")") + 2 :].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND

    def disk_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._directory.rglob("*") if path.is_file())


def backlog(daemon: Daemon, count: int) -> list[socket.socket]:
    body = b"\n".join([b"x" * BODY_BYTES] * BATCH)
    daemon.ask("/topic/create?topic=t", b"")
    daemon.ask("/channel/create?topic=t&channel=c", b"")
    for _ in range(count // BATCH):
        daemon.ask("/mpub?topic=t", body)
    return []


def topics(daemon: Daemon, count: int) -> list[socket.socket]:
    for number in range(count):
        daemon.ask(f"/pub?topic=t{number}", b"x" * BODY_BYTES)
        daemon.ask(f"/channel/create?topic=t{number}&channel=c", b"")
    return []


def channels(daemon: Daemon, count: int) -> list[socket.socket]:
    daemon.ask("/topic/create?topic=t", b"")
    for number in range(count):
        daemon.ask(f"/channel/create?topic=t&channel=c{number}", b"")
    daemon.ask("/pub?topic=t", b"x" * BODY_BYTES)
    return []


def subscribers(daemon: Daemon, count: int) -> list[socket.socket]:
    connections = []
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", daemon.tcp_port))
        connection.sendall(b"  V2SUB t c\nRDY 10\n")
        if connection.recv(10) != b"\0\0\0\6\0\0\0\0OK":
            raise LoadError("SUB was refused")
        connections.append(connection)
    return connections


GROW: dict[str, Callable[[Daemon, int], list[socket.socket]]] = dict(
    zip(STEPS, (backlog, topics, channels, subscribers), strict=True)
)


def measure(program: Path, kind: str, count: int) -> Row:
    with tempfile.TemporaryDirectory(prefix="nsqd-scale-") as name, Daemon(program, Path(name)) as daemon:
        connections = GROW[kind](daemon, count) if count else []
        memory, idle = daemon.memory_bytes(), daemon.idle_cpu()
        disk = daemon.disk_bytes()
        for connection in connections:
            connection.close()
        return Row(kind, count, memory, daemon.crash_and_start(), idle, disk)


def table(rows: list[Row]) -> Table:
    header = ["", "count", "memory MB", "start after kill -9, s", "idle CPU, %", "disk MB"]
    cells = [
        [
            row.kind,
            f"{row.count:,}",
            f"{row.memory_bytes / 1e6:.0f}",
            f"{row.restart_seconds:.2f}",
            f"{row.idle_cpu * 100:.1f}",
            f"{row.disk_bytes / 1e6:.1f}",
        ]
        for row in rows
    ]
    return Table("nsqd by what it holds", header, cells)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--nsqd", type=Path, default=Path(sys.executable).with_name("nsqd"), help="another nsqd")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as well")
    args = parser.parse_args()
    rows = [measure(args.nsqd, "nothing", 0)]
    for kind, counts in STEPS.items():
        for count in counts:
            rows.append(measure(args.nsqd, kind, count))
            print(f"{kind} {count:,}: {rows[-1].memory_bytes / 1e6:.0f} MB", file=sys.stderr, flush=True)
    print(f"{machine()}\n\n{table(rows).markdown()}")
    if args.json:
        args.json.write_text(json.dumps([vars(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
