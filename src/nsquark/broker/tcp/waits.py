"""Knows what a session waits for, and lets it read nothing meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

FOR_TURN, FOR_COMMIT, FOR_AUTH, FOR_READER, FOR_THREAD = 1, 2, 4, 8, 16
"""These are the reasons to wait: the others' turn, the disk, an auth server, its client to read, work in a thread."""


class Waits:
    """Knows the reasons for which a session waits at the moment, as bits of `reasons`.

    While there is any, its transport does not read and the session carries out nothing of what was read. When the last
    one has ended, the session goes on in the next turn of the event loop, by a call of `go_on`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, go_on: Callable[[], None]) -> None:
        self.reasons = 0
        self.transport: asyncio.Transport
        self._loop = loop
        self._go_on = go_on

    def begin(self, reason: int) -> None:
        """Waits for one more thing."""
        if not self.reasons and not self.transport.is_closing():
            self.transport.pause_reading()
        self.reasons |= reason

    def end(self, reason: int) -> None:
        """Is told that what was waited for has come; nothing happens if it was not waited for."""
        if self.reasons & reason:
            self.reasons &= ~reason
            if not self.reasons:
                self.give_way()

    def give_way(self) -> None:
        """Waits until the others had their turn."""
        if not self.reasons & FOR_TURN:
            self.begin(FOR_TURN)
            self._loop.call_soon(self._turn_came)

    def resume_reading(self) -> None:
        """Lets the transport read, unless something is waited for."""
        if not self.reasons and not self.transport.is_closing():
            self.transport.resume_reading()

    def _turn_came(self) -> None:
        self.reasons &= ~FOR_TURN
        if not self.reasons:
            self._go_on()
