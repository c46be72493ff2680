"""Sequence numbers: one counter for the whole nsqd, from which topics lease ranges.

A number is never used twice by one nsqd: not after a crash, a clock that went back, or a topic deleted and made
again. What may be handed out is reserved in a file first, far ahead, and the counter starts above what the file
reserved, above every number any log or cursor names, and above a number made of the time. So a power failure that
keeps a cursor but loses the end of its log cannot make later messages look finished.
"""

import struct
import threading
import time
from pathlib import Path

from xxhash import xxh3_64_intdigest

from nsquark.log.files import write_atomically

LEASE_SEQS_MIN = 1 << 12
LEASE_SEQS_MAX = 1 << 18
RESERVE_SEQS = 1 << 26

_EPOCH_2020_S = 1_577_836_800
_SEQS_PER_SECOND_BITS = 21
_FILE = struct.Struct("<4sIQQ")
_MAGIC = b"NQSQ"


class SequenceFileDamaged(Exception):
    """The counter's file cannot be read; starting would risk using numbers twice."""


class Sequences:
    """Hands out leases: aligned ranges of sequence numbers that nobody else ever gets.

    `_next <= _reserved` always, and the file holds `_reserved` before any number below it is handed out.
    """

    def __init__(self, path: Path, above: int) -> None:
        by_clock = max(0, int(time.time()) - _EPOCH_2020_S) << _SEQS_PER_SECOND_BITS
        self._path = path
        self._next = _aligned(max(self._load(), above, by_clock, LEASE_SEQS_MIN))
        self._reserved = 0
        self._extending: threading.Thread | None = None
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
        self._extending = threading.Thread(
            target=self._reserve, args=(self._reserved + RESERVE_SEQS,), name="sequences", daemon=True
        )
        self._extending.start()

    def _wait_for_extension(self) -> None:
        if self._extending is not None:
            self._extending.join()
            self._extending = None

    def _reserve(self, reserved: int) -> None:
        body = _FILE.pack(_MAGIC, 1, reserved, 0)[:16]
        write_atomically(self._path, body + xxh3_64_intdigest(body).to_bytes(8, "little"))
        self._reserved = reserved

    def _load(self) -> int:
        if not self._path.exists():
            return 0
        raw = self._path.read_bytes()
        if len(raw) != _FILE.size or xxh3_64_intdigest(raw[:16]) != int.from_bytes(raw[16:], "little"):
            raise SequenceFileDamaged(
                f"{self._path} is damaged; restore it from a backup, or remove it to start above the clock's number"
            )
        reserved: int = _FILE.unpack(raw)[2]
        return reserved


def _aligned(seq: int) -> int:
    return -(-seq // LEASE_SEQS_MIN) * LEASE_SEQS_MIN
