"""Closes things at the end of their `with`."""

from types import TracebackType
from typing import Self


class Closing:
    """Is something with a `close`, which the end of its `with` calls."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
