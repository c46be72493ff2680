"""Messages published with a delay (DPUB): they wait in files of their own and enter the log when due.

In the log they would pin every segment for as long as the longest delay. Each file (a bucket) holds what is due within
one minute, and only the buckets of this minute and the next have an index in memory. When messages come due, first
their numbers are noted in the bucket as append N, then they are appended to the log in a batch that carries N: after a
crash the log tells whether the last noted append happened. If the log refuses, an empty note of the same N takes the
first one back, so of several notes of one N in a bucket the last counts.
"""

import heapq
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from xxhash import xxh3_64_intdigest

from nsquark.log.files import DIRECTORY_MODE, FILE_MODE, sync_directory, write_all

BUCKET_MS = 60_000
DUE_MESSAGES_MAX = 1024
_SUFFIX = ".deferred"
_HEAD = struct.Struct("<QIIqqQ")  # checksum, kind, body bytes, due ms, timestamp ns, number
_MESSAGE = 1
_APPENDED = 2

Entry = tuple[int, int, int]  # due ms, number, offset of the record


class Due:
    """Messages that are due: to be appended to the log as append `append_number`, then `confirm`ed or `put_back`."""

    def __init__(self, bucket: "_Bucket", append_number: int, entries: list[Entry]) -> None:
        self.bucket = bucket
        self.append_number = append_number
        self.entries = entries
        self.messages = [(entry[1], *bucket.read(entry)) for entry in entries]
        """(number, timestamp in ns, body) of each."""


class _Bucket:
    """What is due within one minute. `waiting` is a heap once `load` was called."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.count = 0
        self.waiting: list[Entry] | None = [] if path is None else None
        self._memory: dict[int, tuple[int, bytes]] = {}
        self.fd = -1
        self._size = 0
        if path is not None:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)

    def add(self, due_ms: int, timestamp_ns: int, number: int, body: bytes) -> None:
        offset = self._size
        if self.path is None:
            self._memory[number] = (timestamp_ns, body)
        else:
            self._write(_MESSAGE, due_ms, timestamp_ns, number, body)
        self.count += 1
        if self.waiting is not None:
            heapq.heappush(self.waiting, (due_ms, number, offset))

    def note_append(self, append_number: int, entries: list[Entry]) -> None:
        if self.path is not None:
            numbers = b"".join(entry[1].to_bytes(8, "little") for entry in entries)
            self._write(_APPENDED, 0, 0, append_number, numbers)

    def read(self, entry: Entry) -> tuple[int, bytes]:
        if self.path is None:
            return self._memory[entry[1]]
        _, _, size, _, timestamp_ns, _ = _HEAD.unpack(os.pread(self.fd, _HEAD.size, entry[2]))
        return timestamp_ns, os.pread(self.fd, size, entry[2] + _HEAD.size)

    def forget(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._memory.pop(entry[1], None)

    def load(self, last_append: int) -> int:
        """Builds the index from the file; the highest number of a message in it, whether it still waits or not."""
        entries: dict[int, Entry] = {}
        appended: dict[int, bytes] = {}
        highest = 0
        for offset, kind, due_ms, number, body in self._scan():
            if kind == _MESSAGE:
                entries[number] = (due_ms, number, offset)
                highest = max(highest, number)
            else:
                appended[number] = body
        for append_number, numbers in appended.items():
            if append_number <= last_append:
                for start in range(0, len(numbers), 8):
                    entries.pop(int.from_bytes(numbers[start : start + 8], "little"), None)
        self.waiting = list(entries.values())
        heapq.heapify(self.waiting)
        self.count = len(self.waiting)
        return highest

    def unload(self) -> None:
        if self.path is not None:
            self.waiting = None

    def _scan(self) -> Iterator[tuple[int, int, int, int, bytes]]:
        assert self.path is not None
        raw = self.path.read_bytes()
        pos = 0
        while pos + _HEAD.size <= len(raw):
            check, kind, size, due_ms, _, number = _HEAD.unpack_from(raw, pos)
            end = pos + _HEAD.size + size
            if end > len(raw) or xxh3_64_intdigest(raw[pos + 8 : end]) != check:
                break  # a torn end: its publisher got no OK
            yield pos, kind, due_ms, number, raw[pos + _HEAD.size : end]
            pos = end
        if pos < len(raw):
            os.ftruncate(self.fd, pos)
        self._size = pos

    def _write(self, kind: int, due_ms: int, timestamp_ns: int, number: int, body: bytes) -> None:
        record = _HEAD.pack(0, kind, len(body), due_ms, timestamp_ns, number) + body
        record = xxh3_64_intdigest(record[8:]).to_bytes(8, "little") + record[8:]
        try:
            write_all(self.fd, record, self._size)
        except OSError:
            os.ftruncate(self.fd, self._size)
            raise
        self._size += len(record)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def delete(self) -> None:
        self.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class DeferredMessages:
    """What waits of one topic. `number` is the next message's; it only grows, since channels remember it."""

    def __init__(self, directory: Path | None, last_append: int, number_floor: int) -> None:
        self.number = number_floor
        self._directory = directory
        self._appends = last_append
        self._buckets: dict[int, _Bucket] = {}
        self._refused: Due | None = None
        self.found: list[int] = []
        """The numbers of what waited at the start, in order."""
        if directory is not None and directory.exists():
            for path in sorted(directory.glob(f"*{_SUFFIX}")):
                bucket = self._buckets[int(path.stem)] = _Bucket(path)
                self.number = max(self.number, bucket.load(last_append) + 1)
                self.found.extend(entry[1] for entry in bucket.waiting or ())
                bucket.unload()
        self.found.sort()

    @property
    def count(self) -> int:
        return sum(bucket.count for bucket in self._buckets.values())

    def add(self, body: bytes, timestamp_ns: int, due_ms: int) -> None:
        """Stores a message until it is due; raises OSError if that was not possible."""
        key = due_ms // BUCKET_MS
        bucket = self._buckets.get(key) or self._new_bucket(key)
        bucket.add(due_ms, timestamp_ns, self.number, body)
        self.number += 1

    def _new_bucket(self, key: int) -> _Bucket:
        path = None
        if self._directory is not None:
            self._directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
            path = self._directory / f"{key}{_SUFFIX}"
        bucket = self._buckets[key] = _Bucket(path)
        return bucket

    def next_due_ms(self, now_ms: int) -> int | None:
        """When the next message is due, or a bucket has to be looked into or can go; None if there is no bucket."""
        soonest: int | None = None
        for key, bucket in self._buckets.items():
            if bucket.waiting is None and key * BUCKET_MS <= now_ms + BUCKET_MS:
                bucket.load(self._appends)
            if bucket.waiting is None:
                due_ms = (key - 1) * BUCKET_MS
            else:
                due_ms = bucket.waiting[0][0] if bucket.waiting else (key + 1) * BUCKET_MS
            soonest = due_ms if soonest is None else min(soonest, due_ms)
        return soonest

    def take_due(self, now_ms: int) -> Due | None:
        """Some of what is due, noted as about to be appended; OSError if that cannot be noted."""
        if self._refused is not None:
            self._refused.bucket.note_append(self._refused.append_number, [])
            self._refused = None
        for key in sorted(self._buckets):
            bucket = self._buckets[key]
            if bucket.count == 0 and (key + 1) * BUCKET_MS <= now_ms:
                del self._buckets[key]
                bucket.delete()
            elif bucket.waiting and bucket.waiting[0][0] <= now_ms:
                return self._take(bucket, now_ms)
        return None

    def _take(self, bucket: _Bucket, now_ms: int) -> Due:
        assert bucket.waiting is not None
        entries: list[Entry] = []
        while bucket.waiting and bucket.waiting[0][0] <= now_ms and len(entries) < DUE_MESSAGES_MAX:
            entries.append(heapq.heappop(bucket.waiting))
        try:
            due = Due(bucket, self._appends + 1, entries)
            bucket.note_append(due.append_number, entries)
        except OSError:
            self._return(bucket, entries)
            raise
        bucket.count -= len(entries)
        return due

    def confirm(self, due: Due) -> None:
        """The log has them."""
        self._appends = due.append_number
        due.bucket.forget(due.entries)

    def put_back(self, due: Due) -> None:
        """The log did not take them: they are due again. The note is taken back before its number is used anew."""
        self._return(due.bucket, due.entries)
        due.bucket.count += len(due.entries)
        self._refused = due

    @staticmethod
    def _return(bucket: _Bucket, entries: list[Entry]) -> None:
        assert bucket.waiting is not None
        for entry in entries:
            heapq.heappush(bucket.waiting, entry)

    def syncing(self) -> Callable[[], None]:
        """What makes all that waits durable, to be run in a thread: the buckets may go meanwhile."""
        directory = self._directory
        fds = [os.dup(bucket.fd) for bucket in self._buckets.values() if bucket.fd >= 0]

        def sync() -> None:
            try:
                for fd in fds:
                    os.fdatasync(fd)
                if directory is not None and directory.exists():
                    sync_directory(directory)
            finally:
                for fd in fds:
                    os.close(fd)

        return sync

    def close(self) -> None:
        for bucket in self._buckets.values():
            bucket.close()
