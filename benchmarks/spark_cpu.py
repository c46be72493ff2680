"""Measures the CPU time of the three that share a machine in a Spark job: nsqd, Spark's Python workers, and its JVM."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from benchmarks.broker import Broker
from benchmarks.wire import LoadError

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_JVM = "java"
_SAMPLE_S = 0.25


class Cpu(NamedTuple):
    """Has seconds of user and system time."""

    nsqd: float
    python: float
    jvm: float

    def since(self, before: "Cpu") -> "Cpu":
        return Cpu(self.nsqd - before.nsqd, self.python - before.python, self.jvm - before.jvm)


class _Process(NamedTuple):
    name: str
    parent: int
    cpu_s: float


class CpuMeter:
    """Reads the times of an nsqd, of the JVM that this process started, and of all that the JVM started.

    Spark's Python daemons do not wait for the workers that they fork, so the system forgets what a worker took as soon
    as it ends. A thread therefore looks again and again, and what it saw last of a process counts.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._jvm = 0
        self._seen: dict[int, float] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="cpu-meter", daemon=True)

    def __enter__(self) -> Self:
        processes = dict(_processes())
        mine = _descendants(os.getpid(), processes)
        self._jvm = next((pid for pid in mine if processes[pid].name == _JVM), 0)
        if not self._jvm:
            raise LoadError("Spark runs no JVM of its own, whose CPU time could be read")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def read(self) -> Cpu:
        self._look()
        with self._lock:
            jvm, total = self._seen[self._jvm], sum(self._seen.values())
        return Cpu(self._broker.cpu_seconds(), total - jvm, jvm)

    def _look_on(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self._look()

    def _look(self) -> None:
        processes = dict(_processes())
        if self._jvm not in processes:
            return  # it ends; who needs it says so
        with self._lock:
            for pid in (self._jvm, *_descendants(self._jvm, processes)):
                self._seen[pid] = max(processes[pid].cpu_s, self._seen.get(pid, 0.0))


def _processes() -> Iterator[tuple[int, _Process]]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # it has just ended
            continue
        name_end = text.rindex(")")
        fields = text[name_end + 2 :].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
        yield int(path.parent.name), _Process(text[text.index("(") + 1 : name_end], int(fields[1]), cpu_s)


def _descendants(of: int, processes: dict[int, _Process]) -> list[int]:
    found: list[int] = []
    parents = {of}
    while parents:
        children = [pid for pid, one in processes.items() if one.parent in parents]
        found += children
        parents = set(children)
    return found
