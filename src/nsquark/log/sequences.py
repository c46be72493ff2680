"""Sequence numbers: one counter for the whole nsqd, from which topics lease ranges.

A number is never used twice by one nsqd: not after a crash, a clock that went back, or a topic deleted and made
again. What may be handed out is reserved in a file first, far ahead, and the counter starts above what the file
reserved, above every number any log or cursor names, and above a number made of the time. So a power failure that
keeps a cursor but loses the end of its log cannot make later messages look finished.
"""

import contextlib
import os
import struct
import threading
import time
from pathlib import Path

from xxhash import xxh3_64_intdigest

from nsquark.log.files import FILE_MODE, sync_directory, write_all

LEASE_SEQS_MIN = 1 << 12
LEASE_SEQS_MAX = 1 << 18
RESERVE_SEQS = 1 << 26

_EPOCH_2020_S = 1_577_836_800
_SEQS_PER_SECOND_BITS = 21
_SLOT = struct.Struct("<4sIQQ")  # magic, version, reserved up to, checksum


class SequenceFileDamaged(Exception):
    """The counter's file cannot be read; starting would risk using numbers twice."""


class Sequences:
    """Hands out leases: aligned ranges of sequence numbers that nobody else ever gets.

    `_next <= _reserved` always, and the file holds `_reserved` before any number below it is handed out.
    """

    def __init__(self, path: Path, above: int) -> None:
        by_clock = max(0, int(time.time()) - _EPOCH_2020_S) << _SEQS_PER_SECOND_BITS
        self._path = path
        self._writes = 0
        self._next = _aligned(max(self._load(), above, by_clock, LEASE_SEQS_MIN))
        self._reserved = self._next
        self._extending: threading.Thread | None = None
        # On a full disk there is nothing to hand out yet; consumers are served all the same.
        with contextlib.suppress(OSError):
            self._reserve(self._next + RESERVE_SEQS)

    def lease(self, count: int) -> tuple[int, int]:
        """A new range of at least `count` sequence numbers, as (first, end)."""
        size = _aligned(min(max(count, LEASE_SEQS_MIN), LEASE_SEQS_MAX))
        if self._next + size > self._reserved:
            self._wait_for_extension()
            if self._next + size > self._reserved:
                self._reserve(self._next + RESERVE_SEQS)
        first, self._next = self._next, self._next + size
        if self._reserved - self._next < RESERVE_SEQS // 2 and not self._is_extending():
            self._extend_in_background()
        return first, first + size

    def close(self) -> None:
        self._wait_for_extension()

    def _is_extending(self) -> bool:
        return self._extending is not None and self._extending.is_alive()

    def _extend_in_background(self) -> None:
        self._extending = threading.Thread(target=self._extend, name="sequences", daemon=True)
        self._extending.start()

    def _wait_for_extension(self) -> None:
        if self._extending is not None:
            self._extending.join()
            self._extending = None

    def _extend(self) -> None:
        with contextlib.suppress(OSError):  # the next lease tries again, and tells its publisher
            self._reserve(self._reserved + RESERVE_SEQS)

    def _reserve(self, reserved: int) -> None:
        """Stores the new bound, in the older of two places: that needs no space, and a torn write leaves the other."""
        self._writes += 1
        body = _SLOT.pack(b"NQSQ", 1, reserved, 0)[:16]
        slot = body + xxh3_64_intdigest(body).to_bytes(8, "little")
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            write_all(fd, slot, (self._writes & 1) * _SLOT.size)
            os.fsync(fd)
        finally:
            os.close(fd)
        if self._writes == 1:
            sync_directory(self._path.parent)
        self._reserved = reserved

    def _load(self) -> int:
        if not self._path.exists():
            return 0
        raw = self._path.read_bytes()
        reserved: list[int] = []
        for place in (0, 1):
            slot = raw[place * _SLOT.size : (place + 1) * _SLOT.size]
            if len(slot) == _SLOT.size and xxh3_64_intdigest(slot[:16]) == int.from_bytes(slot[16:], "little"):
                reserved.append(_SLOT.unpack(slot)[2])
                if reserved[-1] == max(reserved):
                    self._writes = place  # the next goes to the other place
        if raw and (not reserved or len(raw) != 2 * _SLOT.size):
            raise SequenceFileDamaged(
                f"{self._path} is damaged; restore it from a backup, or remove it to start above the clock's number"
            )
        # The damaged one may have been the newer, or a torn write that nothing was handed out from.
        is_doubtful = len(reserved) == 1 and raw[: _SLOT.size].strip(b"\0") and raw[_SLOT.size :].strip(b"\0")
        return max(reserved, default=0) + (RESERVE_SEQS if is_doubtful else 0)


def _aligned(seq: int) -> int:
    return -(-seq // LEASE_SEQS_MIN) * LEASE_SEQS_MIN
