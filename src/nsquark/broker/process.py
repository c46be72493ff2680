"""What the operating system says of this process; for threads, since it reads files."""

import os
import resource
import threading
import time
from pathlib import Path
from typing import Final, NamedTuple

PROC: Final = Path("/proc/self")
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class ProcessFigures(NamedTuple):
    """What the system does not tell is 0."""

    cpu_seconds: float
    resident_bytes: int
    virtual_bytes: int
    open_files: int
    open_files_max: int
    threads: int


def process_figures() -> ProcessFigures:
    virtual, resident = 0, 0
    try:
        virtual, resident = (int(pages) * PAGE_BYTES for pages in (PROC / "statm").read_text().split()[:2])
        # Listing them takes a descriptor too.
        open_files = len(os.listdir(PROC / "fd")) - 1
        threads = len(os.listdir(PROC / "task"))
    except OSError:
        open_files, threads = 0, threading.active_count()
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ProcessFigures(time.process_time(), resident, virtual, open_files, max(limit, 0), threads)
