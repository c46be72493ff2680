"""Runs a cluster for the tests of a module: one nsqlookupd, two nsqds, and nsqadmins that ask them either way.

With PEER_NSQD and PEER_NSQLOOKUPD, the paths of NSQ's own programs, every test that uses it runs once more on those.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness import Nsqd, eventually
from harness.lookupd import Nsqlookupd
from harness.nsqadmin import Nsqadmin
from nsquark.testing.daemons import started

PATIENT = ("--http-client-connect-timeout=1m", "--http-client-request-timeout=1m")
"""What an nsqadmin knows of an nsqd stays as long as this on its pages, while that does not answer."""

PEERS = ("PEER_NSQD", "PEER_NSQLOOKUPD")
WHOSE = [
    "ours",
    pytest.param(
        "nsq",
        marks=pytest.mark.skipif(
            not all(name in os.environ for name in PEERS), reason="PEER_NSQD, PEER_NSQLOOKUPD name no programs of NSQ"
        ),
    ),
]


@dataclass
class Cluster:
    lookupd: Nsqlookupd
    nsqds: list[Nsqd]
    admin: Nsqadmin
    """Asks nsqlookupd."""
    direct: Nsqadmin
    """Asks the nsqds."""
    is_ours: bool

    def make(self, topic: str, *channels: str, count: int = 0) -> None:
        """Makes a topic with these channels and so many messages on each nsqd, known to nsqlookupd."""
        for nsqd in self.nsqds:
            nsqd.post("/topic/create", topic=topic)
            for channel in channels:
                nsqd.post("/channel/create", topic=topic, channel=channel)
            for number in range(count):
                nsqd.post("/pub", b"message %d" % number, topic=topic)
        eventually(lambda: len(self.lookupd.producers(topic)) == len(self.nsqds))
        eventually(lambda: self.lookupd.channels(topic) == set(channels))

    def topic_on(self, place: int, topic: str) -> Any:
        """Returns the topic in /stats of an nsqd."""
        return next((each for each in self.nsqds[place].stats()["topics"] if each["topic_name"] == topic), None)


@pytest.fixture(scope="module", params=WHOSE)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    is_ours = request.param == "ours"
    flags = ("--e2e-processing-latency-percentile=0.99,0.5",)
    with contextlib.ExitStack() as stack:
        program = None if is_ours else os.environ["PEER_NSQLOOKUPD"]
        lookupd = stack.enter_context(Nsqlookupd(program=program))
        nsqds = []
        for _ in range(2):
            path: Path = tmp_path_factory.mktemp("nsqd")
            program = None if is_ours else os.environ["PEER_NSQD"]
            told = f"--lookupd-tcp-address={lookupd.tcp_address}"
            nsqds.append(stack.enter_context(Nsqd(path, told, *flags, program=program)))
        admin = stack.enter_context(Nsqadmin(f"--lookupd-http-address={lookupd.http_address}", *PATIENT))
        addresses = [f"--nsqd-http-address={nsqd.http_address}" for nsqd in nsqds]
        direct = stack.enter_context(Nsqadmin(*addresses, *PATIENT))
        eventually(lambda: len(lookupd.nodes()) == 2)
        yield Cluster(lookupd, nsqds, admin, direct, is_ours)
        for daemon in (admin, direct):
            assert daemon.stop() == 0, daemon.log


@pytest.fixture(params=["lookupd", "direct"])
def admin(request: pytest.FixtureRequest, cluster: Cluster) -> Nsqadmin:
    """Runs an nsqadmin that finds the nsqds by nsqlookupd, and one that was told of them."""
    return cluster.admin if request.param == "lookupd" else cluster.direct


@pytest.fixture
def make_admin() -> Iterator[Any]:
    """Starts an nsqadmin with these flags."""
    yield from started(Nsqadmin)
