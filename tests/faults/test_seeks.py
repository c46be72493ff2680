"""Checks accidents in the middle of a seek: a channel stands where it stood or where it was sent, and loses nothing."""

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faults.data_files import topic_directory
from faults.flood import finish_many
from faults.shim import KILL, Rule, Shim
from harness import Nsqd, Wire, eventually

pytestmark = pytest.mark.ours

COUNT = 20
HELD = 5
LATER_MS = 2000
PASSING_BATCH, PASSING_BATCHES = 2000, 150
"""So many are finished above the held messages that these are parked."""
CALLS = [("write", "*/t.t/cursors", number) for number in range(5)] + [("unlink", "*.journal", 0)]
"""What a seek does on the disk, with room for calls that it does not make."""


@pytest.fixture
def shim(tmp_path: Path) -> Shim:
    data_path = tmp_path / "data"
    data_path.mkdir()
    return Shim(tmp_path, data_path)


@pytest.fixture
def daemon(shim: Shim) -> Iterator[Nsqd]:
    daemon = Nsqd(shim.root, "--sync-timeout=100ms", "--retention-time=1h", environment=shim.environment).start()
    yield daemon
    daemon.kill()


@pytest.fixture
def unfinished(daemon: Nsqd, connect: Callable[..., Wire]) -> set[bytes]:
    """Has a channel with messages that are finished, requeued and new, and others that wait for their time."""
    bodies = [b"%02d" % number for number in range(COUNT)]
    assert daemon.post("/topic/create", topic="t").status == 200
    assert daemon.post("/channel/create", topic="t", channel="c").status == 200
    connect(daemon).publish("t", *bodies)
    consumer = connect(daemon).subscribe("t", "c", rdy=2 * HELD)
    messages = consumer.read_messages(2 * HELD)
    consumer.RDY(0)
    for number, message in enumerate(messages):
        consumer.REQ(message.id, LATER_MS) if number % 2 else consumer.FIN(message.id)
    consumer.close()
    directory = topic_directory(daemon.data_path, "t")
    eventually(lambda: list(directory.glob("*.journal")) and daemon.channel("t", "c")["in_flight_count"] == 0)
    return set(bodies[1 : 2 * HELD : 2] + bodies[2 * HELD :])


def _drained(daemon: Nsqd, connect: Callable[..., Wire]) -> set[bytes]:
    """Takes messages until the channel has none left."""
    found: set[bytes] = set()
    with connect(daemon).subscribe("t", "c", rdy=1) as consumer:

        def is_empty() -> bool:
            shown = daemon.channel("t", "c")
            if shown["depth"] + shown["deferred_count"] + shown["in_flight_count"] == 0:
                return True
            with contextlib.suppress(TimeoutError):  # what is in flight may be finished, and nsqd not yet told
                message = consumer.read_message(0.2)
                found.add(message.body)
                consumer.FIN(message.id)
            return False

        eventually(is_empty, 60.0)
    return found


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_kill_in_the_middle_loses_nothing(
    daemon: Nsqd, shim: Shim, unfinished: set[bytes], connect: Callable[..., Wire], call: tuple[str, str, int]
) -> None:
    kind, pattern, number = call
    shim.set_rules(Rule(kind, pattern, KILL, after=number))
    try:
        daemon.post("/channel/seek", topic="t", channel="c", to="oldest")
    except OSError:
        eventually(lambda: not daemon.is_running)
    daemon.kill()
    shim.set_rules()
    daemon.start()
    assert _drained(daemon, connect) >= unfinished


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_seek_that_the_disk_refuses_loses_nothing(
    daemon: Nsqd,
    shim: Shim,
    unfinished: set[bytes],
    connect: Callable[..., Wire],
    call: tuple[str, str, int],
    times: int,
) -> None:
    kind, pattern, number = call
    assert daemon.post("/pub", b"deferred", topic="t", defer=LATER_MS).status == 200
    shim.set_rules(Rule(kind, pattern, errno.EIO, after=number, times=times))
    status = daemon.post("/channel/seek", topic="t", channel="c", to="oldest").status
    assert status == (503 if shim.fired() else 200)
    shim.set_rules()
    daemon.kill()
    daemon.start()
    # If it fails twice, what is on the disk may be the seek: that drops deferred messages.
    assert _drained(daemon, connect) >= unfinished | ({b"deferred"} if status == 503 and times == 1 else set())


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_channel_goes_on_after_a_refused_seek(
    daemon: Nsqd, shim: Shim, unfinished: set[bytes], connect: Callable[..., Wire], call: tuple[str, str, int]
) -> None:
    kind, pattern, number = call
    shim.set_rules(Rule(kind, pattern, errno.ENOSPC, after=number, times=1))
    assert daemon.post("/channel/seek", topic="t", channel="c", to="oldest").status in (200, 503)
    shim.set_rules()
    assert _drained(daemon, connect) >= unfinished


def test_a_loss_of_power_right_after_it_keeps_parked_messages(
    daemon: Nsqd, shim: Shim, connect: Callable[..., Wire]
) -> None:
    """The position that a seek has left may come back while what it did with the journal stays."""
    held = {b"held %d" % number for number in range(HELD)}
    consumer = connect(daemon).subscribe("t", "c", msg_timeout=600_000)
    connect(daemon).publish("t", *held)
    consumer.RDY(HELD)
    consumer.read_messages(HELD)
    consumer.RDY(PASSING_BATCH)
    publisher = connect(daemon)
    publisher.identify(heartbeat_interval=-1)
    for _ in range(PASSING_BATCHES):
        publisher.publish("t", *[b"passing"] * PASSING_BATCH)
        finish_many(consumer, PASSING_BATCH)
    directory = topic_directory(daemon.data_path, "t")

    def are_parked() -> bool:
        standing = daemon.get("/channel/seek", topic="t", channel="c", to="oldest").json()
        return bool(standing["position"] > standing["target"])

    eventually(are_parked)
    cursors = (directory / "cursors").read_bytes()
    shim.set_rules(Rule("sync", "*/t.t/cursors", KILL))
    with contextlib.suppress(OSError):
        daemon.post("/channel/seek", topic="t", channel="c", to="oldest")
    eventually(lambda: not daemon.is_running)
    daemon.kill()
    shim.set_rules()
    assert (directory / "cursors").read_bytes() != cursors
    (directory / "cursors").write_bytes(cursors)
    daemon.start()
    consumer = connect(daemon).subscribe("t", "c", rdy=HELD)
    assert held <= {message.body for message in consumer.read_messages(HELD)}
