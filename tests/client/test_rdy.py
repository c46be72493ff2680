"""Checks who may send how much: the counts that connections get, on a clock that the tests move."""

import random
from collections.abc import Iterator
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import hypothesis_profiles
from client.rdy_rig import BACKOFF_S, CONFIG, TURN_S, Rig, Window
from nsquark.client.config import Config
from nsquark.client.rdy import LOWERED_S_MAX, LOWERED_S_MIN, RAISE_STEPS

hypothesis_profiles.load()


@pytest.fixture
def rig() -> Iterator[Rig]:
    running = Rig()
    yield running
    running.close()


# -- sharing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("connections", "counts"),
    [(1, [10]), (2, [5, 5]), (3, [3, 3, 3]), (10, [1] * 10), (12, [1] * 10 + [0] * 2)],
)
def test_shares(rig: Rig, connections: int, counts: list[int]) -> None:
    rig.join(connections)
    assert rig.counts == counts


def test_old_connections_shrink_before_a_new_one_gets_its_share(rig: Rig) -> None:
    (first,) = rig.join()
    (second,) = rig.join()
    assert (first.sent, second.sent) == ([10, 5], [5])


def test_who_stays_gets_the_share_of_who_left(rig: Rig) -> None:
    first, second = rig.join(2)
    rig.flow.leave(second)
    assert first.sent == [10, 5, 10]
    rig.flow.leave(second)
    assert rig.counts == [10]


def test_never_above_what_nsqd_allows(rig: Rig) -> None:
    rig.join(rdy_max=4)
    assert rig.counts == [4]
    rig.flow.change_max_in_flight(100)
    assert rig.counts == [4]


def test_max_in_flight_changes(rig: Rig) -> None:
    first, second = rig.join(2)
    rig.flow.change_max_in_flight(100)
    assert rig.counts == [50, 50]
    rig.flow.change_max_in_flight(2)
    assert rig.counts == [1, 1]
    rig.flow.change_max_in_flight(0)
    assert rig.counts == [0, 0]
    rig.flow.change_max_in_flight(6)
    assert rig.counts == [0, 0], "what was on its way may still come"
    rig.let_arrive()
    assert rig.counts == [3, 3]
    assert (first.sent, second.sent) == ([10, 5, 50, 1, 0, 3], [5, 50, 1, 0, 3])


def test_nothing_is_sent_while_nothing_changes(rig: Rig) -> None:
    windows = rig.join(2)
    rig.loop.advance(100)
    assert [window.sent for window in windows] == [[10, 5], [5]]


# -- what is in flight counts, wherever RDY goes ---------------------------------------------------------


def test_a_new_connection_waits_until_there_is_room(rig: Rig) -> None:
    (first,) = rig.join()
    first.fill()
    rig.join()
    assert rig.counts == [5, 0]
    for _ in range(5):
        first.in_flight_count -= 1
        rig.flow.answered()
        rig.loop.advance(0)
        assert rig.held <= 10
    assert rig.counts == [5, 5]


def test_what_may_be_on_its_way_counts(rig: Rig) -> None:
    (first,) = rig.join()
    rig.flow.join(second := Window(rig.loop))
    second.flow = rig.flow
    assert rig.counts == [5, 0]
    rig.loop.advance(LOWERED_S_MIN / 2)
    first.in_flight_count = 10  # sent before nsqd knew that it may no longer
    rig.let_arrive()
    assert rig.counts == [5, 0]
    first.in_flight_count = 5
    rig.flow.answered()
    rig.loop.advance(0)
    assert rig.counts == [5, 5]


def test_an_nsqd_that_was_slow_to_greet_does_not_hold_up_the_others(rig: Rig) -> None:
    """It was stopped while the connection was made: that says nothing of how long its messages are on their way."""
    rig.flow.change_max_in_flight(1)
    first, second = rig.join(2)
    first.round_trip_s = 30.0
    assert (first.turn_count, second.turn_count) == (1, 0)
    rig.loop.advance(TURN_S + LOWERED_S_MAX)
    assert second.turn_count >= 1


def test_one_message_at_a_time_over_several_connections(rig: Rig) -> None:
    rig.flow.change_max_in_flight(1)
    first, second, third = rig.join(3)
    first.fill()
    rig.loop.advance(TURN_S)
    assert rig.counts == [0, 0, 0]
    first.in_flight_count = 0
    rig.flow.answered()
    rig.loop.advance(0)
    assert first.rdy == 0 and second.rdy + third.rdy == 1


def test_with_too_many_in_flight_none_is_asked_again(rig: Rig) -> None:
    rig.flow.change_max_in_flight(3)
    windows = rig.join(3)
    for window in windows:
        window.fill()
    rig.flow.change_max_in_flight(1)
    rig.let_arrive()
    (asked,) = (window for window in windows if window.rdy)
    asked.in_flight_count = 0
    for _ in range(int(TURN_S)):
        rig.loop.advance(1)
        assert not any(window.rdy for window in windows if window is not asked), "they have two"
    assert rig.counts == [0, 0, 0]
    for window in windows:
        window.in_flight_count = 0
    rig.flow.answered()
    rig.let_arrive()
    assert sum(rig.counts) == 1


def test_what_was_lowered_is_raised_when_there_is_room_for_all(rig: Rig) -> None:
    rig.flow.change_max_in_flight(14)
    first, second = rig.join(2)
    first.in_flight_count = 6
    rig.flow.change_max_in_flight(0)
    rig.flow.change_max_in_flight(7)
    assert rig.counts == [0, 0]
    rig.let_arrive()
    assert rig.held <= 7
    assert first.rdy + second.rdy > 0


def test_what_a_connection_that_leaves_has_in_flight_counts(rig: Rig) -> None:
    rig.flow.change_max_in_flight(1)
    first, second = rig.join(2)
    first.fill()
    rig.flow.leave(first)
    rig.let_arrive()
    assert second.rdy == 0
    first.in_flight_count = 0
    rig.flow.answered()
    rig.loop.advance(0)
    assert second.rdy == 1


def test_a_limit_below_max_in_flight(rig: Rig) -> None:
    rig.join(2)
    rig.flow.limit(4)
    assert rig.counts == [2, 2]
    rig.flow.limit(1)
    assert rig.counts == [1, 1], "every connection may send something"
    rig.flow.change_max_in_flight(0)
    assert rig.counts == [0, 0]
    rig.flow.change_max_in_flight(20)
    rig.flow.limit(None)
    rig.let_arrive()
    assert rig.counts == [10, 10]


# -- too little for all ----------------------------------------------------------------------------------


def test_an_idle_connection_makes_room(rig: Rig) -> None:
    rig.flow.change_max_in_flight(1)
    idle, other = rig.join(2)
    assert rig.counts == [1, 0]
    rig.loop.advance(4)
    assert rig.counts == [1, 0]
    rig.loop.advance(2)
    assert (idle.rdy, other.rdy) == (0, 1)


def test_a_busy_connection_makes_room_after_its_time(rig: Rig) -> None:
    rig.flow.change_max_in_flight(1)
    busy, other = rig.join(2)
    for _ in range(9):
        rig.loop.advance(1)
        busy.message_arrives()
    assert rig.counts == [1, 0]
    rig.loop.advance(2)
    assert (busy.rdy, other.rdy) == (0, 1)


def test_turns_go_round(rig: Rig) -> None:
    rig.flow.change_max_in_flight(2)
    windows = rig.join(7)
    rig.loop.advance(6)
    for _ in range(20):
        before = [window.turn_count for window in windows]
        rig.loop.advance(5)  # as many turns, of two connections each
        assert all(window.turn_count > count for window, count in zip(windows, before, strict=True))


def test_turns_are_long_enough_however_often_they_end() -> None:
    rig = Rig(Config(max_in_flight=1, rdy_redistribute_interval="1ms", low_rdy_idle_timeout="1s"))
    windows = rig.join(3)
    asked = 0
    for _ in range(400):
        rig.loop.advance(0.03)
        asked += any(window.rdy for window in windows)
    assert asked > 100, "a message that comes at any time finds its nsqd asked for it within a few turns"
    assert all(window.turn_count > 3 for window in windows)
    rig.close()


def test_who_left_makes_room_at_once(rig: Rig) -> None:
    rig.flow.change_max_in_flight(1)
    first, second = rig.join(2)
    rig.flow.leave(first)
    assert second.rdy == 1


# -- backoff ---------------------------------------------------------------------------------------------


def test_a_failure_stops_all_and_tests_one(rig: Rig) -> None:
    rig.join(3)
    rig.flow.failed()
    assert rig.flow.level == 1
    assert rig.counts == [0, 0, 0]
    rig.loop.advance(1.9)
    assert rig.counts == [0, 0, 0]
    rig.loop.advance(0.2)
    assert sorted(rig.counts) == [0, 0, 1]
    rig.flow.succeeded()
    assert rig.flow.level == 0
    assert rig.counts == [3, 3, 3]


def test_each_failed_test_waits_longer_up_to_the_cap(rig: Rig) -> None:
    rig.join()
    waits = []
    for _ in range(6):
        rig.flow.failed()
        start_s = rig.loop.time()
        while rig.counts == [0]:
            rig.loop.advance(0.25)
        waits.append(round(rig.loop.time() - start_s))
    assert waits == [2, 4, 8, 16, 16, 16]
    for _ in range(4):
        assert rig.flow.level > 0
        rig.flow.succeeded()
        rig.loop.advance(BACKOFF_S)
    assert (rig.flow.level, rig.counts) == (0, [10])


def test_outcomes_while_it_waits_say_nothing_new(rig: Rig) -> None:
    rig.join()
    rig.flow.failed()
    for _ in range(5):
        rig.flow.failed()
        rig.flow.succeeded()
        rig.flow.went_on()
    assert rig.flow.level == 1
    assert rig.counts == [0]


def test_a_requeue_without_backoff_keeps_the_level(rig: Rig) -> None:
    rig.join()
    rig.flow.failed()
    rig.loop.advance(BACKOFF_S)
    rig.flow.went_on()
    assert (rig.flow.level, rig.counts) == (1, [0])
    rig.loop.advance(BACKOFF_S)
    assert rig.counts == [1]


def test_no_backoff_with_a_duration_of_0() -> None:
    rig = Rig(CONFIG.replace(max_backoff_duration="0s"))
    rig.join()
    rig.flow.failed()
    assert (rig.flow.level, rig.counts) == (0, [10])
    rig.close()


def test_a_connection_that_joins_in_backoff_waits_with_the_others(rig: Rig) -> None:
    rig.join()
    rig.flow.failed()
    rig.join()
    assert rig.counts == [0, 0]
    rig.loop.advance(BACKOFF_S)
    assert sorted(rig.counts) == [0, 1]
    rig.join()
    assert sorted(rig.counts) == [0, 0, 1]


def test_the_tested_connection_brings_nothing(rig: Rig) -> None:
    """Each connection is asked in turn, since of many only one may have messages."""
    windows = rig.join(5)
    rig.flow.failed()
    rig.loop.advance(BACKOFF_S)
    for _ in range(5):
        rig.loop.advance(TURN_S)
        assert sum(rig.counts) == 1
    assert all(1 in window.sent[2:] for window in windows)


def test_the_tested_connection_is_lost(rig: Rig) -> None:
    windows = rig.join(3)
    rig.flow.failed()
    rig.loop.advance(BACKOFF_S)
    (tested,) = [window for window in windows if window.rdy]
    rig.flow.leave(tested)
    assert sum(rig.counts) == 1


@pytest.mark.parametrize("gone_s", [0.0, 0.5, 30.0])
def test_the_only_connection_is_lost_in_backoff_and_comes_back(rig: Rig, gone_s: float) -> None:
    (window,) = rig.join()
    rig.flow.failed()
    rig.loop.advance(BACKOFF_S)
    assert window.rdy == 1
    rig.flow.leave(window)
    rig.loop.advance(gone_s)
    (again,) = rig.join()
    rig.loop.advance(BACKOFF_S)
    assert again.rdy == 1
    rig.flow.succeeded()
    assert again.rdy == 10


@pytest.mark.parametrize("paused_s", [0.0, 1.0, 60.0])
def test_paused_in_backoff(rig: Rig, paused_s: float) -> None:
    rig.join(2)
    rig.flow.failed()
    rig.loop.advance(BACKOFF_S)
    rig.flow.change_max_in_flight(0)
    assert rig.counts == [0, 0]
    rig.loop.advance(paused_s)
    assert rig.counts == [0, 0]
    rig.flow.change_max_in_flight(10)
    rig.loop.advance(BACKOFF_S)
    assert sorted(rig.counts) == [0, 1]


def test_a_share_is_whole_again_after_a_loss_in_backoff(rig: Rig) -> None:
    """What is to be redistributed in backoff must not take from shares after it."""
    windows = rig.join(3)
    rig.flow.failed()
    rig.loop.advance(BACKOFF_S)
    rig.flow.leave(next(window for window in windows if window.rdy))
    rig.flow.succeeded()
    rig.loop.advance(60)
    assert rig.counts == [5, 5]


def test_nothing_moves_after_close(rig: Rig) -> None:
    windows = rig.join(2)
    rig.flow.close()
    rig.flow.failed()
    rig.flow.change_max_in_flight(50)
    rig.loop.advance(100)
    assert [window.rdy for window in windows] == [5, 5]
    assert not [timer for timer in rig.loop.timers if not timer.cancelled()]


# -- anything in any order -------------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Checks what always holds, and that it never ends with everyone waiting for nothing."""

    @initialize(max_in_flight=st.integers(1, 6), seed=st.integers(0, 1000))
    def start(self, max_in_flight: int, seed: int) -> None:
        random.seed(seed)
        self.rig = Rig(CONFIG.replace(max_in_flight=max_in_flight))

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.close()

    @rule(rdy_max=st.sampled_from([1, 2, 2500]))
    def join(self, rdy_max: int) -> None:
        if len(self.rig.flow.windows) < 8:
            self.rig.join(rdy_max=rdy_max)

    @rule(index=st.integers(0, 7))
    def leave(self, index: int) -> None:
        windows = self.rig.flow.windows
        if windows:
            self.rig.flow.leave(windows[index % len(windows)])

    @rule(count=st.integers(0, 12))
    def change_max_in_flight(self, count: int) -> None:
        self.rig.flow.change_max_in_flight(count)

    @rule(outcome=st.sampled_from(["failed", "failed", "succeeded", "went_on"]), index=st.integers(0, 7))
    def message_ends(self, outcome: str, index: int) -> None:
        ready = [window for window in self.rig.flow.windows if window.rdy]
        if ready:
            ready[index % len(ready)].message_arrives()  # type: ignore[attr-defined]
            getattr(self.rig.flow, outcome)()

    @rule(outcome=st.sampled_from(["failed", "succeeded", "went_on"]))
    def an_older_message_ends(self, outcome: str) -> None:
        getattr(self.rig.flow, outcome)()

    @rule(index=st.integers(0, 7))
    def messages_come(self, index: int) -> None:
        windows = cast(list[Window], self.rig.flow.windows)
        if windows:
            windows[index % len(windows)].fill()

    @rule(index=st.integers(0, 7))
    def a_message_is_answered(self, index: int) -> None:
        busy = [window for window in cast(list[Window], self.rig.flow.windows) if window.in_flight_count]
        if busy:
            busy[index % len(busy)].in_flight_count -= 1
            self.rig.flow.answered()

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 5.5, 11.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.loop.advance(seconds)

    @invariant()
    def counts_are_within_bounds(self) -> None:
        if hasattr(self, "rig"):
            flow = self.rig.flow
            assert sum(self.rig.counts) <= flow.max_in_flight
            if flow.level:
                assert sum(self.rig.counts) <= (0 if flow.is_waiting else 1)

    @invariant()
    def nobody_has_less_than_its_share(self) -> None:
        if hasattr(self, "rig") and not self.rig.flow.level and self.rig.flow.windows:
            flow = self.rig.flow
            self.rig.let_arrive()
            share = min(max(flow.max_in_flight // len(flow.windows), 1), flow.max_in_flight)
            if flow.max_in_flight - self.rig.held > share // RAISE_STEPS:
                assert all(window.rdy >= min(share, window.rdy_max) for window in flow.windows)

    @precondition(lambda self: self.rig.flow.windows and self.rig.flow.max_in_flight)
    @rule()
    def everyone_gets_a_turn(self) -> None:
        """Checks that every connection gets its turn; in backoff one at a time does, since no message comes that would
        end it.
        """
        windows = cast(list[Window], self.rig.flow.windows)
        for window in windows:
            window.in_flight_count = 0
            self.rig.flow.answered()
        for window in cast(list[Window], self.rig.flow._left_behind):
            window.in_flight_count = 0
        self.rig.flow.answered()
        self.rig.loop.advance(BACKOFF_S)
        if not any(self.rig.counts):
            self.rig.let_arrive()  # one has just made room for another
        assert any(self.rig.counts), "nobody may send anything, and nothing will change that"
        before = {window: window.turn_count for window in windows}
        self.rig.loop.advance(TURN_S * len(windows))
        assert all(window.rdy or window.turn_count > before[window] for window in windows)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=hypothesis_profiles.examples(2))
