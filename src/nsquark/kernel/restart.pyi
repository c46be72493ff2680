from collections.abc import Container

from nsquark.kernel.ledger import Ledger

def note_finished(ledger: Ledger) -> None: ...
def snapshot(ledger: Ledger) -> bytes: ...
def restore(
    ledger: Ledger,
    records: bytes | bytearray,
    now_ms: int,
    ranges: list[tuple[int, int]] | None = None,
    outliving: Container[int] = (),
) -> int: ...
