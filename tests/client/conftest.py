"""Has fixtures for the tests of the client: what an event loop complains about fails the test, and single tests have
nsqds of their own.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import FaultProxy, Nsqd


@pytest.fixture(scope="module")
def complaints() -> Iterator[list[str]]:
    """Collects what asyncio only logs: exceptions that nobody took, tasks destroyed while pending, callbacks that
    raised.
    """
    kept: list[str] = []

    class Complaints(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(self.format(record))

    handler = Complaints(logging.ERROR)
    logger = logging.getLogger("asyncio")
    logger.addHandler(handler)
    yield kept
    gc.collect()  # too dear for each test
    logger.removeHandler(handler)
    assert not kept, "after one of this module's tests:\n" + "\n".join(kept)


@pytest.fixture(autouse=True)
def _no_complaints(complaints: list[str]) -> Iterator[None]:
    yield
    said, complaints[:] = complaints[:], []
    assert not said, "\n".join(said)


@pytest.fixture
def start_nsqd(tmp_path: Path) -> Iterator[Callable[..., Nsqd]]:
    """Starts an nsqd of its own data path; one that is started again keeps its ports, as an operator's does."""
    daemons: list[Nsqd] = []

    def start(*flags: str) -> Nsqd:
        data_path = tmp_path / f"nsqd{len(daemons)}"
        data_path.mkdir()
        daemon = Nsqd(data_path, *flags)
        daemons.append(daemon)
        daemon.start()
        daemon.keep_ports()
        return daemon

    yield start
    for daemon in daemons:
        daemon.kill()


@pytest.fixture
def proxy(nsqd: Nsqd) -> Iterator[FaultProxy]:
    """Stands in front of the module's nsqd."""
    with FaultProxy(nsqd.tcp) as running:
        yield running
