"""Checks the order in which commits are written, and how each ends, on both forms of the kernel."""

from types import ModuleType
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hypothesis_profiles import run_model
from unit import kernel_forms


@pytest.fixture(params=kernel_forms.FORMS)
def commits(request: pytest.FixtureRequest) -> ModuleType:
    return kernel_forms.load("commits", request.param)


@pytest.fixture(params=kernel_forms.FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def apart(commits: ModuleType, size: int = 0) -> Any:
    commit = commits.Commit(1)
    commit.bytes_added = size
    return commit


class Waiter:
    def __init__(self) -> None:
        self.told: list[Any] = []

    def settled(self, commit: Any) -> None:
        self.told.append(commit.error)


def test_a_settled_commit_tells_everyone_once(commits: ModuleType) -> None:
    commit, waiters = commits.Commit(), [Waiter(), Waiter()]
    commit.waiters += waiters
    error = OSError("full")
    commit.settle(error)
    assert [waiter.told for waiter in waiters] == [[error], [error]]
    assert commit.is_settled and commit.error is error


def test_a_queue_with_much_to_write_is_congested(commits: ModuleType) -> None:
    queue = commits.CommitQueue()
    queue.put_apart(apart(commits, commits.UNCOMMITTED_BYTES_MAX))
    assert not queue.is_congested()
    queue.put_apart(apart(commits, 1))
    assert queue.is_congested()
    queue.start_next()
    queue.written()
    assert not queue.is_congested()


def test_chunks_that_are_yet_to_be_written_are_used(commits: ModuleType) -> None:
    queue, chunk = commits.CommitQueue(), object()
    commit = apart(commits)
    commit.slices.append((chunk, 0))
    queue.put_apart(commit)
    assert queue.uses(chunk) and not queue.uses(object())
    queue.start_next()
    assert queue.uses(chunk)
    queue.written()
    assert not queue.uses(chunk)


class QueueModel(RuleBasedStateMachine):
    """Stands beside the queue as a plain list of commits, the first of which may be the one that is being written.

    Only the kernel opens commits, when something is appended: `tests/unit/test_publish.py` has those.
    """

    commits: ModuleType

    def __init__(self) -> None:
        super().__init__()
        self.queue = self.commits.CommitQueue()
        self.expected: list[Any] = []
        self.is_writing = False

    @rule(size=st.integers(0, 9 << 20))
    def put_apart(self, size: int) -> None:
        commit = apart(self.commits, size)
        self.queue.put_apart(commit)
        self.expected.append(commit)

    @precondition(lambda self: not self.is_writing)
    @rule()
    def start_next(self) -> None:
        started = self.queue.start_next()
        assert started is (self.expected[0] if self.expected else None)
        self.is_writing = started is not None

    @precondition(lambda self: self.is_writing)
    @rule(size=st.integers(0, 1000))
    def grew(self, size: int) -> None:
        self.queue.grew(size)

    @precondition(lambda self: self.is_writing)
    @rule()
    def written(self) -> None:
        self.queue.written()
        del self.expected[0]
        self.is_writing = False

    @precondition(lambda self: self.is_writing)
    @rule()
    def fail(self) -> None:
        assert self.queue.fail() == self.expected
        self.expected, self.is_writing = [], False

    @rule()
    def abandon(self) -> None:
        stays = 1 if self.is_writing else 0
        assert self.queue.abandon() == self.expected[stays:]
        del self.expected[stays:]

    @invariant()
    def agrees(self) -> None:
        assert self.queue.is_empty == (not self.expected)
        assert self.queue.last is (self.expected[-1] if self.expected else None)
        assert self.queue.writing is (self.expected[0] if self.is_writing else None)
        assert self.queue.uncommitted_bytes == sum(commit.bytes_added for commit in self.expected)


def test_commits_are_written_in_order_and_end_once(form: str) -> None:
    run_model(QueueModel, commits=kernel_forms.load("commits", form))
