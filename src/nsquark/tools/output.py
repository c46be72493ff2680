"""Writes a tool's stdout in a thread, so that a reader who pauses does not keep the event loop from heartbeats."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from nsquark.tools.program import Fatal

STDOUT_FD: Final = 1


class Output:
    """Writes to stdout in the order of the calls."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stdout")

    async def write(self, data: bytes) -> None:
        """Returns when all data is written. It raises BrokenPipeError if nobody reads any more, else Fatal."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write, data)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(STDOUT_FD, rest) :]
            except BrokenPipeError:
                raise
            except OSError as error:
                raise Fatal(f"ERROR: failed to write to os.Stdout - {error.strerror}") from None
