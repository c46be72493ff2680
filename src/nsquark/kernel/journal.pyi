from struct import Struct

JOURNAL_REQUEUED: int
JOURNAL_PARKED: int
JOURNAL_FINISHED: int
JOURNAL_RECORD: Struct

def record(kind: int, attempts: int, seq: int, due_ms: int, span: int) -> bytes: ...
def keep_intact(records: bytearray) -> int: ...
def from_format_1(old: bytes, delay_max_ms: int) -> bytearray: ...
