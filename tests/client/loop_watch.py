"""Measures how long hostile peers hold the event loop of a client."""

import asyncio
import gc
import os
import time
from pathlib import Path

HELD_S_MAX = 0.05
LOOK_INTERVAL_S = 0.001
STOLEN_KNOWN_S = 0.02
"""What a host took from this machine is known so much later."""
_STAT = Path("/proc/stat")


def _stolen_s() -> float:
    """Returns how long the host of a virtual machine let its CPUs stand still: Linux counts that as CPU time of the
    threads that were running.
    """
    if not _STAT.exists():
        return 0.0
    return int(_STAT.read_bytes().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")


class HeldLoopWatch:
    """Asserts that the event loop was never held for longer than `held_s_max` while it was entered.

    Only CPU time of the loop's own thread counts: neither other processes nor a server in another thread do, nor what
    the host of a virtual machine takes from it. What earlier tests left in memory is kept from the garbage collector
    meanwhile, since that is not the client's doing.
    """

    def __init__(self, held_s_max: float = HELD_S_MAX) -> None:
        self._held_s_max = held_s_max

    async def __aenter__(self) -> "HeldLoopWatch":
        self._longest_s = 0.0
        self.looks = 0
        gc.collect()
        gc.freeze()
        self._task = asyncio.create_task(self._look())
        await asyncio.sleep(0)
        return self

    async def _look(self) -> None:
        while True:
            stolen_s, before_s = _stolen_s(), time.thread_time()
            try:
                await asyncio.sleep(LOOK_INTERVAL_S)
            finally:
                held_s = time.thread_time() - before_s
                if held_s > self._held_s_max:
                    time.sleep(STOLEN_KNOWN_S)
                    held_s -= _stolen_s() - stolen_s
                self._longest_s = max(self._longest_s, held_s)
            self.looks += 1

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        gc.unfreeze()
        if kind is None:
            assert self._longest_s < self._held_s_max, f"the loop was held for {self._longest_s:.3f} s of CPU"
