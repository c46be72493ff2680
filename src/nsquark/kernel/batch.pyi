from array import array

from nsquark.kernel.extents import Extents
from nsquark.kernel.records import Chunk

def encode_header(
    payload: bytes | bytearray | memoryview,
    first_seq: int,
    messages: int,
    time_min_ns: int,
    time_max_ns: int,
    flags: int,
    token: bytes,
) -> bytes: ...

class BatchFile:
    size: int
    extents: Extents
    time_min_ns: int
    time_max_ns: int
    seqs: array[int]
    offsets: array[int]
    times: array[int]
    index_at: int
    def forget(self) -> None: ...
    def append(self, fd: int, chunk: Chunk, start: int, size: int, time_min_ns: int, time_max_ns: int) -> int: ...
    def reindex(self) -> None: ...
    def grown(
        self, offset: int, first_seq: int, messages: int, payload_bytes: int, time_min_ns: int, time_max_ns: int
    ) -> None: ...
