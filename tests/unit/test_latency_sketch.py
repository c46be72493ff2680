"""Quantiles of latencies are as exact as promised, their halves come and go, and the kernel notes the times."""

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsquark.broker.observe.latency import BUCKETS_MAX, RELATIVE_ERROR, LatencyWindow, Sketch
from unit.ledger_rig import BLOCK, join, make_ledger

QUANTILES = [1.0, 0.999, 0.99, 0.9, 0.5, 0.1]
latencies = st.lists(st.integers(1, 2**62), min_size=1, max_size=300)


def sketch_of(values: list[int]) -> Sketch:
    sketch = Sketch()
    sketch.add_since(sorted(-value for value in values), 0)
    return sketch


class TestSketch:
    @given(latencies, st.floats(0, 1))
    def test_a_quantile_is_within_one_percent_of_the_exact_one(self, values: list[int], quantile: float) -> None:
        exact = sorted(values)[int(quantile * (len(values) - 1))]
        (shown,) = sketch_of(values).quantiles([quantile])
        assert abs(shown - exact) <= RELATIVE_ERROR * exact * (1 + 1e-9) + 0.5  # shown is a whole number

    @given(latencies, latencies)
    def test_merging_is_as_if_one_had_seen_all(self, some: list[int], others: list[int]) -> None:
        merged = sketch_of(some)
        merged.merge(sketch_of(others))
        together = sketch_of(some + others)
        assert merged.count == together.count == len(some) + len(others)
        assert merged.quantiles(QUANTILES) == together.quantiles(QUANTILES)

    @given(st.integers(1, 2**40), st.lists(st.integers(0, 2**20), max_size=100))
    def test_several_at_once_are_as_one_by_one(self, least: int, spread: list[int]) -> None:
        values = [least + more for more in spread]
        one_by_one = Sketch()
        for value in values:
            one_by_one.merge(sketch_of([value]))
        assert sketch_of(values).quantiles(QUANTILES) == one_by_one.quantiles(QUANTILES)

    def test_memory_is_bounded(self) -> None:
        values = [1]
        while values[-1] < 2**63 - 1:
            values.append(min(2**63 - 1, values[-1] + max(1, values[-1] // 500)))  # finer than the buckets
        assert 2000 < len(sketch_of(values)) <= BUCKETS_MAX

    def test_nothing_measured_is_zero(self) -> None:
        assert Sketch().quantiles(QUANTILES) == [0] * len(QUANTILES)

    @pytest.mark.parametrize("value", [-5, 0, 1])
    def test_a_clock_set_back_does_not_break_it(self, value: int) -> None:
        assert sketch_of([value]).quantiles([0.5]) in ([0], [1])


class TestWindow:
    def in_window(self, window: LatencyWindow, now_s: float) -> int:
        sketch = Sketch()
        window.add_to(sketch, now_s)
        return sketch.count

    def test_a_half_goes_when_it_is_older_than_the_window(self) -> None:
        window = LatencyWindow(10, 100.0)
        window.finished([0, 0, 0], 1000, 101.0)
        assert self.in_window(window, 104.9) == 3
        window.finished([0], 1000, 106.0)
        assert self.in_window(window, 109.9) == 4
        assert self.in_window(window, 110.1) == 1
        assert self.in_window(window, 115.1) == 0

    def test_an_idle_channel_forgets_too(self) -> None:
        window = LatencyWindow(10, 0.0)
        window.finished([0], 1000, 1.0)
        assert self.in_window(window, 1000.0) == 0
        window.finished([0], 1000, 1001.0)
        assert self.in_window(window, 1001.0) == 1

    def test_totals_are_since_the_start(self) -> None:
        window = LatencyWindow(10, 0.0)
        window.finished([400, 100, 100], 1000, 1.0)
        window.finished([2000], 1500, 500.0)  # published after it was finished: the clock was set back
        assert (window.total_count, window.total_ns) == (4, 900 + 900 + 600)

    def test_a_window_of_no_time_is_not_divided_by(self) -> None:
        window = LatencyWindow(0, 0.0)
        window.finished([0], 1000, 1.0)
        assert self.in_window(window, 2.0) == 0


def record(published_ns: int, body: bytes = b"x") -> bytes:
    return (30 + len(body)).to_bytes(4, "big") + bytes(4) + published_ns.to_bytes(8, "big") + bytes(18) + body


class TestLedger:
    """The kernel notes publish times when it is asked to, in both its forms."""

    def measuring(self, ledger: ModuleType, floor: int = 0) -> tuple[Any, ...]:
        book = make_ledger(ledger, floor, measure=True)
        return book, join(book)

    def test_finished_messages_tell_when_they_were_published(self, ledger: ModuleType) -> None:
        book, consumer = self.measuring(ledger, BLOCK - 2)
        book.take(consumer, 4, 0)
        book.stamp(BLOCK - 2, bytearray(b"".join(record(10**18 + n, b"b" * n) for n in range(4))))
        for seq in (BLOCK + 1, BLOCK - 2):
            assert book.finish(consumer, seq) == ledger.DONE
        assert book.finished_ns == [10**18 + 3, 10**18]

    def test_only_finishing_counts(self, ledger: ModuleType) -> None:
        book, consumer = self.measuring(ledger)
        book.take(consumer, 3, 0)
        book.stamp(0, bytearray(record(1) + record(2) + record(3)))
        book.requeue(consumer, 0, 0, 0)
        book.touch(consumer, 1, 0)
        assert book.finish(join(book), 2) == ledger.NOT_OWNER
        assert book.finished_ns == []

    def test_parked_messages_keep_their_times(self, ledger: ModuleType) -> None:
        book, consumer = self.measuring(ledger)
        book.take(consumer, BLOCK + 1, 0)
        book.stamp(0, bytearray(b"".join(record(5000 + seq) for seq in range(BLOCK + 1))))
        for seq in range(BLOCK):
            if seq not in (7, 4000):
                book.finish(consumer, seq)
        book.finished_ns.clear()
        book.let_pass(book.park(1))
        assert book.finish(consumer, 4000) == ledger.DONE
        assert book.finish(consumer, 7) == ledger.DONE
        assert book.finished_ns == [9000, 5007]

    def test_without_being_asked_it_notes_nothing(self, ledger: ModuleType) -> None:
        book = make_ledger(ledger)
        consumer = join(book)
        book.take(consumer, 1, 0)
        book.finish(consumer, 0)
        assert book.finished_ns == []
