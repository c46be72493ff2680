"""Checks the source on clusters, where tasks run in other processes than the driver."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from harness import Nsqd, eventually
from spark.source_rig import address, bodies, publish

pyspark = pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'nsquark[spark]'")

pytestmark = [pytest.mark.ours, pytest.mark.timeout(900), pytest.mark.usefixtures("java")]

SCRIPT = Path(__file__).with_name("cluster_script.py")
MESSAGES = 40_000
START_TIMEOUT_S = 120
RUN_TIMEOUT_S = 400


@contextmanager
def process(log: Path, *command: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Starts a process in a session of its own, all of which ends with the test."""
    with log.open("wb") as output:
        started = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=environment())
    try:
        yield started
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def environment() -> dict[str, str]:
    return {**os.environ, "SPARK_HOME": str(Path(pyspark.__file__).parent), "SPARK_NO_DAEMONIZE": "1"}


def spark_class(*arguments: str) -> list[str]:
    return [str(Path(pyspark.__file__).parent / "bin" / "spark-class"), *arguments]


def counted(driver: "subprocess.Popen[bytes]", log: Path, result: Path) -> str:
    assert driver.wait(RUN_TIMEOUT_S) == 0, log.read_text()
    return result.read_text()


def publish_all(nsqd: Nsqd, topic: str) -> None:
    for low in range(0, MESSAGES, 4000):
        publish(nsqd, topic, bodies(low, low + 4000))


@pytest.mark.long  # six JVMs
def test_local_cluster(nsqd: Nsqd, topic: str, tmp_path: Path) -> None:
    publish_all(nsqd, topic)
    result, log = tmp_path / "result", tmp_path / "driver.log"
    Path(f"{result}.go").touch()
    command = [sys.executable, str(SCRIPT), "local-cluster[2,1,1024]", address(nsqd), topic, str(result)]
    with process(log, *command) as driver:
        assert counted(driver, log, result) == f"{MESSAGES} {MESSAGES}"


@pytest.mark.long  # six JVMs
def test_a_worker_killed_in_the_middle_of_a_batch(nsqd: Nsqd, topic: str, tmp_path: Path) -> None:
    publish_all(nsqd, topic)
    result, log = tmp_path / "result", tmp_path / "driver.log"
    at = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    with ExitStack() as stack:
        master_log = tmp_path / "master.log"
        stack.enter_context(process(master_log, *spark_class("org.apache.spark.deploy.master.Master", *at)))
        found = eventually(lambda: re.search(r"spark://127.0.0.1:\d+", master_log.read_text()), START_TIMEOUT_S, 0.2)
        master = found[0]
        workers = []
        for name in ("one", "two"):
            options = [*at, "--cores", "1", "--memory", "600m", "--work-dir", str(tmp_path / name), master]
            command = spark_class("org.apache.spark.deploy.worker.Worker", *options)
            workers.append(stack.enter_context(process(tmp_path / f"{name}.log", *command)))
        eventually(lambda: master_log.read_text().count("Registering worker") == 2, START_TIMEOUT_S, 0.2)
        driver = stack.enter_context(
            process(log, sys.executable, str(SCRIPT), master, address(nsqd), topic, str(result))
        )
        running = Path(f"{result}.running")
        eventually(lambda: running.exists() or driver.poll() is not None, RUN_TIMEOUT_S, 0.05)
        assert driver.poll() is None, log.read_text()
        os.killpg(workers[0].pid, signal.SIGKILL)
        # Executors are also lost when the driver ends; only a killed worker is named like this.
        eventually(lambda: "worker lost" in log.read_text() or driver.poll() is not None, RUN_TIMEOUT_S, 0.05)
        Path(f"{result}.go").touch()
        assert counted(driver, log, result) == f"{MESSAGES} {MESSAGES}"
        assert "worker lost" in log.read_text()
