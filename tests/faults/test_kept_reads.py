"""Checks that kept messages, which have outlived their segments, wait for a disk that is away."""

import contextlib
import errno
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faults.damage import CHANNEL, PARKED, PARKED_MESSAGES, Sample
from faults.shim import Rule, Shim
from harness import Nsqd, Wire, eventually

pytestmark = pytest.mark.ours

KEPT = f"*/t.{PARKED}/kept"
PROBE = f"*/t.{PARKED}/probe.tmp"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a data path whose parked topic has a few messages that are kept, and no others."""
    data_path = Sample(tmp_path_factory.mktemp("parked"), seed=1, parked=True).data_path
    with Nsqd(data_path) as daemon:
        consumer = daemon.connect().subscribe(PARKED, CHANNEL, rdy=2 * PARKED_MESSAGES)
        while daemon.channel(PARKED, CHANNEL)["depth"] + daemon.channel(PARKED, CHANNEL)["in_flight_count"] > (
            PARKED_MESSAGES
        ):
            with contextlib.suppress(TimeoutError):
                message = consumer.read_message(0.1)
                if not message.body.startswith(PARKED.encode()):
                    consumer.FIN(message.id)
        assert daemon.stop() == 0
    return data_path


@pytest.fixture
def daemon(sample: Path, shim: Shim) -> Iterator[Nsqd]:
    shutil.copytree(sample, shim.root, dirs_exist_ok=True)
    daemon = Nsqd(shim.root, environment=shim.environment).start()
    yield daemon
    daemon.kill()


def test_a_disk_that_is_away_costs_no_kept_message(daemon: Nsqd, shim: Shim, connect: Callable[..., Wire]) -> None:
    shim.set_rules(Rule("read", KEPT, errno.EIO), Rule("change", PROBE, errno.EIO))
    consumer = connect(daemon).subscribe(PARKED, CHANNEL, rdy=1)
    daemon.wait_for_log("its disk cannot be written to")
    shim.set_rules()
    bodies = {message.body for message in consumer.read_messages(PARKED_MESSAGES, finish=True)}
    assert bodies == {f"{PARKED}/{number}/".encode() for number in range(PARKED_MESSAGES)}
    assert "lost" not in daemon.log


def test_pages_that_stay_unreadable_do_not_hold_up_the_others(
    daemon: Nsqd, shim: Shim, connect: Callable[..., Wire]
) -> None:
    shim.set_rules(Rule("read", KEPT, errno.EIO))
    consumer = connect(daemon).subscribe(PARKED, CHANNEL, rdy=1)
    eventually(lambda: daemon.log.count("is damaged and lost") == PARKED_MESSAGES, 60.0)
    connect(daemon).publish(PARKED, b"later")
    assert consumer.read_message().body == b"later"
