"""Has fixtures for tests that put a layer between nsqd and its file system."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.shim import Shim
from harness import Nsqd


@pytest.fixture
def shim(tmp_path: Path) -> Shim:
    """Makes the layer for a data path of this test's own, `shim.root`."""
    data_path = tmp_path / "data"
    data_path.mkdir()
    return Shim(tmp_path, data_path, record=True)


@pytest.fixture
def daemon(shim: Shim) -> Iterator[Nsqd]:
    """Runs an nsqd above the layer."""
    daemon = Nsqd(shim.root, environment=shim.environment).start()
    yield daemon
    daemon.kill()
