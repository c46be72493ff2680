"""Uses a ledger as a channel does, for tests."""

import struct
from collections.abc import Container
from types import ModuleType
from typing import Any, NamedTuple

from unit import kernel_forms

BLOCK = 4096
MSG_TIMEOUT_MS = 1_000
MSG_TIMEOUT_MAX_MS = 15_000
REQ_TIMEOUT_MAX_MS = 60_000

_RECORD = struct.Struct("<IHHQqQ")


class Noted(NamedTuple):
    """Is a record of a channel's journal."""

    kind: int
    attempts: int
    seq: int
    due_ms: int
    span: int


def make_ledger(kernel: ModuleType, floor: int = 0, *, measure: bool = False) -> Any:
    return kernel.Ledger(floor, MSG_TIMEOUT_MAX_MS, REQ_TIMEOUT_MAX_MS, measure)


def _beside(book: Any, name: str) -> ModuleType:
    """Loads another module of the kernel, in the form that this ledger has."""
    is_interpreted = isinstance(book, kernel_forms.load("ledger", "interpreted").Ledger)
    return kernel_forms.load(name, "interpreted" if is_interpreted else "compiled")


def restore(
    book: Any,
    journal: bytes,
    now_ms: int,
    ranges: list[tuple[int, int]] | None = None,
    outliving: Container[int] = (),
) -> int:
    brought_forward: int = _beside(book, "restart").restore(book, journal, now_ms, ranges, outliving)
    return brought_forward


def snapshot(book: Any) -> bytes:
    journal: bytes = _beside(book, "restart").snapshot(book)
    return journal


def note_finished(book: Any) -> None:
    _beside(book, "restart").note_finished(book)


def acknowledge_at(book: Any, consumer: Any, data: bytearray, pos: int, end: int, now_ms: int) -> int:
    """Returns where what was carried out ends."""
    done: int = _beside(book, "answers").acknowledge(book, consumer, data, pos, end, now_ms)
    return done


def sequence_of(kernel: ModuleType, text: bytes) -> int:
    seq: int = _beside(make_ledger(kernel), "answers").sequence_of(text)
    return seq


def join(book: Any, rdy_max: int = 2500) -> Any:
    return book.join(rdy_max, MSG_TIMEOUT_MS)


def records(journal: bytes | bytearray) -> list[Noted]:
    return [Noted(*fields[1:]) for fields in _RECORD.iter_unpack(journal)]


def message_id(seq: int, node_id: int = 7) -> bytes:
    return b"%016x" % (node_id << 53 | seq)


def acknowledge(book: Any, consumer: Any, commands: bytes, now_ms: int = 0) -> int:
    """Returns how many bytes of commands were carried out."""
    return acknowledge_at(book, consumer, bytearray(commands), 0, len(commands), now_ms)


def counts(book: Any) -> tuple[int, int, int]:
    return book.in_flight, book.queued, book.deferred


def redeliver_all(book: Any, consumer: Any, now_ms: int = 0) -> dict[int, int]:
    """Delivers everything queued again; sequence number to attempt, in the order of delivery."""
    attempts: dict[int, int] = {}
    while (seq := book.next_queued()) >= 0:
        attempts[seq] = book.retake(consumer, seq, now_ms)
    return attempts


def restarted(kernel: ModuleType, book: Any, now_ms: int = 0) -> Any:
    """Returns what a clean stop and start make of a ledger."""
    book.raise_floor()
    fresh = make_ledger(kernel, book.floor)
    restore(fresh, snapshot(book), now_ms)
    return fresh


def new_among(book: Any, count: int) -> list[int]:
    """Returns which of the `count` messages from `next` on are new to the ledger, and steps over all of them."""
    found: list[int] = []
    end = book.next + count
    while book.next < end:
        run = book.untouched(end - book.next)
        if run > 0:
            found.extend(range(book.next, book.next + run))
        book.skip(book.next + abs(run))
    return found
