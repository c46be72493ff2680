"""Measures how nsqd's memory, start and CPU grow with what it holds, one kind at a time: `python -m
benchmarks.scale`.

The figures of docs/scale.md. Each row is a fresh nsqd with nothing else in it.
"""

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.broker import Broker
from benchmarks.report import Table, machine
from benchmarks.wire import LoadError

IDLE_SECONDS = 3.0
BODY_BYTES = 200
BATCH = 1000

STEPS: dict[str, list[int]] = {
    "messages of backlog": [100_000, 1_000_000, 5_000_000],
    "topics": [100, 1_000],
    "channels of one topic": [100, 1_000],
    "idle subscribers of one channel": [100, 1_000],
}


@dataclass(frozen=True)
class ScaleRow:
    kind: str
    count: int
    memory_bytes: int
    restart_seconds: float
    idle_cpu: float
    disk_bytes: int


def idle_cpu(broker: Broker) -> float:
    """Returns the part of a core that it takes while nothing happens."""
    before = broker.cpu_seconds()
    time.sleep(IDLE_SECONDS)
    return (broker.cpu_seconds() - before) / IDLE_SECONDS


def backlog(broker: Broker, count: int) -> list[socket.socket]:
    body = b"\n".join([b"x" * BODY_BYTES] * BATCH)
    broker.post("/topic/create?topic=t")
    broker.post("/channel/create?topic=t&channel=c")
    for _ in range(count // BATCH):
        broker.post("/mpub?topic=t", body)
    return []


def topics(broker: Broker, count: int) -> list[socket.socket]:
    for number in range(count):
        broker.post(f"/pub?topic=t{number}", b"x" * BODY_BYTES)
        broker.post(f"/channel/create?topic=t{number}&channel=c")
    return []


def channels(broker: Broker, count: int) -> list[socket.socket]:
    broker.post("/topic/create?topic=t")
    for number in range(count):
        broker.post(f"/channel/create?topic=t&channel=c{number}")
    broker.post("/pub?topic=t", b"x" * BODY_BYTES)
    return []


def subscribers(broker: Broker, count: int) -> list[socket.socket]:
    connections = []
    for _ in range(count):
        connection = socket.create_connection(broker.tcp)
        connection.sendall(b"  V2SUB t c\nRDY 10\n")
        if connection.recv(10) != b"\0\0\0\6\0\0\0\0OK":
            raise LoadError("SUB was refused")
        connections.append(connection)
    return connections


GROW: dict[str, Callable[[Broker, int], list[socket.socket]]] = dict(
    zip(STEPS, (backlog, topics, channels, subscribers), strict=True)
)


def measure(program: Path, kind: str, count: int) -> ScaleRow:
    with Broker(program) as broker:
        connections = GROW[kind](broker, count) if count else []
        memory, _ = broker.memory_bytes()
        idle, disk = idle_cpu(broker), broker.disk_bytes()
        for connection in connections:
            connection.close()
        return ScaleRow(kind, count, memory, broker.crash_and_start(), idle, disk)


def table(rows: list[ScaleRow]) -> Table:
    header = ["", "count", "memory MB", "start after kill -9, s", "CPU just after, %", "disk MB"]
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
