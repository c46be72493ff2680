"""Checks that files which the disk fails to open for a moment, when nsqd starts, cost no message."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faults.shim import Rule, Shim
from harness import Nsqd, Wire

pytestmark = pytest.mark.ours

COUNT = 20
FAILURES = 20
"""So many opens fail: more than one file is tried in a row."""


@pytest.fixture
def shim(tmp_path: Path) -> Shim:
    data_path = tmp_path / "data"
    data_path.mkdir()
    return Shim(tmp_path, data_path)


@pytest.fixture
def daemon(shim: Shim) -> Iterator[Nsqd]:
    daemon = Nsqd(shim.root, environment=shim.environment).start()
    yield daemon
    daemon.kill()


@pytest.mark.parametrize("files", ["*", "*.log", "cursors"])
def test_files_that_cannot_be_opened_for_a_moment_cost_nothing(
    daemon: Nsqd, shim: Shim, connect: Callable[..., Wire], files: str
) -> None:
    """Once nsqd has gone on without them, its channels would not come back to their messages."""
    bodies = {b"%d" % number for number in range(COUNT)}
    daemon.post("/channel/create", topic="t", channel="c")
    connect(daemon).publish("t", *bodies)
    daemon.kill()
    shim.set_rules(Rule("open", f"*/t.t/{files}", errno.EIO, times=FAILURES))
    daemon.start()
    shim.set_rules()
    consumer = connect(daemon).subscribe("t", "c", rdy=1)
    connect(daemon).publish("t", b"later")
    consumer.read_messages(1)
    daemon.stop()
    daemon.start()
    consumer = connect(daemon).subscribe("t", "c", rdy=COUNT + 1)
    assert {message.body for message in consumer.read_messages(COUNT + 1)} == {*bodies, b"later"}
