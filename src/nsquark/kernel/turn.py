# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Ends a turn of the event loop: everything that was received in it is written, delivered and noted at once.

This is where group commit and batching come from: a turn that read from fifty sockets costs one write per topic, not
one per message.
"""

import traceback
from time import monotonic_ns

import cython

MISS = cython.declare(cython.int, 16)
"""A poll that found nothing is made up for by this many that did, or by this many turns without one."""
LUCK_MAX = cython.declare(cython.int, 64)
"""Luck is saved up to this: four polls in a row that find nothing are forgiven if all was well before."""

CHANNELS_AT_ONCE = cython.declare(cython.int, 32)
"""A turn delivers to so many channels before it looks whether its time is over."""
DELIVER_NS_MAX = cython.declare(cython.longlong, 2_000_000)
"""A turn delivers this long; the channels that are left come first in the next one, after sockets were read."""


@cython.cclass
class Turn:
    """Collects what has work to do, and does it after the sockets that are readable now were read.

    Before the loop sleeps again, it looks for more for `poll_ns`, if that has paid lately: clients that wait for an
    answer and then send the next command are back in less time than it takes to fall asleep and be woken. It does not
    look while there are `jobs` in threads, which need the interpreter to end.
    """

    jobs = cython.declare(dict, visibility="public")
    count = cython.declare(cython.longlong, visibility="readonly")
    _call_soon: object
    _clock_ns: object
    _report: object
    _run: object
    _logs: list
    _channels: dict
    _undelivered: dict
    _is_due: cython.bint
    _poll: object
    _poll_ns: cython.longlong
    _poll_until_ns: cython.longlong
    _is_polling: cython.bint
    _luck: cython.int

    def __init__(
        self, call_soon: object, report: object, poll_ns: cython.longlong = 0, clock_ns: object = monotonic_ns
    ):
        self.jobs = {}
        self.count = 0
        self._call_soon = call_soon
        self._clock_ns = clock_ns
        self._report = report
        self._run = self.run
        self._logs = []
        self._channels = {}
        self._undelivered = {}
        self._is_due = False
        self._poll = self.poll
        self._poll_ns = poll_ns
        self._poll_until_ns = 0
        self._is_polling = False
        self._luck = 1

    def write(self, log: object) -> None:
        """Is told that a log has something to commit."""
        self._logs.append(log)
        if not self._is_due:
            self._is_due = True
            self._call_soon(self._run)

    def wake(self, channel: object) -> None:
        """Is told that a channel may have something to deliver or to note."""
        self._channels[channel] = None
        if not self._is_due:
            self._is_due = True
            self._call_soon(self._run)

    def run(self) -> None:
        """Notes how far the channels came, commits, then delivers what that made available.

        In this order a client that got an OK knows that what it finished before is noted too.
        """
        started_ns: cython.longlong = self._clock_ns() if self._poll_ns else 0
        self._is_due = False
        self.count += 1
        for channel in list(self._channels):
            self._guarded(channel.persist)
        if self._logs:
            logs: list = self._logs
            self._logs = []
            for log in logs:
                self._guarded(log.write)
        if self._channels or self._undelivered:
            channels: dict = self._channels
            self._channels = {}
            if self._undelivered or len(channels) > CHANNELS_AT_ONCE:
                self._deliver_to_many(channels)
            else:
                for channel in channels:
                    self._guarded(channel.deliver)
        if self._poll_ns:
            self._poll_again(started_ns)

    @cython.cfunc
    def _deliver_to_many(self, woken: dict) -> cython.void:
        """Delivers for as long as a turn may: a message for a thousand channels takes longer, and clients wait."""
        until_ns: cython.longlong = self._clock_ns() + DELIVER_NS_MAX
        self._undelivered.update(woken)
        channels: list = list(self._undelivered)
        count: cython.int = 0
        for channel in channels:
            self._guarded(channel.deliver)
            count += 1
            if count % CHANNELS_AT_ONCE == 0 and self._clock_ns() > until_ns:
                break
        self._undelivered = dict.fromkeys(channels[count:])
        if self._undelivered and not self._is_due:
            self._is_due = True
            self._call_soon(self._run)

    @cython.cfunc
    def _poll_again(self, started_ns: cython.longlong) -> cython.void:
        now_ns: cython.longlong = self._clock_ns()
        if self.jobs or now_ns - started_ns > self._poll_ns >> 1:
            return  # beside that much work, being woken costs little
        if self._is_polling:
            if self._luck < LUCK_MAX:
                self._luck += 1
        elif self._luck <= 0:
            self._luck += 1
            return
        else:
            self._is_polling = True
            self._call_soon(self._poll)
        self._poll_until_ns = now_ns + self._poll_ns

    def poll(self) -> None:
        """Schedules itself again until its time is over: meanwhile the loop looks at the sockets without waiting."""
        if self.jobs:
            self._is_polling = False
        elif self._clock_ns() < self._poll_until_ns:
            self._call_soon(self._poll)
        else:
            self._is_polling = False
            self._luck -= MISS

    @cython.cfunc
    def _guarded(self, work: object) -> cython.void:
        """Calls a function so that a fault in one topic does not stop the others."""
        try:
            work()
        except Exception:
            self._report(f"INTERNAL: {traceback.format_exc()}")
