"""Checks the daemons that `nsquark.testing` runs, where its fixtures do not show it."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nsquark.testing import Nsqlookupd


def test_the_ports_of_a_daemon_that_is_down_go_to_nobody_else() -> None:
    """Any other process that asks for a free port might get one, and so might a client that tries to connect."""
    with Nsqlookupd() as daemon:
        addresses = [daemon.tcp, daemon.http]
        daemon.kill()
        for address in addresses:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(address)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)
        daemon.start()
        assert [daemon.tcp, daemon.http] == addresses
    for address in addresses:
        with socket.socket() as other:
            other.bind(address)


def test_a_daemon_that_runs_is_not_started_again() -> None:
    """A fixture's daemon has been started when a test writes `with` all the same."""
    with Nsqlookupd().start() as lookupd:
        pid = lookupd.pid
        with lookupd.start() as same:
            assert same is lookupd and lookupd.pid == pid and lookupd.get("/ping").text == "OK"
        assert not lookupd.is_running


def test_a_daemon_that_was_not_started_says_so() -> None:
    lookupd = Nsqlookupd()
    for use in (lambda: lookupd.tcp_address, lambda: lookupd.pid, lookupd.stop):
        with pytest.raises(AssertionError, match="not started: use `with`"):
            use()


def test_a_restart_without_asserts(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from nsquark.testing import Nsqd
with Nsqd(Path({str(tmp_path)!r})) as nsqd:
    first = nsqd.process
    nsqd.restart()
    print(first.poll(), nsqd.is_running)
"""
    ended = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "0 True\n"
