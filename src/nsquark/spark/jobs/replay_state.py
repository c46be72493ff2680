"""Remembers in a small file how far a replay has come: what it replays, the last message published, and what is next.

The piece that comes next is durable in the file before it is appended. So also after a power cut there is at most one
piece for which the file does not say whether it was published, and nsqd knows that by the piece's token.
"""

import contextlib
import fcntl
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from nsquark.base.errors import UserError
from nsquark.log.files import sync_directory, write_atomically
from nsquark.spark.options import EPOCH, MICROSECOND
from nsquark.spark.sink.append import digest
from nsquark.wire.documents import decode_json

STATE = "replay.json"
LOCK = "lock"


class ReplayKey(NamedTuple):
    """Names the place of a message in the order of a replay."""

    at_us: int
    nsqd: str
    topic: str
    seq: int


class PendingReplay(msgspec.Struct, frozen=True):
    """Describes a piece that is being appended."""

    token: str
    nsqd: str
    last: ReplayKey
    messages: int


class _Stored(msgspec.Struct):
    """Holds the content of the file."""

    identity: dict[str, str]
    id: str
    since_us: int | None
    """The range begins here; both ends are in microseconds since 1970."""
    until_us: int
    messages: int = 0
    position: ReplayKey | None = None
    pending: PendingReplay | None = None
    is_done: bool = False
    total: int | None = None
    """So many messages were published, or left to publish, when a run last counted them."""
    ends: dict[str, int] = {}
    """By topic and nsqd, this has the highest sequence number that was counted."""


class ReplayState:
    """Keeps a replay's state. Always: all up to `position` is published, and nothing after it but perhaps `pending`."""

    def __init__(self, path: Path, stored: _Stored) -> None:
        self._path = path
        self._stored = stored

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, directory: Path, identity: Mapping[str, str], since: datetime | None, until: datetime
    ) -> Iterator[Self]:
        """Opens the state in a directory, or makes one of this range; no other process can open it meanwhile."""
        try:
            _make_durably(directory)
            lock = (directory / LOCK).open("w")
        except OSError as error:
            raise UserError(f"--checkpoint {directory} cannot be used: {error.strerror}") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another replay uses --checkpoint {directory}: wait for it, or name another") from None
            path = directory / STATE
            if path.exists():
                yield cls(path, _read(path, identity))
                return
            state = cls(path, _Stored(dict(identity), uuid.uuid4().hex, _us(since) if since else None, _us(until)))
            state._write()
            yield state

    @property
    def since(self) -> datetime | None:
        """Returns where the range begins, as it was resolved when the replay began, or where the rest of it begins."""
        since_us = self._stored.since_us if self.position is None else self.position.at_us
        return None if since_us is None else EPOCH + since_us * MICROSECOND

    @property
    def until(self) -> datetime:
        return EPOCH + self._stored.until_us * MICROSECOND

    @property
    def position(self) -> ReplayKey | None:
        return self._stored.position

    @property
    def messages(self) -> int:
        """Returns how many messages are published, without the pending piece."""
        return self._stored.messages

    @property
    def pending(self) -> PendingReplay | None:
        return self._stored.pending

    @property
    def is_done(self) -> bool:
        return self._stored.is_done

    def token_of(self, last: ReplayKey, messages: int) -> str:
        """Returns the token of the next piece, which stands for its messages: those after the position up to `last`.

        After an older state was put back, a piece that is cut as before is known by its token, and one that is cut
        differently has another, so that nothing of it is taken for published.
        """
        return f"replay-{digest([self._stored.id, self.position, last, messages])}"

    def intend(self, piece: PendingReplay) -> None:
        """Makes a piece durable as the pending one, and with it that all before it is published."""
        self._stored.pending = piece
        self._write()

    def piece_published(self) -> None:
        """Marks the pending piece as published. The next write stores that; if it is lost, nsqd knows by the token."""
        piece = self._stored.pending
        assert piece is not None
        self._stored.position = piece.last
        self._stored.messages += piece.messages
        self._stored.pending = None

    @property
    def ends(self) -> Mapping[str, int]:
        return self._stored.ends

    def gone(self, left: int) -> int:
        """Returns how many messages are gone that were left to publish, if `left` of those up to `ends` are there."""
        return 0 if self._stored.total is None else max(self._stored.total - self._stored.messages - left, 0)

    def expect(self, left: int, ends: Mapping[str, int]) -> None:
        """Remembers how many messages are left to publish. The next write stores that; without it none is published."""
        self._stored.total = self._stored.messages + left
        self._stored.ends = dict(ends)

    def finish(self) -> None:
        self._stored.is_done = True
        self._write()

    def _write(self) -> None:
        write_atomically(self._path, msgspec.json.encode(self._stored))


def _make_durably(directory: Path) -> None:
    """Makes a directory and those above it: if a power cut took a new one, the replay would begin again."""
    if not directory.is_dir():
        _make_durably(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def _read(path: Path, identity: Mapping[str, str]) -> _Stored:
    try:
        stored = decode_json(path.read_bytes(), _Stored)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): name another --checkpoint for a new replay") from None
    for name in sorted({*stored.identity, *identity}):
        before, now = stored.identity.get(name, ""), identity.get(name, "")
        if before != now:
            raise UserError(
                f"{path.parent} belongs to a replay with {name} {before or 'not given'}, and now it is "
                f"{now or 'not given'}: write it as it was to go on, or name another --checkpoint for a new replay"
            )
    return stored


def _us(moment: datetime) -> int:
    return (moment - EPOCH) // MICROSECOND
