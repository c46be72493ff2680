"""Runs nsqlookupd, nsqds and nsqadmin by `nsquark up`, and one Spark Connect server."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nsquark.spark.jobs.server import ConnectServer, free_port

NSQDS = 2
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 20.0
POLL_S = 0.05
SHORT_RUN = {"spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""Java's second compiler and its parallel collector pay off after minutes; in a demo they take the cores away."""


class Platform:
    def __init__(self, directory: Path) -> None:
        self._ports = directory / "ports.json"
        self._log = directory / "nsquark-up.log"
        self._directory = directory
        self._up: subprocess.Popen[bytes] | None = None
        ui_port = free_port()
        self.spark_ui = f"http://127.0.0.1:{ui_port}"
        self.spark = ConnectServer(directory / "lake", settings={"spark.ui.port": str(ui_port), **SHORT_RUN})

    async def __aenter__(self) -> Self:
        command = [sys.executable, "-m", "nsquark.tool.main", "up", f"--nsqd={NSQDS}", "--base-port=0"]
        command += [f"--dir={self._directory / 'nsqd'}", f"--ports-file={self._ports}"]
        with self._log.open("wb") as log:
            # A group of its own: Ctrl-C is for the demo, which stops its parts in order.
            self._up = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, process_group=0)
        try:
            spark = asyncio.to_thread(self.spark.start)
            await asyncio.gather(spark, self._wait_for_ports())
        except BaseException:
            self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._stop)

    async def _wait_for_ports(self) -> None:
        assert self._up is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            while not self._ports.exists():
                if self._up.poll() is not None:
                    raise RuntimeError(f"nsquark up ended; see {self._log}")
                await asyncio.sleep(POLL_S)

    def _stop(self) -> None:
        if self._up is not None and self._up.poll() is None:
            self._up.send_signal(signal.SIGTERM)
        self.spark.stop()
        if self._up is not None:
            try:
                self._up.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._up.kill()

    def _known(self, program: str) -> list[dict[str, Any]]:
        known: list[dict[str, Any]] = json.loads(self._ports.read_text())[program]
        return known

    @property
    def lookupd(self) -> str:
        return str(self._known("nsqlookupd")[0]["http"])

    @property
    def admin(self) -> str:
        """Returns where a browser shows it all."""
        return f"http://{self._known('nsqadmin')[0]['http']}"

    def nodes_shown(self) -> int:
        """Returns how many nsqds nsqadmin sees."""
        with urllib.request.urlopen(f"{self.admin}/api/nodes", timeout=ANSWER_TIMEOUT_S) as answer:
            return len(json.load(answer)["nodes"])

    def nsqds(self, kind: str) -> list[str]:
        """Returns the `tcp` or `http` addresses of the nsqds."""
        return [str(nsqd[kind]) for nsqd in self._known("nsqd")]

    def pid(self, number: int) -> int:
        return int(self._known("nsqd")[number]["pid"])

    def kill_nsqd(self, number: int) -> str:
        """Kills an nsqd with SIGKILL; `nsquark up` starts it again on the same ports and data."""
        nsqd = self._known("nsqd")[number]
        os.kill(nsqd["pid"], signal.SIGKILL)
        return str(nsqd["name"])
