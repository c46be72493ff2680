"""How far a replay has come, in a small file: what it replays, the last message that was published, and what is next.

The piece that comes next is stored before it is appended. So there is at most one piece of which the file does not know
whether it was published, and nsqd knows that by the piece's token.
"""

import contextlib
import fcntl
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from nsquark.base.errors import UserError
from nsquark.log.files import write_atomically

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
STATE = "replay.json"
LOCK = "lock"


class ReplayKey(NamedTuple):
    """The place of a message in the order of a replay."""

    at_us: int
    nsqd: str
    topic: str
    seq: int


class PendingReplay(msgspec.Struct, frozen=True):
    """A piece that is being appended."""

    token: str
    nsqd: str
    last: ReplayKey
    messages: int


class _Stored(msgspec.Struct):
    """The file."""

    identity: dict[str, str]
    id: str
    since_us: int | None
    """Microseconds since 1970."""
    until_us: int
    pieces: int = 0
    messages: int = 0
    position: ReplayKey | None = None
    pending: PendingReplay | None = None
    is_done: bool = False


class ReplayState:
    """Always: everything up to `position` is published, and nothing after it but perhaps `pending`."""

    def __init__(self, path: Path, stored: _Stored) -> None:
        self._path = path
        self._stored = stored

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, directory: Path, identity: Mapping[str, str], since: datetime | None, until: datetime
    ) -> Iterator[Self]:
        """The state that is there, else a new one of this range; no other process has it meanwhile."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
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
            state._write(sync=True)
            yield state

    @property
    def since(self) -> datetime | None:
        """Where the range begins, as it was resolved when the replay began, or what is left of it."""
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
        """How many are published, the pending piece aside."""
        return self._stored.messages

    @property
    def pending(self) -> PendingReplay | None:
        return self._stored.pending

    @property
    def is_done(self) -> bool:
        return self._stored.is_done

    def next_token(self) -> str:
        """One that was never used: a piece that came to nothing may be cut otherwise the second time, and nsqd may
        still have what was staged of it.
        """
        self._stored.pieces += 1
        return f"replay-{self._stored.id}-{self._stored.pieces}"

    def intend(self, piece: PendingReplay) -> None:
        self._stored.pending = piece
        self._write()

    def piece_published(self) -> None:
        """The pending piece is published. That is written with the next one: nsqd says so too if this is lost."""
        piece = self._stored.pending
        assert piece is not None
        self._stored.position = piece.last
        self._stored.messages += piece.messages
        self._stored.pending = None

    def finish(self) -> None:
        self._stored.is_done = True
        self._write(sync=True)

    def _write(self, *, sync: bool = False) -> None:
        write_atomically(self._path, msgspec.json.encode(self._stored), sync=sync)


def _read(path: Path, identity: Mapping[str, str]) -> _Stored:
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
    except (OSError, msgspec.MsgspecError) as error:
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
