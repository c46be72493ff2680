"""Keeps the lane: a short way around parser, router and handler, for a request that a connection makes again and again.

After two requests with the same target, the route's `lane` may give the connection a `Lane`. From then on bytes that
are just such a request, with nothing before or behind it, are answered there; all else goes the usual way. No other
request is given to its handler while the lane owes answers, so that answers keep their order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from nsquark.web.messages import Request
    from nsquark.web.router import Target

_LENGTH: Final = re.compile(rb"(?<=\r\ncontent-length: )[0-9]+(?=\r\n)", re.IGNORECASE)


class OwedAnswers(Protocol):
    """Keeps the answers that a lane owes, in order."""

    after: Callable[[], None] | None
    """Is called whenever answers were given."""

    @property
    def are_owed(self) -> bool: ...

    def stop(self) -> None:
        """Forgets what is owed: the connection is closed."""


class Lane(Protocol):
    """Answers requests that are like the one it was made for."""

    @property
    def replies(self) -> OwedAnswers: ...

    def handle(self, data: bytes) -> bool:
        """Answers `data` here if it is just such a request; tells whether it is."""


LaneMaker = Callable[["Request", Callable[[bytes], object]], Lane | None]
"""Makes a lane from a request like those to come, and the way to write to its connection."""


class LaneOfConnection:
    """Keeps the lane of one connection, which is `open` once there is one."""

    __slots__ = ("_after", "_target", "open")

    def __init__(self, after: Callable[[], None]) -> None:
        self.open: Lane | None = None
        self._target: Target | None = None
        """Is the target of the last request that might have had a lane."""
        self._after = after

    @property
    def is_busy(self) -> bool:
        """Tells whether answers are owed; `after` is called whenever some were given."""
        return self.open is not None and self.open.replies.are_owed

    def saw(self, request: Request, make: LaneMaker, write: Callable[[bytes], object]) -> None:
        """Opens a lane at the second of two requests alike; nothing is owed on an earlier one."""
        if request.target is self._target and request.head:
            self.open = make(request, write)
            if self.open is not None:
                self.open.replies.after = self._after
        self._target = request.target

    def stop(self) -> None:
        """Forgets the lane: the connection is closed."""
        if self.open is not None:
            self.open.replies.stop()
            self.open = None


def around_length(head: bytes) -> tuple[bytes, bytes] | None:
    """Returns the parts of a request's head before and behind the length of its body, or None without such a line."""
    around = _LENGTH.split(head)
    return (around[0], around[1]) if len(around) == 2 else None
