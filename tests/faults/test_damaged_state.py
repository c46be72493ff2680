"""Checks damage outside the segments: each record costs itself at most, it is named in the log, and positions fall
back.

Cursors: where nothing is left of a channel, it is made again at the oldest message.
"""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.data_files import flip_byte, topic_directory
from faults.shim import Rule, Shim
from harness import Nsqd, Wire, eventually
from harness.wire import MESSAGE

pytestmark = pytest.mark.ours

Make = Callable[..., Nsqd]
Connect = Callable[..., Wire]

PAGE_BYTES = 4096
SLOT_BYTES = 1024
CHANNELS = [f"c{number}" for number in range(6)]
"""This many are enough for more than one pair of pages."""
BODIES = [b"%04d" % number for number in range(20)]
FINISHED = 5


def _prepare(daemon: Nsqd, connect: Connect) -> None:
    """Makes channels of which each has finished some of the topic's messages; every second one is paused."""
    consumers = [connect(daemon).subscribe("t", channel, rdy=FINISHED) for channel in CHANNELS]
    connect(daemon).publish("t", *BODIES)
    for consumer in consumers:
        messages = consumer.read_messages(FINISHED)
        consumer.RDY(0)
        for message in messages:
            consumer.FIN(message.id)
        consumer.assert_usable()
    for channel in CHANNELS[::2]:
        daemon.post("/channel/pause", topic="t", channel=channel)


def _zero_page(path: Path, page: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = bytes(len(raw[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]))
    path.write_bytes(raw)


def _assert_channels(daemon: Nsqd, depths: set[int]) -> None:
    shown = {channel["channel_name"]: channel for channel in daemon.topic("t")["channels"]}
    assert set(shown) == set(CHANNELS)
    for name, channel in shown.items():
        assert channel["depth"] in depths, name
        assert channel["paused"] is (name in CHANNELS[::2]), name


def _receive(daemon: Nsqd, connect: Connect, channel: str, count: int) -> list[bytes]:
    """Returns the bodies of so many messages; nsqd has noted that they are finished."""
    consumer = connect(daemon).subscribe("t", channel, rdy=100)
    bodies = [message.body for message in consumer.read_messages(count, finish=True)]
    consumer.RDY(0)
    consumer.PUB("settled#ephemeral", b"x")
    while consumer.read_frame().kind == MESSAGE:
        pass
    return bodies


@pytest.mark.parametrize("page", range(4))
def test_losing_a_page_of_cursors_loses_no_channel_and_no_pause(make_nsqd: Make, connect: Connect, page: int) -> None:
    daemon = make_nsqd()
    _prepare(daemon, connect)
    daemon.kill()
    path = topic_directory(daemon.data_path, "t") / "cursors"
    _zero_page(path, page)
    daemon.start()
    assert str(path) in daemon.log and "damaged" in daemon.log
    left = len(BODIES) - FINISHED
    _assert_channels(daemon, set(range(left, len(BODIES) + 1)))
    depth = daemon.channel("t", "c1")["depth"]
    assert _receive(daemon, connect, "c1", depth) == BODIES[-depth:]
    daemon.restart(crash=True)
    assert "damaged" not in daemon.log, "what was damaged should have been written anew"


@pytest.mark.parametrize("damage", ["topic and three channels", "two channels", "all", "removed", "cut"])
def test_channels_of_which_nothing_is_left_are_made_again_at_the_oldest_message(
    make_nsqd: Make, connect: Connect, damage: str
) -> None:
    daemon = make_nsqd()
    _prepare(daemon, connect)
    assert daemon.stop() == 0
    path = topic_directory(daemon.data_path, "t") / "cursors"
    pages = {"topic and three channels": [0, 1], "two channels": [2, 3], "all": [0, 1, 2, 3]}.get(damage, [])
    for page in pages:
        _zero_page(path, page)
    if damage == "removed":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[: 2 * PAGE_BYTES])
    daemon.start()
    assert "made again at the oldest message" in daemon.log
    _assert_channels(daemon, {len(BODIES), len(BODIES) - FINISHED})
    assert len(BODIES) in {channel["depth"] for channel in daemon.topic("t")["channels"]}
    connect(daemon).publish("t", b"after")
    depth = daemon.channel("t", "c5")["depth"]
    assert _receive(daemon, connect, "c5", depth)[-len(BODIES) + FINISHED - 1 :] == [*BODIES[FINISHED:], b"after"]
    daemon.restart(crash=True)
    assert "lost" not in daemon.log
    assert {channel["channel_name"] for channel in daemon.topic("t")["channels"]} == set(CHANNELS)


def test_a_topic_without_channels_keeps_its_backlog_when_its_slot_is_lost(make_nsqd: Make, connect: Connect) -> None:
    daemon = make_nsqd()
    connect(daemon).publish("t", *BODIES)
    daemon.kill()
    (topic_directory(daemon.data_path, "t") / "cursors").write_bytes(b"nothing that was ever written here")
    daemon.start()
    assert daemon.topic("t")["depth"] == len(BODIES)
    assert _receive(daemon, connect, "first", len(BODIES)) == BODIES


def test_the_only_channel_of_which_nothing_is_left_and_nothing_is_listed(make_nsqd: Make, connect: Connect) -> None:
    """It was so new that nsqd.dat did not name it yet: what was published is the topic's again."""
    daemon = make_nsqd()
    connect(daemon).subscribe("t", "ch")
    connect(daemon).publish("t", *BODIES)
    daemon.kill()
    path = topic_directory(daemon.data_path, "t") / "cursors"
    raw = bytearray(path.read_bytes())
    for page in (0, 1):
        at = page * PAGE_BYTES + SLOT_BYTES
        raw[at : at + SLOT_BYTES] = bytes(len(raw[at : at + SLOT_BYTES]))
    path.write_bytes(raw)
    (daemon.data_path / "nsqd.dat").unlink()
    daemon.start()
    assert _receive(daemon, connect, "ch", len(BODIES)) == BODIES
    eventually(lambda: daemon.channel("t", "ch")["in_flight_count"] == 0)
    daemon.restart(crash=True)
    assert daemon.channel("t", "ch")["depth"] == 0


def test_a_deleted_channel_does_not_come_back(make_nsqd: Make, connect: Connect) -> None:
    daemon = make_nsqd()
    _prepare(daemon, connect)
    metadata = daemon.data_path / "nsqd.dat"
    eventually(lambda: all(channel in metadata.read_text() for channel in CHANNELS))
    stale = metadata.read_bytes()
    daemon.post("/channel/delete", topic="t", channel="c1")
    daemon.kill()
    metadata.write_bytes(stale)  # it is written a little later than the cursors
    daemon.start()
    assert {channel["channel_name"] for channel in daemon.topic("t")["channels"]} == set(CHANNELS) - {"c1"}


@pytest.mark.parametrize("unreadable", ["all", "first page"])
def test_cursors_that_cannot_be_read(make_nsqd: Make, connect: Connect, tmp_path: Path, unreadable: str) -> None:
    """With a bad sector nsqd starts, serves this topic and the others, and does not write over it."""
    daemon = make_nsqd()
    _prepare(daemon, connect)
    connect(daemon).publish("healthy", b"one")
    assert daemon.stop() == 0
    directory = topic_directory(daemon.data_path, "t")
    before = (directory / "cursors").read_bytes()
    shim = Shim(tmp_path, daemon.data_path)
    span = (0, len(before)) if unreadable == "all" else (0, PAGE_BYTES)
    shim.set_rules(Rule("read", "*/t.t/cursors", errno.EIO, span=span))
    daemon.environment = shim.environment
    daemon.start()
    assert shim.fired()
    assert "cannot be read" in daemon.log
    shim.set_rules()
    assert (directory / "cursors.bad").read_bytes() == before
    _assert_channels(daemon, {len(BODIES)} if unreadable == "all" else {len(BODIES) - FINISHED})
    assert daemon.topic("healthy")["depth"] == 1
    daemon.restart(crash=True)
    assert {channel["channel_name"] for channel in daemon.topic("t")["channels"]} == set(CHANNELS)
    connect(daemon).publish("t", b"after")
    depth = daemon.channel("t", "c5")["depth"]
    assert _receive(daemon, connect, "c5", depth)[-1] == b"after"


def test_state_may_outgrow_its_slot(make_nsqd: Make, connect: Connect) -> None:
    """Each round leaves a range that the channel, which stands still, is to skip."""
    daemon = make_nsqd()
    publisher = connect(daemon)
    connect(daemon).subscribe("t", "ch")
    publisher.publish("t", b"first")
    for _ in range(80):
        assert daemon.post("/topic/pause", topic="t").status == 200
        publisher.publish("t", b"emptied")
        assert daemon.post("/topic/empty", topic="t").status == 200
        assert daemon.post("/topic/unpause", topic="t").status == 200
        publisher.publish("t", b"kept")
    for crash in (True, False, True):
        daemon.restart(crash=crash)
        assert daemon.channel("t")["depth"] == 81
    assert _receive(daemon, connect, "ch", 81) == [b"first"] + [b"kept"] * 80
    eventually(lambda: daemon.channel("t")["depth"] == 0)
    daemon.restart(crash=True)
    assert daemon.channel("t")["depth"] == 0
    assert "lost" not in daemon.log


def _requeue_all(daemon: Nsqd, connect: Connect) -> None:
    """Lets all messages of the topic wait in the channel, each with an attempt behind it."""
    consumer = connect(daemon).subscribe("t", rdy=len(BODIES))
    connect(daemon).publish("t", *BODIES)
    for message in consumer.read_messages(len(BODIES)):
        consumer.REQ(message.id, 600_000)
    consumer.RDY(0)  # what comes later is for others
    consumer.assert_usable()


@pytest.mark.parametrize("crash", [False, True], ids=["clean", "crash"])
@pytest.mark.parametrize("at", [0.0, 0.5, 0.99])
def test_a_flipped_bit_in_a_journal_costs_one_record(make_nsqd: Make, connect: Connect, crash: bool, at: float) -> None:
    daemon = make_nsqd()
    _requeue_all(daemon, connect)
    if crash:
        daemon.kill()
    else:
        assert daemon.stop() == 0
    (path,) = daemon.data_path.rglob("*.journal")
    flip_byte(path, int(at * path.stat().st_size))
    daemon.start()
    assert str(path) in daemon.log and "1 of 20 records are damaged" in daemon.log
    shown = daemon.channel("t")
    assert (shown["depth"], shown["deferred_count"]) == (1, len(BODIES) - 1)
    daemon.restart(crash=True)
    assert "damaged" not in daemon.log


def test_a_journal_that_cannot_be_read(make_nsqd: Make, connect: Connect, tmp_path: Path) -> None:
    daemon = make_nsqd()
    _requeue_all(daemon, connect)
    connect(daemon).publish("other", b"one")
    assert daemon.stop() == 0
    (path,) = daemon.data_path.rglob("*.journal")
    before = path.read_bytes()
    shim = Shim(tmp_path, daemon.data_path)
    shim.set_rules(Rule("read", "*.journal", errno.EIO))
    daemon.environment = shim.environment
    daemon.start()
    assert shim.fired()
    assert "cannot be read" in daemon.log
    assert path.with_name(path.name + ".bad").read_bytes() == before
    assert daemon.channel("t")["depth"] == len(BODIES)
    assert daemon.topic("other")["depth"] == 1
    _receive(daemon, connect, "ch", len(BODIES))


@pytest.mark.parametrize("pattern", ["*/cursors", "*.journal"])
def test_a_failed_sync_of_cursors_or_journals_loses_nothing(
    make_nsqd: Make, connect: Connect, tmp_path: Path, pattern: str
) -> None:
    daemon = make_nsqd("--sync-timeout=100ms")
    shim = Shim(tmp_path, daemon.data_path)
    daemon.environment = shim.environment
    daemon.restart()
    shim.set_rules(Rule("sync", f"{pattern}*", errno.EIO, times=2))
    _requeue_all(daemon, connect)
    eventually(lambda: shim.fired() == 2)
    eventually(lambda: "written anew" in daemon.log and daemon.get("/ping").status == 200)
    assert "sync failed" in daemon.log
    consumer = connect(daemon).subscribe("t", rdy=1)
    connect(daemon).publish("t", b"after")
    message = consumer.read_message()
    consumer.FIN(message.id)
    consumer.assert_usable()
    daemon.restart(crash=True)
    shown = daemon.channel("t")
    assert shown["depth"] + shown["deferred_count"] in (len(BODIES), len(BODIES) + 1)
    assert shown["deferred_count"] == len(BODIES)
