"""Runs a Spark Connect server on this machine, for updates of a pipeline: only the first waits for Spark's start."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from nsquark.base.errors import UserError
from nsquark.spark.java import spark_environment
from nsquark.spark.jobs.home import PipelineHome, spark_program

SERVER_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.1


class ConnectServer:
    """Runs a server from `start` to `stop`. Tables, metastore and log are in `directory`, which is for one server."""

    def __init__(self, directory: Path, *, master: str = "local[2]", settings: Mapping[str, str] | None = None) -> None:
        self.home = PipelineHome(directory)
        self.log = self.home.directory / "server.log"
        self.port = free_port()
        self._master = master
        self._settings = dict(settings or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"sc://127.0.0.1:{self.port}"

    def __enter__(self) -> "ConnectServer":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> "ConnectServer":
        """Starts the server, and returns when its port is open."""
        self.home.prepare(self._settings)
        settings = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            **self.home.settings(self._settings),
        }
        command = [
            spark_program("spark-submit"),
            "--class",
            SERVER_CLASS,
            "--name",
            "nsquark",
            "--master",
            self._master,
        ]
        command += [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
        with self.log.open("wb") as log:
            # The server has a process group of its own: Ctrl-C must not end it before the updates that use it.
            self._process = subprocess.Popen(
                [*command, "spark-internal"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **spark_environment()},
                process_group=0,
            )
        try:
            self._wait_for_port(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_for_port(self, process: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise UserError(f"Spark's server did not start: see {self.log}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1.0):
                return
            time.sleep(POLL_S)
        raise UserError(f"Spark's server did not open its port within {START_TIMEOUT_S:.0f} s: see {self.log}")


def free_port() -> int:
    """Chooses a free port: Spark does not tell which one it took for 0. Another process rarely takes it first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
