# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""From a client's bytes to an open commit, and from a settled commit to the client's replies.

    Connection.buffer_updated ── Intake.take ── Tail   during the turn: every whole PUB and MPUB of a socket read
    Commit.settle ── ReplyQueue.flush                  after the write: OK for each of them, in order

`tail.py` makes the commit durable in between.
"""

from collections import deque
from time import time_ns

import cython

if cython.compiled:
    from cython.cimports.nsquark.kernel.bytes import u32
    from cython.cimports.nsquark.kernel.records import Chunk, measure_mpub
    from cython.cimports.nsquark.kernel.tail import Commit, Tail
else:
    from nsquark.kernel.bytes import u32
    from nsquark.kernel.records import Chunk, measure_mpub
    from nsquark.kernel.tail import Commit, Tail

MESSAGE_BYTES_MIN = cython.declare(cython.longlong, 5)

MPUB_WHOLE_MESSAGES_MAX = 65_536
"""So many messages of an MPUB are written all or none. More are spread over several turns, or other clients would wait
for all of them..."""
MPUB_TURN_MESSAGES_MAX = 16_384
"""...so many in each."""
_MPUB_WHOLE_MESSAGES_MAX = cython.declare(cython.longlong, MPUB_WHOLE_MESSAGES_MAX)

LETTER_M = cython.declare(cython.int, 77)
LETTER_P = cython.declare(cython.int, 80)


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
    `write` sends bytes to the client.
    """

    after = cython.declare(object, visibility="public")
    write = cython.declare(object, visibility="public")
    _ok: bytes
    _close: object
    _waiting: object
    _is_stopped: cython.bint

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
        elif not self._is_stopped:
            self.write(data)

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
        data: object = out[0] if len(out) == 1 else b"".join(out)
        if data and not self._is_stopped:
            self.write(data)
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

    @cython.ccall
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
        if self.log.is_congested and after > 0:
            self._on_congested()
        return after

    @cython.cfunc
    def _take_pubs(self, data: bytearray, pos: cython.longlong, end: cython.longlong) -> cython.longlong:
        chunk: Chunk = self.log.chunk
        if chunk is None:
            return pos
        now_ns: cython.longlong = time_ns()
        first: cython.longlong = chunk.count
        used: cython.longlong = chunk.used
        count: cython.longlong = chunk.append_pubs(data, pos, end, self._pub_line, self._message_bytes_max, now_ns)
        if count == 0:
            return pos
        commit: Commit = self.log.begin(now_ns, first)
        self.log.added(commit, chunk.used - used, now_ns)
        self._promise(commit, "PUB", count, count)
        return chunk.resume

    @cython.cfunc
    def _take_mpub(self, data: bytearray, pos: cython.longlong, end: cython.longlong) -> cython.longlong:
        at: cython.longlong = pos + len(self._mpub_line)
        if at + 8 > end or not data.startswith(self._mpub_line, pos):
            return pos
        view: cython.const[cython.uchar][::1] = data
        size: cython.longlong = u32(view, at)
        count: cython.longlong = u32(view, at + 4)
        limit: cython.longlong = self._body_bytes_max
        if size == 0 or size > limit or count == 0 or count > (limit - 4) // MESSAGE_BYTES_MIN:
            return pos
        if count > _MPUB_WHOLE_MESSAGES_MAX:
            return pos
        after: cython.longlong = measure_mpub(view, at + 8, end, count, self._message_bytes_max)[0]
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
