# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The end of a turn of the event loop: everything that was received in it is written, delivered and noted at once.

This is where group commit and batching come from: a turn that read from fifty sockets costs one write per topic, not
one per message.
"""

import traceback

import cython


@cython.cclass
class Turn:
    """Collects what has work to do, and does it after the sockets that are readable now were read."""

    count = cython.declare(cython.longlong, visibility="readonly")
    _call_soon: object
    _report: object
    _run: object
    _logs: list
    _channels: dict
    _is_due: cython.bint

    def __init__(self, call_soon: object, report: object):
        self.count = 0
        self._call_soon = call_soon
        self._report = report
        self._run = self.run
        self._logs = []
        self._channels = {}
        self._is_due = False

    def write(self, log: object) -> None:
        """A log has something to commit; each log says so once."""
        self._logs.append(log)
        if not self._is_due:
            self._is_due = True
            self._call_soon(self._run)

    def wake(self, channel: object) -> None:
        """A channel may have something to deliver or to note."""
        self._channels[channel] = None
        if not self._is_due:
            self._is_due = True
            self._call_soon(self._run)

    def run(self) -> None:
        """Note how far the channels came, commit, then deliver what that made available.

        In this order a client that got an OK knows that what it finished before is noted too. A fault in one topic
        must not stop the others.
        """
        self._is_due = False
        self.count += 1
        for channel in list(self._channels) if self._channels else ():
            try:
                channel.persist()
            except Exception:
                self._report_fault()
        if self._logs:
            logs: list = self._logs
            self._logs = []
            for log in logs:
                try:
                    log.write()
                except Exception:
                    self._report_fault()
        if self._channels:
            channels: dict = self._channels
            self._channels = {}
            for channel in channels:
                try:
                    channel.deliver()
                except Exception:
                    self._report_fault()

    @cython.cfunc
    def _report_fault(self) -> cython.void:
        self._report(f"INTERNAL: {traceback.format_exc()}")
