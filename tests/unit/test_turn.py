"""Checks the end of a turn: in which order work is done, what a fault does, and when the loop looks again before it
sleeps.
"""

from collections.abc import Callable
from types import ModuleType

import pytest

from unit import kernel_forms

POLL_NS = 200_000
MISS, LUCK_MAX = 16, 64


@pytest.fixture(params=kernel_forms.FORMS)
def turns(request: pytest.FixtureRequest) -> ModuleType:
    return kernel_forms.load("turn", request.param)


class TurnWork:
    """Is a log and a channel at once."""

    def __init__(self, name: str, done: list[str], fails: str = "") -> None:
        self._name = name
        self._done = done
        self._fails = fails

    def _do(self, what: str) -> None:
        self._done.append(f"{self._name} {what}")
        if what == self._fails:
            raise RuntimeError(f"{self._name} cannot {what}")

    def write(self) -> None:
        self._do("write")

    def persist(self) -> None:
        self._do("persist")

    def deliver(self) -> None:
        self._do("deliver")


class Loop:
    """Keeps what the turn asked for, to be run by hand, and a clock that stands until it is moved."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []
        self.now_ns = 1_000

    def clock_ns(self) -> int:
        return self.now_ns

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.due.append(callback)

    def step(self) -> int:
        """Runs one round of the loop; returns how many callbacks it had."""
        due, self.due = self.due, []
        for callback in due:
            callback()
        return len(due)


def test_positions_are_noted_then_logs_written_then_messages_delivered(turns: ModuleType) -> None:
    loop, done = Loop(), list[str]()
    turn = turns.Turn(loop.call_soon, pytest.fail)
    log, channel = TurnWork("log", done), TurnWork("channel", done)
    turn.wake(channel)
    turn.write(log)
    turn.wake(channel)
    assert loop.step() == 1
    assert done == ["channel persist", "log write", "channel deliver"]
    assert not loop.due
    assert turn.count == 1


@pytest.mark.parametrize("fails", ["persist", "write", "deliver"])
def test_a_fault_of_one_does_not_stop_the_others(turns: ModuleType, fails: str) -> None:
    loop, done, reports = Loop(), list[str](), list[str]()
    turn = turns.Turn(loop.call_soon, reports.append)
    for work in (TurnWork("bad", done, fails), TurnWork("good", done)):
        turn.write(work)
        turn.wake(work)
    loop.step()
    assert len(done) == 6
    assert len(reports) == 1
    assert f"bad cannot {fails}" in reports[0]


class SlowChannel(TurnWork):
    """Takes a tenth of a turn's time to deliver."""

    def __init__(self, name: str, done: list[str], loop: Loop) -> None:
        super().__init__(name, done)
        self._loop = loop

    def deliver(self) -> None:
        self._loop.now_ns += 200_000
        super().deliver()


def test_many_channels_are_delivered_to_in_several_turns(turns: ModuleType) -> None:
    """Sockets are read in between. Those that had to wait come first, and note nothing for that."""
    done: list[str] = []
    loop = Loop()
    turn = turns.Turn(loop.call_soon, pytest.fail, 0, loop.clock_ns)
    channels = [SlowChannel(f"c{number}", done, loop) for number in range(100)]
    for channel in channels:
        turn.wake(channel)
    assert loop.step() == 1
    delivered = [what for what in done if what.endswith("deliver")]
    assert done[:100] == [f"c{number} persist" for number in range(100)]
    assert 0 < len(delivered) < 50
    done.clear()
    turn.wake(channels[0])
    assert loop.step() == 1
    assert done[:2] == ["c0 persist", f"c{len(delivered)} deliver"]
    while loop.due:
        loop.step()
    rest = [f"c{number} deliver" for number in range(len(delivered), 100)]
    assert done[1:] == [*rest, "c0 deliver"]


def test_few_channels_are_delivered_to_in_one_turn(turns: ModuleType) -> None:
    done: list[str] = []
    loop = Loop()
    turn = turns.Turn(loop.call_soon, pytest.fail, 0, loop.clock_ns)
    for number in range(32):
        turn.wake(SlowChannel(f"c{number}", done, loop))
    loop.step()
    assert len(done) == 64 and not loop.due


def test_without_busy_polling_the_loop_may_sleep_at_once(turns: ModuleType) -> None:
    loop = Loop()
    turn = turns.Turn(loop.call_soon, pytest.fail)
    turn.run()
    assert not loop.due


def test_it_looks_again_until_the_time_is_over(turns: ModuleType) -> None:
    loop = Loop()
    turn = turns.Turn(loop.call_soon, pytest.fail, POLL_NS, loop.clock_ns)
    turn.run()
    for _ in range(100):
        assert loop.step() == 1
    turn.run()
    assert len(loop.due) == 1, "there is one poll, however many turns there are"
    loop.now_ns += POLL_NS - 1
    assert loop.step() == 1 == len(loop.due)
    loop.now_ns += 1
    loop.step()
    assert not loop.due, "its time is over"


def test_it_does_not_look_while_threads_work(turns: ModuleType) -> None:
    loop = Loop()
    turn = turns.Turn(loop.call_soon, pytest.fail, POLL_NS, loop.clock_ns)
    turn.jobs = jobs = dict[str, str]()
    turn.run()
    jobs["sync"] = "begins"
    loop.step()
    assert not loop.due
    turn.run()
    assert not loop.due
    jobs.clear()
    turn.run()
    assert loop.due, "that was no miss"


@pytest.mark.parametrize(("took_ns", "polls"), [(POLL_NS // 2, 1), (POLL_NS // 2 + 1, 0)])
def test_it_does_not_look_after_much_work(turns: ModuleType, took_ns: int, polls: int) -> None:
    class Long:
        def write(self) -> None:
            loop.now_ns += took_ns

    loop = Loop()
    turn = turns.Turn(loop.call_soon, pytest.fail, POLL_NS, loop.clock_ns)
    turn.write(Long())
    loop.step()
    assert len(loop.due) == polls


def test_polls_that_find_nothing_become_rare(turns: ModuleType) -> None:
    loop, polls = Loop(), 0
    turn = turns.Turn(loop.call_soon, pytest.fail, POLL_NS, loop.clock_ns)
    for _ in range(10 * (MISS + 1)):
        turn.run()
        loop.now_ns += POLL_NS
        polls += loop.step()
        assert not loop.due, "its time is over"
    assert polls == 10


def test_after_many_that_paid_a_few_that_do_not_are_forgiven(turns: ModuleType) -> None:
    loop = Loop()
    turn = turns.Turn(loop.call_soon, pytest.fail, POLL_NS, loop.clock_ns)
    for _ in range(LUCK_MAX + 1):
        turn.run()
    for _ in range(LUCK_MAX // MISS):
        assert loop.due, "it polls"
        loop.now_ns += POLL_NS
        loop.step()
        turn.run()
    assert not loop.due, "not any more"
