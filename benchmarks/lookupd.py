"""Measures nsqlookupd with a whole cluster registered, ours and, given one, a peer: `python -m benchmarks.lookupd`.

A thousand nsqds, each a real TCP connection, register the same hundred topics with a channel each, so every
`/lookup` names a thousand producers. That is the worst case for its size: about 170 kB of JSON.
"""

import argparse
import asyncio
import dataclasses
import http.client
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.report import Table, machine
from benchmarks.wire import LoadError

NSQDS_DEFAULT = 1000
TOPICS_DEFAULT = 100
LOOKUPS = 1000
NODES = 20
CONNECTING_AT_ONCE = 100
START_SECONDS_MAX = 20
FORGET_SECONDS_MAX = 60
HTTP_TIMEOUT_SECONDS = 30
OK = b"\x00\x00\x00\x02OK"


@dataclass(frozen=True)
class LookupdMeasurement:
    start_seconds: float
    register_seconds: float
    lookup_ms: list[float]
    lookup_bytes: int
    nodes_ms: list[float]
    forget_seconds: float
    memory_before_bytes: int
    memory_bytes: int


class Lookupd:
    """Runs an nsqlookupd under measurement, on loopback ports of the system's choice."""

    def __init__(self, program: Path) -> None:
        self._program = program

    def __enter__(self) -> Self:
        command = [str(self._program), "--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]
        started = time.monotonic()
        self._log = tempfile.NamedTemporaryFile(prefix="nsqlookupd-bench-")
        self._process = subprocess.Popen(command, stderr=self._log, stdin=subprocess.DEVNULL)
        self.tcp_port, self.http_port = self._listening("TCP"), self._listening("HTTP")
        self.start_seconds = time.monotonic() - started
        self._http = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=HTTP_TIMEOUT_SECONDS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def _listening(self, name: str) -> int:
        deadline = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < deadline and self._process.poll() is None:
            found = re.search(rf" {name}: listening on \S+:(\d+)", Path(self._log.name).read_text(errors="replace"))
            if found:
                return int(found[1])
            time.sleep(0.002)
        raise LoadError(f"{self._program} does not listen on its {name} port")

    def memory_bytes(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024

    def get(self, target: str) -> bytes:
        self._http.request("GET", target)
        return self._http.getresponse().read()

    def milliseconds(self, target_of: Callable[[int], str], count: int) -> list[float]:
        """Measures each request in turn, on one connection, the whole answer read."""
        taken = []
        for number in range(count):
            target = target_of(number)
            started = time.perf_counter()
            self.get(target)
            taken.append((time.perf_counter() - started) * 1e3)
        return sorted(taken)


async def register(port: int, number: int, topics: int, gate: asyncio.Semaphore) -> asyncio.StreamWriter:
    """Registers one nsqd: it connects, identifies, registers, and stays connected until the writer is closed."""
    identity = {
        "broadcast_address": f"nsqd-{number}.example",
        "hostname": f"nsqd-{number}",
        "tcp_port": 4150,
        "http_port": 4151,
        "version": "1.3.0",
    }
    body = json.dumps(identity).encode()
    async with gate:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"  V1IDENTIFY\n" + len(body).to_bytes(4) + body)
        await reader.readexactly(int.from_bytes(await reader.readexactly(4)))
        writer.write(b"".join(b"REGISTER topic-%d channel\n" % topic for topic in range(topics)))
        replies = await reader.readexactly(len(OK) * topics)
    if replies != OK * topics:
        raise LoadError(f"REGISTER was refused: {replies[:200]!r}")
    return writer


async def measure(program: Path, nsqds: int, topics: int) -> LookupdMeasurement:
    with Lookupd(program) as lookupd:
        memory_before = lookupd.memory_bytes()
        started = time.monotonic()
        gate = asyncio.Semaphore(CONNECTING_AT_ONCE)
        writers = await asyncio.gather(*(register(lookupd.tcp_port, number, topics, gate) for number in range(nsqds)))
        register_seconds = time.monotonic() - started
        body = lookupd.get("/lookup?topic=topic-0")
        if len(json.loads(body)["producers"]) != nsqds:
            raise LoadError(f"{program} does not know all {nsqds} producers")
        lookup_ms = lookupd.milliseconds(lambda number: f"/lookup?topic=topic-{number % topics}", LOOKUPS)
        nodes_ms = lookupd.milliseconds(lambda number: "/nodes", NODES)
        memory = lookupd.memory_bytes()
        forget_seconds = await forget(lookupd, writers)
        return LookupdMeasurement(
            lookupd.start_seconds,
            register_seconds,
            lookup_ms,
            len(body),
            nodes_ms,
            forget_seconds,
            memory_before,
            memory,
        )


async def forget(lookupd: Lookupd, writers: list[asyncio.StreamWriter]) -> float:
    """Lets all nsqds be gone at once; returns the time until the last is no longer found."""
    started = time.monotonic()
    for writer in writers:
        writer.close()
    while json.loads(lookupd.get("/lookup?topic=topic-0"))["producers"]:
        if time.monotonic() - started > FORGET_SECONDS_MAX:
            raise LoadError("producers that left are still found")
        await asyncio.sleep(0.01)
    return time.monotonic() - started


def quantile(ordered: list[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def column(measured: LookupdMeasurement) -> list[str]:
    return [
        f"{measured.start_seconds * 1e3:.0f} ms",
        f"{measured.register_seconds:.2f} s",
        f"{quantile(measured.lookup_ms, 0.5):.2f} ms",
        f"{quantile(measured.lookup_ms, 0.99):.2f} ms",
        f"{measured.lookup_bytes / 1e3:.0f} kB",
        f"{quantile(measured.nodes_ms, 0.5):.1f} ms",
        f"{measured.forget_seconds:.2f} s",
        f"{measured.memory_before_bytes / 1e6:.1f} MB",
        f"{measured.memory_bytes / 1e6:.1f} MB",
    ]


ROWS = [
    "start until listening",
    "register all",
    "/lookup p50",
    "/lookup p99",
    "/lookup body",
    "/nodes p50",
    "forget all",
    "memory, empty",
    "memory, all registered",
]


def run(program: Path, nsqds: int = NSQDS_DEFAULT, topics: int = TOPICS_DEFAULT) -> LookupdMeasurement:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))
    return asyncio.run(measure(program, nsqds, topics))


def table(measured: dict[str, LookupdMeasurement], nsqds: int = NSQDS_DEFAULT, topics: int = TOPICS_DEFAULT) -> Table:
    rows = [list(row) for row in zip(ROWS, *map(column, measured.values()), strict=True)]
    title = f"nsqlookupd with {nsqds:,} nsqds x {topics} topics, one channel each"
    return Table(title, ["", *measured], rows)


def as_json(measured: LookupdMeasurement) -> dict[str, float]:
    plain = dataclasses.asdict(measured)
    for name in ("lookup_ms", "nodes_ms"):
        ordered = plain.pop(name)
        plain |= {f"{name}_p50": quantile(ordered, 0.5), f"{name}_p99": quantile(ordered, 0.99)}
    return plain


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lookupd", description=__doc__)
    parser.add_argument("--nsqlookupd", type=Path, default=Path(sys.executable).with_name("nsqlookupd"))
    peer = os.environ.get("PEER_NSQLOOKUPD")
    parser.add_argument("--peer", type=Path, default=Path(peer) if peer else None, help="$PEER_NSQLOOKUPD")
    parser.add_argument("--nsqds", type=int, default=NSQDS_DEFAULT)
    parser.add_argument("--topics", type=int, default=TOPICS_DEFAULT)
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    options = parser.parse_args()
    programs = {"ours": options.nsqlookupd} | ({"peer": options.peer} if options.peer else {})
    try:
        measured = {who: run(program, options.nsqds, options.topics) for who, program in programs.items()}
    except LoadError as error:
        print(error, file=sys.stderr)
        return 1
    made = table(measured, options.nsqds, options.topics)
    print(f"{machine()}\n\n{made.markdown() if options.markdown else made.plain()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
