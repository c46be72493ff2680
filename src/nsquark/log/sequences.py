"""Counts sequence numbers: one counter for the whole nsqd, from which topics lease ranges.

A number is never used twice by one nsqd: not after a crash, a clock that went back, or a topic deleted and made
again. What may be handed out is reserved in a file first, far ahead, and the counter starts above what the file
reserved, above every number any log or cursor names, and above a number made of the time. So a power failure that
keeps a cursor but loses the end of its log cannot make later messages look finished. Without the file the other two
are enough, but for a clock that went back while a topic was deleted.

Message ids have 53 bits for a number. A clock that is far ahead must not use them up: it is not believed.
"""

import contextlib
import errno
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from xxhash import xxh3_64_intdigest

from nsquark.log.files import read_surviving, write_all, write_atomically
from nsquark.wire.record import SEQ_BITS

LEASE_SEQS_MIN = 1 << 12
LEASE_SEQS_MAX = 1 << 18
RESERVE_SEQS = 1 << 26

SEQS_END = 1 << SEQ_BITS
_EPOCH_2020_S = 1_577_836_800
_CLOCK_END_S = 4_102_444_800
"""This is the year 2100: a clock that says more is not believed. Times until then use up about half of all numbers."""
_SEQS_PER_SECOND_BITS = 21
_SLOT = struct.Struct("<4sIQQ")
"""Packs magic, version, up to where numbers are reserved, and a checksum."""


class Sequences:
    """Hands out leases: aligned ranges of sequence numbers that nobody else ever gets.

    `_next <= _reserved` always, and the file has `_reserved` before any number below it is handed out.
    """

    def __init__(self, path: Path, above: int, report: Callable[[str], None], reserve_seqs: int = RESERVE_SEQS) -> None:
        self._reserve_seqs = reserve_seqs
        self._path = path
        self._report = report
        self._writes = 0
        self._is_sound = False
        """Tells whether the file and its name are durable, so that a part of it can be written anew."""
        self._next = _aligned(self._start(above))
        self._reserved = self._next
        self._extending: threading.Thread | None = None
        # On a full disk there is nothing to hand out yet; consumers are served all the same.
        with contextlib.suppress(OSError):
            self._reserve(self._next + self._reserve_seqs)

    def _start(self, above: int) -> int:
        """Returns a number from which on none was ever handed out."""
        now_s = time.time()
        by_clock = max(0, int(now_s) - _EPOCH_2020_S) << _SEQS_PER_SECOND_BITS
        if now_s >= _CLOCK_END_S:
            self._report(
                f"SEQUENCE({self._path}): the clock says {now_s:.0f} s since 1970, which is not believed:"
                " sequence numbers go on from those that are in use"
            )
            by_clock = 0
        reserved = self._load()
        if reserved is None:
            start = max(above, by_clock) + self._reserve_seqs
            self._report(
                f"SEQUENCE({self._path}): damaged; sequence numbers start anew at {start}, above all that the topics"
                " name and above the clock"
            )
            return start
        return max(reserved, above, by_clock, LEASE_SEQS_MIN)

    @property
    def next(self) -> int:
        """Returns a number above every one that was ever handed out."""
        return self._next

    def lease(self, count: int) -> tuple[int, int]:
        """Leases a new range of `count` sequence numbers or more, but at most LEASE_SEQS_MAX, as (first, end)."""
        size = _aligned(min(max(count, LEASE_SEQS_MIN), LEASE_SEQS_MAX))
        self.require(size)
        first, self._next = self._next, self._next + size
        if self._reserved - self._next < self._reserve_seqs // 2 and not self._is_extending():
            self._extend_in_background()
        return first, first + size

    def require(self, count: int = LEASE_SEQS_MIN) -> None:
        """Raises OSError if `count` sequence numbers cannot be handed out."""
        if self._next + count > self._reserved:
            self._wait_for_extension()
            if self._next + count > self._reserved:
                self._reserve(self._next + self._reserve_seqs)

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
            self._reserve(self._reserved + self._reserve_seqs)

    def _reserve(self, reserved: int) -> None:
        """Stores the new bound, in the older of two places: that needs no space, and a torn write leaves the other.

        At a start, and after a failed sync, a new file with the bound in both places takes the name: then one that is
        lost is made up for by one more reserve.
        """
        if reserved > SEQS_END:
            raise OSError(errno.EOVERFLOW, f"sequence numbers are used up: {self._next} of {SEQS_END}")
        body = _SLOT.pack(b"NQSQ", 1, reserved, 0)[:16]
        slot = body + xxh3_64_intdigest(body).to_bytes(8, "little")
        if self._is_sound:
            self._write_place(slot)
        else:
            write_atomically(self._path, slot + slot)
        self._is_sound = True
        self._reserved = reserved

    def _write_place(self, slot: bytes) -> None:
        self._writes += 1
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            write_all(fd, slot, (self._writes & 1) * _SLOT.size)
            self._is_sound = False  # until the disk has confirmed it
            os.fsync(fd)
        finally:
            os.close(fd)

    def _load(self) -> int | None:
        """Returns up to where numbers are reserved: 0 without a file, None if the file does not tell."""
        try:
            raw, _ = read_surviving(self._path, self._report)
        except FileNotFoundError:
            return 0
        reserved: list[int] = []
        for place in (0, 1):
            slot = raw[place * _SLOT.size : (place + 1) * _SLOT.size]
            if len(slot) == _SLOT.size and xxh3_64_intdigest(slot[:16]) == int.from_bytes(slot[16:], "little"):
                reserved.append(_SLOT.unpack(slot)[2])
        if not reserved:
            return None
        # The other one may have been the newer, or a torn write that nothing was handed out from.
        return max(reserved) + (self._reserve_seqs if len(reserved) == 1 else 0)


def _aligned(seq: int) -> int:
    return -(-seq // LEASE_SEQS_MIN) * LEASE_SEQS_MIN
