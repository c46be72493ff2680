"""Divides file descriptors: connections may use them up to a mark, the rest is a reserve for the daemon's own files.

A daemon that has none left can neither write a new file nor sync a directory. The system gives out the lowest free
number, so a connection whose number is at the mark or above says that so many are in use.
"""

import asyncio
import contextlib
import resource
from typing import Final

RESERVE_DIVISOR: Final = 4
"""One in this many descriptors is reserved."""
RESERVE_MAX: Final = 16_384
"""At most this many descriptors are reserved."""


class Descriptors:
    """Knows how many descriptors there are, and which connection would use one of the reserve.

    As many are allowed as the system permits: the usual soft limit of 1,024 is less than a large cluster needs.
    """

    def __init__(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.for_connections = limit - min(limit // RESERVE_DIVISOR, RESERVE_MAX) if limit > 0 else 0
        """Is the mark up to which connections may use descriptors, or 0 where the system sets no limit."""

    def admits(self, transport: asyncio.BaseTransport) -> bool:
        if not self.for_connections:
            return True
        found = transport.get_extra_info("socket")
        return found is None or found.fileno() < self.for_connections
