"""Tells whether a test's process or its nsqd stood still: a message may time out then, whatever the client does."""

import contextlib
import math
import threading
import time

from harness import Nsqd
from harness.closing import Closing

LOOK_INTERVAL_S = 0.1
STOOD_STILL_S = 0.5
"""Is the shortest time that counts: every test that asks here bears more."""


class StallWatch(Closing):
    """Asks nsqd for a sign of life again and again, in a thread of its own: event loops may be held up on purpose."""

    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd
        self._longest_s = 0.0
        self._last_s = time.monotonic()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self._longest_s, self._last_s = max(self._longest_s, time.monotonic() - self._last_s), math.inf

    @property
    def stood_still(self) -> bool:
        return max(self._longest_s, time.monotonic() - self._last_s) > STOOD_STILL_S + LOOK_INTERVAL_S

    def _look(self) -> None:
        while not self._ending.wait(LOOK_INTERVAL_S):
            with contextlib.suppress(OSError):
                self._nsqd.get("/ping")
            now_s = time.monotonic()
            self._longest_s, self._last_s = max(self._longest_s, now_s - self._last_s), now_s
