"""For the tests of the client: what an event loop complains about fails the test, and nsqds for single tests."""

import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import FaultProxy, Nsqd


@pytest.fixture(scope="module")
def complaints() -> Iterator[list[str]]:
    """What asyncio only logs: exceptions that nobody took, tasks destroyed while pending, callbacks that raised."""
    kept: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(self.format(record))

    keep = Keep(logging.ERROR)
    logger = logging.getLogger("asyncio")
    logger.addHandler(keep)
    yield kept
    gc.collect()  # too dear for each test
    logger.removeHandler(keep)
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
    """In front of the module's nsqd."""
    with FaultProxy(nsqd.tcp) as running:
        yield running
