"""Stores the state of a topic and its channels that must survive a crash: one small file, a pair of places for each.

A slot is written alternately to its two places, with a generation and a checksum, so that a torn write leaves the older
one. (A mapped page was considered: a full disk kills the process, and a crash can tear it.) Slot 0 is the topic's, the
others belong to channels. The two places lie in different pages of the file, and what may not get lost is written to
both: losing a page loses neither a channel nor its state, only how far it came lately. The head of a slot, which
changes with every FIN, is 40 bytes and is written alone as long as the state has not changed. A state that does not fit
is in a file of its own, and the slot has a brief one.

Pages 2k and 2k + 1 of the file hold the first and the second places of slots 4k to 4k + 3. In format 1 the two places
of a slot lay side by side; such a file is read, and written anew as a whole.
"""

import contextlib
import errno
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from xxhash import xxh3_64_intdigest

from nsquark.log.durable import DurableFile
from nsquark.log.files import PAGE_BYTES, read_surviving, write_atomically
from nsquark.log.services import LogShared

SLOT_BYTES = 1024
SLOTS_PER_PAGE = PAGE_BYTES // SLOT_BYTES
_HEAD = struct.Struct("<QQQQIHBx")
"""Packs the head of a place: checksum, generation, position, deferred position, number of the file with the state,
bytes of the state, in use.
"""
STATE_BYTES_MAX = SLOT_BYTES - _HEAD.size
_SEED = 2
"""Seeds the checksums, so that a slot of one layout never passes for one of the other."""
_HEAD_1 = struct.Struct("<QQQQII")
"""Packs the head of format 1: checksum, generation, position, deferred position, bytes of the state, in use."""
_STATE_HEAD = struct.Struct("<QQ")
"""Packs the head of a file with a state: checksum, number."""


class ChannelState(msgspec.Struct, array_like=True, frozen=True):
    """Has the part of a channel's state that changes rarely."""

    name: str
    paused: bool = False
    owner: str = ""  # the reader of a channel that is read by range
    owner_ttl_ms: int = 0
    owner_seen_ms: int = 0  # not used any more: the time to live starts again with nsqd
    skips: tuple[tuple[int, int], ...] = ()
    had_subscribers: bool = False  # then it is never read by range


class TopicState(msgspec.Struct, array_like=True, frozen=True):
    """Has the part of a topic's state that changes rarely."""

    name: str
    paused: bool = False
    follows: bool = False
    voided_deferred: tuple[tuple[int, int], ...] = ()
    deferred_append: int = 0  # the last append of deferred messages in a segment that was removed
    slots: int = 0  # how many are in the file, so that a file that was cut is noticed
    id: str = ""  # a topic that is deleted and made again has another


def encode_state(state: ChannelState | TopicState) -> tuple[bytes, bytes]:
    """Encodes all of a state, and a brief form without what may grow: losing the rest brings messages back that were
    emptied, and loses none.
    """
    brief = (
        msgspec.structs.replace(state, skips=())
        if isinstance(state, ChannelState)
        else msgspec.structs.replace(state, voided_deferred=())
    )
    return msgspec.msgpack.encode(state), msgspec.msgpack.encode(brief)


@dataclass(slots=True)
class Slot:
    """Is one pair of places in the file. `position` is the topic's pump or the channel's floor, `deferred` the lowest
    number of a deferred message that it waits for.
    """

    index: int
    position: int = 0
    deferred: int = 0
    state: bytes = b""
    brief: bytes = b""
    """This is left of `state` if it does not fit and its file is lost."""
    generation: int = 0
    state_number: int = 0
    """Numbers the file that has `state`, counted up with each that is written; it is 0 if the state fits."""
    stored: tuple[int, bytes, bool] | None = None
    """Has the deferred position, the state and whether the slot is in use, as written last."""
    stored_position: int = 0
    rest_written: list[bytes] = field(default_factory=lambda: [b"", b""])


class CursorFile:
    """Keeps all slots of a topic. Writes go to the page cache at once and to the disk within --sync-timeout.

    After `load`, `lost` tells that there were channels of which nothing is left. The proof of that stays in the file
    until `repair`, which is to be called when they are made again.
    """

    def __init__(self, shared: LogShared, path: Path) -> None:
        self.path = path
        self.file = DurableFile(shared.syncer, path)
        self.lost = False
        self.is_new = False
        self.slots = 1
        """Counts the slots in the file, used or free."""
        self._report = shared.report
        self._free: dict[int, int] = {}  # generations by index, since a reused slot must outdo the one before
        self._damaged: dict[int, Slot | None] = {}
        self._image: bytearray | None = None

    # -- reading -----------------------------------------------------------------------------------------

    def load(self) -> list[Slot]:
        """Reads the slots in use, the topic's first if there is one; to be called once, before anything else."""
        try:
            raw, whole = read_surviving(self.path, self._report)
        except FileNotFoundError:
            self.is_new = True
            return []
        found = _read_format_1(raw)
        is_old = bool(found)
        if not is_old:
            found = self._read(raw)
        self.slots = max([1, *(index + 1 for index in (*found, *self._damaged))])
        if is_old or not whole:
            self._image = _image(found)
            try:
                self._replace()
            except OSError as error:  # tried again before the next write
                self._report(f"CURSORS({self.path}): could not be written anew: {error}")
        else:
            self.file.changed()  # a process that was killed may not have synced it
        used = [slot for slot, in_use in found.values() if in_use]
        self._free.update((slot.index, slot.generation) for slot, in_use in found.values() if not in_use)
        for index in range(self.slots):
            if index not in found:
                self._give_up(index)
        return used

    def _read(self, raw: bytearray) -> dict[int, tuple[Slot, bool]]:
        """Reads the slots of which at least one place is intact."""
        found: dict[int, tuple[Slot, bool]] = {}
        pairs = -(-len(raw) // (2 * PAGE_BYTES))
        for index in range(pairs * SLOTS_PER_PAGE):
            places = [_read_place(raw, _offset(index, place)) for place in (0, 1)]
            intact = [place for place in places if place is not None]
            if not intact:
                continue
            slot, in_use = max(intact, key=lambda place: place[0].generation)
            slot.index = index
            if len(intact) < 2:
                self._damaged[index] = slot
                self._report(f"CURSORS({self.path}): one of the two copies of slot {index} is damaged; it has another")
            if slot.state_number and in_use:
                self._load_state(slot)
            slot.stored, slot.stored_position = (slot.deferred, slot.state, in_use), slot.position
            found[index] = (slot, in_use)
        # The first slot of each pair of pages was written when the file grew by them.
        for index in range(0, pairs * SLOTS_PER_PAGE, SLOTS_PER_PAGE):
            if index not in found and len(raw) > _offset(index, 0):
                self._give_up(index)
        return found

    def _give_up(self, index: int) -> None:
        if index in self._damaged:
            return
        self.lost = True
        self._damaged[index] = None
        if index > 0:
            self._free[index] = 0
        what = "a channel" if index else "the topic"
        self._report(f"CURSORS({self.path}): both copies of slot {index} are damaged: the state of {what} is lost")

    def expect(self, slots: int) -> None:
        """Is told how many slots there should be; a file that was cut has fewer."""
        for index in range(self.slots, slots):
            self._give_up(index)
        self.slots = max(self.slots, slots)

    def _load_state(self, slot: Slot) -> None:
        """Reads the state from the file that the slot names, or if that is gone, from one written later."""
        slot.brief = slot.state
        fitting = {number: state for number, state in self._states(slot.index).values() if number >= slot.state_number}
        if fitting:
            slot.state = fitting[min(fitting)]
        else:
            self._report(
                f"CURSORS({self.path}): the file with the state of slot {slot.index} is lost;"
                " messages that were emptied may come again"
            )

    def _states(self, index: int) -> dict[int, tuple[int, bytes]]:
        """Reads the intact ones of the two files for a slot's state; returns number and state by place."""
        found: dict[int, tuple[int, bytes]] = {}
        for place in (0, 1):
            try:
                raw, _ = read_surviving(self._state_path(index, place), self._report)
            except FileNotFoundError:
                continue
            if len(raw) >= _STATE_HEAD.size and xxh3_64_intdigest(raw[8:]) == _STATE_HEAD.unpack_from(raw)[0]:
                found[place] = (_STATE_HEAD.unpack_from(raw)[1], bytes(raw[_STATE_HEAD.size :]))
        return found

    # -- writing -----------------------------------------------------------------------------------------

    def new_slot(self) -> Slot:
        if self._free:
            index, generation = self._free.popitem()
            return Slot(index, generation=generation)
        self.slots += 1
        return Slot(self.slots - 1)

    def topic_slot(self) -> Slot:
        return Slot(0)

    def write(self, slot: Slot, *, used: bool = True) -> None:
        """Stores a slot as it is now.

        A slot that only moved on is written to one of its places: the other then has an older position, from which
        nothing is lost.
        """
        if self._image is not None:
            self._replace()
        now = (slot.deferred, slot.state, used)
        moved_on = now == slot.stored and slot.position >= slot.stored_position
        if not moved_on:
            slot.stored = None
            self._store_state(slot)
        for _ in range(1 if moved_on else 2):
            self._write_place(slot, used)
        slot.stored, slot.stored_position = now, slot.position
        self._damaged.pop(slot.index, None)

    def move_on(self, slot: Slot, position: int) -> None:
        """Stores that a slot in use moved on, in a short way, since each busy channel does so once a turn."""
        slot.position = position
        generation = slot.generation + 1
        place = generation & 1
        inline = slot.brief if slot.state_number else slot.state
        is_plain = slot.stored is not None and position >= slot.stored_position
        if not is_plain or self._damaged or self._image is not None or slot.rest_written[place] != inline:
            self.write(slot)
            return
        self.file.write(_head(slot, generation, True, inline), _offset(slot.index, place))
        slot.generation, slot.stored_position = generation, position

    def _write_place(self, slot: Slot, used: bool) -> None:
        generation = slot.generation + 1
        place = generation & 1
        inline = slot.brief if slot.state_number else slot.state
        head = _head(slot, generation, used, inline)
        offset = _offset(slot.index, place)
        if slot.rest_written[place] == inline:
            self._write(head, offset)
        else:
            slot.rest_written[place] = b""
            self._write(head + inline, offset)
            slot.rest_written[place] = inline
        slot.generation = generation

    def _store_state(self, slot: Slot) -> None:
        """Writes the state to a file of its own if it does not fit; alternately to two, as a slot has two places."""
        if len(slot.state) <= STATE_BYTES_MAX:
            slot.state_number = 0
            return
        if len(slot.brief) > STATE_BYTES_MAX:
            raise OSError(errno.EFBIG, f"{len(slot.brief)} bytes of a slot's state, {STATE_BYTES_MAX} at most")
        numbers = {place: number for place, (number, _) in self._states(slot.index).items()}
        place = min((0, 1), key=lambda place: numbers.get(place, 0))
        number = max(numbers.values(), default=0) + 1
        body = number.to_bytes(8, "little") + slot.state
        write_atomically(self._state_path(slot.index, place), xxh3_64_intdigest(body).to_bytes(8, "little") + body)
        slot.state_number = number

    def _state_path(self, index: int, place: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{index}.{place}")

    def free(self, slot: Slot) -> None:
        """Clears both places of a slot, so that no older generation comes back."""
        slot.state, slot.stored = b"", None
        self.write(slot, used=False)
        self._free[slot.index] = slot.generation
        for place in (0, 1):
            with contextlib.suppress(OSError):  # the slot is free: what is left is not read, and written over
                self._state_path(slot.index, place).unlink()

    def repair(self) -> None:
        """Writes damaged places anew, once all that was in them is stored elsewhere."""
        for index, slot in list(self._damaged.items()):
            if slot is None:
                self.write(Slot(index), used=False)
            else:
                used = slot.stored is None or slot.stored[2]
                slot.stored = None
                self.write(slot, used=used)

    def _replace(self) -> None:
        assert self._image is not None
        write_atomically(self.path, self._image)
        self._image = None

    def _write(self, data: bytes, offset: int) -> None:
        if self.file.fd < 0:
            self.file.open(os.O_RDWR | os.O_CREAT)
        self.file.write(data, offset)

    def make_durable(self) -> None:
        """Makes the file durable here and now, or raises; to be called when no thread uses it."""
        if self.file.fd >= 0:
            self.file.make_durable()

    def close(self) -> None:
        self.file.close()


def _offset(index: int, place: int) -> int:
    pair, within = divmod(index, SLOTS_PER_PAGE)
    return (2 * pair + place) * PAGE_BYTES + within * SLOT_BYTES


def _head(slot: Slot, generation: int, used: bool, inline: bytes) -> bytes:
    head = _HEAD.pack(0, generation, slot.position, slot.deferred, slot.state_number, len(inline), used)
    return _checksum(head, inline, _SEED).to_bytes(8, "little") + head[8:]


def _checksum(head: bytes, state: bytes, seed: int) -> int:
    return xxh3_64_intdigest(state, seed=xxh3_64_intdigest(head[8:], seed=seed))


def _read_place(raw: bytearray, offset: int) -> tuple[Slot, bool] | None:
    """Returns the slot at an offset and whether it is in use, or None if it is not intact."""
    piece = bytes(raw[offset : offset + SLOT_BYTES])
    if len(piece) < _HEAD.size:
        return None
    check, generation, position, deferred, state_number, size, used = _HEAD.unpack_from(piece)
    state = piece[_HEAD.size : _HEAD.size + size]
    if _checksum(piece[: _HEAD.size], state, _SEED) != check:
        return None
    return Slot(0, position, deferred, state, b"", generation, state_number), bool(used)


def _read_format_1(raw: bytearray) -> dict[int, tuple[Slot, bool]]:
    """Reads the slots of a file in format 1; a file in another format gives none."""
    found: dict[int, tuple[Slot, bool]] = {}
    for number in range(-(-len(raw) // SLOT_BYTES)):
        piece = bytes(raw[number * SLOT_BYTES : (number + 1) * SLOT_BYTES])
        if len(piece) < _HEAD_1.size:
            continue
        check, generation, position, deferred, size, used = _HEAD_1.unpack_from(piece)
        state = piece[_HEAD_1.size : _HEAD_1.size + size]
        index = number // 2
        if _checksum(piece[: _HEAD_1.size], state, 0) != check:
            continue
        if index not in found or generation > found[index][0].generation:
            found[index] = (Slot(index, position, deferred, state, b"", generation), bool(used))
    return found


def _image(found: dict[int, tuple[Slot, bool]]) -> bytearray:
    """Makes the content of a file that has these slots in both places, and zeros elsewhere."""
    slots = max([1, *(index + 1 for index in found)])
    image = bytearray(-(-slots // SLOTS_PER_PAGE) * 2 * PAGE_BYTES)
    for index, (slot, used) in found.items():
        inline = slot.brief if slot.state_number else slot.state
        for _ in (0, 1):
            slot.generation += 1
            piece = _head(slot, slot.generation, used, inline) + inline
            offset = _offset(index, slot.generation & 1)
            image[offset : offset + len(piece)] = piece
        slot.stored, slot.stored_position = (slot.deferred, slot.state, used), slot.position
    return image
