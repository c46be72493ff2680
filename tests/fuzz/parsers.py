"""Gives any bytes to the parsers in this process.

The kernel's compiled form must agree with the interpreted one; the readers of JSON and of compressed streams must raise
nothing but what they say.
"""

import contextlib
import struct
from random import Random
from typing import Any

from fuzz import grammar
from nsquark.broker.tcp.command import decimal_of
from nsquark.broker.tcp.identify import read_fields
from nsquark.lookupd.peer import BadJsonError, read_peer_info
from nsquark.web.query import parse_query
from nsquark.wire.compression import CorruptStream, Decoder, DeflateDecoder, SnappyDecoder
from nsquark.wire.errors import FatalClientError
from unit import kernel_forms

FORMS = ("compiled", "interpreted")
NOW_NS = 1_700_000_000_000_000_000


def _agreed(outcomes: list[Any]) -> None:
    assert outcomes[0] == outcomes[1], f"compiled {outcomes[0]!r}, interpreted {outcomes[1]!r}"


def _outcome(work: Any, *arguments: Any) -> Any:
    """Returns what a parser gives, or which error it raises."""
    try:
        return work(*arguments)
    except (ValueError, OverflowError) as error:
        return type(error).__name__


def frames(random: Random) -> None:
    """Tries frames of messages and responses, as a client gets them."""
    pieces = []
    for _ in range(random.randrange(1, 6)):
        content = random.choice(
            (b"OK", b"_heartbeat_", struct.pack(">qH16s", NOW_NS, 1, b"0123456789abcdef") + b"body")
        )
        kind = random.choice((0, 1, 2, 2, 2, 7))
        pieces.append(struct.pack(">II", len(content) + 4, kind) + content)
    data = b"".join(pieces)
    data = grammar.mutated(random, data) if random.random() < 0.7 else data
    found = []
    for form in FORMS:
        module = kernel_forms.load("frames", form)
        scanner = module.FrameScanner()
        out = bytearray(1 << 12)
        found.append(
            (_outcome(scanner.scan, data, 0, len(data)), _outcome(module.finish_all, data, 0, len(data), out), out)
        )
    _agreed(found)


def publishes(random: Random) -> None:
    """Tries PUBs and MPUBs that a chunk appends."""
    data = bytearray(b"".join(b"PUB t0\n" + grammar.sized(random, grammar.body(random)) for _ in range(5)))
    data = bytearray(grammar.mutated(random, bytes(data))) if random.random() < 0.5 else data
    count = random.choice((0, 1, 5, 1000, 1 << 40))
    found = []
    for form in FORMS:
        records = kernel_forms.load("records", form)
        chunk = records.Chunk(1, 4096, 1 << 14, 100)
        taken = chunk.append_pubs(data, 0, len(data), b"PUB t0\n", 1000, NOW_NS)
        measured = records.measure_mpub(data, 0, len(data), count, 1000)
        found.append((taken, chunk.resume, bytes(chunk.view[: chunk.used]), measured))
    _agreed(found)


def answers(random: Random) -> None:
    """Tries FIN, REQ, TOUCH and RDY of a consumer that has messages in flight."""
    ids = [b"%016x" % (1 << 53 | seq) for seq in range(20)]
    data = b"".join(grammar.command(random, ids) for _ in range(8))
    found = []
    for form in FORMS:
        ledger = kernel_forms.load("ledger", form).Ledger(0, 15_000, 60_000)
        consumer = ledger.join(2500, 1000)
        ledger.take(consumer, 20, 0)
        done = kernel_forms.load("answers", form).acknowledge(ledger, consumer, bytearray(data), 0, len(data), 5)
        found.append((done, consumer.rdy, ledger.in_flight, ledger.queued, ledger.deferred))
    _agreed(found)


def lines(random: Random) -> None:
    data = grammar.mutated(random, b"\n".join(grammar.body(random) for _ in range(6)))
    forms = [kernel_forms.load("mpub", form) for form in FORMS]
    _agreed([(form.measure_lines(data, 100), form.size_lines(data, 0, 3)) for form in forms])


def rows(random: Random) -> None:
    """Tries an Arrow column with offsets that may lie."""
    offsets = memoryview(
        bytearray(struct.pack("6i", *(random.choice((0, 1, 2, 5, -1, 50, 1 << 30)) for _ in range(6))))
    ).cast("i")
    first, last = random.randrange(-1, 7), random.randrange(-1, 7)
    found = []
    for form in FORMS:
        found.append(_outcome(kernel_forms.load("mpub", form).pack, b"x" * 40, offsets, first, last, 30, 3))
    _agreed(found)


def records(random: Random) -> None:
    """Tries records as a log has them, or as a damaged disk made them."""
    records = kernel_forms.load("records", "interpreted")
    chunk = records.Chunk(1, 4096, 1 << 14, 100)
    for _ in range(5):
        content = grammar.body(random)
        chunk.append(bytearray(content), 0, len(content), NOW_NS)
    data = bytes(chunk.view[: chunk.used])
    data = grammar.mutated(random, data) if random.random() < 0.8 else data
    found = []
    for form in FORMS:
        builder = kernel_forms.load("columns", form).ColumnBuilder(0, 1 << 60, 100, 1 << 20)
        loaded = kernel_forms.load("records", form).Chunk(1, 4096, 1 << 14, 100)
        found.append((_outcome(builder.append, data, 0, len(data), 4096), loaded.load(data, 0, len(data), 5)))
    _agreed(found)


def documents(random: Random) -> None:
    data = grammar.document(random, grammar.IDENTIFY_FIELDS)
    data = grammar.mutated(random, data) if random.random() < 0.5 else data
    if random.random() < 0.2:
        data = data[:-1] + b',"x":"' + b"y" * 20_000 + b'"}'
    with contextlib.suppress(FatalClientError):
        read_fields(data)
    with contextlib.suppress(BadJsonError):
        read_peer_info(data)
    decimal_of(random.choice(grammar.DIGITS).encode())
    parse_query(grammar.mutated(random, b"topic=a%20b&defer=1&x"))


def streams(random: Random) -> None:
    """Tries encoded bytes in any portions: what comes out is bounded by what was asked for."""
    snappy = random.random() < 0.5
    plain = b"".join(grammar.command(random, []) for _ in range(5))
    encoded = grammar.snappy(plain) if snappy else grammar.deflate(plain)
    broken = random.random() < 0.7
    encoded = grammar.mutated(random, encoded) if broken else encoded
    decoder: Decoder = SnappyDecoder() if snappy else DeflateDecoder()
    limit, received = random.choice((1, 64, 1 << 16)), b""
    try:
        for piece in grammar.pieces(encoded, random):
            decoder.feed(piece)
            while (data := decoder.read(limit)) or decoder.has_more:
                assert len(data) <= limit
                received += data
    except CorruptStream:
        assert broken
    else:
        assert broken or received == plain


PARSERS = (frames, publishes, answers, lines, rows, records, documents, streams)
