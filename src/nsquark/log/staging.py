"""Stages appends: messages that arrive in parts, wait in files, and enter the log all together or not at all.

A part is a file under the topic's directory. `StagedAppend` makes the log's batches from them in a thread, a little at
a time. All batches but the last say that more follow, and the last is written only after those are on disk: so after
any crash either the last is there, and everything before it, or recovery cuts the rest off.
"""

import os
import time
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from xxhash import xxh3_128_digest

from nsquark.kernel.records import Chunk
from nsquark.log.durable import sync_data
from nsquark.log.files import DIRECTORY_MODE, FILE_MODE, write_all
from nsquark.log.sequences import Sequences
from nsquark.log.writer import BatchWriter
from nsquark.wire.batch_format import APPEND_ONCE, HEADER_BYTES, MORE_FOLLOWS, StoredBatch
from nsquark.wire.record import COUNT_BYTES, RECORD_OVERHEAD_BYTES, SIZE_BYTES

STAGE_BYTES_MAX = 64 << 20
"""One append has at most this many bytes in the log, where each message counts its body and RECORD_OVERHEAD_BYTES."""
STAGED_BYTES_MAX = 1 << 30
"""All staged appends of one nsqd together have at most this many bytes."""
STAGES_MAX = 1000
PEER_DIVISOR = 2
"""One peer may have a half of either limit."""
STAGE_PATIENCE_S = 60.0
"""A stage that got no part for this long may have to make room."""
PARTS_MAX = 10_000
"""Part numbers are below this."""
STAGE_IDLE_S = 600.0
"""A stage that got no part for this long is dropped."""
BATCH_BYTES = 128 << 10
"""The batches made here have about this size: a cold read gets one whole."""
WRITE_BYTES = 1 << 20
DIRECTORY = "staged"


class AppendTooBig(Exception):
    """Says that an append has more bytes than it may have."""


class StagingFull(Exception):
    """Says that a bound of the staging area is reached; the text says which."""


class Incomplete(Exception):
    """Says that parts are missing or still arriving; the text says which."""


@dataclass(slots=True)
class StagedPart:
    """Names a file with the body as it was sent: count, then each message behind its size."""

    path: Path
    count: int
    log_bytes: int


@dataclass(slots=True, eq=False)
class Stage:
    """Collects the parts of one append so far, in files that `parts` names; `arriving` more are being written."""

    token: bytes
    directory: Path
    peer: str = ""
    parts: dict[int, StagedPart] = field(default_factory=dict)
    log_bytes: int = 0
    arriving: int = 0
    used_s: float = 0.0
    is_appending: bool = False
    is_dropped: bool = False

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts.values())

    def bytes_beside(self, number: int) -> int:
        """Counts the bytes of all parts but one."""
        replaced = self.parts.get(number)
        return self.log_bytes - (replaced.log_bytes if replaced is not None else 0)

    def check_complete(self, parts: int | None) -> None:
        """Raises unless all parts are here: a stage that was dropped and begun again must not pass for a whole one."""
        if self.arriving:
            raise Incomplete(f"{self.arriving} parts are still arriving")
        wanted = len(self.parts) if parts is None else parts
        missing = [number for number in range(wanted) if number not in self.parts]
        if missing or len(self.parts) != wanted:
            raise Incomplete(
                f"parts 0 to {wanted - 1} are needed, {sorted(self.parts)[:10]} are staged; stage all again"
            )


class Staging:
    """Keeps all stages of an nsqd within their bounds: `staged_bytes` is the sum of their `log_bytes`."""

    def __init__(self) -> None:
        self.staged_bytes = 0
        # By topic, not by its name: one that was deleted and made again is another.
        self._stages: dict[tuple[Hashable, bytes], Stage] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._stages)

    @property
    def topics(self) -> set[Hashable]:
        """Returns the topics that have stages."""
        return {topic for topic, _ in self._stages}

    def has_room(self, log_bytes: int) -> bool:
        """Tells whether there is room for one more stage, with a part of `log_bytes` bytes."""
        return self.staged_bytes + log_bytes <= STAGED_BYTES_MAX and len(self._stages) < STAGES_MAX

    def find(self, topic: Hashable, token: bytes) -> Stage | None:
        return self._stages.get((topic, token))

    def begin_part(
        self, topic: Hashable, directory: Path, token: bytes, number: int, count: int, log_bytes: int, peer: str = ""
    ) -> tuple[Stage, StagedPart]:
        """Reserves room for a part; `write_part` is to follow in a thread, then `end_part`."""
        stage = self._stages.get((topic, token))
        if (stage.bytes_beside(number) if stage is not None else 0) + log_bytes > STAGE_BYTES_MAX:
            raise AppendTooBig(f"an append has at most {STAGE_BYTES_MAX} bytes: split it, each piece with a token")
        own = [each for each in self._stages.values() if each.peer == peer] if peer else []
        if sum(each.log_bytes for each in own) + log_bytes > STAGED_BYTES_MAX // PEER_DIVISOR:
            raise StagingFull(
                f"{peer} has staged {STAGED_BYTES_MAX // PEER_DIVISOR} bytes: append or abort some of them"
            )
        if stage is None and len(own) >= STAGES_MAX // PEER_DIVISOR:
            raise StagingFull(f"{peer} has staged {STAGES_MAX // PEER_DIVISOR} appends: append or abort some of them")
        if self.staged_bytes + log_bytes > STAGED_BYTES_MAX:
            raise StagingFull(f"{STAGED_BYTES_MAX} bytes are staged: append or abort some of them, or try again later")
        if stage is None:
            if len(self._stages) >= STAGES_MAX:
                raise StagingFull(f"{STAGES_MAX} appends are staged: append or abort some of them, or try again later")
            stage = self._stages[topic, token] = Stage(token, directory / DIRECTORY, peer)
        self._serial += 1
        stage.arriving += 1
        stage.log_bytes += log_bytes
        stage.used_s = time.monotonic()
        self.staged_bytes += log_bytes
        return stage, StagedPart(stage.directory / f"{token.hex()}.{self._serial}", count, log_bytes)

    def end_part(self, stage: Stage, number: int, part: StagedPart, *, written: bool) -> StagedPart | None:
        """Is told that a part is there, or failed; returns the part to delete: the one that it replaces, or itself."""
        stage.arriving -= 1
        useless: StagedPart | None = part
        if written and not stage.is_dropped:
            useless = stage.parts.get(number)
            stage.parts[number] = part
        if useless is not None:
            stage.log_bytes -= useless.log_bytes
            self.staged_bytes -= useless.log_bytes
        return useless

    def drop(self, topic: Hashable, stage: Stage) -> list[Path]:
        """Forgets a stage; returns the files to delete."""
        if self._stages.get((topic, stage.token)) is not stage:
            return []
        del self._stages[topic, stage.token]
        paths = [part.path for part in stage.parts.values()]
        for part in stage.parts.values():
            stage.log_bytes -= part.log_bytes
            self.staged_bytes -= part.log_bytes
        stage.parts = {}
        stage.is_dropped = True
        return paths

    def drop_idle(self) -> list[Path]:
        """Drops stages that got no part for too long; returns the files to delete."""
        before = time.monotonic() - STAGE_IDLE_S
        paths: list[Path] = []
        for (topic, _), stage in list(self._stages.items()):
            if stage.used_s < before and not stage.arriving and not stage.is_appending:
                paths += self.drop(topic, stage)
        return paths

    def drop_slowest(self, log_bytes: int) -> list[Path]:
        """Makes room for a part of `log_bytes` bytes by dropping the stages that got no part for longest; returns the
        files to delete.
        """
        paths: list[Path] = []
        before = time.monotonic() - STAGE_PATIENCE_S
        idle = [
            (stage.used_s, topic, stage)
            for (topic, _), stage in self._stages.items()
            if stage.used_s < before and not stage.arriving and not stage.is_appending
        ]
        for _, topic, stage in sorted(idle, key=lambda each: each[0]):
            if self.has_room(log_bytes):
                break
            paths += self.drop(topic, stage)
        return paths

    def drop_topic(self, topic: Hashable) -> None:
        """Forgets the stages of a topic that is gone, and its files with it."""
        for owner, token in list(self._stages):
            if owner is topic:
                self.drop(topic, self._stages[owner, token])


def token_of(text: str) -> bytes:
    """Returns what the log keeps of a token: as many bytes as make a chance match impossible in practice."""
    return xxh3_128_digest(text.encode())


def log_bytes_of(body_bytes: int, count: int) -> int:
    """Returns how many bytes a part's messages have in the log."""
    return body_bytes - COUNT_BYTES + count * (RECORD_OVERHEAD_BYTES - SIZE_BYTES)


def write_part(part: StagedPart, body: bytes | bytearray) -> None:
    """Writes a part to its file. It is not synced: a stage does not outlive the process."""
    part.path.parent.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    fd = os.open(part.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        write_all(fd, memoryview(body))
    finally:
        os.close(fd)


def remove_leftovers(topics: Path) -> None:
    """Removes at start what was staged: its publishers have to stage it again."""
    for path in topics.glob(f"*/{DIRECTORY}/*"):
        path.unlink(missing_ok=True)


def lease_spans(sequences: Sequences, count: int) -> list[tuple[int, int]]:
    """Leases `count` sequence numbers, as (first, count) of consecutive ones."""
    spans: list[tuple[int, int]] = []
    while count:
        low, high = sequences.lease(count)
        used = min(count, high - low)
        if spans and sum(spans[-1]) == low:
            spans[-1] = (spans[-1][0], spans[-1][1] + used)
        else:
            spans.append((low, used))
        count -= used
    return spans


class StagedAppend:
    """Makes the batches of one append from its parts and writes them; memory has one part and a few batches."""

    def __init__(
        self, node_id: int, token: bytes, parts: Iterable[StagedPart], spans: list[tuple[int, int]], timestamp_ns: int
    ) -> None:
        self._node_id = node_id
        self._token = token
        self._parts = list(parts)
        self._spans = spans
        self._timestamp_ns = timestamp_ns
        self.first_seq, self.next_seq = spans[0][0], sum(spans[-1])
        records = sum(part.log_bytes for part in self._parts)
        # Each batch but the last of a part, or of a span, is filled to where the next message might not have fitted.
        batches_max = 2 * records // BATCH_BYTES + len(self._parts) + len(spans)
        self.bytes_max = records + batches_max * HEADER_BYTES

    def write(self, fd: int, offset: int) -> list[StoredBatch]:
        with BatchWriter(fd, offset, unwritten_bytes_max=WRITE_BYTES) as writer:
            previous: Chunk | None = None
            for chunk in self._chunks():
                if previous is not None:
                    writer.add(*self._batch(previous, MORE_FOLLOWS))
                previous = chunk
            assert previous is not None
            if writer.batches:
                writer.flush()
                sync_data(fd)
            writer.add(*self._batch(previous, 0))
            writer.flush()
            sync_data(fd)
        return writer.batches

    def _batch(self, chunk: Chunk, more: int) -> tuple[StoredBatch, memoryview]:
        now, flags = self._timestamp_ns, APPEND_ONCE | more
        batch = StoredBatch(0, chunk.first_seq, chunk.count, chunk.used, now, now, flags, self._token)
        return batch, chunk.view[: chunk.used]

    def _chunks(self) -> Iterator[Chunk]:
        """Yields all messages in order, in chunks of consecutive sequence numbers."""
        spans = iter(self._spans)
        seq, left_in_span = next(spans)
        for part in self._parts:
            body = bytearray(part.path.read_bytes())
            pos, left = COUNT_BYTES, part.count
            while left:
                if not left_in_span:
                    seq, left_in_span = next(spans)
                size = int.from_bytes(body[pos : pos + SIZE_BYTES], "big") + RECORD_OVERHEAD_BYTES
                rest = len(body) - pos + left * (RECORD_OVERHEAD_BYTES - SIZE_BYTES)
                most = min(left, left_in_span)
                size = max(size, min(rest, BATCH_BYTES))
                chunk = Chunk(self._node_id, seq, size, min(most, size // RECORD_OVERHEAD_BYTES + 1))
                added = chunk.append_sized(body, pos, most, self._timestamp_ns)
                pos = chunk.resume
                seq, left, left_in_span = seq + added, left - added, left_in_span - added
                yield chunk
