"""Sends bytes for a connection, and knows whether its peer reads them."""

from __future__ import annotations

import asyncio


class Outgoing:
    """Gathers bytes while a connection is at work, and then writes them in one piece.

    It `is_paused` while the peer leaves so much unread that no more should be sent. Ticks are seconds by the server's
    clock.
    """

    __slots__ = (
        "_gathered",
        "_stalled_bytes",
        "_stalled_tick",
        "_transport",
        "_writable",
        "gathered_bytes",
        "is_paused",
    )

    def __init__(self, transport: asyncio.Transport) -> None:
        self.is_paused = False
        self.gathered_bytes = 0
        self._transport = transport
        self._gathered: list[bytes] = []
        self._writable: asyncio.Future[None] | None = None
        # These say when a full buffer changed last, and how much was in it.
        self._stalled_tick = 0
        self._stalled_bytes = 0

    def add(self, data: bytes) -> None:
        self._gathered.append(data)
        self.gathered_bytes += len(data)

    def write(self) -> None:
        """Writes what has gathered."""
        gathered = self._gathered
        if gathered:
            self._transport.write(gathered[0] if len(gathered) == 1 else b"".join(gathered))
            self._gathered = []
            self.gathered_bytes = 0

    def pause(self, tick: int) -> None:
        self.is_paused = True
        self._stalled_tick = tick

    def resume(self) -> None:
        self.is_paused = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    async def wait_writable(self) -> None:
        """Waits until the peer has read enough for more to be sent; it is cancelled when the connection is lost."""
        if self.is_paused:
            self._writable = asyncio.get_running_loop().create_future()
            await self._writable
            self._writable = None

    def lost(self) -> None:
        """Is told that the connection is gone."""
        if self._writable is not None:
            self._writable.cancel()

    def is_stalled(self, tick: int, seconds_max: int) -> bool:
        """Tells whether the peer has read nothing for longer than `seconds_max`; to be called once a second."""
        waiting_bytes = self._transport.get_write_buffer_size()
        if waiting_bytes != self._stalled_bytes:
            self._stalled_bytes = waiting_bytes
            self._stalled_tick = tick
        return tick - self._stalled_tick > seconds_max
