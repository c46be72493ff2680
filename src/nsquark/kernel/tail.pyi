from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from nsquark.kernel.extents import Extents
from nsquark.kernel.records import Chunk
from nsquark.log.segments import Segments

Buffer = bytes | bytearray | memoryview

SLOW_WRITE_S: float

class Waiter(Protocol):
    def committed(self, commit: Commit) -> None:
        """The commit is settled: `commit.error` tells how."""

class Commit:
    waiters: list[Waiter]
    is_settled: bool
    error: Exception | None
    slices: list[tuple[Chunk, int]]
    time_min_ns: int
    time_max_ns: int
    bytes_added: int
    flags: int
    token: bytes
    def __init__(self, timestamp_ns: int = 0) -> None: ...
    def settle(self, error: Exception | None = None) -> None: ...

class Tail:
    chunk: Chunk | None
    open: Commit | None
    writing: Commit | None
    waiting: deque[Commit]
    writes_inline: bool
    uncommitted_bytes: int
    is_closed: bool
    segments: Segments | None
    extents: Extents
    head: int
    on_committed: Callable[[int, int], None]
    def __init__(self, on_dirty: Callable[[Any], None]) -> None: ...
    @property
    def is_congested(self) -> bool: ...
    def append(self, source: Buffer, pos: int, size: int, timestamp_ns: int) -> Commit: ...
    def append_sized(self, source: Buffer, pos: int, end: int, count: int, timestamp_ns: int) -> Commit: ...
    def begin(self, timestamp_ns: int, first: int = -1) -> Commit: ...
    def write(self) -> None: ...
    def committed(self, commit: Commit, messages: int, batches: int) -> None: ...
