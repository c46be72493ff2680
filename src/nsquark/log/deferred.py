"""Keeps messages published with a delay (DPUB): they wait in files of their own and enter the log when due.

In the log they would pin every segment for as long as the longest delay. Each file (a bucket, log/deferred_bucket.py)
has what is due within one minute, and only the buckets of this minute and the next have an index in memory. When
messages come due, first their numbers are noted in the bucket as append N, then they are appended to the log in a batch
that carries N: after a crash the log tells whether the last noted append happened. If the log refuses, an empty note of
the same N cancels the first one: of several notes of one N in a bucket the last counts.

Due times are of a clock that is not set while the machine runs. After a boot it may be anywhere, so each message also
has its delay: none waits for longer than that from the start of nsqd on.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

from nsquark.log.deferred_appends import Appends
from nsquark.log.deferred_bucket import SUFFIX, DeferredBucket, Entry
from nsquark.log.deferred_records import BUCKET_MS
from nsquark.log.durable import ANEW_SUFFIX
from nsquark.log.files import DIRECTORY_MODE, names_like
from nsquark.log.services import LogShared

DUE_MESSAGES_MAX = 128
"""At most this many messages are moved into the log at once: a few milliseconds of work."""
READ_RETRY_MS = 1000
LOAD_RECORDS_MAX = 4096
"""At most this many records of a bucket are looked at in one step."""


class Due:
    """Has messages that are due: they go to the log as append `append_number`, and are `confirm`ed or `put_back`."""

    def __init__(self, bucket: DeferredBucket, append_number: int, entries: list[Entry]) -> None:
        self.bucket = bucket
        self.append_number = append_number
        self.error: OSError | None = None
        self.messages: list[tuple[int, int, bytes]] = []
        """Has the number, timestamp in ns and body of each message."""
        self.lost: list[int] = []
        """Has the numbers of messages that proved to be damaged."""
        self.unreadable: list[Entry] = []
        """Has the messages that could not be read now; they are not part of `messages`."""
        for entry in entries:
            try:
                found = bucket.read(entry)
            except OSError as error:
                self.unreadable.append(entry)
                self.error = error
                continue
            if found is None:
                self.lost.append(entry[1])
            else:
                self.messages.append((entry[1], *found))
        self.entries = [entry for entry in entries if entry not in self.unreadable] if self.unreadable else entries


class DeferredMessages:
    """Keeps a topic's deferred messages. `number` is the next one's; it only grows, since channels remember it."""

    def __init__(
        self,
        shared: LogShared,
        directory: Path | None,
        appends: Appends,
        number_min: int,
        now_ms: int,
        due_messages_max: int = DUE_MESSAGES_MAX,
    ) -> None:
        self._due_messages_max = due_messages_max
        self.number = number_min
        self._shared = shared
        self._directory = directory
        self.appends = appends
        self._buckets: dict[int, DeferredBucket] = {}
        self._refused: Due | None = None
        self._load_again_ms = 0
        self.when_log_synced: Callable[[Callable[[], None]], None] = lambda callback: callback()
        """Calls back once all that the log has by now is durable."""
        self.on_missing: Callable[[int, int], None] = lambda number, count: None
        """Is told that `count` messages fewer wait than was known, or more if it is negative; all from `number` on."""
        self.found: list[int] = []
        """Has the numbers of the messages that waited at the start, in order."""
        if directory is not None and directory.exists():
            self._open_existing(directory, now_ms)

    def _open_existing(self, directory: Path, now_ms: int) -> None:
        for leftover in names_like(directory, "*.tmp", f"*{ANEW_SUFFIX}"):
            leftover.unlink(missing_ok=True)
        try:
            for path in names_like(directory, f"*{SUFFIX}"):
                if path.stem.isdecimal() and path.stem.isascii():
                    self._open_bucket(path)
            self.found.sort()
            self._drop_copies()
            for bucket in list(self._buckets.values()):
                if self._bring_forward(bucket, now_ms):
                    bucket.unload()
        except BaseException:
            self.abandon()  # if one cannot be opened, none stays open: it is tried again and again
            raise

    def _open_bucket(self, path: Path) -> None:
        bucket = DeferredBucket(self._shared, int(path.stem), path)
        try:
            self.number = max(self.number, bucket.load(self.appends) + 1)
        except BaseException:
            bucket.abandon()
            raise
        self._buckets[bucket.key] = bucket
        self.found.extend(entry[1] for entry in bucket.waiting or ())

    def _bring_forward(self, bucket: DeferredBucket, now_ms: int) -> bool:
        """Moves messages that would wait for longer than their delays, since the clock was ahead, to their right
        buckets.

        Returns False if that is not possible: then the bucket has to stay loaded, since only memory has the right
        times.
        """
        late = bucket.later_than_asked(now_ms)
        if not late:
            return True
        self._shared.report(f"DEFERRED({bucket.path}): {len(late)} messages are due too late for their delays: moved")
        moved: list[Entry] = []
        lost: list[Entry] = []
        try:
            for entry, delay_ms in late:
                found = bucket.read(entry)
                due_ms = now_ms + delay_ms
                if found is None:
                    lost.append(entry)
                elif due_ms // BUCKET_MS == bucket.key:
                    bucket.note_due(entry, due_ms, delay_ms, *found)
                else:
                    self._bucket_of(due_ms).add(due_ms, delay_ms, found[0], entry[1], found[1])
                    moved.append(entry)
            if moved or lost:
                self._note_moved(bucket, moved + lost)
        except OSError as error:  # a full disk, or one that does not confirm: they are delivered in time all the same
            self._shared.report(f"DEFERRED({bucket.path}): not all could be moved, or not durably: {error}")
            self._note_when_safe(bucket, moved)
            return False
        return True

    def _drop_copies(self) -> None:
        """Drops messages from the bucket in which a start found them and from which it moved them, if it was killed
        before it could note that.

        Two copies have one number and one publish time. The number alone may belong to two messages, if a bucket was
        moved away for a while.
        """
        twice = {number for number, following in pairwise(self.found) if number == following}
        first_ns: dict[int, int] = {}
        for key in sorted(self._buckets) if twice else ():
            bucket = self._buckets[key]
            times = {entry: _timestamp_ns(bucket, entry) for entry in bucket.waiting or () if entry[1] in twice}
            copies = [entry for entry, time_ns in times.items() if time_ns and time_ns == first_ns.get(entry[1])]
            for entry, time_ns in times.items():
                first_ns.setdefault(entry[1], time_ns)
            if copies:
                try:
                    self._note_moved(bucket, copies)
                except OSError as error:
                    self._shared.report(f"DEFERRED({bucket.path}): not noted that messages were moved: {error}")
                    self._note_when_safe(bucket, copies)
        if twice:
            self.found = sorted(entry[1] for bucket in self._buckets.values() for entry in bucket.waiting or ())

    def _note_moved(self, bucket: DeferredBucket, entries: list[Entry]) -> None:
        """Notes that messages are in another bucket, which is made durable before; a bucket that is empty then goes."""
        self.make_durable()
        bucket.note_moved(entries)
        if bucket.count == 0:
            del self._buckets[bucket.key]
            bucket.delete()

    def _note_when_safe(self, bucket: DeferredBucket, moved: list[Entry]) -> None:
        """Lets messages wait where they were moved to, and notes that in their old bucket once they are durable."""
        bucket.forget_moved(moved)
        unsafe = {other.key for other in self._buckets.values()}

        def is_safe(key: int) -> None:
            unsafe.discard(key)
            if not unsafe and self._buckets.get(bucket.key) is bucket:
                try:
                    bucket.note_moved(moved)
                except OSError as error:  # without the note they come again after another start
                    self._shared.report(f"DEFERRED({bucket.path}): not noted that messages were moved: {error}")

        for other in list(self._buckets.values()):
            if other.file is not None:
                other.file.when_synced(partial(is_safe, other.key))

    @property
    def count(self) -> int:
        return sum(bucket.count for bucket in self._buckets.values())

    def add(self, body: bytes, timestamp_ns: int, now_ms: int, delay_ms: int) -> DeferredBucket:
        """Stores a message until it is due, and returns its bucket; raises OSError if that is not possible."""
        due_ms = now_ms + delay_ms
        bucket = self._bucket_of(due_ms)
        bucket.add(due_ms, delay_ms, timestamp_ns, self.number, body)
        self.number += 1
        return bucket

    def _bucket_of(self, due_ms: int) -> DeferredBucket:
        key = due_ms // BUCKET_MS
        found = self._buckets.get(key)
        if found is not None:
            return found
        path = None
        if self._directory is not None:
            if not self._directory.exists():
                self._directory.mkdir(mode=DIRECTORY_MODE)
                self._shared.syncer.directory(self._directory.parent).changed()
            path = self._directory / f"{key}{SUFFIX}"
        bucket = self._buckets[key] = DeferredBucket(self._shared, key, path)
        bucket.load(self.appends)
        return bucket

    def load_near(self, now_ms: int) -> None:
        """Reads some of the buckets whose time is near and that are not in memory; to be called again and again."""
        if now_ms < self._load_again_ms:
            return
        for bucket in self._buckets.values():
            if bucket.waiting is None and bucket.starts_ms <= now_ms + BUCKET_MS:
                known = bucket.count
                try:
                    if bucket.load_some(self.appends, LOAD_RECORDS_MAX) and bucket.count != known:
                        self.on_missing(bucket.missing_from, known - bucket.count)
                except OSError as error:
                    self._load_again_ms = now_ms + READ_RETRY_MS
                    self._shared.report(f"DEFERRED({bucket.path}): reading failed: {error}; trying again")

    def next_due_ms(self, now_ms: int) -> int | None:
        """Returns when a message is due, or a bucket has to be looked into or can go, or None without a bucket."""
        soonest: int | None = None
        for bucket in self._buckets.values():
            if bucket.is_loading:
                due_ms = now_ms
            elif bucket.waiting is None:
                due_ms = bucket.starts_ms - BUCKET_MS
            elif bucket.is_leaving and not bucket.waiting:
                due_ms = now_ms + BUCKET_MS
            else:
                due_ms = bucket.waiting[0][0] if bucket.waiting else bucket.ends_ms
            soonest = due_ms if soonest is None else min(soonest, due_ms)
        return soonest

    def next_due(self, now_ms: int) -> Due | None:
        """Returns some of what is due, noted as about to be appended; raises OSError if that cannot be noted."""
        if self._refused is not None:
            self._refused.bucket.note_append(self._refused.append_number, [])
            self._refused = None
        for key in sorted(self._buckets):
            bucket = self._buckets[key]
            if bucket.count == 0 and bucket.ends_ms <= now_ms:
                self._remove_when_safe(bucket)
            elif bucket.waiting and bucket.waiting[0][0] <= now_ms:
                return self._due_of(bucket, now_ms)
        return None

    def _remove_when_safe(self, bucket: DeferredBucket) -> None:
        """Removes a bucket once the log, which has its messages, is durable: until then only the bucket is safe."""

        def remove() -> None:
            bucket.is_leaving = False
            if bucket.count == 0 and self._buckets.get(bucket.key) is bucket:
                del self._buckets[bucket.key]
                bucket.delete()

        if not bucket.is_leaving:
            bucket.is_leaving = True
            self.when_log_synced(remove)

    def _due_of(self, bucket: DeferredBucket, now_ms: int) -> Due | None:
        entries = bucket.pop_due(now_ms, self._due_messages_max)
        due = Due(bucket, self.appends.last + 1, entries)
        if due.unreadable:
            self._shared.report(f"DEFERRED({bucket.path}): reading failed: {due.error}; trying again")
            bucket.push([(now_ms + READ_RETRY_MS, *entry[1:]) for entry in due.unreadable])
        if not due.entries:
            return None
        try:
            bucket.note_append(due.append_number, due.entries)
        except OSError:
            bucket.push(due.entries)
            raise
        bucket.count -= len(due.entries)
        return due

    def confirm(self, due: Due) -> None:
        """Is told that the log has these messages."""
        number = due.append_number
        self.appends.add(number)
        self.when_log_synced(lambda: self.appends.add_durable(number))
        due.bucket.forget(due.entries)

    def put_back(self, due: Due) -> None:
        """Makes messages due again that the log refused. Their note is cancelled before its number is used again."""
        due.bucket.push(due.entries)
        due.bucket.count += len(due.entries)
        self._refused = due

    def waiting(self) -> Iterator[tuple[int, int, bytes]]:
        """Yields all that waits, as (number, timestamp in ns, body), by due time; nothing may change meanwhile."""
        for key in sorted(self._buckets):
            bucket = self._buckets[key]
            was_loaded = bucket.waiting is not None
            if not was_loaded:
                bucket.load(self.appends)
            for entry in sorted(bucket.waiting or ()):
                found = bucket.read(entry)
                if found is not None:
                    yield (entry[1], *found)
            if not was_loaded:
                bucket.unload()

    def make_durable(self) -> None:
        """Makes all that waits durable here and now, or raises; to be called when no thread uses the files."""
        for bucket in self._buckets.values():
            if bucket.file is not None:
                bucket.file.make_durable()

    def close(self) -> None:
        for bucket in self._buckets.values():
            bucket.close()

    def abandon(self) -> None:
        """Lets go of files that are about to be deleted, or are not used after all."""
        for bucket in self._buckets.values():
            bucket.abandon()


def _timestamp_ns(bucket: DeferredBucket, entry: Entry) -> int:
    """Returns when a message was published, or 0 if it cannot be read."""
    try:
        found = bucket.read(entry)
    except OSError:
        return 0
    return found[0] if found is not None else 0
