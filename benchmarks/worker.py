"""Runs a load generator in a process of its own, so that it shares nothing with the others but the machine.

A role is a generator function: what it yields goes to the parent, and it goes on when the parent says so. By
convention it first yields None when it is ready, then its `Load` when its work is done.
"""

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from benchmarks.wire import LoadError

STEP_SECONDS_MAX = 120
"""No step of a role takes longer: each bounds itself by time and by count."""

Role = Callable[..., Iterator[Any]]


@dataclass(frozen=True)
class Load:
    """Holds what a role did. Times are of the monotonic clock, which all processes of a machine share."""

    messages: int
    started: float
    ended: float
    latencies_ns: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        return max(self.ended - self.started, 1e-9)


class Worker:
    """Is ready inside its `with` block; `go()` lets it take the next step, `result()` waits for what that gives.

    `busy` is the share of a core that its last step took: near 1, the load generator was the limit.
    """

    def __init__(self, role: Role, *args: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.busy = 0.0
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_run, args=(child, role, args), daemon=True)
        self._process.start()
        child.close()

    def __enter__(self) -> "Worker":
        try:
            self.result()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join(10)

    def go(self) -> None:
        self._pipe.send(True)

    def result(self) -> Any:
        if not self._pipe.poll(STEP_SECONDS_MAX):
            raise LoadError(f"a load generator gave no result within {STEP_SECONDS_MAX} s")
        try:
            failure, value, self.busy = self._pipe.recv()
        except EOFError:
            raise LoadError("a load generator died") from None
        if failure:
            raise LoadError(failure)
        return value


def _run(pipe: Connection, role: Role, args: tuple[Any, ...]) -> None:
    steps = role(*args)
    try:
        while True:
            pipe.send(_step(steps))
            pipe.recv()
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return  # the parent is done with us


def _step(steps: Iterator[Any]) -> tuple[str, Any, float]:
    """Takes a step; returns what failed or "", what the step gave, and the part of a core it took."""
    cpu, clock = time.process_time(), time.monotonic()
    try:
        value = next(steps)
    except OSError as error:
        return f"a load generator's connection failed: {error}", None, 0.0
    except LoadError as error:
        return str(error), None, 0.0
    except Exception:
        return traceback.format_exc(), None, 0.0
    return "", value, (time.process_time() - cpu) / (time.monotonic() - clock)
