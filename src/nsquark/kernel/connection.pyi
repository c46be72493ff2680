import asyncio

from nsquark.kernel.publish import Intake
from nsquark.kernel.share import Share

class Connection:
    transport: asyncio.Transport
    consumer: Share | None
    _data: bytearray
    _partial: bytearray | None
    _partial_bytes: int
    _intake: Intake | None
    _is_closed: bool
    _was_heard: bool
    _awaits_ok: bool
    _write_paused_at_ms: int
    def use_buffer(self, buffer: bytearray, view: memoryview) -> None: ...
    def get_buffer(self, sizehint: int) -> memoryview: ...
    def buffer_updated(self, nbytes: int) -> None: ...
    def publish(self, pos: int, end: int) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def is_nearly_full(self) -> bool: ...
    def send(self, data: bytes | memoryview) -> None: ...
