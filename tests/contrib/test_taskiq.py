"""Runs Taskiq's tasks through a real nsqd, in this process and in a worker that is killed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from taskiq import InMemoryBroker, TaskiqMessage
from taskiq.api import run_receiver_task
from taskiq.exceptions import SendTaskError

from client.pool_rig import address_of
from harness import Nsqd, eventually, until
from nsquark import Config, Producer
from nsquark.contrib.taskiq import MAX_IN_FLIGHT, NsqBroker
from nsquark.errors import ConfigError, InvalidName, NsqError

WORKER = """
import asyncio, os, pathlib
from nsquark.contrib.taskiq import NsqBroker

broker = NsqBroker(os.environ["NSQD_ADDRESS"], topic="jobs", msg_timeout="1s")
directory = pathlib.Path(os.environ["JOBS"])


@broker.task
async def write(name: str) -> None:
    (directory / f"{name}.{os.getpid()}").write_text("begun")
    if os.environ.get("HANGS"):
        await asyncio.sleep(3600)
    (directory / name).write_text("done")
"""


@pytest.fixture
async def broker(nsqd: Nsqd, topic: str) -> AsyncIterator[NsqBroker]:
    made = NsqBroker(address_of(nsqd), topic=topic)
    made.result_backend = InMemoryBroker().result_backend
    made.is_worker_process = True
    await made.startup()
    yield made
    await made.shutdown()


async def test_tasks_are_done_and_finished(nsqd: Nsqd, topic: str, broker: NsqBroker) -> None:
    @broker.task
    async def add(one: int, two: int) -> int:
        return one + two

    @broker.task
    def fail() -> None:
        raise RuntimeError("no")

    receiving = asyncio.create_task(run_receiver_task(broker))
    sums = [await add.kiq(number, 1) for number in range(20)]
    failed = await fail.kiq()
    results = [await task.wait_result(timeout=30) for task in sums]
    assert [result.return_value for result in results] == list(range(1, 21))
    assert isinstance((await failed.wait_result(timeout=30)).error, RuntimeError)
    await until(lambda: nsqd.channel(topic, "workers")["in_flight_count"] == 0)
    assert nsqd.channel(topic, "workers")["depth"] == 0
    receiving.cancel()
    await asyncio.wait([receiving])


async def test_tasks_that_the_worker_does_not_know_hold_nothing_up(nsqd: Nsqd, topic: str, broker: NsqBroker) -> None:
    @broker.task
    async def known() -> str:
        return "done"

    async with Producer(address_of(nsqd)) as producer:
        unknown = broker.formatter.dumps(
            TaskiqMessage(task_id="1", task_name="unknown", labels={}, args=[], kwargs={})
        ).message
        await producer.multi_publish(topic, [unknown] * MAX_IN_FLIGHT + [b"no task"])
    task = await known.kiq()
    receiving = asyncio.create_task(run_receiver_task(broker))
    assert (await task.wait_result(timeout=30)).return_value == "done"
    await until(lambda: nsqd.channel(topic, "workers")["in_flight_count"] == 0)
    receiving.cancel()
    await asyncio.wait([receiving])


async def test_a_delayed_task_waits(nsqd: Nsqd, topic: str, broker: NsqBroker) -> None:
    @broker.task
    async def later() -> str:
        return "now"

    began_s = time.monotonic()
    task = await later.kicker().with_labels(delay=1).kiq()
    receiving = asyncio.create_task(run_receiver_task(broker))
    assert (await task.wait_result(timeout=30)).return_value == "now"
    assert time.monotonic() - began_s > 0.95
    receiving.cancel()
    await asyncio.wait([receiving])


async def test_a_delay_that_is_no_seconds(broker: NsqBroker) -> None:
    @broker.task
    async def later() -> None: ...

    wrong: tuple[Any, ...] = ("soon", timedelta(seconds=1))
    for delay in wrong:
        with pytest.raises(SendTaskError) as caught:
            await later.kicker().with_labels(delay=delay).kiq()
        assert isinstance(caught.value.__cause__, ConfigError)
        assert "label delay" in str(caught.value.__cause__) and "give seconds" in str(caught.value.__cause__)


async def test_a_broker_that_is_not_started_says_so(nsqd: Nsqd, topic: str) -> None:
    broker = NsqBroker(address_of(nsqd), topic=topic)

    @broker.task
    async def never() -> None: ...

    with pytest.raises(SendTaskError) as caught:
        await never.kiq()
    assert isinstance(caught.value.__cause__, NsqError) and "startup" in str(caught.value.__cause__)


async def test_a_killed_worker_leaves_its_task_to_another(make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> None:
    nsqd = make_nsqd()
    module, jobs = tmp_path / "jobs_module.py", tmp_path / "jobs"
    module.write_text(WORKER)
    jobs.mkdir()
    environment = {**os.environ, "NSQD_ADDRESS": address_of(nsqd), "JOBS": str(jobs)}
    command = [sys.executable, "-m", "taskiq", "worker", "jobs_module:broker", "--workers", "1"]
    kick = "import asyncio, jobs_module as m\nasync def main():\n await m.broker.startup()\n"
    kick += " await m.write.kiq('job')\n await m.broker.shutdown()\nasyncio.run(main())"
    subprocess.run([sys.executable, "-c", kick], cwd=tmp_path, env=environment, check=True, timeout=60)
    with subprocess.Popen(command, cwd=tmp_path, env={**environment, "HANGS": "1"}, start_new_session=True) as first:
        try:
            await asyncio.to_thread(eventually, lambda: list(jobs.iterdir()), 60)
        finally:
            os.killpg(first.pid, signal.SIGKILL)
    with subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True) as second:
        try:
            await asyncio.to_thread(eventually, lambda: (jobs / "job").exists(), 60)
            await until(lambda: nsqd.channel("jobs", "workers")["in_flight_count"] == 0)
            second.terminate()
            second.wait(60)
        finally:
            if second.poll() is None:
                os.killpg(second.pid, signal.SIGKILL)
    assert len(list(jobs.iterdir())) == 3, "begun twice, done once"


@pytest.mark.parametrize(
    ("settings", "in_flight"),
    [
        ({}, 100),
        ({"config": Config(msg_timeout="2m")}, 100),
        ({"config": Config(msg_timeout="2m").replace(snappy=True)}, 100),
        ({"config": Config(max_in_flight=1)}, 1),
        ({"config": Config(max_in_flight=7), "snappy": True}, 7),
        ({"config": Config(max_in_flight=7), "max_in_flight": 8}, 8),
    ],
)
async def test_tasks_in_flight_unless_the_user_says_otherwise(
    nsqd: Nsqd, topic: str, settings: dict[str, Any], in_flight: int
) -> None:
    broker = NsqBroker(address_of(nsqd), topic=topic, **settings)
    broker.is_worker_process = True
    await broker.startup()
    await until(lambda: [client["ready_count"] for client in nsqd.channel(topic, "workers")["clients"]] == [in_flight])
    await broker.shutdown()


def test_what_is_no_address() -> None:
    with pytest.raises(ConfigError, match="host:port"):
        NsqBroker(4150)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"topic": "no name"}, {"channel": None}])
def test_what_is_no_name(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidName):
        NsqBroker("127.0.0.1:1", **settings)
