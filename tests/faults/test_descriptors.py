"""Begins a storm of idle connections: nsqd keeps descriptors for its own files, and loses nothing."""

import contextlib
import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.shim import Rule, Shim
from harness import Nsqd, Wire, eventually, nsqd_program

pytestmark = pytest.mark.ours

LIMIT = 256
"""nsqd may open this many files; a storm needs as many here, where the limit is the same, and some for itself."""
TOPICS = 10
CONNECT_TIMEOUT_S = 30.0
"""While nsqd stands still the queue of its socket is full, and connecting is tried again only after seconds."""


@pytest.fixture
def few_descriptors(tmp_path: Path) -> Iterator[Nsqd]:
    """Runs an nsqd that may open LIMIT files."""
    program = tmp_path / "nsqd-with-few-descriptors"
    program.write_text(f'#!/bin/sh\nulimit -n {LIMIT}\nexec {nsqd_program()} "$@"\n')
    program.chmod(0o755)
    data_path = tmp_path / "data"
    data_path.mkdir()
    with Nsqd(data_path, "--sync-timeout=100ms", program=str(program)) as daemon:
        yield daemon


def _storm(address: tuple[str, int], stack: contextlib.ExitStack) -> list[socket.socket]:
    """Opens more connections than there are descriptors; they stay open, and say nothing."""
    return [stack.enter_context(socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)) for _ in range(LIMIT)]


@pytest.mark.parametrize("port", ["tcp", "http"])
def test_topics_are_made_written_and_kept_in_a_storm(few_descriptors: Nsqd, port: str) -> None:
    daemon = few_descriptors
    publisher = daemon.connect()
    acknowledged = 0
    with contextlib.ExitStack() as stack:
        _storm(daemon.tcp if port == "tcp" else daemon.http, stack)
        for number in range(TOPICS):
            for _ in range(20):
                publisher.publish(f"topic{number}", b"body")
                acknowledged += 1
        if port == "tcp":
            eventually(lambda: "connections are refused" in daemon.log)
    assert "sync failed" not in daemon.log
    eventually(lambda: _is_well(daemon))
    publisher.close()
    daemon.stop()
    daemon.start()
    assert sum(_drain(daemon, f"topic{number}") for number in range(TOPICS)) == acknowledged


def _is_well(daemon: Nsqd) -> bool:
    """Tells whether /ping says that all is well; the connections of a storm take a moment to go."""
    with contextlib.suppress(ConnectionError):
        return daemon.get("/ping").text == "OK"
    return False


def _drain(daemon: Nsqd, topic: str) -> int:
    with daemon.connect() as wire:
        assert isinstance(wire, Wire)
        wire.subscribe(topic, "ch", rdy=100)
        return len(wire.read_messages(20, finish=True))


def test_a_topic_that_cannot_be_opened_at_the_start_is_opened_later(shim: Shim) -> None:
    """Its messages are passed over neither now nor later."""
    with Nsqd(shim.root, environment=shim.environment) as daemon:
        with daemon.connect() as publisher:
            for topic in ("bad", "good"):
                daemon.post("/topic/create", topic=topic)
                daemon.post("/channel/create", topic=topic, channel="ch")
                for _ in range(20):
                    publisher.publish(topic, b"body")
        daemon.kill()
        shim.set_rules(Rule("open", "*/t.bad/*.log", errno.EMFILE))
        daemon.start()
        assert "TOPIC(bad): cannot be opened" in daemon.log
        assert daemon.post("/pub", b"more", topic="bad").status == 503
        assert _drain(daemon, "good") == 20
        shim.set_rules()
        daemon.wait_for_log("TOPIC(bad): opened")
        assert _drain(daemon, "bad") == 20
