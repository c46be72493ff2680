"""The state of a topic and its channels that must survive a crash: one small file, a pair of slots for each.

A slot is written alternately to the two places of its pair, with a generation and a checksum, so that a torn write
leaves the older one. (A mapped page was considered: a full disk kills the process, and a crash can tear it.)
Slot 0 is the topic's, the others belong to channels. The head of a slot, which changes with every FIN, is 40 bytes and
is written alone as long as the rest has not changed.
"""

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from xxhash import xxh3_64_intdigest

from nsquark.log.files import FILE_MODE, write_all

SLOT_BYTES = 1024
_HEAD = struct.Struct("<QQQQII")  # checksum, generation, position, deferred position, bytes of the rest, in use
_REST_BYTES_MAX = SLOT_BYTES - _HEAD.size


class ChannelRest(msgspec.Struct, array_like=True, frozen=True):
    """What of a channel changes rarely."""

    name: str
    paused: bool = False
    owner: str = ""  # of a channel that is read by range
    owner_ttl_ms: int = 0
    owner_seen_ms: int = 0
    skips: tuple[tuple[int, int], ...] = ()


class TopicRest(msgspec.Struct, array_like=True, frozen=True):
    """What of a topic changes rarely."""

    name: str
    paused: bool = False
    follows: bool = False
    voided_deferred: tuple[tuple[int, int], ...] = ()
    deferred_append: int = 0  # the last append of deferred messages in a segment that was removed


class SlotTooSmall(Exception):
    """More to remember than a slot holds."""


@dataclass(slots=True)
class Slot:
    """One pair of places in the file. `position` and `deferred` are the topic's pump or the channel's floor."""

    index: int
    position: int = 0
    deferred: int = 0
    rest: bytes = b""
    generation: int = 0
    rest_written: list[bytes] = field(default_factory=lambda: [b"", b""])


class CursorFile:
    """All slots of a topic. Writes go to the page cache at once and to the disk by `sync`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        self._free: dict[int, int] = {}  # generations, since a reused slot must outdo the one before
        self._slots = 1
        self.damaged = 0

    def load(self) -> list[Slot]:
        """The slots in use, the topic's first if there is one; call once, before anything else."""
        raw = self.path.read_bytes()
        found: list[Slot] = []
        self._slots = max(1, -(-len(raw) // (2 * SLOT_BYTES)))
        for index in range(self._slots):
            slot, used = self._load_slot(raw, index)
            if used:
                found.append(slot)
            elif index > 0:
                self._free[index] = slot.generation
        return found

    def _load_slot(self, raw: bytes, index: int) -> tuple[Slot, bool]:
        """The newer of the two places that are intact, and whether it is in use."""
        best: tuple[int, int, int, int, bytes] | None = None
        for place in (0, 1):
            start = (2 * index + place) * SLOT_BYTES
            piece = raw[start : start + SLOT_BYTES]
            if len(piece) < _HEAD.size or not any(piece):
                continue
            checksum, generation, position, deferred, size, used = _HEAD.unpack_from(piece)
            rest = piece[_HEAD.size : _HEAD.size + size]
            if _checksum(piece[: _HEAD.size], rest) != checksum:
                self.damaged += 1
                continue
            if best is None or generation > best[0]:
                best = (generation, position, deferred, used, rest)
        if best is None:
            return Slot(index), False
        generation, position, deferred, used, rest = best
        return Slot(index, position, deferred, rest, generation), bool(used)

    def new_slot(self) -> Slot:
        if self._free:
            index, generation = self._free.popitem()
            return Slot(index, generation=generation)
        self._slots += 1
        return Slot(self._slots - 1)

    def topic_slot(self) -> Slot:
        return Slot(0)

    def write(self, slot: Slot, *, used: bool = True) -> None:
        """Stores a slot as it is now."""
        if len(slot.rest) > _REST_BYTES_MAX:
            raise SlotTooSmall(f"{len(slot.rest)} bytes of state, {_REST_BYTES_MAX} at most")
        slot.generation += 1
        place = slot.generation & 1
        offset = (2 * slot.index + place) * SLOT_BYTES
        head = _HEAD.pack(0, slot.generation, slot.position, slot.deferred, len(slot.rest), used)
        head = _checksum(head, slot.rest).to_bytes(8, "little") + head[8:]
        if slot.rest_written[place] == slot.rest:
            write_all(self._fd, head, offset)
        else:
            write_all(self._fd, head + slot.rest, offset)
            slot.rest_written[place] = slot.rest

    def free(self, slot: Slot) -> None:
        """Both places are cleared, so that no older generation comes back."""
        self.write(slot, used=False)
        self.write(slot, used=False)
        self._free[slot.index] = slot.generation

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def _checksum(head: bytes, rest: bytes) -> int:
    return xxh3_64_intdigest(rest, seed=xxh3_64_intdigest(head[8:]))
