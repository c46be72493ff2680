# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""From a client's bytes to an open commit, and from a settled commit to the client's replies.

    Intake.take ── Tail ── Chunk           during the turn: every whole PUB and MPUB of a socket read
    Commit.settle ── ReplyQueue.flush      after the write: OK for each of them, in order

`log/` makes the commit durable in between.
"""

from collections import deque
from time import time_ns

import cython

from nsquark.kernel.arena import measure_mpub

UNCOMMITTED_BYTES_MAX = cython.declare(cython.longlong, 8 << 20)
RECORD_OVERHEAD = cython.declare(cython.longlong, 34)
MESSAGE_BYTES_MIN = cython.declare(cython.longlong, 5)
NO_TOKEN = bytes(16)

LETTER_M = cython.declare(cython.int, 77)
LETTER_P = cython.declare(cython.int, 80)


@cython.cclass
class Commit:
    """The records of one write: open while messages are being added, then settled once, with an error or without.

    `slices` are parts of chunks, each from a record's index on.
    """

    waiters = cython.declare(list, visibility="public")
    is_settled = cython.declare(cython.bint, visibility="public")
    error = cython.declare(object, visibility="public")
    slices = cython.declare(list, visibility="public")
    time_min_ns = cython.declare(cython.longlong, visibility="public")
    time_max_ns = cython.declare(cython.longlong, visibility="public")
    bytes_added = cython.declare(cython.longlong, visibility="public")
    flags = cython.declare(cython.int, visibility="public")
    token = cython.declare(bytes, visibility="public")

    def __init__(self, timestamp_ns: cython.longlong = 0):
        self.waiters = []
        self.is_settled = False
        self.error = None
        self.slices = []
        self.time_min_ns = timestamp_ns
        self.time_max_ns = timestamp_ns
        self.bytes_added = 0
        self.flags = 0
        self.token = NO_TOKEN

    def settle(self, error: object = None) -> None:
        self.is_settled = True
        self.error = error
        for waiter in self.waiters:
            waiter.committed(self)


@cython.cclass
class Tail:
    """The end of a log: `chunk` takes what is appended, `open` is the commit that will write it.

    A subclass has `extend(body_bytes)`, which gives `chunk` room for a message, and is told by `on_dirty` when a
    commit is opened. While it `is_closed` nothing is to be appended.
    """

    chunk = cython.declare(object, visibility="public")
    open = cython.declare(object, visibility="public")
    uncommitted_bytes = cython.declare(cython.longlong, visibility="public")
    is_closed = cython.declare(cython.bint, visibility="public")
    _on_dirty: object

    def __init__(self, on_dirty: object):
        self.chunk = None
        self.open = None
        self.uncommitted_bytes = 0
        self.is_closed = False
        self._on_dirty = on_dirty

    @property
    def is_congested(self) -> cython.bint:
        """Publishers are to be paused until the disk has caught up."""
        return self.uncommitted_bytes > UNCOMMITTED_BYTES_MAX

    def append(
        self, source: object, pos: cython.longlong, size: cython.longlong, timestamp_ns: cython.longlong
    ) -> object:
        """One message; it is published once the commit that is returned is settled without an error."""
        commit: Commit = self.begin(timestamp_ns)
        if self.chunk is None or not self.chunk.append(source, pos, size, timestamp_ns):
            self.extend(size)
            self.chunk.append(source, pos, size, timestamp_ns)
        self._added(commit, size + RECORD_OVERHEAD, timestamp_ns)
        return commit

    def append_sized(
        self,
        source: object,
        pos: cython.longlong,
        end: cython.longlong,
        count: cython.longlong,
        timestamp_ns: cython.longlong,
    ) -> object:
        """`count` messages, each behind its size, as in MPUB; they were measured before."""
        commit: Commit = self.begin(timestamp_ns)
        start: cython.longlong = pos
        left: cython.longlong = count
        while left:
            if self.chunk is not None:
                left -= self.chunk.append_sized(source, pos, left, timestamp_ns)
                pos = self.chunk.resume
            if left:
                self.extend(int.from_bytes(source[pos : pos + 4], "big"))
        self._added(commit, end - start + count * (RECORD_OVERHEAD - 4), timestamp_ns)
        return commit

    @cython.ccall
    def begin(self, timestamp_ns: cython.longlong, first: cython.longlong = -1) -> object:
        """The commit that is open; if it has to be opened, from record `first` of the chunk on, or the next."""
        if self.open is not None:
            return self.open
        commit = Commit(timestamp_ns)
        if self.chunk is not None:
            commit.slices.append((self.chunk, self.chunk.count if first < 0 else first))
        self.open = commit
        self._on_dirty(self)
        return commit

    @cython.cfunc
    def _added(self, commit: Commit, size: cython.longlong, timestamp_ns: cython.longlong) -> cython.void:
        commit.bytes_added += size
        self.uncommitted_bytes += size
        if timestamp_ns > commit.time_max_ns:
            commit.time_max_ns = timestamp_ns
        elif timestamp_ns < commit.time_min_ns:
            commit.time_min_ns = timestamp_ns


@cython.cclass
class _Reply:
    """`count` publishes that share a commit, or a frame that is ready; it is the last if something comes `then`."""

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


@cython.cclass
class ReplyQueue:
    """The replies that one connection is still owed, first come first answered.

    A subclass has `refusal(word, error)`, the bytes for a publish that failed; after those comes `close`, if any.
    """

    after = cython.declare(object, visibility="public")
    _ok: bytes
    _write: object
    _close: object
    _waiting: object
    _is_stopped: cython.bint

    def __init__(self, ok: bytes, write: object, close: object):
        self.after = None
        self._ok = ok
        self._write = write
        self._close = close
        self._waiting = deque()
        self._is_stopped = False

    @property
    def are_owed(self) -> cython.bint:
        return len(self._waiting) > 0

    @cython.ccall
    def promise(self, commit: Commit, word: object, count: cython.longlong) -> cython.void:
        """`count` OKs, or the error of the command `word`, once the commit is settled."""
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

    def committed(self, commit: object) -> None:
        if not self._is_stopped:
            self.flush()
            if self.after is not None:
                self.after()

    def send(self, data: object) -> None:
        """A frame in its turn."""
        if self._waiting:
            self._waiting.append(_Reply(None, "", 0, data, None))
        else:
            self._write(data)

    def send_last(self, data: object) -> None:
        """A frame in its turn, after which the connection is closed."""
        self.send_then(data, self._close)

    def send_then(self, data: object, then: object) -> None:
        """A frame in its turn; once it is written nothing else is owed, and `then` is called."""
        self._waiting.append(_Reply(None, "", 0, data, then))
        self.flush()

    def stop(self) -> None:
        """The connection is closed."""
        self._is_stopped = True
        self._waiting.clear()

    @cython.ccall
    def flush(self) -> cython.void:
        """Writes what is settled, up to the first that is not."""
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
        if out:
            self._write(out[0] if len(out) == 1 else b"".join(out))
        if then is not None:
            self._waiting.clear()
            then()


@cython.cclass
class Intake:
    """The quick way of a client's publishes into the topic it published to last; what it leaves takes the other.

    `published` counts by topic, and has this one's `name` already. `on_congested` is called when more is uncommitted
    than should be.
    """

    log = cython.declare(Tail, visibility="readonly")
    _name: object
    _replies: ReplyQueue
    _published: dict
    _on_congested: object
    _pub_line: bytes
    _mpub_line: bytes
    _message_bytes_max: cython.longlong
    _body_bytes_max: cython.longlong

    def __init__(
        self,
        name: str,
        log: Tail,
        replies: ReplyQueue,
        published: dict,
        on_congested: object,
        message_bytes_max: cython.longlong,
        body_bytes_max: cython.longlong,
    ):
        self._name = name
        self.log = log
        self._replies = replies
        self._published = published
        self._on_congested = on_congested
        self._pub_line = b"PUB " + name.encode() + b"\n"
        self._mpub_line = b"M" + self._pub_line
        self._message_bytes_max = message_bytes_max
        self._body_bytes_max = body_bytes_max

    def take(self, data: bytearray, pos: cython.longlong, end: cython.longlong) -> cython.longlong:
        """Takes the whole and well-formed PUBs and MPUBs to this topic; where the first other thing starts."""
        after: cython.longlong = pos
        while after < end and not self.log.is_closed:
            pos = after
            if data[pos] == LETTER_P:
                after = self._take_pubs(data, pos, end)
            elif data[pos] == LETTER_M:
                after = self._take_mpub(data, pos, end)
            if after == pos:
                break
        if self.log.uncommitted_bytes > UNCOMMITTED_BYTES_MAX and after > 0:
            self._on_congested()
        return after

    @cython.cfunc
    def _take_pubs(self, data: bytearray, pos: cython.longlong, end: cython.longlong) -> cython.longlong:
        chunk: object = self.log.chunk
        if chunk is None:
            return pos
        now_ns: cython.longlong = time_ns()
        first: cython.longlong = chunk.count
        used: cython.longlong = chunk.used
        count: cython.longlong = chunk.append_pubs(data, pos, end, self._pub_line, self._message_bytes_max, now_ns)
        if count == 0:
            return pos
        commit: Commit = self.log.begin(now_ns, first)
        self.log._added(commit, chunk.used - used, now_ns)
        self._promise(commit, "PUB", count, count)
        return chunk.resume

    @cython.cfunc
    def _take_mpub(self, data: bytearray, pos: cython.longlong, end: cython.longlong) -> cython.longlong:
        at: cython.longlong = pos + len(self._mpub_line)
        if at + 8 > end or not data.startswith(self._mpub_line, pos):
            return pos
        size: cython.longlong = _u32(data, at)
        count: cython.longlong = _u32(data, at + 4)
        limit: cython.longlong = self._body_bytes_max
        if size == 0 or size > limit or count == 0 or count > (limit - 4) // MESSAGE_BYTES_MIN:
            return pos
        after: cython.longlong = measure_mpub(data, at + 8, end, count, self._message_bytes_max)[0]
        if after < 0:
            return pos
        self._promise(self.log.append_sized(data, at + 8, after, count, time_ns()), "MPUB", count, 1)
        return after

    @cython.cfunc
    def _promise(
        self, commit: Commit, word: object, messages: cython.longlong, replies: cython.longlong
    ) -> cython.void:
        self._published[self._name] += messages
        self._replies.promise(commit, word, replies)


@cython.cclass
class HttpIntake:
    """The same for a client that publishes by HTTP: requests with the same head as one before, but for their length.

    `before` and `behind` are the parts of that head around the number of the body's bytes. It takes a request only if
    that is all that came; its answers are due in `replies`.
    """

    replies = cython.declare(ReplyQueue, visibility="readonly")
    _log: Tail
    _before: bytes
    _behind: bytes
    _message_bytes_max: cython.longlong

    def __init__(
        self, log: Tail, replies: ReplyQueue, before: bytes, behind: bytes, message_bytes_max: cython.longlong
    ):
        self.replies = replies
        self._log = log
        self._before = before
        self._behind = behind
        self._message_bytes_max = message_bytes_max

    def take(self, data: bytes) -> cython.bint:
        """Whether it was such a request; then it will be answered."""
        at: cython.longlong = len(self._before)
        end: cython.longlong = len(data)
        size: cython.longlong = 0
        if self._log.is_closed or self._log.is_congested or not data.startswith(self._before):
            return False
        while at < end and 48 <= data[at] <= 57 and size <= self._message_bytes_max:
            size = 10 * size + data[at] - 48
            at += 1
        if size == 0 or size > self._message_bytes_max or at + len(self._behind) + size != end:
            return False
        if not data.startswith(self._behind, at):
            return False
        try:
            commit: Commit = self._log.append(data, end - size, size, time_ns())
        except OSError:
            return False  # it fails on the other way too, and is answered there
        self.replies.promise(commit, "", 1)
        return True


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _u32(data: bytearray, pos: cython.longlong) -> cython.longlong:
    return (
        (cython.cast(cython.longlong, data[pos]) << 24)
        | (cython.cast(cython.longlong, data[pos + 1]) << 16)
        | (cython.cast(cython.longlong, data[pos + 2]) << 8)
        | cython.cast(cython.longlong, data[pos + 3])
    )
