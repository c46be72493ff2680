"""Replies in order: each waits for all earlier ones, whichever topic commits first."""

from collections import deque
from collections.abc import Callable

from nsquark.log.commit import Commit
from nsquark.wire.errors import FatalClientError
from nsquark.wire.frames import OK, FrameType, frame


class _Reply:
    """`count` publishes that share a commit, or a frame that is ready; it is the last if something comes `then`."""

    __slots__ = ("commit", "count", "data", "then", "word")

    def __init__(self, commit: Commit | None, word: str, data: bytes, then: Callable[[], None] | None) -> None:
        self.commit = commit
        self.word = word
        self.data = data
        self.count = 1
        self.then = then


class Replies:
    """The replies that one connection is still owed, first come first answered."""

    def __init__(self, write: Callable[[bytes], None], close: Callable[[], None]) -> None:
        self._write = write
        self._close = close
        self._waiting: deque[_Reply] = deque()

    @property
    def are_owed(self) -> bool:
        return bool(self._waiting)

    def promise(self, commit: Commit, word: str, count: int = 1) -> bool:
        """OK, or the error of the command `word`, once the commit is settled; False if others wait for it already."""
        waiting = self._waiting
        if waiting and waiting[-1].commit is commit and waiting[-1].word == word:
            waiting[-1].count += count
            return False
        reply = _Reply(commit, word, b"", None)
        reply.count = count
        waiting.append(reply)
        return True

    def send(self, data: bytes) -> None:
        """A frame in its turn."""
        if self._waiting:
            self._waiting.append(_Reply(None, "", data, None))
        else:
            self._write(data)

    def send_last(self, data: bytes) -> None:
        """A frame in its turn, after which the connection is closed."""
        self.send_then(data, self._close)

    def send_then(self, data: bytes, then: Callable[[], None]) -> None:
        """A frame in its turn; once it is written nothing else is owed, and `then` is called."""
        self._waiting.append(_Reply(None, "", data, then))
        self.flush()

    def flush(self) -> None:
        """Writes what is settled, up to the first that is not."""
        waiting = self._waiting
        if len(waiting) == 1 and (commit := waiting[0].commit) is not None and commit.is_settled and not commit.error:
            self._write(OK * waiting.popleft().count)  # nearly always
            return
        out: list[bytes] = []
        then: Callable[[], None] | None = None
        while waiting and then is None and (waiting[0].commit is None or waiting[0].commit.is_settled):
            reply = waiting.popleft()
            if reply.commit is None:
                out.append(reply.data)
                then = reply.then
            elif reply.commit.error is None:
                out.append(OK * reply.count)
            else:
                error = FatalClientError(f"E_{reply.word}_FAILED", f"{reply.word} failed {reply.commit.error}")
                out.append(frame(FrameType.ERROR, error.payload()))
                then = self._close
        if out:
            self._write(out[0] if len(out) == 1 else b"".join(out))
        if then is not None:
            waiting.clear()
            then()
