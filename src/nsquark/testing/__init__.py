"""Contains pytest fixtures with a real nsqd; `pytest_plugins = ["nsquark.testing"]` in the top conftest.py loads them.

* `nsqd` is one nsqd for the whole run, on a free port; `nsqd.tcp_address` is what producers and consumers take.
* `topic` is a name that no other test uses.
* `make_nsqd` starts an nsqd with flags of your choice, for one test.
* `make_nsqlookupd` starts an nsqlookupd with flags of your choice, for one test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from nsquark.testing.daemons import Daemon, HttpReply, Nsqd, Nsqlookupd, StartError, started

__all__ = ["Daemon", "HttpReply", "Nsqd", "Nsqlookupd", "StartError"]

_serial: Final = itertools.count(1)


@pytest.fixture(scope="session")
def nsqd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nsqd]:
    """Runs one nsqd for all tests, which use topics of their own."""
    with Nsqd(tmp_path_factory.mktemp("nsqd")) as daemon:
        yield daemon
        if request.session.exitstatus != pytest.ExitCode.INTERRUPTED:  # a terminal's Ctrl-C reaches nsqd too
            assert daemon.is_running, f"nsqd died under the tests:\n{daemon.log}"


@pytest.fixture
def topic() -> str:
    """Returns a name that no other test uses."""
    return f"topic_{next(_serial)}"


@pytest.fixture
def make_nsqd(tmp_path: Path) -> Iterator[Callable[..., Nsqd]]:
    """Starts nsqds with flags of the test's choice, each on a data path of its own."""
    numbers = itertools.count()

    def made(*flags: str) -> Nsqd:
        data_path = tmp_path / f"nsqd{next(numbers)}"
        data_path.mkdir()
        return Nsqd(data_path, *flags)

    yield from started(made)


@pytest.fixture
def make_nsqlookupd() -> Iterator[Callable[..., Nsqlookupd]]:
    """Starts nsqlookupds with flags of the test's choice."""
    yield from started(Nsqlookupd)
