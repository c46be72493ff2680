"""Appends exactly once: a partition's rows for a topic go to one nsqd's log all or none, however Spark retries.

Spark runs a task again after a failure, and a whole batch again after a restart. The token of an append makes the
second time harmless (docs/log-api.md). Two things are easy to get wrong here:

* The rows of a retried task come in another order if there is a shuffle before it. So whatever the token stands for
  must be the same for the same rows in any order: the token has the sum of their hashes, and where rows are cut into
  parts or pieces they are sorted by hash first. Cutting them as they come would lose some and double others when a
  retry finds the first piece done. Sorting also keeps two attempts that run at the same time from mixing their parts.
* A partition of the second attempt may have other rows, for example because a setting changed how many partitions
  there are. By number alone it would be taken for done, and its rows lost. With the hashes in its token it is
  appended: doubled at worst, never lost.
"""

from __future__ import annotations

import hashlib
import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from nsquark.spark.endpoint import Endpoint, NsqdError, Refused, Unreachable
from nsquark.spark.sink.options import SinkOptions
from nsquark.spark.sink.rows import Bodies
from nsquark.wire.record import RECORD_OVERHEAD_BYTES, SIZE_BYTES

T = TypeVar("T")

PIECE_LOG_BYTES_MAX = 64 << 20
"""One append has at most this many bytes. It decides where rows are cut: with another value, tokens change."""
PARTITION_BYTES_MAX = 512 << 20
"""A partition's bodies have at most this many bytes: they are held in memory until all are known, and nsqd stages no
more than 1 GiB in all.
"""
PART_MESSAGES_MAX = 1 << 30
"""This is no limit, in effect: parts are bounded by their bytes."""
TRY_AGAIN = frozenset({"NOT_STAGED", "INCOMPLETE", "APPENDING", "ABORTED", "TOPIC_NOT_FOUND"})
"""After these codes all is staged again: nsqd was restarted, another attempt is at work, or the topic was deleted."""
NOT_APPENDED = frozenset({"NOT_STAGED", "INCOMPLETE", "TOPIC_NOT_FOUND"})
"""By these codes nsqd says for sure that nothing was appended under the token."""
RETRY_FIRST_S, RETRY_LAST_S = 0.05, 2.0


class AppendFailed(RuntimeError):
    """Says that nsqd did not take an append, or did not say that it did; the text says what to do."""


def choose_nsqd(addresses: Sequence[str], name: str, topic: str) -> str:
    """Chooses an nsqd by name and topic: every attempt gets the same one, whatever order the addresses have."""
    return max(addresses, key=lambda address: digest([address, name, topic]))


def digest(values: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=20).hexdigest()


class Collected:
    """Collects all rows of a partition, by topic."""

    def __init__(self, partition: int, bytes_max: int = PARTITION_BYTES_MAX) -> None:
        self._partition = partition
        self._bytes_max = bytes_max
        self._columns: dict[str, list[pa.Array]] = {}
        self._bytes = 0

    def add(self, bodies: Bodies) -> None:
        _, offsets = bodies.buffers()
        self._bytes += offsets[-1] - offsets[0]
        if self._bytes > self._bytes_max:
            raise AppendFailed(
                f"partition {self._partition} has more than {self._bytes_max >> 20} MiB of bodies, too much to "
                "append at once: use more partitions with repartition(n), smaller batches, or leave out idempotent=true"
            )
        self._columns.setdefault(bodies.topic, []).append(bodies.column)

    def topics(self) -> Iterator[Bodies]:
        for topic, columns in self._columns.items():
            yield Bodies(topic, pa.concat_arrays(columns))


def pieces(bodies: Bodies, part_bytes: int, log_bytes_max: int = PIECE_LOG_BYTES_MAX) -> tuple[str, list[Bodies]]:
    """Returns a text that identifies these rows, and the rows cut into appends: the text and the cuts are the same for
    the same rows in any order.

    Rows that fit into one part are not cut, and keep their order.
    """
    hashes, total = bodies.hashes()
    _, offsets = bodies.buffers()
    body_bytes = offsets[-1] - offsets[0]
    content = f"{total:016x}-{len(bodies)}-{body_bytes}"
    fits_part = body_bytes + SIZE_BYTES * (len(bodies) + 1) <= part_bytes
    if fits_part and body_bytes + RECORD_OVERHEAD_BYTES * len(bodies) <= log_bytes_max:
        return content, [bodies]
    return content, list(_cut(bodies.reordered(pc.sort_indices(hashes)), log_bytes_max))


def _cut(bodies: Bodies, log_bytes_max: int) -> Iterator[Bodies]:
    _, offsets = bodies.buffers()
    start, rows = 0, len(bodies)
    while start < rows:
        # The rows before `row` take offsets[row] + RECORD_OVERHEAD_BYTES * row bytes in the log: it rises with `row`.
        limit = log_bytes_max + offsets[start] + RECORD_OVERHEAD_BYTES * start
        end = bisect_right(range(rows + 1), limit, lo=start, key=lambda row: offsets[row] + RECORD_OVERHEAD_BYTES * row)
        end = max(end - 1, start + 1)
        yield Bodies(bodies.topic, bodies.column.slice(start, end - start))
        start = end


class Appenders:
    """Appends rows under tokens, each to the nsqd that its name and topic choose."""

    def __init__(self, options: SinkOptions, log_bytes_max: int = PIECE_LOG_BYTES_MAX) -> None:
        self._options = options
        self._log_bytes_max = log_bytes_max
        self._by_address: dict[str, Appender] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for appender in self._by_address.values():
            appender.close()

    def append(self, name: str, bodies: Bodies) -> None:
        """Appends messages; returns when all are in the log, by this attempt or by an earlier one."""
        appender = self.of(choose_nsqd(self._options.nsqd, name, bodies.topic))
        content, parts = pieces(bodies, self._options.request_bytes_max, self._log_bytes_max)
        for number, piece in enumerate(parts):
            appender.append(digest([name, content, number]), piece)

    def of(self, address: str) -> Appender:
        """Returns the appender for an nsqd, which stays connected until all are closed."""
        appender = self._by_address.get(address)
        if appender is None:
            appender = self._by_address[address] = Appender(address, self._options)
        return appender


class _Staged(msgspec.Struct):
    """Describes nsqd's answer to a staged part."""

    duplicate: bool


class Appender:
    """Stages and appends on one nsqd, and tries again for `write_timeout_s` after a failure."""

    def __init__(self, address: str, options: SinkOptions) -> None:
        self._nsqd = Endpoint(address, options.access, options.write_timeout_s)
        self._part_bytes = options.request_bytes_max
        self._timeout_s = options.write_timeout_s

    def close(self) -> None:
        self._nsqd.close()

    def append(self, token: str, piece: Bodies) -> None:
        self._insist(lambda: self._try(token, piece), piece.topic, len(piece))

    def was_appended(self, token: str, topic: str, messages: int) -> bool:
        """Tells whether an earlier process appended these messages, which are one part; if it only staged them, they
        are appended now.
        """

        def ask() -> bool:
            try:
                self._nsqd.ask("/log/append", "POST", b"", topic=topic, token=token, parts=1)
            except Refused as error:
                if error.code in NOT_APPENDED:
                    return False
                raise
            return True

        return self._insist(ask, topic, messages)

    def _insist(self, action: Callable[[], T], topic: str, messages: int) -> T:
        """Repeats an action after errors that may pass, until the time is over."""
        deadline: float | None = None
        pause_s = RETRY_FIRST_S
        while True:
            try:
                return action()
            except (Unreachable, Refused) as error:
                now = time.monotonic()
                deadline = deadline or now + self._timeout_s
                if not _may_pass(error) or now + pause_s > deadline:
                    raise self._explained(error, topic, messages) from None
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_LAST_S)

    def _try(self, token: str, piece: Bodies) -> None:
        where = {"topic": piece.topic, "token": token}
        count = 0
        for count, part in enumerate(piece.mpub_bodies(self._part_bytes, PART_MESSAGES_MAX), 1):
            answer = self._nsqd.ask("/log/stage", "POST", part.data, **where, part=count - 1)
            if self._nsqd.read_as(answer, _Staged).duplicate:
                return
        self._nsqd.ask("/log/append", "POST", b"", **where, parts=count)

    def _explained(self, error: NsqdError, topic: str, messages: int) -> AppendFailed:
        if isinstance(error, Refused) and error.status == 404 and error.code not in TRY_AGAIN:
            return AppendFailed(f"{self._nsqd.address} has no log to append to: idempotent=true needs nsquark's nsqd")
        if not _may_pass(error):
            return AppendFailed(f"{messages} messages for topic {topic} were not appended: {error}")
        return AppendFailed(
            f"{messages} messages for topic {topic} were not appended within {self._timeout_s:g} s: {error}. "
            "See to that nsqd: with idempotent=true no other may take its place"
        )


def _may_pass(error: NsqdError) -> bool:
    return isinstance(error, Unreachable) or (
        isinstance(error, Refused) and (error.status == 503 or error.code in TRY_AGAIN)
    )
