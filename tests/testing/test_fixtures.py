"""Checks `nsquark.testing` as a user has it: in a test suite of its own, run by a pytest of its own."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness import eventually

CONFTEST = 'pytest_plugins = ["nsquark.testing"]\n'

INI = """
[pytest]
filterwarnings =
    error::ResourceWarning
    error::pytest.PytestUnraisableExceptionWarning
"""

TESTS = """
import asyncio

import pytest

from nsquark import Consumer, Producer, sync
from nsquark.testing import Nsqd, StartError

seen = set()


@pytest.mark.parametrize("turn", [1, 2])
def test_what_was_published_arrives(nsqd, topic, turn):
    async def round_trip():
        async with Producer(nsqd.tcp_address) as producer:
            await producer.publish(topic, b"hello")
        async with Consumer(topic, "ch", nsqd=nsqd.tcp_address) as consumer:
            async with (await anext(consumer)).or_raise() as message:
                assert message.body == b"hello"

    asyncio.run(round_trip())
    seen.add((nsqd.pid, topic))
    assert len({pid for pid, _ in seen}) == 1 and len(seen) == turn, "one nsqd, and a topic for each test"


def test_flags_and_a_restart_on_the_same_ports(make_nsqd):
    nsqd = make_nsqd("--max-msg-size=100")
    with sync.Producer(nsqd.tcp_address) as producer:
        producer.publish("kept", b"x" * 100)
    address = nsqd.tcp_address
    nsqd.restart(crash=True)
    assert nsqd.tcp_address == address and nsqd.topic("kept")["depth"] == 1
    assert nsqd.stop() == 0 and not nsqd.is_running


def test_discovery(make_nsqd, make_nsqlookupd, topic):
    lookupd = make_nsqlookupd()
    nsqd = make_nsqd(f"--lookupd-tcp-address={lookupd.tcp_address}")
    with sync.Producer(nsqd.tcp_address) as producer:
        producer.publish(topic, b"found")
    with sync.Consumer(topic, "ch", lookupd=lookupd.http_address, lookupd_poll_interval="100ms") as consumer:
        with next(consumer).or_raise() as message:
            assert message.body == b"found"


def test_a_wrong_flag(make_nsqd):
    with pytest.raises(StartError, match="no-such-flag"):
        make_nsqd("--no-such-flag")


def test_that_fails_with_its_message(nsqd, topic):
    with sync.Producer(nsqd.tcp_address) as producer:
        producer.publish(topic, b"one")
    with sync.Consumer(topic, "ch", nsqd=nsqd.tcp_address) as consumer:
        with next(consumer).or_raise() as message:
            assert message.body == b"two"
"""


HANGS_S = 50

WAITING = """
from pathlib import Path

from nsquark import sync


def test_that_waits(nsqd, make_nsqlookupd, topic):
    pids = [nsqd.pid, make_nsqlookupd().pid]
    with sync.Consumer(topic, "ch", nsqd=nsqd.tcp_address) as consumer:
        Path("pids.new").write_text(" ".join(map(str, pids)))
        Path("pids.new").rename("pids")
        next(consumer)
"""


def suite(directory: Path, tests: str) -> tuple[list[str], dict[str, str]]:
    """Writes a suite of a user; returns the command that runs it, and its environment."""
    (directory / "pytest.ini").write_text(INI)
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "test_user.py").write_text(tests)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--basetemp", str(directory / "temp"), "-q"]
    return [*command, "-o", f"faulthandler_timeout={HANGS_S}", "."], environment


def test_a_suite_of_a_user(tmp_path: Path) -> None:
    """The suite takes for errors what Python warns of when a process, a pipe or a socket is left open."""
    command, environment = suite(tmp_path, TESTS)
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert result.returncode == 1 and "5 passed" in result.stdout and "1 failed" in result.stdout, result.stdout
    assert "assert b'one' == b'two'" in result.stdout


def test_ctrl_c_ends_a_suite_and_its_daemons(tmp_path: Path) -> None:
    """A terminal sends SIGINT to all processes of the group, to the daemons too."""
    command, environment = suite(tmp_path, WAITING)
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            eventually(lambda: (tmp_path / "pids").exists() or running.poll() is not None, 60)
            os.killpg(running.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
        said, _ = running.communicate()  # if it hangs, with the stacks of all its threads
    assert running.returncode == pytest.ExitCode.INTERRUPTED and "KeyboardInterrupt" in said, said
    assert "nsqd died" not in said and "Error" not in said, said
    for pid in (tmp_path / "pids").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
