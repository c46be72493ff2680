"""Measures how long hostile peers hold the event loop of a client."""

import asyncio
import gc
import time

HELD_S_MAX = 0.05
LOOK_INTERVAL_S = 0.001


class HeldLoopWatch:
    """Asserts that the event loop was never held for longer than `HELD_S_MAX` while it was entered.

    Only CPU time of the loop's own thread counts: neither other processes nor a server in another thread do. What
    earlier tests left in memory is kept from the garbage collector meanwhile, since that is not the client's doing.
    """

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
            before_s = time.thread_time()
            try:
                await asyncio.sleep(LOOK_INTERVAL_S)
            finally:
                self._longest_s = max(self._longest_s, time.thread_time() - before_s)
            self.looks += 1

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        gc.unfreeze()
        if kind is None:
            assert self._longest_s < HELD_S_MAX, f"the loop was held for {self._longest_s:.3f} s of CPU"
