"""Checks messages that wait for their time, on disks that damage, lose, refuse or do not confirm what is written."""

import contextlib
import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faults.data_files import topic_directory
from faults.shim import DELAY, Call, Rule, Shim
from harness import Nsqd, Wire, eventually
from harness.wire import ERROR, RESPONSE, Frame
from nsquark.log.files import READ_TRIES

pytestmark = pytest.mark.ours

Make = Callable[..., Nsqd]
Connect = Callable[..., Wire]

LATER_MS = 600_000
COUNT = 40
BUCKET_MS = 60_000
RECORD_HEAD_BYTES = 48
SLOW_SYNC_S = 3.0
TOGETHER = 10


def _bodies() -> list[bytes]:
    return [b"%04d" % number + b"." * 100 for number in range(COUNT)]


def _defer(daemon: Nsqd, connect: Connect, bodies: list[bytes], delay_ms: int = LATER_MS) -> None:
    publisher = connect(daemon)
    for body in bodies:
        publisher.DPUB("t", delay_ms, body)
    for _ in bodies:
        publisher.expect("OK")


@contextlib.contextmanager
def _watched_nsqd(tmp_path: Path, *flags: str, record: bool = False) -> Iterator[tuple[Nsqd, Shim]]:
    """Runs an nsqd under a shim from its first start on."""
    data_path = tmp_path / "data"
    data_path.mkdir()
    shim = Shim(tmp_path, data_path, record=record)
    daemon = Nsqd(data_path, *flags, environment=shim.environment).start()
    try:
        yield daemon, shim
    finally:
        daemon.kill()


def _waiting(daemon: Nsqd) -> int:
    count: int = daemon.channel("t")["deferred_count"]
    return count


def _file(daemon: Nsqd) -> Path:
    """Returns the file with all messages, which may be cut in two when a minute ends."""
    files = list((topic_directory(daemon.data_path, "t") / "deferred").glob("*.deferred"))
    return max(files, key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("damage", ["flipped", "page"])
def test_damage_costs_the_messages_in_it_and_is_told(make_nsqd: Make, connect: Connect, damage: str) -> None:
    daemon = make_nsqd()
    connect(daemon).subscribe("t")
    _defer(daemon, connect, _bodies())
    daemon.kill()
    path = _file(daemon)
    raw = bytearray(path.read_bytes())
    start = min(4096, len(raw) // 2)
    if damage == "flipped":
        raw[start] ^= 1
    else:
        raw[start : start + 1000] = bytes(len(raw[start : start + 1000]))
    path.write_bytes(raw)
    daemon.start()
    assert str(path) in daemon.log and "lost" in daemon.log
    assert COUNT - (1 if damage == "flipped" else 1000 // 148 + 2) <= _waiting(daemon) < COUNT


def test_what_cannot_be_read_does_not_stop_the_rest(make_nsqd: Make, connect: Connect, tmp_path: Path) -> None:
    daemon = make_nsqd()
    connect(daemon).subscribe("t")
    _defer(daemon, connect, _bodies())
    connect(daemon).publish("t", b"now")
    connect(daemon).publish("other", b"one")
    assert daemon.stop() == 0
    path = _file(daemon)
    before = path.read_bytes()
    shim = Shim(tmp_path, daemon.data_path)
    shim.set_rules(Rule("read", f"*{path.name}", errno.EIO, span=(0, 4096)))
    daemon.environment = shim.environment
    daemon.start()
    assert shim.fired()
    assert "cannot be read" in daemon.log
    assert path.with_name(path.name + ".bad").read_bytes() == before
    assert connect(daemon).subscribe("t", rdy=1).read_message().body == b"now"
    assert daemon.topic("other")["depth"] == 1
    _defer(daemon, connect, [b"more"])
    expected = _waiting(daemon)
    assert expected < COUNT + 1
    shim.set_rules()
    daemon.restart(crash=True)
    assert _waiting(daemon) == expected


@pytest.mark.parametrize("fault", ["a flipped bit", "a bad page", "no memory for once"])
def test_a_file_that_goes_bad_before_its_time_comes(
    make_nsqd: Make, connect: Connect, tmp_path: Path, fault: str
) -> None:
    """It is read again when it is nearly due: what cannot be read then is told, and is not removed with the rest."""
    daemon = make_nsqd()
    connect(daemon).subscribe("t")
    _defer(daemon, connect, _bodies())
    assert daemon.stop() == 0
    shim = Shim(tmp_path, daemon.data_path)
    daemon.environment = shim.environment
    daemon.start()
    path = _file(daemon)
    before = path.read_bytes()
    in_page = sum(-1 < before.find(body) < 4096 + RECORD_HEAD_BYTES for body in _bodies())
    if fault == "a flipped bit":
        path.write_bytes(before[:200] + bytes([before[200] ^ 1]) + before[201:])
        lost = 1
    elif fault == "a bad page":
        shim.set_rules(Rule("read", f"*{path.name}", errno.EIO, span=(0, 4096), times=1 + READ_TRIES))
        lost = in_page
    else:
        shim.set_rules(Rule("read", f"*{path.name}", errno.ENOMEM, times=1))
        lost = 0
    shim.set_slept(LATER_MS / 1000 + 2 * BUCKET_MS / 1000)
    consumer = connect(daemon).subscribe("t", rdy=COUNT)
    bodies = [message.body for message in consumer.read_messages(COUNT - lost, finish=True)]
    assert set(bodies) <= set(_bodies()) and len(set(bodies)) == COUNT - lost
    assert daemon.channel("t")["deferred_count"] == 0
    daemon.wait_for_log(path.name)
    if lost:
        daemon.wait_for_log("lost")
        assert path.with_name(path.name + ".bad").exists()


def test_one_failed_sync_loses_nothing_and_is_told(make_nsqd: Make, connect: Connect, tmp_path: Path) -> None:
    """The pages of a failed sync are never trusted again: the file is written anew."""
    with _watched_nsqd(tmp_path, "--sync-timeout=100ms") as (daemon, shim):
        connect(daemon).subscribe("t")
        shim.set_rules(Rule("sync", "*.deferred*", errno.EIO, times=1), Rule("sync", "*.deferred.anew", errno.EIO))
        _defer(daemon, connect, _bodies())
        eventually(lambda: shim.fired(0) and shim.fired(1))
        eventually(lambda: daemon.get("/ping").status == 500)
        shim.set_rules()
        eventually(lambda: "written anew" in daemon.log and daemon.get("/ping").status == 200)
        assert "sync failed" in daemon.log
        _defer(daemon, connect, [b"after"])
        daemon.restart(crash=True)
        assert _waiting(daemon) == COUNT + 1


def test_with_sync_every_1_a_disk_that_does_not_confirm_is_told_to_publishers(
    make_nsqd: Make, connect: Connect, tmp_path: Path
) -> None:
    with _watched_nsqd(tmp_path, "--sync-every=1") as (daemon, shim):
        connect(daemon).subscribe("t")
        _defer(daemon, connect, _bodies())
        shim.set_rules(Rule("sync", "*.deferred*", errno.EIO))
        publisher = connect(daemon)
        publisher.DPUB("t", LATER_MS, b"not confirmed")
        assert publisher.read_frame().kind == ERROR
        shim.set_rules()
        eventually(lambda: daemon.get("/ping").status == 200)
        _defer(daemon, connect, [b"after"])
        daemon.restart(crash=True)
        assert _waiting(daemon) >= COUNT + 1


def test_a_file_goes_only_after_a_sync_of_the_log_that_has_its_messages(
    make_nsqd: Make, connect: Connect, tmp_path: Path
) -> None:
    with _watched_nsqd(tmp_path, "--sync-timeout=2s", record=True) as (daemon, shim):
        shim.set_rules(Rule("sync", "*.log", DELAY, delay_s=SLOW_SYNC_S))
        consumer = connect(daemon).subscribe("t", rdy=COUNT)
        shim.set_slept((57 - time.time()) % 60)  # the minute ends before the log is synced
        _defer(daemon, connect, _bodies(), 1000)
        assert len(consumer.read_messages(COUNT)) == COUNT
        eventually(lambda: any(_removes_bucket(call) for call in shim.trace()), 90, 0.2)
        calls = list(shim.trace())
        log = {call.inode for call in calls if call.kind == "create" and call.path.endswith(".log")}
        gone, path = next((at, call.path) for at, call in enumerate(calls) if _removes_bucket(call))
        # On a slow machine some messages are due in the next minute, and follow from another file.
        bucket = {call.inode for call in calls[:gone] if call.kind == "create" and call.path == path}
        waited = b"".join(call.data for call in calls[:gone] if call.kind == "write" and call.inode in bucket)
        bodies = [body for body in _bodies() if body in waited]
        writes = [(at, call.data) for at, call in enumerate(calls) if call.kind == "write" and call.inode in log]
        logged = max(at for at, data in writes if any(body in data for body in bodies))
        begun = {call.size for call in calls[logged:gone] if call.kind == "sync begins" and call.inode in log}
        synced = [call for call in calls[logged:gone] if call.kind == "sync" and call.size in begun]
        assert synced, "the file was removed before the log was synced"


def _removes_bucket(call: Call) -> bool:
    return call.kind == "unlink" and call.path.endswith(".deferred")


def test_what_waits_counts_in_max_disk_bytes_and_comes_in_time_all_the_same(tmp_path: Path, connect: Connect) -> None:
    with _watched_nsqd(tmp_path, "--max-disk-bytes=200000") as (daemon, shim):
        consumer = connect(daemon).subscribe("t", rdy=1000)
        publisher = connect(daemon)
        accepted = 0
        frame = Frame(RESPONSE, b"OK")
        while frame.kind == RESPONSE and accepted < 1000:
            for number in range(accepted, accepted + TOGETHER):
                publisher.DPUB("t", LATER_MS, b"%06d" % number + b"." * 1000)
            for _ in range(TOGETHER):
                frame = publisher.read_frame()
                if frame.kind == ERROR:
                    break
                accepted += 1
        assert b"E_DPUB_FAILED" in frame.data and b"max-disk-bytes" in frame.data
        assert 150 < accepted < 200
        shim.set_slept(LATER_MS / 1000 + BUCKET_MS / 1000)  # not before all are there, however slow the machine is
        bodies = [message.body for message in consumer.read_messages(accepted, finish=True)]
        assert [body[:6] for body in bodies] == [b"%06d" % number for number in range(accepted)]


def test_very_many_due_at_once_come_in_portions_and_in_order(make_nsqd: Make, connect: Connect, tmp_path: Path) -> None:
    """Between two portions others are served."""
    daemon = make_nsqd()
    assert daemon.stop() == 0
    shim = Shim(tmp_path, daemon.data_path, record=True)
    daemon.environment = shim.environment
    daemon.start()
    count = 3000
    consumer = connect(daemon).subscribe("t", rdy=2500)
    _defer(daemon, connect, [b"%06d" % number for number in range(count)], 1500)
    bodies = [message.body for message in consumer.read_messages(count, finish=True)]
    assert bodies == [b"%06d" % number for number in range(count)]
    shown = daemon.channel("t")
    assert (shown["deferred_count"], shown["message_count"]) == (0, count)
    logs = {call.inode for call in shim.trace() if call.kind == "create" and call.path.endswith(".log")}
    portions = [call for call in shim.trace() if call.kind == "write" and call.inode in logs]
    assert len(portions) > count // 200


@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
def test_a_channel_s_count_of_messages_never_goes_down(make_nsqd: Make, connect: Connect, paused: bool) -> None:
    daemon = make_nsqd()
    connect(daemon).subscribe("t")
    connect(daemon).publish("t", b"one", b"two")
    _defer(daemon, connect, _bodies(), 1000)
    if paused:
        daemon.post("/topic/pause", topic="t")
    counts = [daemon.channel("t")["message_count"]]
    assert counts == [COUNT + 2]
    daemon.post("/channel/empty", topic="t", channel="ch")
    connect(daemon).subscribe("t", "later")
    counts.append(daemon.channel("t")["message_count"])
    later = daemon.channel("t", "later")["message_count"]

    def came() -> bool:
        """Tells whether all are in the log; what was there before may be gone, since the channel was emptied."""
        counts.append(daemon.channel("t")["message_count"])
        return bool(daemon.get("/log/info", topic="t").json()["count"] >= COUNT)

    eventually(came)
    daemon.post("/topic/unpause", topic="t")
    counts.append(daemon.channel("t")["message_count"])
    assert counts == [COUNT + 2] * len(counts)
    assert daemon.channel("t", "later")["message_count"] == later


def test_syncs_that_fail_at_a_start_are_made_up_for(tmp_path: Path, connect: Connect) -> None:
    """The clock was an hour ahead, so the start moves what waits to its right minute, and must have it there."""
    with _watched_nsqd(tmp_path, "--sync-every=1") as (daemon, shim):
        connect(daemon).subscribe("t")
        shim.set_clock(3600)
        assert daemon.stop() == 0
        clock = daemon.data_path / "nsquark" / "clock"
        clock.unlink()
        daemon.start()
        _defer(daemon, connect, _bodies())
        assert daemon.stop() == 0
        clock.unlink()
        shim.set_clock(0)
        shim.set_rules(Rule("sync", "*.deferred*", errno.EIO, times=2))
        daemon.start()
        assert shim.fired() == 2
        eventually(lambda: daemon.get("/ping").text == "OK")
        eventually(lambda: "written anew after a failed sync" in daemon.log)
        _defer(daemon, connect, [b"more"])
        assert _waiting(daemon) == COUNT + 1
        daemon.restart(crash=True)
        assert _waiting(daemon) == COUNT + 1
        assert "INTERNAL" not in daemon.log and "AssertionError" not in daemon.log
