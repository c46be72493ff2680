"""Types of mpub.py as its callers see them: its own annotations are C types."""

def pack(
    data: bytes | bytearray | memoryview,
    offsets: memoryview,
    first: int,
    last: int,
    bytes_max: int,
    count_max: int,
) -> tuple[bytes, int]: ...
def pack_bodies(bodies: list[bytes]) -> bytes: ...
def hash_rows(
    data: bytes | bytearray | memoryview, offsets: memoryview, first: int, last: int, out: memoryview
) -> int: ...
