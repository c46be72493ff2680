"""Declares the types of frames.py for its callers: its own annotations are C types."""

FRAME_SIZE_MAX_BYTES: int
LARGE_FRAME_BYTES: int
FIN_COMMAND_BYTES: int

class FrameError(ValueError): ...

class FrameScanner:
    def __init__(self, size_max: int = ...) -> None: ...
    def scan(
        self, data: bytes | bytearray | memoryview, start: int, end: int
    ) -> tuple[int, list[tuple[int, int, bytes, bytes]], list[tuple[int, bytes]]]: ...

def finish_all(
    data: bytes | bytearray | memoryview, start: int, end: int, out: bytearray | memoryview
) -> tuple[int, int, int, list[tuple[int, bytes]]]: ...
