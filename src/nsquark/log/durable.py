"""Keeps files that must survive a power loss: whoever changes one says so, and the syncer makes it durable in the
background.

When a sync fails, the system counts the pages as clean although they are not on the disk: a second sync of them would
succeed and mean nothing. So there is one way out, for every file: its content is copied to a new file, that is synced,
renamed over the old one and used from then on. Until that has worked the file is not trusted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nsquark.log.files import FILE_MODE, write_all

if TYPE_CHECKING:
    from nsquark.log.syncer import Syncer

ANEW_SUFFIX = ".anew"
"""Ends the names of copies that are not finished; a start removes what is left of them."""
RETRY_S = 1.0
"""Writing a file anew is tried again this long after an attempt that failed."""
COPY_BYTES = 1 << 20


class SyncFailed(OSError):
    """Says that the disk did not confirm what was written to a file."""


class Directory:
    """Makes the entries of a directory durable with the files in it, and its own entry with them."""

    def __init__(self, path: Path, parent: Directory | None) -> None:
        self.path = path
        self._parent = parent
        self._changes = 1  # at a start nobody knows whether its entries were ever synced
        self._synced = 0
        self.device = -1

    def changed(self) -> None:
        """Is told that a name was added, replaced or removed."""
        self._changes += 1

    def sync(self) -> None:
        """Makes the directory's entries durable; it runs in threads."""
        if self._parent is not None:
            self._parent.sync()
        changes = self._changes
        if changes == self._synced:
            return
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            raise SyncFailed(error.errno, f"{self.path}: {error.strerror}") from error
        finally:
            os.close(fd)
        self._synced = changes

    def unsynced(self) -> list[tuple[Directory, int]]:
        """Lists the directories that a sync of the whole file system would make durable now."""
        above = self._parent.unsynced() if self._parent is not None else []
        return [*above, (self, self._changes)] if self._changes != self._synced else above

    def became_durable(self, changes: int) -> None:
        self._synced = changes

    def is_on(self, device: int) -> bool:
        if self.device < 0:
            self.device = os.stat(self.path).st_dev
        return self.device == device


class DurableFile:
    """Keeps one file, open as `fd`, that must survive a power loss. All but `sync` is called in the event loop's
    thread.

    * `is_changed` says that something was written which no sync under way covers.
    * After a failed sync, until it is written anew (`sync_error` says why), nothing may be written to it.
    """

    def __init__(self, syncer: Syncer, path: Path) -> None:
        self.path = path
        self.directory = syncer.directory(path.parent)
        self.fd = -1
        self.is_changed = False
        self.sync_error: Exception | None = None
        self.is_written_in_thread = False
        """Tells whether a thread writes to the file, which then must not be copied yet."""
        self.content_bytes: Callable[[], int] | None = None
        """Returns how many bytes of the file count; all do if this is not set."""
        self.after_sync: Callable[[], Callable[[], None] | None] = lambda: None
        """Is asked as a sync begins what to do in the thread when it has succeeded."""
        self.on_sync_failed: Callable[[], None] = lambda: None
        self.on_mended: Callable[[], None] = lambda: None
        self._syncer = syncer
        self.attempts = 0
        """Counts how often writing the file anew has failed since a sync failed."""
        self._mended_s = float("-inf")
        self._waiting: list[Callable[[], None]] = []
        self._covered: list[Callable[[], None]] = []
        self._users = 0
        self._is_closed = False
        self._is_abandoned = False
        self._naming = threading.Lock()
        """Is locked while a copy gets the file's name, which it must not get once the file is abandoned."""

    def open(self, flags: int) -> None:
        """Opens the file; one that is created becomes durable with its name."""
        self.fd = os.open(self.path, flags | os.O_CLOEXEC, FILE_MODE)
        self._is_closed = False
        if flags & os.O_CREAT:
            self.directory.changed()

    def adopt(self, fd: int) -> None:
        """Uses a new file that is open as `fd` and has got the name, which is to be durable with it."""
        self.fd = fd
        self.directory.changed()
        self.changed()

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Writes all of `data`, or raises."""
        if self.sync_error is not None:
            self.require_sound()
        write_all(self.fd, data, offset)
        if not self.is_changed:
            self.changed()

    def require_sound(self) -> None:
        if self.sync_error is not None:
            raise OSError(
                errno.EIO, f"{self.path.name} could not be synced and is not written anew yet: {self.sync_error}"
            )

    def changed(self) -> None:
        """Is told that something was written, which is to be durable within --sync-timeout, or with the new file after
        a failed sync.
        """
        if not self.is_changed and self.sync_error is None:
            self.is_changed = True
            self._syncer.add(self)

    def rename(self, path: Path) -> None:
        """Gives the file another name in its directory, which is to be durable as soon as possible."""
        os.replace(self.path, path)
        self.path = path
        self.directory.changed()
        self.hurry()

    def hurry(self) -> None:
        """Lets the file become durable as soon as possible."""
        self.changed()
        self._syncer.hurry(self)

    def when_synced(self, callback: Callable[[], None]) -> None:
        """Calls back once all that is written by now is durable, which may be at once."""
        if self.is_changed or self.sync_error is not None:
            self._waiting.append(callback)
        elif self._users:
            self._covered.append(callback)
        else:
            callback()

    @property
    def is_durable(self) -> bool:
        return not self.is_changed and not self._users and self.sync_error is None

    def sync(self) -> None:
        """Makes what is written durable, with its name; it runs in threads.

        Whoever catches SyncFailed tells `failed`. Any other OSError comes from before the sync, which may be repeated.
        """
        with self._descriptor() as fd:
            sync_data(fd)
        self.directory.sync()

    @contextlib.contextmanager
    def _descriptor(self) -> Iterator[int]:
        """Yields the file's descriptor, or one that is opened for a moment if it has none."""
        if self.fd >= 0:
            yield self.fd
            return
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    # -- a round of the syncer ---------------------------------------------------------------------------

    def begin(self) -> Callable[[], None] | None:
        """Begins a sync that is about to run in a thread; returns what is to follow it there.

        This never raises: a round that had begun with some of its files only would never end.
        """
        self._users += 1
        self.is_changed = False
        self._covered, self._waiting = self._covered + self._waiting, []
        try:
            return self.after_sync()
        except Exception as error:  # an index: a start makes up for it
            self._syncer.report(f"LOG({self.path}): its index could not be made: {error}")
            return None

    def ended(self, error: Exception | None) -> None:
        covered, self._covered = self._covered, []
        self._leave()
        if self._is_closed:
            return
        if error is None and self.sync_error is None:
            for callback in covered:
                callback()
            return
        self._waiting = covered + self._waiting
        if isinstance(error, SyncFailed):
            self.failed(error)
        elif error is not None:  # it was not even tried, for want of a descriptor
            self._syncer.report(f"LOG({self.path}): not synced: {error}; trying again")
            self.changed()
        self.write_anew()

    def _leave(self) -> None:
        self._users -= 1
        if self._is_closed:
            self.close()

    # -- after a failed sync -----------------------------------------------------------------------------

    def failed(self, error: Exception) -> None:
        """Is told that a sync failed: the file's pages are not trusted again, its content goes to a new file."""
        first = self.sync_error is None
        self.sync_error = error
        self.is_changed = False
        self._syncer.mark_unsafe(self, error)
        self._syncer.report(f"LOG({self.path}): sync failed: {error}")
        if first:
            self.on_sync_failed()
            # A disk that fails every sync must not be busy with copies all the time.
            wait_s = self._mended_s + RETRY_S - time.monotonic()
            if wait_s > 0:
                self._syncer.later(wait_s, self.write_anew)
            else:
                self.write_anew()

    def write_anew(self) -> None:
        """Tries to write the file anew, unless a thread writes to it: whoever ends that write calls this again."""
        if self.sync_error is None or self._is_closed or self.is_written_in_thread or self._users:
            return
        self._users += 1
        fresh: list[int] = []
        size = self.content_bytes() if self.content_bytes is not None else -1
        self._syncer.run(lambda: self._copy(size, fresh), lambda error: self._written_anew(error, fresh))

    def _copy(self, size: int, fresh: list[int]) -> None:
        """Writes the first `size` bytes (-1: all) to a new file that gets the name; `fresh` gets its descriptor."""
        temporary = self.path.with_name(self.path.name + ANEW_SUFFIX)
        with self._descriptor() as source:
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
            try:
                _copy_content(source, fd, os.fstat(source).st_size if size < 0 else size)
                sync_data(fd)
                with self._naming:
                    if self._is_abandoned:
                        raise OSError(errno.ECANCELED, f"{self.path.name} is not used any more")
                    os.replace(temporary, self.path)
            except BaseException:
                os.close(fd)
                temporary.unlink(missing_ok=True)
                raise
        fresh.append(fd)
        self.directory.changed()
        self.directory.sync()

    def _swap(self, fresh: list[int]) -> None:
        """Puts the new file into use: it has the name already, whether or not that is durable."""
        if fresh:
            if self.fd >= 0:
                os.close(self.fd)
            self.fd = fresh[0]

    def _written_anew(self, error: Exception | None, fresh: list[int]) -> None:
        self._swap(fresh)
        self._leave()
        if self._is_closed:
            return
        if error is not None:
            self._not_written_anew(error)
            return
        self.sync_error = None
        self._mended_s = time.monotonic()
        self.attempts = 0
        self.became_durable()
        self._syncer.report(f"LOG({self.path}): written anew after a failed sync")
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()
        self.on_mended()

    def _not_written_anew(self, error: Exception) -> None:
        """Leaves the file out of the syncer's rounds until another attempt has worked."""
        self.sync_error = error
        self.is_changed = False
        self.attempts += 1
        self._syncer.mark_unsafe(self, error)
        self._syncer.report(f"LOG({self.path}): could not be written anew: {error}; trying again")
        self.on_sync_failed()
        self._syncer.later(RETRY_S, self.write_anew)

    # -- start and end -----------------------------------------------------------------------------------

    def make_durable(self) -> None:
        """Syncs the file here and now, or writes it anew; it is for a start and a clean stop, when no thread uses it.

        If neither is possible this raises, and what is left to do is done later.
        """
        if self.sync_error is None:
            try:
                self.sync()
            except SyncFailed as error:
                self.sync_error = error
        if self.sync_error is not None:
            fresh: list[int] = []
            try:
                self._copy(self.content_bytes() if self.content_bytes is not None else -1, fresh)
            except OSError as error:
                self._swap(fresh)
                self._not_written_anew(error)
                raise
            self._swap(fresh)
            self.sync_error = None
            self.attempts = 0
        self.became_durable()

    def became_durable(self) -> None:
        """Is told that all that was written is on the disk."""
        self.is_changed = False
        self._syncer.forget(self)

    @property
    def is_in_use(self) -> bool:
        """Tells whether a thread syncs or copies the file."""
        return self._users > 0

    def abandon(self) -> list[Callable[[], None]]:
        """Closes a file that is deleted or replaced, or about to be: it need not be durable, and no copy gets its name.

        Returns the callbacks that waited for it to be durable.
        """
        with self._naming:
            self._is_abandoned = True
        waiting, self._covered, self._waiting = self._covered + self._waiting, [], []
        self.is_changed = False
        self._syncer.forget(self)
        self.close()
        return waiting

    def close(self) -> None:
        """Closes the descriptor, once no thread uses it. What was written is still to be made durable."""
        self._is_closed = True
        if self.fd >= 0 and not self._users:
            os.close(self.fd)
            self.fd = -1


def sync_data(fd: int) -> None:
    """Syncs the content of a file that is relied on; a failure is SyncFailed, after which its pages are not trusted."""
    try:
        os.fdatasync(fd)
    except OSError as error:
        raise SyncFailed(error.errno, f"sync failed: {error.strerror}") from error


def _copy_content(source: int, target: int, size: int) -> None:
    for offset in range(0, size, COPY_BYTES):
        piece = os.pread(source, min(COPY_BYTES, size - offset), offset)
        write_all(target, piece, offset)
