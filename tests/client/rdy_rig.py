"""Shows a flow connections that are none, on a clock that the tests move."""

from client.virtual_loop import VirtualLoop
from nsquark.client.config import Config
from nsquark.client.rdy import LOWERED_S_MIN, Flow

CONFIG = Config(
    max_in_flight=10,
    backoff_multiplier="1s",
    max_backoff_duration="20s",
    rdy_redistribute_interval="1s",
    low_rdy_idle_timeout="5s",
    low_rdy_timeout="10s",
)
LOWERED_S = LOWERED_S_MIN + 0.001
TURN_S = 12.0
"""Is more than low_rdy_timeout and an interval: by then who has had its time has made room."""
BACKOFF_S = 21.0
"""Is more than the longest wait."""


class Window:
    """Is a connection as the flow sees it; `sent` are the counts that nsqd got."""

    def __init__(self, loop: VirtualLoop, rdy_max: int = 2500) -> None:
        self._loop = loop
        self.rdy = 0
        self.rdy_max = rdy_max
        self.in_flight_count = 0
        self.round_trip_s = 0.0
        self.rdy_at_s = self.last_message_at_s = loop.time()
        self.sent: list[int] = []
        self.flow: Flow

    @property
    def turn_count(self) -> int:
        """Counts how often it was allowed to send after it had not been."""
        return sum(1 for before, count in zip([0, *self.sent], self.sent, strict=False) if count and not before)

    def set_rdy(self, count: int) -> None:
        assert count != self.rdy, "RDY is a window: it is sent when it changes"
        assert 0 <= count <= self.rdy_max
        if count > self.rdy:
            held = sum(max(other.rdy, other.in_flight_count) for other in self.flow.windows if other is not self)
            assert held + max(count, self.in_flight_count) <= max(self.flow.max_in_flight, held + self.in_flight_count)
        self.rdy = count
        self.rdy_at_s = self._loop.time()
        self.sent.append(count)

    def message_arrives(self) -> None:
        self.last_message_at_s = self._loop.time()

    def fill(self) -> None:
        """Lets nsqd send all that it may."""
        self.in_flight_count = max(self.rdy, self.in_flight_count)


class Rig:
    def __init__(self, config: Config = CONFIG) -> None:
        self.loop = VirtualLoop()
        self.flow = self.loop.inside(lambda: Flow(config))

    def join(self, count: int = 1, rdy_max: int = 2500) -> list[Window]:
        windows = [Window(self.loop, rdy_max) for _ in range(count)]
        for window in windows:
            window.flow = self.flow
            self.flow.join(window)
            self.let_arrive()
        return windows

    def let_arrive(self) -> None:
        """Waits until what was on its way has come."""
        self.loop.advance(LOWERED_S)
        while self.flow._lowered:
            self.loop.advance(LOWERED_S)

    @property
    def counts(self) -> list[int]:
        return [window.rdy for window in self.flow.windows]

    @property
    def held(self) -> int:
        """Counts what is in flight, or may be by the RDY counts."""
        gone = sum(window.in_flight_count for window in self.flow._left_behind)
        return gone + sum(max(window.rdy, window.in_flight_count) for window in self.flow.windows)

    def close(self) -> None:
        self.flow.close()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
