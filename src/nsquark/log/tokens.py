"""Which appends were done, by their idempotency tokens: bounded, and kept over restarts.

The log itself has the token of every append, but not for longer than the append's messages. So each is also noted in a
small file; a crash before that harms nothing, since the log still has it then.
"""

import os
import threading
from collections.abc import Iterable
from pathlib import Path

from nsquark.log.batches import NO_TOKEN
from nsquark.log.files import FILE_MODE, write_all, write_atomically

TOKENS_MAX = 100_000
"""Of a topic; the oldest are forgotten first."""
TOKEN_BYTES = len(NO_TOKEN)


class Tokens:
    """The last TOKENS_MAX tokens of a topic, oldest first."""

    def __init__(self, path: Path, in_log: Iterable[bytes]) -> None:
        self._path = path
        self._lock = threading.Lock()
        stored = _load(path)
        self._stored = len(stored)
        self._tokens: dict[bytes, None] = dict.fromkeys(stored)
        self._tokens.update(dict.fromkeys(in_log))
        self._trim()

    def __contains__(self, token: bytes) -> bool:
        return token in self._tokens

    def add(self, token: bytes) -> None:
        self._tokens[token] = None
        self._trim()

    def store(self, token: bytes) -> None:
        """Notes a token in the file, for a thread: the log has it, so there is no hurry."""
        with self._lock:
            if self._stored >= 2 * TOKENS_MAX:
                write_atomically(self._path, b"".join(list(self._tokens)))
                self._stored = len(self._tokens)
                return
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
            try:
                write_all(fd, token)
                os.fdatasync(fd)
            finally:
                os.close(fd)
            self._stored += 1

    def _trim(self) -> None:
        while len(self._tokens) > TOKENS_MAX:
            del self._tokens[next(iter(self._tokens))]


def _load(path: Path) -> list[bytes]:
    """All stored tokens. A crash can leave half a token, which is cut off, or zeros, which are none."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = len(raw) - len(raw) % TOKEN_BYTES
    if whole < len(raw):
        os.truncate(path, whole)
    tokens = (raw[pos : pos + TOKEN_BYTES] for pos in range(0, whole, TOKEN_BYTES))
    return [token for token in tokens if token != NO_TOKEN]
