"""Runs the command in docs/operations.md that mirrors a running NSQ cluster; its source is PEER_NSQD=<path> or our
nsqd.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import Nsqd, eventually
from nsquark import sync
from tools.rig import END_TIMEOUT_S, Cluster, numbered_lines

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
CHANNEL = "nsquark_mirror"
TOPICS = ("orders", "clicks")


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Cluster]:
    # What the killed mirror had comes again after this, not after a minute.
    cluster = Cluster(tmp_path / "source", "--msg-timeout=2s", program=os.environ.get("PEER_NSQD"))
    (tmp_path / "source").mkdir()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


def documented_command(lookupd: str, destination: str) -> str:
    """Returns the command as it stands in the documentation, with addresses of this test."""
    found = re.search(r"^nsq_to_nsq (?:.*\\\n)*.*$", PAGE.read_text(), re.MULTILINE)
    assert found is not None
    command = found[0]
    for old, new in (("nsqlookupd.old:4161", lookupd), ("127.0.0.1:4150", destination)):
        assert old in command
        command = command.replace(old, new)
    return command


def program_on_path(directory: Path) -> dict[str, str]:
    """Makes an environment in which nsq_to_nsq is the one of this source, installed or not."""
    directory.mkdir()
    script = directory / "nsq_to_nsq"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m nsquark.tools.nsq_to_nsq "$@"\n')
    script.chmod(0o755)
    return {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}"}


def test_the_documented_mirror(source: Cluster, make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> None:
    """Each message of each topic arrives, also those that were published while the mirror and its nsqd were killed."""
    destination = make_nsqd(data_path=tmp_path / "destination")
    destination.keep_ports()
    for topic in TOPICS:
        source.create(topic, CHANNEL, "others")
    command = f"exec {documented_command(source.lookupd.http_address, destination.tcp_address)}"
    environment = program_on_path(tmp_path / "bin")
    lines = {topic: [b"%s %b" % (topic.encode(), line) for line in numbered_lines(3000)] for topic in TOPICS}

    def mirror() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(command, shell=True, env=environment, stderr=subprocess.DEVNULL)

    with mirror() as first:
        for topic in TOPICS:
            source.publish(topic, lines[topic][:1000])
        eventually(lambda: destination.topic_names() == set(TOPICS), END_TIMEOUT_S)
        first.kill()
        destination.kill()
    for topic in TOPICS:
        source.publish(topic, lines[topic][1000:2000])
    destination.start()
    with mirror() as second:
        for topic in TOPICS:
            source.publish(topic, lines[topic][2000:])
        for topic in TOPICS:
            source.wait_until_finished(topic, CHANNEL)
        second.send_signal(signal.SIGTERM)
        assert second.wait(END_TIMEOUT_S) == 0
    for topic in TOPICS:
        assert bodies_at(destination, topic) == set(lines[topic])
        assert source.depth(topic, "others") == 3000, "other channels of the source are as they were"


def bodies_at(nsqd: Nsqd, topic: str) -> set[bytes]:
    bodies = set()
    waiting = nsqd.topic(topic)["depth"]
    with sync.Consumer(topic, "check", nsqd=nsqd.tcp_address, max_in_flight=1000) as consumer:
        for _ in range(waiting):
            message = consumer.get(timeout=20)
            assert message is not None
            bodies.add(message.body)
            message.finish()
    return bodies
