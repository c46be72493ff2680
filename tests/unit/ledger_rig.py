"""A ledger as a channel uses it, for tests."""

import struct
from types import ModuleType
from typing import Any, NamedTuple

BLOCK = 4096
MSG_TIMEOUT_MS = 1_000
MSG_TIMEOUT_MAX_MS = 15_000
REQ_TIMEOUT_MAX_MS = 60_000

_RECORD = struct.Struct("<IHHQqQ")


class Noted(NamedTuple):
    """A record of a channel's journal."""

    kind: int
    attempts: int
    seq: int
    due_ms: int
    span: int


def make_ledger(kernel: ModuleType, floor: int = 0) -> Any:
    return kernel.Ledger(floor, MSG_TIMEOUT_MAX_MS, REQ_TIMEOUT_MAX_MS)


def join(book: Any, rdy_max: int = 2500) -> Any:
    return book.join(rdy_max, MSG_TIMEOUT_MS)


def records(journal: bytes | bytearray) -> list[Noted]:
    return [Noted(*fields[1:]) for fields in _RECORD.iter_unpack(journal)]


def message_id(seq: int, node_id: int = 7) -> bytes:
    return b"%016x" % (node_id << 53 | seq)


def acknowledge(book: Any, consumer: Any, commands: bytes, now_ms: int = 0) -> int:
    """How many bytes of commands were carried out."""
    done: int = book.acknowledge(consumer, bytearray(commands), 0, len(commands), now_ms)
    return done


def counts(book: Any) -> tuple[int, int, int]:
    return book.in_flight, book.queued, book.deferred


def redeliver_all(book: Any, consumer: Any, now_ms: int = 0) -> dict[int, int]:
    """Delivers everything queued again; sequence number to attempt, in the order of delivery."""
    attempts: dict[int, int] = {}
    while (seq := book.next_queued()) >= 0:
        attempts[seq] = book.retake(consumer, seq, now_ms)
    return attempts


def restarted(kernel: ModuleType, book: Any, now_ms: int = 0) -> Any:
    """What a clean stop and start make of a ledger."""
    book.settle()
    fresh = make_ledger(kernel, book.floor)
    fresh.restore(book.snapshot(), now_ms)
    return fresh


def new_among(book: Any, count: int) -> list[int]:
    """Which of the `count` messages from `next` on are new to the ledger; it steps over all of them."""
    found: list[int] = []
    end = book.next + count
    while book.next < end:
        run = book.untouched(end - book.next)
        if run > 0:
            found.extend(range(book.next, book.next + run))
        book.skip(book.next + abs(run))
    return found
