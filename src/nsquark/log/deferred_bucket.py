"""Keeps a bucket: one file with the deferred messages that are due within one minute, and notes of those that left it.

Its records are in log/deferred_records.py.
"""

import contextlib
import heapq
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from nsquark.log.deferred_appends import Appends
from nsquark.log.deferred_records import (
    BUCKET_MS,
    LEFT,
    MESSAGE,
    READ_BYTES,
    DamagedBytes,
    Record,
    encode,
    read_record,
    scan,
    wants_bytes,
)
from nsquark.log.durable import DurableFile
from nsquark.log.files import FILE_MODE, name_twice, set_aside, write_all
from nsquark.log.services import LogShared

SUFFIX = ".deferred"
WINDOW_BYTES = 64 << 10
"""This much of the file is read at once for messages that are due."""
_MOVED = 0

Entry = tuple[int, int, int]
"""Has due ms, number and the offset of the record."""


class _Found:
    """Collects what a scan of the file has found so far."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.delays: dict[int, int] = {}
        self.left: dict[int, bytes] = {}
        self.highest = 0
        self.sound_to = 0
        """Is the highest number of a message before the first damage."""
        self.damages: list[DamagedBytes] = []
        self.unreadable: list[int] = []
        self.doubtful: set[int] = set()
        """Has the numbers of appends whose notes do not count."""
        self._last_note = 0

    def add(self, item: "Record | DamagedBytes") -> None:
        if isinstance(item, DamagedBytes):
            if not self.damages:
                self.sound_to = self.highest
            self.damages.append(item)
            # What is damaged may have cancelled the last note; to deliver twice is better than not at all.
            if self.left.pop(self._last_note, None) is not None:
                self.doubtful.add(self._last_note)
        elif item.is_message:
            self.entries[item.number] = (item.due_ms, item.number, item.offset)
            self.delays[item.number] = item.delay_ms
            self.highest = max(self.highest, item.number)
        elif item.number == _MOVED:
            self.left[_MOVED] = self.left.get(_MOVED, b"") + item.body
        else:
            self.left[item.number] = item.body
            self._last_note = item.number
            self.doubtful.discard(item.number)

    def doubt(self, appends: Appends) -> None:
        """Doubts appends that were lost while later ones were not: their notes must not count when `durable` passes."""
        lost = (number for number in self.left if number != _MOVED and number <= appends.last)
        self.doubtful.update(number for number in lost if not appends.happened(number))

    def waiting(self, appends: Appends) -> list[Entry]:
        for append_number, numbers in self.left.items():
            if append_number == _MOVED or appends.happened(append_number):
                for start in range(0, len(numbers), 8):
                    self.entries.pop(int.from_bytes(numbers[start : start + 8], "little"), None)
        return list(self.entries.values())


class DeferredBucket:
    """Keeps messages that are due within one minute. `waiting` is a heap, or None while it is not loaded; without a
    path all is in memory.
    """

    def __init__(self, shared: LogShared, key: int, path: Path | None) -> None:
        self.key = key
        self.path = path
        self.count = 0
        self.lowest = 0
        """No message that was ever here has a lower number; it is 0 if there was none."""
        self.is_leaving = False
        """Tells whether the bucket, empty and its minute over, only stays until its messages are durable in the log."""
        self.waiting: list[Entry] | None = [] if path is None else None
        self.file: DurableFile | None = None
        self._shared = shared
        self._memory: dict[int, tuple[int, bytes]] = {}
        self._delays: dict[int, int] = {}
        self._size = 0
        self._window = bytearray()
        self._window_at = 0
        self._undurable: dict[Callable[[Exception | None], None], None] = {}
        self._loading: Iterator[Record | DamagedBytes] | None = None
        self._found = _Found()
        self._is_damaged = False
        """Tells whether the file is all that is left of messages that could not be read."""
        if path is not None:
            self.file = self._durable_file(path)
            self.file.open(os.O_RDWR | os.O_CREAT)
            self.file.changed()  # a file that was there may never have been synced
            self._size = os.fstat(self.fd).st_size
            shared.disk_bytes += self._size

    def _durable_file(self, path: Path) -> DurableFile:
        file = DurableFile(self._shared.syncer, path)
        file.content_bytes = lambda: self._size
        file.on_sync_failed = self._sync_failed
        return file

    @property
    def fd(self) -> int:
        assert self.file is not None
        return self.file.fd

    @property
    def starts_ms(self) -> int:
        return self.key * BUCKET_MS

    @property
    def ends_ms(self) -> int:
        return (self.key + 1) * BUCKET_MS

    # -- messages ----------------------------------------------------------------------------------------

    def add(self, due_ms: int, delay_ms: int, timestamp_ns: int, number: int, body: bytes) -> None:
        offset = self._size
        if self.path is None:
            self._memory[number] = (timestamp_ns, body)
        else:
            self._write(MESSAGE, due_ms, delay_ms, timestamp_ns, number, body)
        self.count += 1
        self.lowest = min(self.lowest or number, number)
        if self.waiting is not None:
            heapq.heappush(self.waiting, (due_ms, number, offset))
        elif self._loading is not None:
            self._found.entries[number] = (due_ms, number, offset)

    def pop_due(self, now_ms: int, count: int) -> list[Entry]:
        """Removes and returns at most `count` of those that are due."""
        entries: list[Entry] = []
        while self.waiting and self.waiting[0][0] <= now_ms and len(entries) < count:
            entries.append(heapq.heappop(self.waiting))
        return entries

    def push(self, entries: list[Entry]) -> None:
        assert self.waiting is not None
        for entry in entries:
            heapq.heappush(self.waiting, entry)

    def note_append(self, append_number: int, entries: list[Entry]) -> None:
        if self.path is not None:
            numbers = b"".join(entry[1].to_bytes(8, "little") for entry in entries)
            self._write(LEFT, 0, 0, 0, append_number, numbers)

    def note_due(self, entry: Entry, due_ms: int, delay_ms: int, timestamp_ns: int, body: bytes) -> None:
        """Stores another due time, within the same minute, of a message that is known to be due then: of two records
        with one number the later counts.
        """
        self._write(MESSAGE, due_ms, delay_ms, timestamp_ns, entry[1], body)

    def note_moved(self, entries: list[Entry]) -> None:
        """Notes that messages are durable in another bucket."""
        self.note_append(_MOVED, entries)
        self.forget_moved(entries)

    def forget_moved(self, entries: list[Entry]) -> None:
        """Leaves messages to another bucket; until that is noted, the next start finds them here too."""
        moved = {entry[1] for entry in entries}
        self.waiting = [entry for entry in self.waiting or () if entry[1] not in moved]
        heapq.heapify(self.waiting)
        self.count = len(self.waiting)

    def later_than_asked(self, now_ms: int) -> list[tuple[Entry, int]]:
        """Lists, right after loading, the messages that wait for longer than their delays, with these delays.

        They are in time from here on, as long as this bucket stays loaded.
        """
        assert self.waiting is not None
        late = [(entry, self._delays[entry[1]]) for entry in self.waiting if entry[0] - now_ms > self._delays[entry[1]]]
        if late:
            due = {entry[1]: now_ms + delay_ms for entry, delay_ms in late}
            self.waiting = [(due.get(entry[1], entry[0]), *entry[1:]) for entry in self.waiting]
            heapq.heapify(self.waiting)
        self._delays = {}
        return late

    def read(self, entry: Entry) -> tuple[int, bytes] | None:
        """Returns timestamp and body of a message, or None if it is damaged, which is reported."""
        if self.path is None:
            return self._memory[entry[1]]
        offset = entry[2]
        record = read_record(self._window, offset - self._window_at, self._window_at) if self._is_near(offset) else None
        if record is None:
            record = self._read_at(offset)
        if record is None or record.number != entry[1]:
            self._shared.report(f"DEFERRED({self.path}): the message at {offset} is damaged and lost")
            return None
        return record.timestamp_ns, record.body

    def _is_near(self, offset: int) -> bool:
        return self._window_at <= offset < self._window_at + len(self._window)

    def _read_at(self, offset: int) -> Record | None:
        """Reads a record, with those behind it, which are mostly due next."""
        window = bytearray(os.pread(self.fd, WINDOW_BYTES, offset))
        wanted = wants_bytes(window, 0, self._size - offset)
        if wanted > len(window):
            return read_record(window + os.pread(self.fd, wanted - len(window), offset + len(window)), 0, offset)
        self._window, self._window_at = window, offset
        return read_record(window, 0, offset)

    def forget(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._memory.pop(entry[1], None)

    # -- durability --------------------------------------------------------------------------------------

    def when_durable(self, done: Callable[[Exception | None], None]) -> None:
        """Calls back once all that is in the bucket is on disk, or with an error if the disk refuses."""

        def synced() -> None:
            if self._undurable.pop(done, True) is None:
                done(None)

        assert self.file is not None
        self._undurable[done] = None
        self.file.hurry()
        self.file.when_synced(synced)

    def _sync_failed(self) -> None:
        """Is told that a sync failed. If writing the file anew failed too, everyone who waits is told."""
        assert self.file is not None
        if self.file.attempts:
            undurable, self._undurable = self._undurable, {}
            for done in undurable:
                done(self.file.sync_error)

    # -- the index ---------------------------------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        return self._loading is not None

    def load(self, appends: Appends) -> int:
        """Builds the index from the file; returns the highest number of a message that was ever in it."""
        if self.path is None:
            return 0
        while not self.load_some(appends, READ_BYTES):
            pass
        return self._found.highest

    def load_some(self, appends: Appends, records: int) -> bool:
        """Looks at up to `records` records, and makes the index when these were the last; returns whether they were.

        If the file cannot be read for another reason than damage, this raises OSError, and the next call begins anew.
        """
        if self._loading is None:
            assert self.path is not None
            self._found = _Found()
            self._loading = scan(self.fd, self.path, self._size, self.key, self._found.unreadable)
        try:
            for _ in range(records):
                item = next(self._loading, None)
                if item is None:
                    self._loading = None
                    self._loaded(appends)
                    self._mend()
                    return True
                self._found.add(item)
        except OSError:
            self._loading = None  # a generator that raised would pass for one that has come to its end
            raise
        return False

    @property
    def missing_from(self) -> int:
        """Returns a number below which nothing proved to be missing when the bucket was loaded."""
        return max(self.lowest, self._found.sound_to + 1)

    def _loaded(self, appends: Appends) -> None:
        self._delays = self._found.delays
        if self._found.entries:
            lowest = min(self._found.entries)
            self.lowest = min(self.lowest or lowest, lowest)
        self.waiting = self._found.waiting(appends)
        self._found.doubt(appends)
        heapq.heapify(self.waiting)
        self.count = len(self.waiting)

    def _mend(self) -> None:
        """Cuts off a torn end; if there is other damage, what is intact is written to a new file."""
        damages, unreadable = self._found.damages, self._found.unreadable
        if damages and damages[-1].end == self._size and not unreadable and not self._found.doubtful:
            torn = damages.pop()
            try:
                os.ftruncate(self.fd, torn.offset)
                outcome = "cut off"
            except OSError as error:  # what comes next is written over it
                outcome = f"could not be cut off ({error})"
            self._shared.report(f"DEFERRED({self.path}): bytes {torn.offset} to {torn.end} {outcome}: torn end")
            self._shared.disk_bytes -= torn.end - torn.offset
            self._size = torn.offset
        if damages:
            reason = "cannot be read" if unreadable else "are damaged"
            for damage in damages:
                self._shared.report(
                    f"DEFERRED({self.path}): bytes {damage.offset} to {damage.end} {reason}:"
                    " the messages in them are lost"
                )
            self._salvage(damages)

    def _salvage(self, damages: list[DamagedBytes]) -> None:
        """Writes what is intact to a new file, and uses that from the moment it has the name; the syncer makes the name
        durable. Doubtful notes are cancelled first: without the damage nothing would tell that they are doubtful.
        """
        assert self.path is not None and self.file is not None
        self._is_damaged = True
        if self.file.is_in_use or self.file.sync_error is not None:
            return  # it is being written anew for another reason
        temporary = self.path.with_suffix(".tmp")
        fd = -1
        try:
            for append_number in self._found.doubtful:
                self.note_append(append_number, [])
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
            size = self._copy_intact(damages, fd)
            os.fsync(fd)
            name_twice(self.path)
            os.replace(temporary, self.path)
        except OSError as error:  # the damaged file can be used as it is
            self._shared.report(f"DEFERRED({self.path}): could not be written anew: {error}")
            if fd >= 0:
                os.close(fd)
                with contextlib.suppress(OSError):  # the next start removes it
                    temporary.unlink(missing_ok=True)
            return
        self._is_damaged = False
        self.file.abandon()
        self.file = self._durable_file(self.path)
        self._shared.disk_bytes += size - self._size
        self._size = size
        self.file.adopt(fd)
        self._window = bytearray()
        self._offsets_moved(damages)
        undurable, self._undurable = self._undurable, {}
        for done in undurable:
            self.when_durable(done)

    def _copy_intact(self, damages: list[DamagedBytes], target: int) -> int:
        """Copies all but the damages to another file; returns how many bytes these are."""
        ends = [0, *(damage.end for damage in damages)]
        starts = [*(damage.offset for damage in damages), self._size]
        size = 0
        for low, high in zip(ends, starts, strict=True):
            for at in range(low, high, READ_BYTES):
                piece = os.pread(self.fd, min(READ_BYTES, high - at), at)
                write_all(target, piece, size)
                size += len(piece)
        return size

    def _offsets_moved(self, damages: list[DamagedBytes]) -> None:
        def moved(offset: int) -> int:
            return offset - sum(damage.end - damage.offset for damage in damages if damage.offset < offset)

        self.waiting = [(due_ms, number, moved(offset)) for due_ms, number, offset in self.waiting or ()]
        heapq.heapify(self.waiting)

    def unload(self) -> None:
        self._found = _Found()
        self._delays = {}
        self._window = bytearray()
        if self.path is not None:
            self.waiting = None

    # -- the file ----------------------------------------------------------------------------------------

    def _write(self, kind: int, due_ms: int, delay_ms: int, timestamp_ns: int, number: int, body: bytes) -> None:
        record = encode(kind, due_ms, delay_ms, timestamp_ns, number, body)
        if kind == MESSAGE:  # notes are what makes room
            self._shared.require_room(len(record))
        assert self.file is not None
        self.file.require_sound()
        try:
            self.file.write(record, self._size)
        except OSError:
            os.ftruncate(self.fd, self._size)
            raise
        self._size += len(record)
        self._shared.disk_bytes += len(record)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        self._shared.disk_bytes -= self._size
        self._size = 0

    def abandon(self) -> None:
        """Closes a file that is deleted, or about to be."""
        if self.file is not None:
            self.file.abandon()
        self.close()

    def delete(self) -> None:
        self.abandon()
        if self.path is not None and self._is_damaged:
            with contextlib.suppress(OSError):
                set_aside(self.path)
        elif self.path is not None:
            self.path.unlink(missing_ok=True)
