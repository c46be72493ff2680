"""Keeps a channel's journal: attempts and due times of requeued messages, and what was parked when the floor passed it.

The file is records of 32 bytes, each with a check of its own (kernel/journal.py), so the next one is found behind one
that is damaged. In format 1 it was pieces of records with one checksum for each piece; such a file is read and written
anew.

While nsqd runs, a journal is made shorter in a file beside it, which takes its name once it is durable. What is noted
meanwhile goes to both, so that neither a crash nor a disk that fails costs more than the attempt.
"""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from xxhash import xxh32_intdigest

from nsquark.kernel.journal import JOURNAL_RECORD, from_format_1, keep_intact
from nsquark.log.durable import DurableFile
from nsquark.log.files import read_surviving, write_atomically
from nsquark.log.services import LogShared

COMPACT_BYTES_MIN = 4 << 20
"""A journal smaller than this is not worth rewriting; it is read in some 50 ms."""
REWRITE_FACTOR = 4
"""A journal is rewritten when it is this many times as long as needed; a parked message is noted twice at least."""
REPLACE_RETRY_S = 1.0
"""Another replacement is tried this long after one that failed."""
REPLACEMENT_SUFFIX = ".next.tmp"
"""Ends the names of replacements, which a start removes."""
_MAGIC_1 = b"NQJ1"
_PIECE_HEAD_BYTES = 12
"""A piece of format 1 begins with magic, bytes and checksum, of four bytes each."""
_RECORD_BYTES_1 = 24


class Journal:
    """Appends records to a file, which is rewritten when most of it is out of date. Its bytes count as used disk."""

    def __init__(self, shared: LogShared, path: Path, compact_bytes_min: int = COMPACT_BYTES_MIN) -> None:
        self._compact_bytes_min = compact_bytes_min
        self.path = path
        self.size = 0
        self.on_mended: Callable[[], None] = lambda: None
        """Is called when the journal can be written to again after a failed sync, and when it was replaced."""
        self._shared = shared
        self._file: DurableFile | None = None
        self._replacement: DurableFile | None = None
        self._replacement_bytes = 0
        self._replace_not_before_s = 0.0

    def load(self, delay_max_ms: int) -> bytearray:
        """Reads all intact records in order; those of format 1, which do not tell their delay, get `delay_max_ms`."""
        try:
            raw, whole = read_surviving(self.path, self._shared.report)
        except FileNotFoundError:
            return bytearray()
        size = len(raw)
        self._resize(size)
        old = _records_of_format_1(raw)
        if old is not None:
            records, lost = from_format_1(old[0], delay_max_ms), old[1]
        else:
            records = raw
            damaged = keep_intact(records)
            # A part of a record at the end is what a crash left of the last write, which nobody was told of.
            lost = f"{damaged} of {size // JOURNAL_RECORD.size} records" if damaged > (size % 32 > 0) else ""
        if lost:
            self._shared.report(f"JOURNAL({self.path}): {lost} are damaged and left out")
        if old is not None or not whole or len(records) != size:
            try:
                self.rewrite(records)
                return records
            except OSError as error:
                if old is not None:
                    raise  # records of both formats cannot be in one file
                self._shared.report(f"JOURNAL({self.path}): could not be written anew: {error}")
                self._resize(self.size - self.size % JOURNAL_RECORD.size)  # the next record begins where one may
        if records:
            self._file = self._durable_file(self.path)
            self._file.changed()  # a process that was killed may not have synced it
        return records

    def append(self, records: bytes | bytearray) -> None:
        if self._file is None:
            self._file = self._durable_file(self.path)
        if self._file.fd < 0:
            self._file.open(os.O_RDWR | os.O_CREAT)
        self._file.write(records, self.size)
        self._resize(self.size + len(records))
        if self._replacement is not None:
            self._append_to_replacement(self._replacement, records)

    def _durable_file(self, path: Path) -> DurableFile:
        file = DurableFile(self._shared.syncer, path)
        file.content_bytes = lambda: self.size
        file.on_mended = lambda: self.on_mended()
        return file

    def wants_rewrite(self, live_records: int) -> bool:
        """Tells whether most of the journal is out of date, given how many messages it has to remember."""
        is_long = self.size > max(self._compact_bytes_min, REWRITE_FACTOR * live_records * JOURNAL_RECORD.size)
        return is_long and self._replacement is None and time.monotonic() >= self._replace_not_before_s

    # -- replacing it while others are served ------------------------------------------------------------

    @property
    def is_being_replaced(self) -> bool:
        """Tells whether a replacement is on its way: meanwhile nothing may rely on a sync of what is appended."""
        return self._replacement is not None

    def replace_later(self, records: bytes | bytearray) -> None:
        """Lets `records`, and what is appended from now on, replace everything once they are durable. If the disk
        refuses them, all stays as it is.
        """
        file = self._replacement = self._durable_file(self.path.with_name(self.path.name + REPLACEMENT_SUFFIX))
        file.content_bytes = lambda: self.size if file is self._file else self._replacement_bytes
        file.on_sync_failed = lambda: self._give_up(file)
        self._replacement_bytes = 0
        try:
            file.open(os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        except OSError:
            self._give_up(file)
            return
        self._append_to_replacement(file, records)
        if self._replacement is file:
            file.hurry()
            file.when_synced(lambda: self._replace_by(file))

    def _append_to_replacement(self, file: DurableFile, records: bytes | bytearray) -> None:
        try:
            file.write(records, self._replacement_bytes)
            self._replacement_bytes += len(records)
        except OSError:
            self._give_up(file)

    def _replace_by(self, file: DurableFile) -> None:
        """Gives the replacement the journal's name."""
        if self._replacement is not file:
            return
        if self._file is not None and self._file.sync_error is not None:
            self._give_up(file)  # a copy that is being made of the journal would get the name back
            return
        try:
            file.rename(self.path)
        except OSError:
            self._give_up(file)
            return
        self._close_file()
        self._file, self._replacement = file, None
        self._resize(self._replacement_bytes)
        self.on_mended()

    def _give_up(self, file: DurableFile) -> None:
        """Removes a replacement, unless it is the journal by now."""
        if self._replacement is file:
            self._replacement = None
            self._replace_not_before_s = time.monotonic() + REPLACE_RETRY_S
            file.abandon()
            with contextlib.suppress(OSError):  # the next start removes it
                file.path.unlink()

    # -- replacing it here and now -----------------------------------------------------------------------

    def rewrite(self, records: bytes | bytearray) -> None:
        """Replaces everything by `records`, durably: parked messages rely on it."""
        if self._replacement is not None:
            self._give_up(self._replacement)
        before = _inode(self.path)
        unsound = self._file.sync_error if self._file is not None else None
        if unsound is not None:
            self._close_file()  # or the copy that is made of it would replace what is written here
        try:
            if records:
                write_atomically(self.path, records)
            else:
                self.path.unlink(missing_ok=True)
        except OSError:
            if unsound is not None and _inode(self.path) == before:
                self._file = self._durable_file(self.path)
                self._file.open(os.O_RDWR)
                self._file.failed(unsound)
            raise
        finally:
            # The file may be replaced although its name could not be synced: the old one is not to be written to, and
            # the name is to be synced with whatever is synced next.
            if _inode(self.path) != before:
                self._shared.syncer.directory(self.path.parent).changed()
                self._close_file()
                self._resize(len(records))

    def when_synced(self, callback: Callable[[], None]) -> None:
        """Calls back once all that was appended is durable, as soon as possible; not if it is rewritten meanwhile."""
        if self._file is None:
            callback()
            return
        self._file.hurry()
        self._file.when_synced(callback)

    def make_durable(self) -> None:
        """Makes the journal durable here and now, or raises; to be called when no thread uses it."""
        if self._file is not None:
            self._file.make_durable()

    def close(self) -> None:
        if self._replacement is not None:
            self._give_up(self._replacement)
        self._close_file()
        self._resize(0)

    def delete(self) -> None:
        """Deletes the journal of a channel that is gone. One that cannot be deleted, or comes back after a loss of
        power, is deleted before another channel gets its name.
        """
        self.close()
        with contextlib.suppress(OSError):
            self.delete_leftover()

    def delete_leftover(self) -> None:
        """Deletes a journal that an earlier channel of this name has left, or raises OSError."""
        try:
            self.path.unlink()
        except FileNotFoundError:
            return
        self._shared.syncer.directory(self.path.parent).changed()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.abandon()
            self._file = None

    def _resize(self, size: int) -> None:
        self._shared.disk_bytes += size - self.size
        self.size = size


def _inode(path: Path) -> int:
    """Returns the number of the file that a name stands for, or 0 if there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _records_of_format_1(raw: bytearray) -> tuple[bytes, str] | None:
    """Returns the records in the intact pieces of a file of format 1, and what is lost, or None if there is none."""
    records, found, damaged_bytes = bytearray(), False, 0
    pos = raw.find(_MAGIC_1)
    damaged_bytes = max(0, pos)
    while pos >= 0:
        size, check = (int.from_bytes(raw[at : at + 4], "little") for at in (pos + 4, pos + 8))
        piece = raw[pos + _PIECE_HEAD_BYTES : pos + _PIECE_HEAD_BYTES + size]
        if len(piece) == size and size % _RECORD_BYTES_1 == 0 and xxh32_intdigest(piece) == check:
            records += piece
            found = True
            end = pos + _PIECE_HEAD_BYTES + size
        else:
            end = pos + 1
            damaged_bytes += 1
        pos = raw.find(_MAGIC_1, end)
        if pos > end:
            damaged_bytes += pos - end
    return (bytes(records), f"{damaged_bytes} bytes" if damaged_bytes else "") if found else None
