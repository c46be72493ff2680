"""Has what all logs of one nsqd share: settings, sequence numbers, memory, threads and the state of the disk."""

import errno
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import TypeVar

from nsquark.base.histogram import Histogram
from nsquark.log.cache import ChunkCache
from nsquark.log.disk import DiskLimitReached, DiskState
from nsquark.log.segment import CHECKPOINT_BYTES
from nsquark.log.sequences import Sequences
from nsquark.log.syncer import Syncer

THREADS_MAX = 4
SYNC_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
COMMIT_BOUNDS = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000)
DRAIN_TIMEOUT_S = 30.0
READ_TRIES = 3
"""Logs try a read this many times; then what the disk cannot read is left out, unless the disk is away."""
READ_RETRY_S = 1.0

T = TypeVar("T")


@dataclass(slots=True)
class LogSettings:
    max_bytes_per_file: int = 100 << 20
    sync_every: int = 2500
    retention_ns: int = 0
    retention_bytes: int = 0
    disk_bytes_max: int = 0
    sync_timeout_s: float = 2.0
    checkpoint_bytes: int = CHECKPOINT_BYTES


class LogShared:
    """Is what all logs share. `post` runs a function in the event loop's thread; everything but the functions given to
    `run` happens there.
    """

    def __init__(
        self,
        settings: LogSettings,
        node_id: int,
        cache: ChunkCache,
        post: Callable[[Callable[[], None]], object],
        later: Callable[[float, Callable[[], None]], object],
        report: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.node_id = node_id
        self.sequences: Sequences
        """Is set once all logs are open: it starts above what they name."""
        self.cache = cache
        self.later = later
        self.report = report
        self.make_room: Callable[[int], bool] = lambda size: False
        self.disk_bytes = 0
        self.disk = DiskState(report)
        self.sync_seconds = Histogram(SYNC_BOUNDS_S)
        self.commit_messages = Histogram(COMMIT_BOUNDS)
        self.post = post
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="log")
        # Syncs have their own thread, so that reading does not wait behind them.
        self._sync_thread = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self.running: dict[Future[None], Callable[[], None]] = {}
        """Has the work that is done in threads now, and what follows it."""
        self.syncer = Syncer(
            self.run, self._run_sync, later, self.disk, report, self.sync_seconds.observe, settings.sync_timeout_s
        )

    def require_room(self, size: int) -> None:
        """Raises DiskLimitReached if `size` bytes more would exceed --max-disk-bytes, and no room can be made."""
        limit = self.settings.disk_bytes_max
        if limit and self.disk_bytes + size > limit and not self.make_room(size):
            raise DiskLimitReached(errno.EDQUOT, f"--max-disk-bytes={limit} is reached")

    def run(self, work: Callable[[], None], done: Callable[[Exception | None], None]) -> None:
        """Does slow work in a thread, then calls `done` with its error, if any, in the event loop's thread."""
        self._run_in(self._threads, work, done)

    def read(
        self, fd: int, what: str, read: Callable[[int], T], done: Callable[[T], None], again: Callable[[], None]
    ) -> None:
        """Reads a file in a thread, by a descriptor of its own, since `fd` may be closed meanwhile.

        A read that fails is reported, by the name `what`; then `again` is called a little later.
        """

        def failed(error: Exception) -> None:
            self.report(f"{what} failed: {error}; trying again")
            self.later(READ_RETRY_S, again)

        try:
            own_fd = os.dup(fd)
        except OSError as error:
            failed(error)
            return
        found: list[T] = []

        def work() -> None:
            try:
                found.append(read(own_fd))
            finally:
                os.close(own_fd)

        def ended(error: Exception | None) -> None:
            if error is not None:
                failed(error)
            else:
                done(found[0])

        self.run(work, ended)

    def _run_sync(self, work: Callable[[], None], done: Callable[[Exception | None], None]) -> None:
        self._run_in(self._sync_thread, work, done)

    def _run_in(
        self, threads: ThreadPoolExecutor, work: Callable[[], None], done: Callable[[Exception | None], None]
    ) -> None:
        outcome: list[Exception | None] = [None]

        def guarded() -> None:
            try:
                work()
            except Exception as error:
                outcome[0] = error
            self.post(finish)

        def finish() -> None:
            if self.running.pop(future, None) is not None:
                done(outcome[0])

        future = threads.submit(guarded)
        self.running[future] = finish

    def drain(self) -> None:
        """Waits for all threads and calls what follows them; it is for closing, when the event loop does not run."""
        while self.running:
            done, _ = wait_for(list(self.running), timeout=DRAIN_TIMEOUT_S)
            if not done:
                raise TimeoutError(f"the disk did not answer within {DRAIN_TIMEOUT_S:.0f} s")
            for future in done:
                self.running[future]()

    def flush(self) -> None:
        """Makes durable what was written; it is for closing."""
        self.drain()
        self.syncer.flush()

    def close(self) -> None:
        self.flush()
        self._threads.shutdown(wait=True)
        self._sync_thread.shutdown(wait=True)
        self.sequences.close()
