"""Remembers which appends were done, by their idempotency tokens: a bounded number, over restarts too.

The log itself has the token of every append, in the same batch as its messages, so the two are durable together. But a
token is to be known for longer than its messages: before a segment goes, its tokens are stored in a small file, and if
that fails the segment stays.

The file is records of 24 bytes, each a token and its checksum. In format 1 there were no checksums; such a file is read
and written anew.
"""

import errno
from collections.abc import Iterable
from pathlib import Path

from xxhash import xxh3_64_digest

from nsquark.log.files import read_surviving, write_atomically
from nsquark.log.segment import Segment
from nsquark.log.services import LogShared
from nsquark.wire.batch_format import NO_TOKEN

TOKENS_MAX = 100_000
"""A topic has at most this many tokens; the oldest are forgotten first."""
TOKEN_BYTES = len(NO_TOKEN)
CHECK_BYTES = 8
RECORD_BYTES = TOKEN_BYTES + CHECK_BYTES


class Tokens:
    """Knows the last `tokens_max` tokens of a topic, oldest first: those in the file, then those only the log has."""

    def __init__(self, shared: LogShared, path: Path, in_log: Iterable[bytes], tokens_max: int = TOKENS_MAX) -> None:
        self._tokens_max = tokens_max
        self._shared = shared
        self._path = path
        self._stored = self._load()
        self._tokens: dict[bytes, None] = dict(self._stored)
        self._tokens.update(dict.fromkeys(in_log))
        self._trim(self._tokens)

    def __contains__(self, token: bytes) -> bool:
        return token in self._tokens

    def add(self, token: bytes) -> None:
        """Is told that the log has an append with this token."""
        self._tokens[token] = None
        self._trim(self._tokens)

    def store_of(self, segment: Segment) -> None:
        """Makes durable the tokens of a segment that is about to go, or raises OSError."""
        new = dict.fromkeys(token for token in segment.tokens if token not in self._stored)
        if not new:
            return
        stored = {**self._stored, **new}
        self._trim(stored)
        try:
            self._store(stored)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # What would make room must not wait for room: without its index a segment is scanned.
            segment.index_path.unlink(missing_ok=True)
            self._store(stored)
        self._stored = stored

    def _store(self, tokens: Iterable[bytes]) -> None:
        write_atomically(self._path, b"".join(token + xxh3_64_digest(token) for token in tokens))

    def _load(self) -> dict[bytes, None]:
        try:
            raw, whole = read_surviving(self._path, self._shared.report)
        except FileNotFoundError:
            return {}
        records = [bytes(raw[pos : pos + RECORD_BYTES]) for pos in range(0, len(raw), RECORD_BYTES)]
        intact = [record[:TOKEN_BYTES] for record in records if _is_intact(record)]
        if raw and not intact:
            intact = _tokens_of_format_1(raw)
        elif len(intact) < len(records):
            lost = len(records) - len(intact)
            self._shared.report(f"TOKENS({self._path}): {lost} of {len(records)} tokens are damaged and forgotten")
        if not whole or len(intact) * RECORD_BYTES != len(raw):
            try:
                self._store(intact)
            except OSError as error:
                self._shared.report(f"TOKENS({self._path}): could not be written anew: {error}")
        return dict.fromkeys(intact)

    def _trim(self, tokens: dict[bytes, None]) -> None:
        while len(tokens) > self._tokens_max:
            del tokens[next(iter(tokens))]


def _is_intact(record: bytes) -> bool:
    return len(record) == RECORD_BYTES and xxh3_64_digest(record[:TOKEN_BYTES]) == record[TOKEN_BYTES:]


def _tokens_of_format_1(raw: bytearray) -> list[bytes]:
    """Reads the tokens of a file in format 1. A crash could leave half a token, or zeros, which are none."""
    whole = len(raw) - len(raw) % TOKEN_BYTES
    tokens = [bytes(raw[pos : pos + TOKEN_BYTES]) for pos in range(0, whole, TOKEN_BYTES)]
    return [token for token in tokens if token != NO_TOKEN]
