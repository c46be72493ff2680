"""Runs `nsquark tap` as its users have it, and nsqds to tap: ours, or the one that PEER_NSQD names."""

import contextlib
import http.client
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import HttpReply, Nsqd, eventually, mpub_messages
from nsquark import sync, testing

CHANNEL = "nsquark_tap"
WITNESS = "witness"
"""Nobody taps this channel: it tells which messages an nsqd delivers, with their ids and times."""
SOON = ("--topic-refresh=100ms", "--consumer-opt=msg_timeout,2s", "--consumer-opt=lookupd_poll_interval,1s")
DRAIN_TIMEOUT_S = 60.0

WHOSE = [
    "ours",
    pytest.param("nsq", marks=pytest.mark.skipif("PEER_NSQD" not in os.environ, reason="PEER_NSQD names no nsqd")),
]

Row = tuple[str, int, bytes]
"""Has id, time in us, and body."""


class Tap(testing.daemons.Daemon):
    """Has one data path and the processes that serve it, one after another."""

    MODULE = "nsquark.tap.main"

    def __init__(self, data_path: Path, *flags: str):
        super().__init__(f"--data-path={data_path}", *SOON, *flags)
        data_path.mkdir(exist_ok=True)
        self._ports = {"http": 0}

    def _is_listening(self) -> bool:
        return bool(self._listening("http"))

    def _listening(self, kind: str) -> str:
        """Returns its own address; lines of the logs that it serves name their nsqd."""
        mark = "[nsquark tap] "
        return next((line.rpartition(" ")[2] for line in self._lines if mark in line and "HTTP: listening" in line), "")

    def of_log(self, source: Nsqd, method: str, target: str, body: bytes = b"") -> HttpReply:
        """Asks the log API of a tapped nsqd."""
        port = self.nodes()[source.tcp_address]["http_port"]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DRAIN_TIMEOUT_S)
        try:
            connection.request(method, target, body)
            answer = connection.getresponse()
            return HttpReply(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Returns the nodes by the address of the tapped nsqd."""
        return {node["remote_address"]: node for node in self.get("/nodes").json()["producers"]}

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum of all samples with these labels."""
        total = 0.0
        for labelled, value in re.findall(
            rf"^nsquark_tap_{name}{{(.*)}} (.*)$", self.get("/metrics").text, re.MULTILINE
        ):
            if all(f'{label}="{text}"' in labelled for label, text in labels.items()):
                total += float(value)
        return total

    def wait_until_connected(self, count: int = 1) -> None:
        eventually(lambda: self.metric("connected") == count, DRAIN_TIMEOUT_S)


@contextlib.contextmanager
def running_source(whose: str, data_path: Path, *flags: str) -> Iterator[Nsqd]:
    """Runs an nsqd to tap. Started again, it is where it was, as those of a cluster are."""
    data_path.mkdir()
    program = None if whose == "ours" else os.environ["PEER_NSQD"]
    with Nsqd(data_path, *flags, program=program) as source:
        source.keep_ports()
        yield source


def prepare(source: Nsqd, topic: str, *channels: str) -> None:
    assert source.post("/topic/create", topic=topic).status == 200
    for channel in channels or (CHANNEL, WITNESS):
        assert source.post("/channel/create", topic=topic, channel=channel).status == 200


def publish(source: Nsqd, topic: str, bodies: list[bytes]) -> None:
    for at in range(0, len(bodies), 1000):
        reply = source.post("/mpub", mpub_messages(bodies[at : at + 1000]), topic=topic, binary="true")
        assert reply.status == 200, reply.text


def unfinished(source: Nsqd, topic: str, channel: str = CHANNEL) -> int:
    state, entry = source.topic(topic), source.channel(topic, channel)
    return int(state["depth"] + entry["depth"] + entry["in_flight_count"] + entry["deferred_count"])


def wait_until_finished(source: Nsqd, topic: str) -> None:
    eventually(lambda: unfinished(source, topic) == 0, DRAIN_TIMEOUT_S)


def witnessed(source: Nsqd, topic: str, count: int) -> list[Row]:
    """Returns what the nsqd delivers to the witness, in order; a message that comes again counts once."""
    rows: dict[str, Row] = {}
    with sync.Consumer(topic, WITNESS, nsqd=source.tcp_address, max_in_flight=1000) as consumer:
        while len(rows) < count:
            message = consumer.get(timeout=DRAIN_TIMEOUT_S)
            assert message is not None, f"{len(rows)} of {count}"
            rows[message.id.decode()] = (message.id.decode(), message.timestamp // 1000, message.body)
            message.finish()
    return sorted(rows.values())


def numbered(low: int, high: int) -> list[bytes]:
    return [b"%08d %s" % (number, b"x" * (number % 89)) for number in range(low, high)]
