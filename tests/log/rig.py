"""Drives a topic's log in a real directory by a test instead of an event loop."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nsquark.kernel.commits import Commit
from nsquark.log.cache import ChunkCache
from nsquark.log.sequences import Sequences
from nsquark.log.services import LogSettings, LogShared
from nsquark.log.topic_log import TopicLog
from nsquark.wire.batch_format import NO_TOKEN

NODE_ID = 7
CACHE_BYTES = 64 << 20
SETTLE_ROUNDS_MAX = 10
"""What is tried again later on a disk that stays bad has no end."""
NEVER_S = 1e6
"""No file is synced because its time has come: on a slow machine that would be in the middle of a test."""


def make_shared(report: Callable[[str], None] = lambda text: None) -> LogShared:
    """Makes what the parts of a log share, for those that are tested alone, and use no threads."""
    return LogShared(
        LogSettings(), NODE_ID, ChunkCache(CACHE_BYTES), lambda call: None, lambda seconds, call: None, report
    )


def fail_reads(patch: pytest.MonkeyPatch, is_bad: Callable[[int, int, int], bool]) -> None:
    """Lets reads fail as on a disk with bad sectors: those whose descriptor, size and offset `is_bad` says yes to."""
    real: Callable[[int, int, int], bytes] = os.pread

    def pread(fd: int, size: int, offset: int) -> bytes:
        if is_bad(fd, size, offset):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, size, offset)

    patch.setattr(os, "pread", pread)


def refuse_links(patch: pytest.MonkeyPatch, reason: int = errno.EPERM) -> None:
    """Lets no file have two names, as on a file system without hard links."""

    def link(*_: object) -> None:
        raise OSError(reason, os.strerror(reason))

    patch.setattr(os, "link", link)


def fail_directory_syncs(patch: pytest.MonkeyPatch, directory: Path) -> list[int]:
    """Lets syncs of this directory fail, those of files do not; returns a list that grows with each."""
    real: Callable[[int], None] = os.fsync
    failed: list[int] = []

    def fsync(fd: int) -> None:
        if os.path.samestat(os.fstat(fd), directory.stat()):
            failed.append(fd)
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    patch.setattr(os, "fsync", fsync)
    return failed


class Rig:
    """Has `shared`, `log` and what they reported; `settle` lets threads finish and runs what they left to do."""

    def __init__(self, root: Path, directory: Path | None, *, cache_bytes: int = CACHE_BYTES, **settings: int) -> None:
        self.reports: list[str] = []
        self.delayed: list[Callable[[], None]] = []
        self._posted: list[Callable[[], None]] = []
        self.shared = LogShared(
            LogSettings(**settings, sync_timeout_s=NEVER_S),
            NODE_ID,
            ChunkCache(cache_bytes),
            self._posted.append,
            lambda _seconds, call: self.delayed.append(call),
            self.reports.append,
        )
        self.log = TopicLog(self.shared, directory, lambda log: None)
        self.shared.sequences = Sequences(root / "sequence", self.log.head, self.reports.append)
        self._is_open = True

    # -- publishing --------------------------------------------------------------------------------------

    def publish(self, *bodies: bytes, timestamp_ns: int = 1) -> Commit:
        """Appends and writes these messages as one commit."""
        commit = self.append(*bodies, timestamp_ns=timestamp_ns)
        self.log.write()
        self.settle()
        return commit

    def append(self, *bodies: bytes, timestamp_ns: int = 1) -> Commit:
        for body in bodies:
            commit = self.log.append(bytearray(body), 0, len(body), timestamp_ns)
        return commit

    def append_apart(self, *bodies: bytes, flags: int = 0, token: bytes = NO_TOKEN) -> tuple[Commit, list[int]]:
        commit, seqs = self.log.append_apart([(1, body) for body in bodies], flags, token)
        self.log.write()
        self.settle()
        return commit, seqs

    def sync(self) -> None:
        """Makes everything durable that is written."""
        assert self.log.segments is not None
        self.log.segments.sync()
        self.settle()

    def turn(self) -> None:
        """Runs what threads have left to do by now, without waiting for them."""
        calls, self._posted[:] = self._posted[:], []
        for call in calls:
            call()

    def settle(self) -> None:
        """Waits for threads, runs what they left to do, and what that asked for later, while there is something."""
        self.shared.drain()
        for _ in range(SETTLE_ROUNDS_MAX):
            calls, self.delayed[:], self._posted[:] = self._posted + self.delayed, [], []
            for call in calls:
                call()
            self.shared.drain()

    # -- reading -----------------------------------------------------------------------------------------

    def read(self) -> list[tuple[int, bytes]]:
        """Reads every message, as (sequence number, body), as a channel does: from memory, else loaded."""
        messages: list[tuple[int, bytes]] = []
        seq = self.log.extents.at_or_after(0)
        while self.log.extents.between(seq, self.log.head):
            record = self.record(seq)
            if record is not None:
                assert int(record[18:34], 16) & ((1 << 53) - 1) == seq
                messages.append((seq, record[34:]))
                seq += 1
            seq = self.log.extents.at_or_after(seq)
        return messages

    def record(self, seq: int) -> bytes | None:
        """Returns a message's record, or None if it turned out to be lost."""
        while self.log.extents.between(seq, seq + 1):
            chunk = self.log.chunk_at(seq)
            if chunk is None:
                called: list[bool] = []
                chunk = self.log.load(seq, lambda: called.append(True))  # noqa: B023  (called before the next round)
                if chunk is None:
                    self.settle()
                    assert called, f"message {seq} was neither loaded nor will anybody be told"
                    continue
            index = seq - chunk.first_seq
            return bytes(chunk.view[chunk.offset(index) : chunk.offset(index + 1)])
        return None

    def bodies(self) -> list[bytes]:
        return [body for _, body in self.read()]

    # -- the end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stops cleanly."""
        self._is_open = False
        self.log.close()
        self.shared.close()

    def crash(self) -> None:
        """Ends as if the process were gone; what it wrote stays."""
        if self._is_open:
            self._is_open = False
            self.shared.drain()
            for segment in self.log.segments or ():
                segment.close()
