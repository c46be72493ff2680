"""The end of a turn of the event loop: everything that was received in it is written, delivered and noted at once.

This is where group commit and batching come from: a turn that read from fifty sockets costs one write per topic, not
one per message.
"""

import asyncio
import traceback
from collections.abc import Callable
from typing import Protocol


class Writable(Protocol):
    def write(self) -> None: ...


class Deliverer(Protocol):
    def deliver(self) -> None: ...

    def persist(self) -> None: ...


class Turn:
    """Collects what has work to do, and does it after the sockets that are readable now were read."""

    def __init__(self, loop: asyncio.AbstractEventLoop, report: Callable[[str], None]) -> None:
        self._loop = loop
        self._report = report
        self._logs: list[Writable] = []
        self._channels: dict[Deliverer, None] = {}
        self._scheduled = False
        self.count = 0

    def write(self, log: Writable) -> None:
        """A log has something to commit; each log says so once."""
        self._logs.append(log)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.run)

    def wake(self, channel: Deliverer) -> None:
        """A channel may have something to deliver or to note."""
        self._channels[channel] = None
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.run)

    def run(self) -> None:
        """Note how far the channels came, commit, then deliver what that made available.

        In this order a client that got an OK knows that what it finished before is noted too.
        """
        self._scheduled = False
        self.count += 1
        for channel in list(self._channels):
            self._guarded(channel.persist)
        if self._logs:
            logs, self._logs = self._logs, []
            for log in logs:
                self._guarded(log.write)
        if self._channels:
            channels, self._channels = self._channels, {}
            for channel in channels:
                self._guarded(channel.deliver)

    def _guarded(self, work: Callable[[], None]) -> None:
        """A fault in one topic must not stop the others."""
        try:
            work()
        except Exception:
            self._report(f"INTERNAL: {traceback.format_exc()}")
