"""Runs daemons as child processes: it reads their ports from their logs, restarts those that die, and stops them."""

import asyncio
import contextlib
import ctypes
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from nsquark.base.errors import UserError

RESTART_WAIT_SECONDS_MIN: Final = 1.0
RESTART_WAIT_SECONDS_MAX: Final = 30.0
"""The wait before a dead daemon is restarted doubles with every death, up to this."""
QUIET_SECONDS: Final = 60.0
"""After this time without a death, the wait begins anew."""
STOP_SECONDS_MAX: Final = 60.0
"""A stop writes and syncs everything; if it takes longer than this, something hangs."""
READ_BYTES: Final = 64 * 1024
LINE_BYTES_MAX: Final = 64 * 1024
"""A longer line is shown in pieces rather than collected without end."""
LAST_LINES_MAX: Final = 5

_LISTENING: Final = re.compile(r" INFO: (TCP|HTTP): listening on (\S*):(\d+)$")
_PR_SET_PDEATHSIG: Final = 1

Say = Callable[[str, str], None]
"""Takes a daemon's name and a line, which is the daemon's own or about it."""


class Child:
    """Runs one daemon. Ports given as 0 are chosen by the system at the first start and kept from then on.

    After `start`, while `keep` runs and until `stop`, there is always a process, or one is about to be started.
    """

    def __init__(self, name: str, entry: str, host: str, ports: dict[str, int], flags: Sequence[str], say: Say) -> None:
        self.name = name
        self.ports = dict(ports)
        self.on_listening: Callable[[], None] = lambda: None
        self._entry = entry
        self._host = host
        self._flags = list(flags)
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._life: asyncio.Task[None] | None = None
        self._last_lines: list[str] = []
        self._heard: set[str] = set()
        self._listening = asyncio.Event()
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Starts the daemon and returns when all ports are open, or raises UserError if it does not start."""
        self._life = asyncio.create_task(self._live())
        listening = asyncio.create_task(self._listening.wait())
        await asyncio.wait({self._life, listening}, return_when=asyncio.FIRST_COMPLETED)
        if listening.done() or self._stopping.is_set():
            return
        listening.cancel()
        await self._life
        raise UserError(f"{self.name} did not start: {self._last_word()}")

    async def keep(self) -> None:
        """Restarts the daemon whenever it ends, until it is stopped."""
        wait_s = RESTART_WAIT_SECONDS_MIN
        while True:
            born = time.monotonic()
            assert self._life is not None
            await self._life
            if time.monotonic() - born > QUIET_SECONDS:
                wait_s = RESTART_WAIT_SECONDS_MIN
            if not self._stopping.is_set():
                self._say(self.name, f"died ({self._end()}): starting it again in {wait_s:g} s")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), wait_s)
            if self._stopping.is_set():
                return
            wait_s = min(wait_s * 2, RESTART_WAIT_SECONDS_MAX)
            self._life = asyncio.create_task(self._live())

    async def stop(self) -> bool:
        """Sends SIGTERM, and SIGKILL if the daemon does not end; it returns whether SIGTERM was enough."""
        self._stopping.set()
        if self._life is None:
            return True
        self._signal(signal.SIGTERM)
        _, alive = await asyncio.wait({self._life}, timeout=STOP_SECONDS_MAX)
        if alive:
            self._say(self.name, f"does not stop after {STOP_SECONDS_MAX:g} s: killed")
            self.kill()
            await self._life
        return not alive

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _live(self) -> None:
        """Starts a process, and returns when it has ended and all its lines are passed on."""
        self._heard.clear()
        self._process = await asyncio.create_subprocess_exec(
            *self._command(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Ctrl-C goes to a whole process group. In groups of their own, daemons are stopped by us, in order.
            process_group=0,
            preexec_fn=_die_with_parent,
        )
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        assert self._process.stdout is not None
        async for line in _lines(self._process.stdout):
            self._hear(line)
        await self._process.wait()

    def _command(self) -> list[str]:
        # Without -P, Python would import a json.py in the directory where the user happens to be.
        start = f"from {self._entry} import main; main()"
        addresses = [f"--{kind}-address={self._host}:{port}" for kind, port in self.ports.items()]
        return [sys.executable, "-P", "-c", start, *addresses, "--log-prefix=", *self._flags]

    def _hear(self, line: str) -> None:
        self._last_lines = [*self._last_lines[1 - LAST_LINES_MAX :], line]
        self._say(self.name, line)
        found = _LISTENING.search(line)
        if found is not None and (kind := found[1].lower()) in self.ports:
            self.ports[kind] = int(found[3])
            self._heard.add(kind)
            if self._heard == self.ports.keys():
                self._listening.set()
                self.on_listening()

    def _last_word(self) -> str:
        """Returns the last line of the daemon, a fatal one if there is any, which is more use than an exit code."""
        fatal = [line.partition(" FATAL: ")[2] for line in self._last_lines if " FATAL: " in line]
        said = fatal or self._last_lines
        return said[-1].rstrip(".") if said else self._end()

    def _end(self) -> str:
        code = self._process.returncode if self._process is not None else None
        if code is not None and code < 0:
            return signal.Signals(-code).name
        return f"exit code {code}"


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    rest = b""
    while data := await stream.read(READ_BYTES):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace")
        if len(rest) > LINE_BYTES_MAX:
            yield rest.decode("utf-8", "replace")
            rest = b""
    if rest:
        yield rest.decode("utf-8", "replace")


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    """Makes Linux stop a daemon if we are killed with -9, so that it does not hold its ports and data path."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
