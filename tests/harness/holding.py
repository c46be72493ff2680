"""Stops processes as SIGSTOP does, until SIGCONT, and waits until they stand still: on other cores their threads run on
for a while after the signal was sent, and could still answer.
"""

import os
import signal
from pathlib import Path

from harness.waiting import eventually

PROCESSES = Path("/proc")


def hold(pid: int) -> None:
    """Stops one process."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: _stands_still(pid))


def hold_group(group: int) -> None:
    """Stops a process and those that it has started."""
    os.killpg(group, signal.SIGSTOP)
    pids = [int(process.name) for process in PROCESSES.iterdir() if process.name.isdigit()]
    eventually(lambda: all(_stands_still(pid) for pid in pids if _group(pid) == group))


def _stands_still(pid: int) -> bool:
    return all(_stat(thread)[0] in "TZX" for thread in (PROCESSES / str(pid) / "task").iterdir())


def _group(pid: int) -> int:
    try:
        return int(_stat(PROCESSES / str(pid))[2])
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return 0


def _stat(process: Path) -> list[str]:
    """Returns the fields that follow the name: state, parent, group."""
    return (process / "stat").read_text().rpartition(")")[2].split()
