"""Reads what the system says of this process, and its memory under the names NSQ has for Go's."""

import gc
import os
import resource
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

PROC: Final = Path("/proc/self")
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
PAUSES_MAX: Final = 256
"""This many pauses are remembered, as many as in Go."""
FULL_GENERATION: Final = 2


class ProcessFigures(NamedTuple):
    """Has the figures of this process; what the system does not tell is 0."""

    cpu_seconds: float
    resident_bytes: int
    virtual_bytes: int
    open_files: int
    open_files_max: int
    threads: int


def process_figures() -> ProcessFigures:
    """Reads the figures; it is to run in a thread, since it reads files."""
    virtual, resident = 0, 0
    try:
        virtual, resident = (int(pages) * PAGE_BYTES for pages in (PROC / "statm").read_text().split()[:2])
        # Listing them uses a descriptor too.
        open_files = len(os.listdir(PROC / "fd")) - 1
        threads = len(os.listdir(PROC / "task"))
    except OSError:
        open_files, threads = 0, threading.active_count()
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ProcessFigures(time.process_time(), resident, virtual, open_files, max(limit, 0), threads)


class MemoryStats(msgspec.Struct):
    """Has the figures of memory in the order of /stats; what Python has no equivalent of is 0."""

    heap_objects: int
    heap_idle_bytes: int
    heap_in_use_bytes: int
    heap_released_bytes: int
    gc_pause_usec_100: int
    gc_pause_usec_99: int
    gc_pause_usec_95: int
    next_gc_bytes: int
    gc_total_runs: int


class CollectorPauses:
    """Measures how long the last full collections took: only those visit every object and are long enough to notice."""

    def __init__(self) -> None:
        self.usec: deque[int] = deque(maxlen=PAUSES_MAX)
        self._started_ns = 0

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        """Is called by the collector, from `gc.callbacks`."""
        if info["generation"] != FULL_GENERATION:
            return
        if phase == "start":
            self._started_ns = time.perf_counter_ns()
        elif self._started_ns:
            self.usec.append((time.perf_counter_ns() - self._started_ns) // 1000)


_pauses: Final = CollectorPauses()
gc.callbacks.append(_pauses)


def memory_stats() -> MemoryStats:
    pauses = sorted(_pauses.usec)
    return MemoryStats(
        heap_objects=sys.getallocatedblocks(),
        heap_idle_bytes=0,
        heap_in_use_bytes=_private_bytes(),
        heap_released_bytes=0,
        gc_pause_usec_100=_percentile(pauses, 100),
        gc_pause_usec_99=_percentile(pauses, 99),
        gc_pause_usec_95=_percentile(pauses, 95),
        next_gc_bytes=0,
        gc_total_runs=gc.get_stats()[FULL_GENERATION]["collections"],
    )


def _private_bytes() -> int:
    """Returns how much memory this process has for itself, or 0 where the system does not say."""
    try:
        _, resident, shared, *_ = (PROC / "statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * PAGE_BYTES


def _percentile(values: list[int], percent: int) -> int:
    """Finds the least value that `percent` of the sorted values do not exceed."""
    return values[-(-len(values) * percent // 100) - 1] if values else 0
