"""Runs the `nsquark` command as a user does."""

import itertools
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import eventually

START_TIMEOUT_S = 40
STOP_TIMEOUT_S = 40
RUN_TIMEOUT_S = 60

_serial = itertools.count(1)
NSQUARK = [sys.executable, "-m", "nsquark.tool.main"]


def nsquark(*arguments: str, before: tuple[str, ...] = (), **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs the command, by means of another one if `before` names it."""
    return subprocess.run(
        [*before, *NSQUARK, *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
        env=os.environ | environment,
    )


def get(address: str, path: str, body: bytes | None = None) -> bytes:
    with urllib.request.urlopen(f"http://{address}{path}", body, timeout=30) as answer:
        return bytes(answer.read())


class Up:
    """Runs `nsquark up` on free ports, with its output in files."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self._ports_file = directory / "ports.json"
        number = next(_serial)
        self._output = directory / f"output-{number}"
        self._errors = directory / f"errors-{number}"
        command = [*NSQUARK, "up", "--base-port=0", f"--dir={directory / 'data'}", f"--ports-file={self._ports_file}"]
        with self._output.open("w") as output, self._errors.open("w") as errors:
            self.process = subprocess.Popen([*command, *flags], stdout=output, stderr=errors, stdin=subprocess.DEVNULL)

    def wait_until_up(self) -> "Up":
        eventually(lambda: self._ports_file.exists() or self.process.poll() is not None, START_TIMEOUT_S)
        assert self.process.poll() is None, self.errors
        eventually(lambda: "Ctrl-C" in self.output)
        return self

    @property
    def ports(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self._ports_file.read_text())
        return content

    @property
    def ports_file_exists(self) -> bool:
        return self._ports_file.exists()

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)


@pytest.fixture
def make_up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def make(*flags: str) -> Up:
        started.append(Up(tmp_path, *flags))
        return started[-1]

    yield make
    for up in started:
        up.process.kill()
        up.process.wait(STOP_TIMEOUT_S)
