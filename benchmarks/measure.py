"""Defines what a scenario gives: one measurement of one broker."""

from dataclasses import dataclass

from benchmarks.broker import Broker
from benchmarks.wire import LoadError
from benchmarks.worker import Load


@dataclass(frozen=True)
class Measurement:
    """Says that `messages` took `seconds`, and that those `handled` (in and out) cost the broker `cpu_seconds`.

    `load_busy` is the share of a core that the busiest load generator took: near 1, it was the limit.
    """

    messages: int
    seconds: float
    handled: int
    cpu_seconds: float
    memory_end_bytes: int
    memory_peak_bytes: int
    load_busy: float
    latencies_ns: tuple[int, ...] = ()

    @property
    def rate(self) -> float:
        return self.messages / self.seconds

    @property
    def cpu_us_per_message(self) -> float:
        return self.cpu_seconds * 1e6 / self.handled

    def latency_ms(self, quantile: float) -> float:
        ordered = sorted(self.latencies_ns)
        return ordered[min(int(len(ordered) * quantile), len(ordered) - 1)] / 1e6


class Meter:
    """Starts with the load and is read when the broker has settled, so that work put off is counted too."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._cpu_before = broker.cpu_seconds()

    def read(self, load: Load, load_busy: float, handled: int) -> Measurement:
        cpu_seconds = self._broker.cpu_seconds() - self._cpu_before
        end, peak = self._broker.memory_bytes()
        if load.messages == 0:
            raise LoadError("no message passed in the whole time: nothing to measure")
        return Measurement(load.messages, load.seconds, handled, cpu_seconds, end, peak, load_busy, load.latencies_ns)
