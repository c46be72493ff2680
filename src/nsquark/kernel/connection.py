# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Keeps what every turn needs to know of a client's connection: what it sends, and whether it may be sent more."""

from time import monotonic_ns

import cython

REFILL_RDY_MIN = cython.declare(cython.longlong, 8)
READ_BYTES_MAX = cython.declare(cython.longlong, 256 << 10)
"""One read has at most this much: a connection that fills it has more to say, and has to give way at some time."""
BUSY_NS_MAX = cython.declare(cython.longlong, 1_000_000)
"""A connection gives way after full reads of this time together: half of a turn's budget, for the last may be long."""
GIVE_WAY_BYTES_MIN = cython.declare(cython.longlong, 64 << 10)
"""A smaller read that fills its buffer is the rest of a command: giving way after each would cost too much."""


@cython.cclass
class Connection:
    """Reads what a client sends: its publishes are for `_intake`, all else is for a subclass.

    Bytes are read into a buffer that all connections share, since it is used up before the next read; only an
    incomplete command has a buffer of its own (`_partial`), so an idle connection has none. A subclass has
    `received(pos, end)`, which is given what is at `_data[pos:end]`, `not_published(error)`, for a publish that failed,
    and `give_way()`, after which nothing is read until the next turn: event loops read a busy socket again and again.
    """

    transport = cython.declare(object, visibility="public")
    consumer = cython.declare(object, visibility="public")
    _data = cython.declare(object, visibility="public")
    _partial = cython.declare(object, visibility="public")
    _partial_bytes = cython.declare(cython.longlong, visibility="public")
    _intake = cython.declare(object, visibility="public")
    _is_closed = cython.declare(cython.bint, visibility="public")
    _was_heard = cython.declare(cython.bint, visibility="public")
    _awaits_ok = cython.declare(cython.bint, visibility="public")
    _write_paused_at_ms = cython.declare(cython.longlong, visibility="public")
    _shared: bytearray
    _shared_view: object
    _offered: cython.longlong
    _busy_ns: cython.longlong

    def use_buffer(self, buffer: bytearray, view: object) -> None:
        """Lets the connection read into a buffer that it shares with others; to be called first."""
        self.transport = None
        self.consumer = None
        self._data = buffer
        self._partial = None
        self._partial_bytes = 0
        self._intake = None
        self._is_closed = False
        self._was_heard = False
        self._awaits_ok = False
        self._write_paused_at_ms = 0
        self._shared = buffer
        self._shared_view = view
        self._offered = len(buffer)
        self._busy_ns = 0

    # -- receiving ---------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: object) -> object:
        if self._partial is None:
            self._offered = len(self._shared)
            return self._shared_view
        free: object = memoryview(self._partial)[self._partial_bytes : self._partial_bytes + READ_BYTES_MAX]
        self._offered = len(free)
        return free

    def buffer_updated(self, nbytes: cython.longlong) -> None:
        if self._is_closed:
            return
        self._was_heard = True
        started_ns: cython.longlong = monotonic_ns() if nbytes >= GIVE_WAY_BYTES_MIN else 0
        pos: cython.longlong = 0
        end: cython.longlong = nbytes
        if self._partial is not None:
            self._data = self._partial
            end += self._partial_bytes
        else:
            self._data = self._shared
            if self._intake is not None and not self._write_paused_at_ms:
                pos = self.publish(0, end)
        if pos < end:  # false for nearly all publishes
            self.received(pos, end)
        if started_ns and nbytes == self._offered:
            self._busy_ns += monotonic_ns() - started_ns
            if self._busy_ns >= BUSY_NS_MAX:
                self._busy_ns = 0
                self.give_way()

    @cython.ccall
    def publish(self, pos: cython.longlong, end: cython.longlong) -> cython.longlong:
        """Lets `_intake` publish what it can; returns where the first other thing starts."""
        try:
            return self._intake.publish(self._data, pos, end)
        except OSError as error:
            self.not_published(error)
            return end

    # -- sending -----------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Returns how many more messages RDY allows."""
        return self.consumer.rdy - self.consumer.in_flight

    @property
    def is_ready(self) -> bool:
        return (
            self.consumer.rdy > self.consumer.in_flight
            and not self._write_paused_at_ms
            and not self._is_closed
            and not self._awaits_ok
        )

    @property
    def is_nearly_full(self) -> bool:
        """Tells whether most of what RDY allows is in flight, and little of it is free."""
        rdy: cython.longlong = self.consumer.rdy
        in_flight: cython.longlong = self.consumer.in_flight
        return rdy > REFILL_RDY_MIN and 2 * in_flight >= rdy and 8 * (rdy - in_flight) < rdy

    def send(self, data: object) -> None:
        if not self._is_closed:
            self.transport.write(data)
