# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Brings a client's bytes into an open commit; a settled commit becomes the client's replies.

    Connection.buffer_updated ── Intake.publish ── Tail   during the turn: every whole PUB and MPUB of a socket read
    Commit.settle ── ReplyQueue.flush                     after the write: OK for each of them, in order

`tail.py` writes the commit in between.
"""

from time import time_ns

import cython

if cython.compiled:
    from cython.cimports.nsquark.kernel.bytes import u32
    from cython.cimports.nsquark.kernel.commits import Commit
    from cython.cimports.nsquark.kernel.records import Chunk, measure_mpub
    from cython.cimports.nsquark.kernel.replies import ReplyQueue
    from cython.cimports.nsquark.kernel.tail import Tail
else:
    from nsquark.kernel.bytes import u32
    from nsquark.kernel.commits import Commit
    from nsquark.kernel.records import Chunk, measure_mpub
    from nsquark.kernel.replies import ReplyQueue
    from nsquark.kernel.tail import Tail

MESSAGE_BYTES_MIN = cython.declare(cython.longlong, 5)

MPUB_WHOLE_MESSAGES_MAX = 65_536
"""An MPUB of at most this many messages is written all or none. More are spread over several turns, or other clients
would wait for all of them.
"""
MPUB_TURN_MESSAGES_MAX = 16_384
"""At most this many messages of a larger MPUB are written in each turn."""
_MPUB_WHOLE_MESSAGES_MAX = cython.declare(cython.longlong, MPUB_WHOLE_MESSAGES_MAX)

LETTER_M = cython.declare(cython.int, 77)
LETTER_P = cython.declare(cython.int, 80)


@cython.cclass
class Intake:
    """Publishes quickly what a client sends to the topic it published to last; the session handles what it leaves.

    `published` counts messages by topic, and has this topic's `name` already. `on_congested` is called when more is
    uncommitted than should be.
    """

    tail = cython.declare(Tail, visibility="readonly")
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
        tail: Tail,
        replies: ReplyQueue,
        published: dict,
        on_congested: object,
        message_bytes_max: cython.longlong,
        body_bytes_max: cython.longlong,
    ):
        self._name = name
        self.tail = tail
        self._replies = replies
        self._published = published
        self._on_congested = on_congested
        self._pub_line = b"PUB " + name.encode() + b"\n"
        self._mpub_line = b"M" + self._pub_line
        self._message_bytes_max = message_bytes_max
        self._body_bytes_max = body_bytes_max

    @cython.ccall
    def publish(self, data: bytearray, pos: cython.longlong, end: cython.longlong) -> cython.longlong:
        """Publishes whole and well-formed PUBs and MPUBs to this topic; returns where the first other thing starts."""
        after: cython.longlong = pos
        while after < end and not self.tail.is_closed:
            pos = after
            if data[pos] == LETTER_P:
                after = self._publish_pubs(data, pos, end)
            elif data[pos] == LETTER_M:
                after = self._publish_mpub(data, pos, end)
            if after == pos:
                break
        if self.tail.commits.is_congested() and after > 0:
            self._on_congested()
        return after

    @cython.cfunc
    def _publish_pubs(self, data: bytearray, pos: cython.longlong, end: cython.longlong) -> cython.longlong:
        chunk: Chunk = self.tail.chunk
        if chunk is None:
            return pos
        now_ns: cython.longlong = time_ns()
        first: cython.longlong = chunk.count
        used: cython.longlong = chunk.used
        count: cython.longlong = chunk.append_pubs(data, pos, end, self._pub_line, self._message_bytes_max, now_ns)
        if count == 0:
            return pos
        commit: Commit = self.tail.begin(now_ns, first)
        self.tail.commits.added(chunk.used - used, now_ns)
        self._promise(commit, "PUB", count, count)
        return chunk.resume

    @cython.cfunc
    def _publish_mpub(self, data: bytearray, pos: cython.longlong, end: cython.longlong) -> cython.longlong:
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
        self._promise(self.tail.append_sized(data, at + 8, after, count, time_ns()), "MPUB", count, 1)
        return after

    @cython.cfunc
    def _promise(
        self, commit: Commit, word: object, messages: cython.longlong, replies: cython.longlong
    ) -> cython.void:
        self._published[self._name] += messages
        self._replies.promise(commit, word, replies)
