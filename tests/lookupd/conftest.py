"""An nsqlookupd for the tests of a module, and more where a test needs its own."""

from collections.abc import Callable, Iterator

import pytest

from harness.lookupd import LookupWire, Nsqlookupd


@pytest.fixture(scope="module")
def lookupd() -> Iterator[Nsqlookupd]:
    with Nsqlookupd() as daemon:
        yield daemon
        assert daemon.is_running, f"nsqlookupd died under the tests of this module:\n{daemon.log}"
        assert daemon.stop() == 0, daemon.log


@pytest.fixture
def make_lookupd() -> Iterator[Callable[..., Nsqlookupd]]:
    daemons: list[Nsqlookupd] = []

    def make(*flags: str) -> Nsqlookupd:
        daemons.append(Nsqlookupd(*flags))
        return daemons[-1].start()

    yield make
    for daemon in daemons:
        daemon.kill()


@pytest.fixture
def wire(lookupd: Nsqlookupd) -> Iterator[LookupWire]:
    with lookupd.connect() as connection:
        yield connection
