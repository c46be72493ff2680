"""Long forms of tests run only when asked for, as in tests/faults."""

from faults.conftest import pytest_collection_modifyitems, pytest_configure

__all__ = ["pytest_collection_modifyitems", "pytest_configure"]
