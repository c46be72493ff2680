# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Publishes a repeated HTTP request without parser, router and handler; `web/lane.py` says when it may go this way."""

from time import time_ns

import cython

if cython.compiled:
    from cython.cimports.nsquark.kernel.commits import Commit
    from cython.cimports.nsquark.kernel.replies import ReplyQueue
    from cython.cimports.nsquark.kernel.tail import Tail
else:
    from nsquark.kernel.commits import Commit
    from nsquark.kernel.replies import ReplyQueue
    from nsquark.kernel.tail import Tail


@cython.cclass
class HttpLane:
    """Publishes HTTP requests whose head is that of an earlier one, but for the length of the body.

    `before` and `behind` are the parts of that head around the number of the body's bytes. A request is published here
    only if nothing else came with it; `replies` owes its answer.
    """

    replies = cython.declare(ReplyQueue, visibility="readonly")
    _tail: Tail
    _before: bytes
    _behind: bytes
    _message_bytes_max: cython.longlong

    def __init__(
        self, tail: Tail, replies: ReplyQueue, before: bytes, behind: bytes, message_bytes_max: cython.longlong
    ):
        self.replies = replies
        self._tail = tail
        self._before = before
        self._behind = behind
        self._message_bytes_max = message_bytes_max

    def handle(self, data: bytes) -> cython.bint:
        """Publishes `data` if it is such a request, which then will be answered; tells whether it was."""
        at: cython.longlong = len(self._before)
        end: cython.longlong = len(data)
        size: cython.longlong = 0
        if self._tail.is_closed or self._tail.commits.is_congested() or not data.startswith(self._before):
            return False
        while at < end and 48 <= data[at] <= 57 and size <= self._message_bytes_max:
            size = 10 * size + data[at] - 48
            at += 1
        if size == 0 or size > self._message_bytes_max or at + len(self._behind) + size != end:
            return False
        if not data.startswith(self._behind, at):
            return False
        try:
            commit: Commit = self._tail.append(data, end - size, size, time_ns())
        except OSError:
            return False  # it fails on the other way too, and is answered there
        self.replies.promise(commit, "", 1)
        return True
