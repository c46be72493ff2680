"""Goes back to NSQ: `nsquark export --to-nsq` writes what NSQ's nsqd, or this one again, goes on with."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.nsq_files import Stored, write_messages, write_metadata
from faults.shim import Rule, Shim
from harness import Nsqd, Wire, eventually
from nsquark.broker.export import without
from nsquark.log.nsq_import.diskqueue import DiskQueueWriter

pytestmark = pytest.mark.ours

NSQUARK = str(Path(sys.executable).with_name("nsquark"))
EXPORT_TIMEOUT_S = 120
MakeNsqd = Callable[..., Nsqd]
Connect = Callable[..., Wire]
Left = dict[tuple[str, str], list[tuple[bytes, int, int]]]
"""Has by topic and channel body, attempts and publish time of all that is left, sorted."""


def export(data: Path, target: Path, environment: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    command = [NSQUARK, "export", "--data-path", str(data), "--to-nsq", str(target)]
    env = {**os.environ, **(environment or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_TIMEOUT_S, check=False, env=env)


def left_in(daemon: Nsqd, wanted: dict[tuple[str, str], int]) -> Left:
    """Takes so many messages out of each channel, and sees that these were all."""
    found: Left = {}
    for (topic, channel), count in wanted.items():
        for verb in (f"/topic/unpause?topic={topic}", f"/channel/unpause?topic={topic}&channel={channel}"):
            daemon.request("POST", verb)
        with daemon.connect() as wire:
            wire.subscribe(topic, channel, rdy=2500)
            messages = wire.read_messages(count, finish=True)
            wire.assert_usable()
        shown = daemon.channel(topic, channel)
        assert (shown["depth"], shown["in_flight_count"], shown["deferred_count"]) == (0, 0, 0), (topic, channel)
        found[topic, channel] = sorted((message.body, message.attempts, message.timestamp_ns) for message in messages)
    return found


def names_of(daemon: Nsqd) -> dict[str, Any]:
    return {
        topic["topic_name"]: (topic["paused"], {c["channel_name"]: c["paused"] for c in topic["channels"] or ()})
        for topic in daemon.stats()["topics"]
    }


@pytest.fixture
def stopped(make_nsqd: MakeNsqd, connect: Connect, tmp_path: Path) -> Path:
    """Makes a data path with messages in every state a message can be in."""
    daemon = make_nsqd()
    for topic, channels in {"orders": ("first", "second", "drained"), "paused": ("ch",), "idle": ("ch",)}.items():
        daemon.post("/topic/create", topic=topic)
        for channel in channels:
            daemon.post("/channel/create", topic=topic, channel=channel)
    publisher = connect(daemon)
    publisher.publish("orders", *[b"order %d" % number for number in range(6000)])
    publisher.DPUB("orders", 3_600_000, b"deferred")
    publisher.expect_ok()
    publisher.publish("lonely", *[b"nobody reads %d" % number for number in range(100)])
    publisher.DPUB("lonely", 3_600_000, b"nobody reads this later")
    publisher.expect_ok()
    publisher.publish("paused", b"before the pause")
    daemon.post("/topic/pause", topic="paused")
    daemon.post("/channel/pause", topic="orders", channel="second")
    publisher.publish("paused", b"held back")
    consumer = connect(daemon).subscribe("orders", "first", rdy=2000)
    for number, message in enumerate(consumer.read_messages(2000)):
        if number % 10 == 0:
            consumer.REQ(message.id, 3_000_000 if number % 20 == 0 else 0)
        elif number % 10 < 9:
            consumer.FIN(message.id)
    for message in consumer.read_messages(1800):  # the window again: new ones, and 100 for the second time
        if message.attempts > 1:
            consumer.REQ(message.id, 3_000_000)
    eventually(lambda: daemon.channel("orders", "first")["deferred_count"] == 100 + 100 + 1)
    drainer = connect(daemon).subscribe("orders", "drained", rdy=2500)
    drainer.read_messages(6000, finish=True)
    drainer.assert_usable()
    connect(daemon).subscribe("orders", "gone#ephemeral")
    assert daemon.stop() == 0
    return tmp_path / "data"


PROGRAMS = pytest.mark.parametrize(
    "program",
    [
        pytest.param(None, id="ours"),
        pytest.param(
            os.environ.get("PEER_NSQD"),
            id="nsq",
            marks=pytest.mark.skipif("PEER_NSQD" not in os.environ, reason="PEER_NSQD names no nsqd of NSQ"),
        ),
    ],
)
WANTED = {
    ("orders", "first"): 6000 - 1600 + 1,
    ("orders", "second"): 6001,
    ("orders", "drained"): 1,
    ("lonely", "new"): 101,
    ("paused", "ch"): 2,
    ("idle", "ch"): 0,
}


@pytest.fixture
def peers() -> Iterator[Callable[..., Nsqd]]:
    """Lists NSQ's own nsqd, where PEER_NSQD names it, and ours, which takes over what NSQ left."""
    daemons: list[Nsqd] = []

    def start(data: Path, program: str | None = None, *flags: str) -> Nsqd:
        daemons.append(Nsqd(data, *flags, program=program))
        return daemons[-1].start()

    yield start
    for daemon in daemons:
        daemon.kill()


@PROGRAMS
def test_what_is_left_is_the_same_here_and_there(
    stopped: Path, tmp_path: Path, peers: Callable[..., Nsqd], program: str | None
) -> None:
    result = export(stopped, tmp_path / "nsq")
    assert result.returncode == 0, result.stderr
    assert "orders:first: 4401 messages\n" in result.stdout
    assert f"{sum(WANTED.values())} messages are in {tmp_path / 'nsq'}\n" in result.stdout
    metadata = json.loads((tmp_path / "nsq" / "nsqd.dat").read_bytes())
    assert set(metadata) == {"topics", "version"}
    there, here = peers(tmp_path / "nsq", program), peers(stopped)
    assert names_of(there) == names_of(here)
    assert there.topic("paused")["depth"] == 1
    assert there.topic("lonely")["depth"] == 101
    # What waits for its time here is ready there; all else comes in the same way from both.
    found = left_in(there, WANTED)
    ready = {key: [entry for entry in entries if entry in found[key]] for key, entries in found.items()}
    late = {("orders", "first"): 100 + 100 + 1, ("orders", "second"): 1, ("orders", "drained"): 1, ("lonely", "new"): 1}
    at_once = {key: count - late.get(key, 0) for key, count in WANTED.items()}
    for key, count in at_once.items():
        with here.connect() as wire:
            here.post("/topic/unpause", topic=key[0])
            here.post("/channel/create", topic=key[0], channel=key[1])
            here.post("/channel/unpause", topic=key[0], channel=key[1])
            wire.subscribe(*key, rdy=2500)
            messages = wire.read_messages(count, finish=True)
            wire.assert_usable()
        entries = {(message.body, message.attempts, message.timestamp_ns) for message in messages}
        assert entries <= set(ready[key])
        assert len(entries) == count
        assert here.channel(*key)["deferred_count"] == late.get(key, 0)


@PROGRAMS
def test_a_queue_of_several_files(
    tmp_path: Path,
    connect: Connect,
    peers: Callable[..., Nsqd],
    program: str | None,
) -> None:
    """The files are read to their ends, whatever --max-bytes-per-file the other nsqd has."""
    queue = DiskQueueWriter(tmp_path, "t", file_bytes_max=10_000)
    for number in range(1000):
        queue.add(number, 0, b"%016x" % number, b"%d" % number)
    queue.finish()
    write_metadata(tmp_path, {"t": {}})
    assert len(list(tmp_path.glob("t.diskqueue.0*.dat"))) > 3
    daemon = peers(tmp_path, program, "--max-bytes-per-file=1000")
    assert daemon.topic("t")["depth"] == 1000
    consumer = connect(daemon).subscribe("t", rdy=100)
    messages = consumer.read_messages(1000, finish=True)
    assert sorted(int(message.body) for message in messages) == list(range(1000))
    assert {(message.timestamp_ns == int(message.body), message.attempts) for message in messages} == {(True, 1)}
    connect(daemon).publish("t", b"more")
    assert consumer.read_message().body == b"more"


def test_what_nsq_left_and_came_here_goes_back(make_nsqd: MakeNsqd, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    write_messages(data, "t:a", [Stored(b"a%d" % number, attempts=number) for number in range(5)])
    write_messages(data, "t:b", [Stored(b"b%d" % number) for number in range(7)])
    write_metadata(data, {"t": {"a": False, "b": True}})
    assert make_nsqd().stop() == 0
    assert export(data, tmp_path / "nsq").returncode == 0
    with Nsqd(tmp_path / "nsq") as again:
        found = left_in(again, {("t", "a"): 5, ("t", "b"): 7})
    assert [entry[:2] for entry in found["t", "a"]] == [(b"a%d" % number, number + 1) for number in range(5)]
    assert {entry[2] for entry in found["t", "b"]} == {Stored(b"").timestamp_ns}


def test_refusals(make_nsqd: MakeNsqd, tmp_path: Path) -> None:
    daemon = make_nsqd()
    daemon.post("/topic/create", topic="t")
    result = export(tmp_path / "data", tmp_path / "nsq")
    assert result.returncode == 1
    assert result.stderr.startswith("nsquark export: failed to lock data-path")
    assert daemon.stop() == 0
    (tmp_path / "nsq").mkdir(exist_ok=True)
    (tmp_path / "nsq" / "something").touch()
    result = export(tmp_path / "data", tmp_path / "nsq")
    assert (result.returncode, "is not empty" in result.stderr) == (1, True)
    result = export(tmp_path / "nsq", tmp_path / "other")
    assert (result.returncode, "is no data path of this nsqd" in result.stderr) == (1, True)
    eventually(lambda: not (tmp_path / "other").exists())
    cursors = tmp_path / "data" / "nsquark" / "topics" / "t.t" / "cursors"
    cursors.rename(cursors.with_name("elsewhere"))
    cursors.mkdir()
    result = export(tmp_path / "data", tmp_path / "other")
    assert (result.returncode, "these topics cannot be opened, and would be missing: t" in result.stderr) == (1, True)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("calls", "files"),
    [("mkdir", "nsq"), ("write", "nsq/*.000000.dat"), ("create", "nsq/*.meta.dat"), ("write", "nsq/nsqd.dat*")],
)
def test_a_disk_that_gets_full_leaves_no_export_that_passes_for_a_whole_one(
    make_nsqd: MakeNsqd, tmp_path: Path, calls: str, files: str
) -> None:
    daemon = make_nsqd()
    daemon.post("/topic/create", topic="t")
    daemon.post("/channel/create", topic="t", channel="ch")
    for number in range(3):
        daemon.post("/pub", b"%d" % number, topic="t")
    assert daemon.stop() == 0
    shim = Shim(tmp_path, tmp_path)
    shim.set_rules(Rule(calls, files, errno.ENOSPC))
    result = export(tmp_path / "data", tmp_path / "nsq", shim.environment)
    assert shim.fired()
    assert result.returncode == 1
    assert f"nsquark export: {tmp_path / 'nsq'} is not complete - " in result.stderr
    assert "No space left" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "nsq" / "nsqd.dat").exists()
    shutil.rmtree(tmp_path / "nsq", ignore_errors=True)
    assert export(tmp_path / "data", tmp_path / "nsq").returncode == 0
    with Nsqd(tmp_path / "nsq") as there:
        assert there.channel("t", "ch")["depth"] == 3
    daemon.start()
    assert daemon.channel("t", "ch")["depth"] == 3


@pytest.mark.parametrize(
    ("ranges", "holes", "left"),
    [
        ([], [(0, 5)], []),
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10), (20, 30)], [(5, 25)], [(0, 5), (25, 30)]),
        ([(0, 10), (20, 30)], [(8, 9), (2, 3), (2, 5), (40, 50)], [(0, 2), (5, 8), (9, 10), (20, 30)]),
        ([(0, 10), (12, 14)], [(0, 1), (0, 13)], [(13, 14)]),
        ([(5, 3), (6, 8)], [(6, 6)], [(6, 8)]),
    ],
)
def test_ranges_without_holes(
    ranges: list[tuple[int, int]], holes: list[tuple[int, int]], left: list[tuple[int, int]]
) -> None:
    assert without(ranges, holes) == left
