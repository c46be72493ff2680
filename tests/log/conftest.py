"""Makes logs in real directories for tests; their threads report when the test lets them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hypothesis_profiles
from log.rig import Rig

hypothesis_profiles.load()


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Opens a log on this test's directory, or another one, with these settings."""
    rigs: list[Rig] = []

    def make(directory: Path | None = tmp_path / "topic", **settings: Any) -> Rig:
        rigs.append(Rig(tmp_path, directory, **settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.crash()
