"""Measures client libraries side by side: what one process gets out of an nsqd with each of them.

Every library runs in a process of its own (gevent patches the standard library under everyone) and does what its own
documentation shows: no library is helped by another's load generator.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.broker import Broker
from benchmarks.report import Table
from benchmarks.scenarios import CHANNEL, TOPIC, batch, fill
from benchmarks.wire import LoadError

OURS = "nsquark"
LIBRARIES = {OURS: "nsquark", "pynsq": "nsq", "gnsq": "gnsq", "ansq": "ansq"}
"""Has each library with the module that it is imported as."""
SECONDS = 2.0
BODY_BYTES = 200
CONSUMED_PER_SECOND_MAX = {OURS: 500_000}
OTHERS_PER_SECOND_MAX = 60_000
RUN_SECONDS_MAX = 60

TASKS = {
    "pub": "PUB, one awaited after another",
    "pipe": "PUB, 1,000 outstanding",
    "mpub": "MPUB x 200, one awaited after another",
    "mpubpipe": "MPUB x 200, 8 outstanding",
    "sync": "consume, plain handler",
    "async": "consume, async handler",
    "iter": "consume, async for",
}
TARGETS = {"pipe": 5.0, "mpub": 2.0, "mpubpipe": 2.0, "sync": 8.0, "async": 8.0, "iter": 8.0}
"""Says what is to be reached beside the best of the others."""
CONSUMING = ("sync", "async", "iter")


@dataclass(frozen=True)
class Rate:
    library: str
    task: str
    per_second: float


def run(program: Path, flags: tuple[str, ...] = ()) -> list[Rate]:
    """Runs task by task, all libraries right after one another, so that they see the machine in the same mood."""
    rates = []
    for task in TASKS:
        for library, module in LIBRARIES.items():
            if find_spec(module) is None:
                print(f"client {library}: skipped, it is not installed", file=sys.stderr)
                continue
            rate = _rate(program, flags, library, task)
            if rate is not None:
                rates.append(Rate(library, task, rate))
                print(f"client {task:6} {library:8} {rate:12,.0f} msg/s", file=sys.stderr, flush=True)
    return rates


def _rate(program: Path, flags: tuple[str, ...], library: str, task: str) -> float | None:
    """Returns the rate of a task, or None if the library has no such way."""
    with Broker(program, flags) as broker:
        wanted = 0
        if task in CONSUMING:
            rate_max = CONSUMED_PER_SECOND_MAX.get(library, OTHERS_PER_SECOND_MAX)
            wanted = fill(broker, batch(BODY_BYTES), int(rate_max * SECONDS))
        host, port = broker.tcp
        command = [sys.executable, "-m", f"benchmarks.clients.use_{library}"]
        command += [task, f"{host}:{port}", TOPIC, CHANNEL, str(SECONDS), str(wanted)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS_MAX, check=False)
        broker.post(f"/topic/delete?topic={TOPIC}")
    if done.returncode:
        raise LoadError(f"{library} failed at {task}:\n{done.stderr[-2000:]}")
    count, seconds = json.loads(done.stdout)
    return count / seconds if count else None


def table(title: str, rates: list[Rate]) -> Table:
    libraries = [library for library in LIBRARIES if any(rate.library == library for rate in rates)]
    rows = []
    for task, name in TASKS.items():
        found = {rate.library: rate.per_second for rate in rates if rate.task == task}
        # An async handler or iteration is compared with whatever way of consuming the others have.
        others = [
            rate.per_second
            for rate in rates
            if rate.library != OURS and (rate.task == task or (task in CONSUMING and rate.task in CONSUMING))
        ]
        ratio = f"{found[OURS] / max(others):.1f}" if OURS in found and others else "-"
        target = f"{TARGETS[task]:g}" if task in TARGETS else "-"
        cells = [f"{found[library]:,.0f}" if library in found else "-" for library in libraries]
        rows.append([name, *cells, ratio, target])
    return Table(title, ["msg/s", *libraries, "to the best other", "target"], rows)


def as_json(rates: list[Rate]) -> dict[str, dict[str, float]]:
    return {task: {rate.library: rate.per_second for rate in rates if rate.task == task} for task in TASKS}
