# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Keeps the replies that a connection is owed, in the order of its commands. The C types are in replies.pxd."""

from collections import deque

import cython

if cython.compiled:
    from cython.cimports.nsquark.kernel.commits import Commit
else:
    from nsquark.kernel.commits import Commit


@cython.cclass
class _Reply:
    """Is the reply to `count` publishes that share a commit, or a frame that is ready; one with `then` is the last."""

    commit = cython.declare(object)
    word = cython.declare(object)
    data = cython.declare(object)
    count = cython.declare(cython.longlong)
    then = cython.declare(object)

    def __init__(self, commit: object, word: object, count: cython.longlong, data: object, then: object):
        self.commit = commit
        self.word = word
        self.count = count
        self.data = data
        self.then = then


class ReplyQueue:
    """Keeps the replies that one connection is still owed, first come first answered.

    A subclass has `refusal(word, error)`, which returns the bytes for a publish that failed; `close`, if any, is called
    behind them. `write` sends bytes to the client.
    """

    def __init__(self, ok: bytes, write: object, close: object):
        self.after = None
        self.write = write
        self._ok = ok
        self._close = close
        self._waiting = deque()
        self._is_stopped = False

    @property
    def are_owed(self) -> cython.bint:
        return len(self._waiting) > 0

    def promise(self, commit: Commit, word: object, count: cython.longlong) -> cython.void:
        """Owes `count` OKs, or the error of the command `word`, once the commit is settled."""
        last: _Reply
        if self._waiting:
            last = self._waiting[len(self._waiting) - 1]
            if last.commit is commit and last.word == word:
                last.count += count
                return
        self._waiting.append(_Reply(commit, word, count, b"", None))
        if commit.is_settled:
            self.flush()
        else:
            commit.waiters.append(self)

    def settled(self, commit: object) -> None:
        """Is called when a commit that replies wait for is settled."""
        if not self._is_stopped:
            self.flush()
            if self.after is not None:
                self.after()

    def send(self, data: object) -> None:
        """Sends a frame behind the replies that are owed."""
        if self._waiting:
            self._waiting.append(_Reply(None, "", 0, data, None))
        elif not self._is_stopped:
            self.write(data)

    def send_last(self, data: object) -> None:
        """Sends a frame behind the replies that are owed, and closes the connection behind it."""
        self.send_then(data, self._close)

    def send_then(self, data: object, then: object) -> None:
        """Sends a frame behind the replies that are owed; then nothing else is owed, and `then` is called."""
        self._waiting.append(_Reply(None, "", 0, data, then))
        self.flush()

    def stop(self) -> None:
        """Forgets what is owed: the connection is closed."""
        self._is_stopped = True
        self._waiting.clear()

    def flush(self) -> cython.void:
        """Writes the replies whose commits are settled, up to the first that still waits."""
        out: list = []
        then: object = None
        reply: _Reply
        commit: Commit
        while self._waiting and then is None:
            reply = self._waiting[0]
            if reply.commit is None:
                out.append(reply.data)
                then = reply.then
            else:
                commit = reply.commit
                if not commit.is_settled:
                    break
                if commit.error is None:
                    out.append(self._ok if reply.count == 1 else self._ok * reply.count)
                else:
                    out.append(self.refusal(reply.word, commit.error))
                    then = self._close
            self._waiting.popleft()
        data: object = out[0] if len(out) == 1 else b"".join(out)
        if data and not self._is_stopped:
            self.write(data)
        if then is not None:
            self._waiting.clear()
            then()
