"""Says which extra of this package a failed import asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Surrounds imports of what only an extra brings: one that fails says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "nsquark":
            raise
        text = f"No module named {error.name!r}: pip install 'nsquark[{extra}]'"
        raise ModuleNotFoundError(text, name=error.name, path=error.path) from None
