"""Runs an nsqd under measurement: any program that takes nsqd's flags and prints nsqd's log lines."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.wire import Address, LoadError

START_SECONDS_MAX = 20
STOP_SECONDS_MAX = 20
SETTLE_SECONDS_MAX = 30
SETTLE_STEP_SECONDS = 0.05
WRONG_COUNTS_SHOWN = 5
LOG_SHOWN_CHARS = 2000

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_LISTENING = r"{}: listening on (\S+):(\d+)"


class Broker:
    """Runs while the `with` block does, on loopback ports of the system's choice and its own data path."""

    def __init__(self, program: Path, flags: tuple[str, ...] = ()) -> None:
        self.program = program
        self.flags = flags

    def __enter__(self) -> "Broker":
        self._directory = Path(tempfile.mkdtemp(prefix="nsqd-bench-"))
        self._log = self._directory / "stderr"
        self._data_path = self._directory / "data"
        self._data_path.mkdir()
        self._start()
        return self

    def _start(self) -> None:
        command = [
            str(self.program),
            f"--data-path={self._data_path}",
            "--tcp-address=127.0.0.1:0",
            "--http-address=127.0.0.1:0",
            "--https-address=127.0.0.1:0",
            *self.flags,
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            self.tcp, self.http = self._addresses()
        except BaseException:
            self._stop()
            raise

    def crash_and_start(self) -> float:
        """Kills it by SIGKILL and starts it on the same data; returns the seconds until it answers."""
        self._process.kill()
        self._process.wait()
        started = time.monotonic()
        self._start()
        self._request("GET", "/ping")
        return time.monotonic() - started

    def disk_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._data_path.rglob("*") if path.is_file())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        died = self._process.poll()
        said = self._said()
        self._stop()
        if died is not None:
            raise LoadError(f"{self.program} ended by itself with code {died}; it said:\n{said}") from error

    def _addresses(self) -> tuple[Address, Address]:
        deadline = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < deadline:
            log = self._log.read_text(errors="replace")
            tcp, web = (re.search(_LISTENING.format(name), log) for name in ("TCP", "HTTP"))
            if tcp and web:
                return (tcp[1], int(tcp[2])), (web[1], int(web[2]))
            if self._process.poll() is not None:
                break
            time.sleep(0.01)
        raise LoadError(f"{self.program} does not listen; it said:\n{self._said()}")

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-LOG_SHOWN_CHARS:]

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def cpu_seconds(self) -> float:
        """Returns the user and system time of all its threads."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        fields = stat[stat.rindex(")") + 2 :].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND

    def memory_bytes(self) -> tuple[int, int]:
        """Returns the bytes that are resident now, and the most that ever were."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        now, peak = (re.search(rf"{name}:\s+(\d+) kB", status) for name in ("VmRSS", "VmHWM"))
        if now is None or peak is None:
            raise LoadError("the broker ended by itself")
        return int(now[1]) * 1024, int(peak[1]) * 1024

    def post(self, path: str, body: bytes | None = None) -> None:
        self._request("POST", path, body)

    def counts(self, topic: str) -> dict[str, int]:
        """Returns what /stats says of the topic and its channels."""
        stats = json.loads(self._request("GET", f"/stats?format=json&topic={topic}&include_clients=false"))
        found: list[dict[str, Any]] = stats["topics"]
        if len(found) != 1:
            raise LoadError(f"/stats shows {len(found)} topics named {topic}")
        counts = {"messages": found[0]["message_count"], "depth": found[0]["depth"]}
        for channel in found[0]["channels"]:
            counts |= _channel_counts(
                channel["channel_name"],
                channel["depth"],
                channel["in_flight_count"],
                channel["requeue_count"] + channel["timeout_count"],
            )
        return counts

    def settle(self, topic: str, published: int, remaining: dict[str, int]) -> None:
        """Waits until the topic counts `published` and each channel holds `remaining`: else no figure.

        Without channels the topic itself must hold everything.
        """
        expected = {"messages": published, "depth": 0 if remaining else published}
        for channel, depth in remaining.items():
            expected |= _channel_counts(channel, depth, 0, 0)
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        while (counts := self.counts(topic)) != expected:
            if time.monotonic() > deadline:
                wrong = [
                    f"{name} {counts.get(name)}, not {expected.get(name)}"
                    for name in sorted(counts.keys() | expected.keys())
                    if counts.get(name) != expected.get(name)
                ]
                raise LoadError(f"wrong counts in /stats: {'; '.join(wrong[:WRONG_COUNTS_SHOWN])}")
            time.sleep(SETTLE_STEP_SECONDS)

    def _request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        connection = http.client.HTTPConnection(*self.http, timeout=STOP_SECONDS_MAX)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise LoadError(f"{method} {path} failed: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise LoadError(f"{method} {path} was answered with {response.status} {answer[:200]!r}")
        return answer


def _channel_counts(name: str, depth: int, in_flight: int, delivered_again: int) -> dict[str, int]:
    return {
        f"{name} depth": depth,
        f"{name} in flight": in_flight,
        f"{name} delivered again": delivered_again,
    }
