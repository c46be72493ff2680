"""Runs the blocks of one document, in order, in one directory: `python run_blocks.py <document> <directory>`.

To be started in a network of its own, where the default ports are free, and with process ids of its own, so that all
that a block started ends with this program. Documents find nsqlookupd and nsqd running on their default ports, unless
a block in the background starts some.
"""

import array
import fcntl
import os
import re
import select
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from blocks import PYTHON, Block, read_blocks  # type: ignore[import-not-found]

from nsquark.spark.java import find_java

ROOT = Path(__file__).parents[2]
BESIDE = (".venv", "examples", "contrib", "benchmarks")
"""The commands in documents expect these beside them, as in the root of the repository."""
PINGS = {"nsqlookupd": "http://127.0.0.1:4161/ping", "nsqd": "http://127.0.0.1:4151/ping"}
BIN = Path(sys.executable).parent

START_TIMEOUT_S = 60
BLOCK_TIMEOUT_S = 300
STOP_TIMEOUT_S = 60
POLL_S = 0.05

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_IFREQ_BYTES = 40


class Failed(Exception):
    """Says that a block did not do what it should."""


def main() -> None:
    document, directory = Path(sys.argv[1]), Path(sys.argv[2])
    bring_loopback_up()
    work = directory / "work"
    work.mkdir()
    for name in BESIDE:
        target = BIN.parent if name == ".venv" else ROOT / name
        if target.exists():
            (work / name).symlink_to(target)
    try:
        Runner(work, directory / "data").run(read_blocks(document))
    except Failed as error:
        sys.exit(f"{document.name}:{error}")


def bring_loopback_up() -> None:
    """Switches the loopback interface on, which a new network has switched off."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = array.array("B", b"lo".ljust(_IFREQ_BYTES, b"\0"))
        fcntl.ioctl(sock, _SIOCGIFFLAGS, request)
        request[16] |= _IFF_UP
        fcntl.ioctl(sock, _SIOCSIFFLAGS, request)


class Runner:
    def __init__(self, work: Path, data: Path) -> None:
        self._work = work
        self._data = data
        self._background: list[tuple[Block, subprocess.Popen[bytes], Path]] = []
        self._spark: subprocess.Popen[bytes] | None = None
        self._environment = os.environ | {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            "JAVA_HOME": str(find_java()),  # as README tells those who have none
        }

    def run(self, blocks: list[Block]) -> None:
        if not any(block.starts_daemons for block in blocks):
            self._start(
                Block(0, "sh", f"exec {sys.executable} -m nsquark.tool.main up --dir {self._data}", in_background=True)
            )
            for url in PINGS.values():
                self._wait_for(url)
        for place, block in enumerate(blocks):
            if block.file:
                self._write(block, blocks[place + 1 :])
            elif block.in_background:
                self._start(block)
            elif block.is_run:
                self._do(block)
        self._end_background()

    def _write(self, block: Block, later: list[Block]) -> None:
        if not any(block.file in other.text for other in later if other.is_run or other.file):
            raise Failed(f"{block.line}: nothing below uses the file {block.file}")
        file = self._work / block.file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text)

    def _do(self, block: Block) -> None:
        output = self._work.parent / f"output-{block.line}"
        started = time.monotonic()
        code = self._run_in_spark(block, output) if block.uses_spark else self._run_alone(block, output)
        if code is None:
            raise Failed(f"{block.line}: still runs after {BLOCK_TIMEOUT_S} s:\n{output.read_text()}")
        print(f"line {block.line}: exit code {code} after {time.monotonic() - started:.1f} s", flush=True)
        if code != 0:
            raise Failed(f"{block.line}: exit code {code}:\n{output.read_text()}{self._background_output()}")

    def _run_alone(self, block: Block, output: Path) -> int | None:
        """Returns its exit code; None if it still runs."""
        try:
            return self._launch(block, output).wait(BLOCK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None

    def _run_in_spark(self, block: Block, output: Path) -> int | None:
        """Runs a block in the process of all blocks that use Spark: a JVM for each would take most of the time."""
        if self._spark is None:
            self._spark = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("spark_blocks.py"))],
                cwd=self._work,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self._spark.stdin is not None and self._spark.stdout is not None
        output.touch()
        self._spark.stdin.write(f"{self._script(block)}\t{output}\n".encode())
        self._spark.stdin.flush()
        if not select.select([self._spark.stdout], [], [], BLOCK_TIMEOUT_S)[0]:
            return None
        return int(self._spark.stdout.readline() or b"1")

    def _start(self, block: Block) -> None:
        output = self._work.parent / f"output-{block.line}"
        process = self._launch(block, output)
        self._background.append((block, process, output))
        for name, url in PINGS.items():
            if block.starts_daemons and re.search(rf"\b({name}|nsquark up)\b", block.text):
                self._wait_for(url)

    def _wait_for(self, url: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            self._check_background()
            try:
                with urllib.request.urlopen(url, timeout=5):
                    return
            except OSError:
                if time.monotonic() > deadline:
                    raise Failed(f"{self._background[-1][0].line}: no answer at {url}") from None
            time.sleep(POLL_S)

    def _launch(self, block: Block, output: Path) -> "subprocess.Popen[bytes]":
        if block.language in PYTHON:
            command = [sys.executable, str(self._script(block))]
        else:
            command = ["bash", "-euo", "pipefail", "-c", block.text]
        with output.open("wb") as file:
            return subprocess.Popen(
                command, cwd=self._work, env=self._environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def _script(self, block: Block) -> Path:
        script = self._work / f"block_{block.line}.py"
        script.write_text(block.text)
        return script

    def _check_background(self) -> None:
        """Checks that no command in the background failed; it may end by itself."""
        for block, process, output in self._background:
            if process.poll() not in (None, 0):
                raise Failed(f"{block.line}: exit code {process.returncode}:\n{output.read_text()}")

    def _background_output(self) -> str:
        return "".join(
            f"\nmeanwhile the block of line {block.line} said:\n{output.read_text()}"
            for block, _, output in self._background
        )

    def _end_background(self) -> None:
        self._check_background()
        if self._spark is not None:
            self._spark.communicate(timeout=STOP_TIMEOUT_S)
        for _, process, _ in reversed(self._background):
            process.terminate()
            process.wait(STOP_TIMEOUT_S)


if __name__ == "__main__":
    main()
