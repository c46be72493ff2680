# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Keeps what one write brings to a log, and the order in which writes are made. The C types are in commits.pxd."""

from collections import deque

import cython

from nsquark.wire.batch_format import NO_TOKEN

UNCOMMITTED_BYTES_MAX = 8 << 20
"""While more than this waits for the disk, publishers are paused."""
_UNCOMMITTED_BYTES_MAX = cython.declare(cython.longlong, UNCOMMITTED_BYTES_MAX)


class Commit:
    """Collects the records of one write: it is open while messages are being added, then settled once, with an error or
    without.

    `slices` are parts of chunks, each from a record's index on.
    """

    def __init__(self, timestamp_ns: cython.longlong = 0):
        self.waiters = []
        self.is_settled = False
        self.error = None
        self.slices = []
        self.time_min_ns = timestamp_ns
        self.time_max_ns = timestamp_ns
        self.bytes_added = 0
        self.flags = 0
        self.token = NO_TOKEN

    def settle(self, error: object = None) -> None:
        """Tells everyone who waits for the commit how its write went."""
        self.is_settled = True
        self.error = error
        for waiter in self.waiters:
            waiter.settled(self)


class CommitQueue:
    """Brings the commits of one log to its file, in the order of their sequence numbers.

    * `writing` is the commit that is being written, at most one; only `written` or `fail` end that.
    * `waiting` are the commits that were closed meanwhile.
    * `open` is the last commit, which gets what is appended.
    * `uncommitted_bytes` is the sum of the bytes added to all these commits.
    """

    def __init__(self):
        self.open = None
        self.writing = None
        self.uncommitted_bytes = 0
        self.waiting = deque()

    def is_congested(self) -> cython.bint:
        """Tells whether publishers are to be paused until the disk has caught up."""
        return self.uncommitted_bytes > _UNCOMMITTED_BYTES_MAX

    @property
    def is_empty(self) -> cython.bint:
        return self.last is None

    @property
    def last(self) -> object:
        """Returns the commit after which everything that was appended by now is written, or None if it is already."""
        if self.open is not None:
            return self.open
        return self.waiting[len(self.waiting) - 1] if self.waiting else self.writing

    def uses(self, chunk: object) -> bool:
        """Tells whether records of a chunk are yet to be written."""
        return any(used is chunk for commit in self._all() for used, _ in commit.slices)

    def begin(self, timestamp_ns: cython.longlong):
        """Opens a commit; to be called only while none is open."""
        self.open = Commit(timestamp_ns)
        return self.open

    def added(self, size: cython.longlong, timestamp_ns: cython.longlong) -> cython.void:
        """Counts what was appended to the open commit."""
        commit: Commit = self.open
        commit.bytes_added += size
        self.uncommitted_bytes += size
        if timestamp_ns > commit.time_max_ns:
            commit.time_max_ns = timestamp_ns
        elif timestamp_ns < commit.time_min_ns:
            commit.time_min_ns = timestamp_ns

    def put_apart(self, commit: Commit) -> None:
        """Closes the open commit and puts one behind it that gets nothing more."""
        if self.open is not None:
            self.waiting.append(self.open)
            self.open = None
        self.waiting.append(commit)
        self.uncommitted_bytes += commit.bytes_added

    def start_next(self) -> object:
        """Makes the next commit in order the one that is being written, and returns it, or None if there is none."""
        if self.waiting:
            self.writing = self.waiting.popleft()
        else:
            self.writing = self.open
            self.open = None
        return self.writing

    def grew(self, size: cython.longlong) -> None:
        """Counts bytes that the commit being written turned out to have."""
        self.writing.bytes_added += size
        self.uncommitted_bytes += size

    def written(self) -> cython.void:
        """Ends the write that succeeded."""
        self.uncommitted_bytes -= self.writing.bytes_added
        self.writing = None

    def fail(self) -> list:
        """Ends the write that failed; returns its commit and all behind it, which are to be settled with the error."""
        failed: list = self._all()
        self.writing = None
        self.abandon()
        self.uncommitted_bytes = 0
        return failed

    def abandon(self) -> list:
        """Forgets all commits but the one being written; returns them, which are to be settled with an error."""
        writing: Commit = self.writing
        abandoned: list = [commit for commit in self._all() if commit is not writing]
        self.waiting.clear()
        self.open = None
        self.uncommitted_bytes = writing.bytes_added if writing is not None else 0
        return abandoned

    def _all(self) -> list:
        return [commit for commit in (self.writing, *self.waiting, self.open) if commit is not None]
