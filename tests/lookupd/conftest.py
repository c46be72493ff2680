"""Opens a connection to the nsqlookupd of a module."""

from collections.abc import Iterator

import pytest

from harness.lookupd import LookupWire, Nsqlookupd


@pytest.fixture
def wire(lookupd: Nsqlookupd) -> Iterator[LookupWire]:
    with lookupd.connect() as connection:
        yield connection
