"""Checks what a restart keeps, after a clean stop and after kill -9."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.crash_states import Disk
from faults.data_files import cut, segments, topic_directory
from faults.shim import Shim
from harness import Nsqd, Wire, eventually
from harness.wire import MESSAGE

pytestmark = pytest.mark.ours

Make = Callable[..., Nsqd]
Connect = Callable[..., Wire]

MUCH_LATER_MS = 600_000

crash_or_not = pytest.mark.parametrize("crash", [False, True], ids=["clean", "crash"])


def _drain(consumer: Wire, count: int) -> list[bytes]:
    return [message.body for message in consumer.read_messages(count, finish=True)]


def _settle(wire: Wire) -> None:
    """Makes two round trips: the turn of the event loop that saw the first one is over, and noted what it did.

    A message that comes due meanwhile is left in flight.
    """
    for _ in range(2):
        wire.PUB("still_usable#ephemeral", b"x")
        while wire.read_frame().kind == MESSAGE:
            pass


@crash_or_not
def test_channels_and_pauses_are_kept(make_nsqd: Make, connect: Connect, crash: bool) -> None:
    daemon = make_nsqd()
    for topic in ("paused", "running"):
        for channel in ("stopped", "open"):
            connect(daemon).subscribe(topic, channel)
        daemon.post("/channel/pause", topic=topic, channel="stopped")
    daemon.post("/topic/pause", topic="paused")
    daemon.restart(crash=crash)
    for topic in ("paused", "running"):
        assert daemon.topic(topic)["paused"] is (topic == "paused")
        assert daemon.channel(topic, "stopped")["paused"] is True
        assert daemon.channel(topic, "open")["paused"] is False
    connect(daemon).publish("paused", b"x")
    connect(daemon).publish("running", b"x")
    assert daemon.topic("paused")["depth"] == 1
    connect(daemon).subscribe("running", "stopped", rdy=1).expect_silence(0.1)
    assert _drain(connect(daemon).subscribe("running", "open", rdy=1), 1) == [b"x"]
    daemon.post("/topic/unpause", topic="paused")
    daemon.post("/channel/unpause", topic="paused", channel="stopped")
    assert _drain(connect(daemon).subscribe("paused", "stopped", rdy=1), 1) == [b"x"]


@crash_or_not
def test_unpausing_is_kept(make_nsqd: Make, connect: Connect, crash: bool) -> None:
    daemon = make_nsqd()
    connect(daemon).subscribe("t", "c")
    for verb in ("pause", "unpause"):
        daemon.post(f"/topic/{verb}", topic="t")
        daemon.post(f"/channel/{verb}", topic="t", channel="c")
    daemon.restart(crash=crash)
    assert daemon.topic("t")["paused"] is False
    assert daemon.channel("t", "c")["paused"] is False


@crash_or_not
def test_deleted_channels_and_topics_stay_deleted(make_nsqd: Make, connect: Connect, crash: bool) -> None:
    daemon = make_nsqd()
    for name in ("one", "two", "three"):
        connect(daemon).subscribe("t", name)
    connect(daemon).publish("gone", b"x")
    daemon.post("/channel/delete", topic="t", channel="two")
    daemon.post("/topic/delete", topic="gone")
    daemon.restart(crash=crash)
    assert daemon.topic_names() == {"t"}
    assert {channel["channel_name"] for channel in daemon.topic("t")["channels"]} == {"one", "three"}
    connect(daemon).subscribe("t", "two", rdy=1).expect_silence(0.1)
    connect(daemon).subscribe("gone", "c", rdy=1).expect_silence(0.1)


@crash_or_not
def test_backlog_without_channels_goes_to_the_first_channel(make_nsqd: Make, connect: Connect, crash: bool) -> None:
    daemon = make_nsqd()
    connect(daemon).publish("t", b"1", b"2")
    daemon.restart(crash=crash)
    connect(daemon).publish("t", b"3")
    daemon.restart(crash=crash)
    assert daemon.topic("t")["depth"] == 3
    first = connect(daemon).subscribe("t", "first", rdy=10)
    assert _drain(first, 3) == [b"1", b"2", b"3"]
    connect(daemon).subscribe("t", "second", rdy=10).expect_silence(0.1)


@crash_or_not
def test_channel_made_in_a_pause_gets_what_the_pause_held_back(make_nsqd: Make, connect: Connect, crash: bool) -> None:
    daemon = make_nsqd()
    connect(daemon).subscribe("t", "old")
    connect(daemon).publish("t", b"before")
    daemon.post("/topic/pause", topic="t")
    connect(daemon).publish("t", b"held back")
    daemon.restart(crash=crash)
    young = connect(daemon).subscribe("t", "young", rdy=10)
    daemon.post("/topic/unpause", topic="t")
    assert _drain(young, 1) == [b"held back"]
    assert _drain(connect(daemon).subscribe("t", "old", rdy=10), 2) == [b"before", b"held back"]


@crash_or_not
def test_emptied_stays_empty(make_nsqd: Make, connect: Connect, crash: bool) -> None:
    daemon = make_nsqd()
    connect(daemon).subscribe("t", "c")
    connect(daemon).publish("t", b"1", b"2")
    connect(daemon).publish("lonely", b"1", b"2")
    publisher = connect(daemon)
    publisher.DPUB("t", 500, b"deferred")
    publisher.expect_ok()
    daemon.post("/channel/empty", topic="t", channel="c")
    daemon.post("/topic/empty", topic="lonely")
    daemon.restart(crash=crash)
    connect(daemon).publish("t", b"3")
    connect(daemon).publish("lonely", b"3")
    consumer = connect(daemon).subscribe("t", "c", rdy=10)
    assert _drain(consumer, 1) == [b"3"]
    assert _drain(connect(daemon).subscribe("lonely", "c", rdy=10), 1) == [b"3"]
    consumer.expect_silence(0.8)


def test_in_flight_messages_keep_their_attempts_at_a_clean_stop(make_nsqd: Make, connect: Connect) -> None:
    daemon = make_nsqd()
    connect(daemon).publish("t", b"1", b"2", b"3")
    for attempt in range(1, 4):
        consumer = connect(daemon).subscribe("t", rdy=10)
        messages = consumer.read_messages(3)
        assert [message.body for message in messages] == [b"1", b"2", b"3"]
        assert {message.attempts for message in messages} == {attempt}
        daemon.restart()


def test_finished_out_of_order_stays_finished_at_a_clean_stop(make_nsqd: Make, connect: Connect) -> None:
    daemon = make_nsqd()
    consumer = connect(daemon).subscribe("t", rdy=100)
    connect(daemon).publish("t", *[b"%d" % number for number in range(100)])
    for message in consumer.read_messages(100):
        if int(message.body) % 10:
            consumer.FIN(message.id)
    consumer.assert_usable()
    daemon.restart()
    assert daemon.channel("t")["depth"] == 10
    again = connect(daemon).subscribe("t", rdy=100)
    assert _drain(again, 10) == [b"%d" % number for number in range(0, 100, 10)]
    again.expect_silence(0.1)


@crash_or_not
def test_requeued_messages_keep_attempts_and_delay(make_nsqd: Make, connect: Connect, crash: bool) -> None:
    daemon = make_nsqd()
    consumer = connect(daemon).subscribe("t", rdy=10)
    connect(daemon).publish("t", b"now", b"later", b"much later")
    for attempt in (1, 2):
        messages = {message.body: message for message in consumer.read_messages(3)}
        assert {message.attempts for message in messages.values()} == {attempt}
        consumer.RDY(0 if attempt == 2 else 10)
        requeued = time.time()
        consumer.REQ(messages[b"now"].id, 0)
        consumer.REQ(messages[b"later"].id, 1500 if attempt == 2 else 0)
        consumer.REQ(messages[b"much later"].id, MUCH_LATER_MS if attempt == 2 else 0)
    _settle(consumer)
    daemon.restart(crash=crash)
    counts = daemon.channel("t")
    assert (counts["depth"], counts["deferred_count"]) in ((1, 2), (2, 1)), "the start may take longer than the delay"
    again = connect(daemon).subscribe("t", rdy=10)
    now, later = again.read_messages(2)
    assert (now.body, now.attempts) == (b"now", 3)
    assert (later.body, later.attempts) == (b"later", 3)
    assert time.time() - requeued >= 1.495
    assert daemon.channel("t")["deferred_count"] == 1


@crash_or_not
def test_deferred_messages_keep_their_time(make_nsqd: Make, connect: Connect, crash: bool) -> None:
    daemon = make_nsqd()
    connect(daemon).subscribe("t")
    publisher = connect(daemon)
    begun = time.time()
    for delay_ms in (MUCH_LATER_MS, 2500, 1500):
        publisher.DPUB("t", delay_ms, b"%d" % delay_ms)
        publisher.expect_ok()
    came_at_once = time.time() - begun < 1.0  # else the longer delay may end first
    daemon.restart(crash=crash)
    consumer = connect(daemon).subscribe("t", rdy=10)
    delays_ms = []
    for _ in range(2):
        delays_ms.append(int(consumer.read_message().body))
        assert (time.time() - begun) * 1000 >= delays_ms[-1] - 5
    assert (delays_ms if came_at_once else sorted(delays_ms)) == [1500, 2500]
    assert daemon.channel("t")["deferred_count"] == 1


@crash_or_not
def test_deferred_message_that_came_due_meanwhile_comes_at_once_and_once(
    make_nsqd: Make, connect: Connect, crash: bool
) -> None:
    daemon = make_nsqd()
    connect(daemon).subscribe("t")
    publisher = connect(daemon)
    publisher.DPUB("t", 300, b"due")
    publisher.expect_ok()
    if crash:
        daemon.kill()
    else:
        assert daemon.stop() == 0
    time.sleep(0.4)
    daemon.start()
    consumer = connect(daemon).subscribe("t", rdy=10)
    assert _drain(consumer, 1) == [b"due"]
    _settle(consumer)
    daemon.restart(crash=crash)
    connect(daemon).subscribe("t", rdy=10).expect_silence(0.3)


@crash_or_not
def test_deferred_messages_of_every_start_are_delivered_once(make_nsqd: Make, connect: Connect, crash: bool) -> None:
    """Each start finds the files of the one before, with messages that are delivered and ones that wait."""
    daemon = make_nsqd()
    connect(daemon).subscribe("t")
    wanted: list[bytes] = []
    received: list[bytes] = []
    for number in range(4):
        publisher = connect(daemon)
        for name, delay_ms in ((b"short", 50), (b"long", 1500)):
            wanted.append(b"%s %d" % (name, number))
            publisher.DPUB("t", delay_ms, wanted[-1])
            publisher.expect_ok()
        consumer = connect(daemon).subscribe("t", rdy=10)
        while b"short %d" % number not in received:
            received += _drain(consumer, 1)
        _settle(consumer)
        daemon.restart(crash=crash)
    consumer = connect(daemon).subscribe("t", rdy=10)
    while len(received) < len(wanted):
        received += _drain(consumer, 1)
    assert sorted(received) == sorted(wanted)
    consumer.expect_silence(0.2)


@crash_or_not
def test_deferred_message_is_not_taken_for_one_that_was_delivered_before(
    make_nsqd: Make, connect: Connect, crash: bool
) -> None:
    """Nothing waits when nsqd starts, but the file still tells of what did."""
    daemon = make_nsqd()
    consumer = connect(daemon).subscribe("t", rdy=10)
    publisher = connect(daemon)
    publisher.DPUB("t", 50, b"first")
    publisher.expect_ok()
    assert _drain(consumer, 1) == [b"first"]
    _settle(consumer)
    daemon.restart(crash=crash)
    publisher = connect(daemon)
    publisher.DPUB("t", 700, b"second")
    publisher.expect_ok()
    daemon.restart(crash=crash)
    consumer = connect(daemon).subscribe("t", rdy=10)
    assert _drain(consumer, 1) == [b"second"]
    consumer.expect_silence(0.2)


@crash_or_not
def test_finished_deferred_message_stays_finished_when_its_segment_is_gone(
    make_nsqd: Make, connect: Connect, crash: bool
) -> None:
    daemon = make_nsqd("--max-bytes-per-file=65536")
    consumer = connect(daemon).subscribe("t", rdy=100)
    publisher = connect(daemon)
    publisher.DPUB("t", 50, b"deferred")
    publisher.expect_ok()
    assert _drain(consumer, 1) == [b"deferred"]
    first = segments(daemon.data_path, "t")[0]
    for _ in range(4):
        publisher.publish("t", *[b"." * 1000] * 60)
        _drain(consumer, 60)
    eventually(lambda: not first.exists())
    _settle(consumer)
    daemon.restart(crash=crash)
    connect(daemon).subscribe("t", rdy=10).expect_silence(0.3)


def test_ids_are_unique_over_restarts_and_deleted_topics(make_nsqd: Make, connect: Connect) -> None:
    daemon = make_nsqd()
    ids: list[bytes] = []
    for crash in (True, False, True, True, False):
        for _ in range(2):
            consumer = connect(daemon).subscribe("t", rdy=500)
            connect(daemon).publish("t", *[b"x"] * 300)
            connect(daemon).publish("other", *[b"x"] * 10)
            ids += [message.id for message in consumer.read_messages(300, finish=True)]
            consumer.assert_usable()
            assert daemon.post("/topic/delete", topic="t").status == 200
        daemon.restart(crash=crash)
    assert len(set(ids)) == len(ids)
    assert ids == sorted(ids)


@pytest.mark.parametrize("lost_share", [0.3, 1.0], ids=["a part", "all"])
@pytest.mark.parametrize("requeued", [False, True], ids=["finished", "some requeued"])
def test_cursor_ahead_of_the_log_harms_no_new_message(
    make_nsqd: Make, connect: Connect, lost_share: float, requeued: bool
) -> None:
    """Power fails: the cursor and the journal reached the disk, the end of the log did not."""
    daemon = make_nsqd()
    consumer = connect(daemon).subscribe("t", rdy=2500)
    connect(daemon).subscribe("t", "behind")
    publisher = connect(daemon)
    for number in range(20):
        publisher.publish("t", *[b"%d" % (number * 50 + index) for index in range(50)])
    messages = consumer.read_messages(1000)
    consumer.RDY(0)
    for message in messages:
        if requeued and int(message.body) % 100 == 99:
            consumer.REQ(message.id, 0 if int(message.body) < 900 else 300_000)
        else:
            consumer.FIN(message.id)
    _settle(consumer)
    daemon.kill()
    (path,) = segments(daemon.data_path, "t")
    cut(path, int(path.stat().st_size * (1 - lost_share)))
    path.with_suffix(".idx").unlink(missing_ok=True)
    daemon.start()
    new = [b"new %d" % number for number in range(10)]
    connect(daemon).publish("t", *new)
    for channel in ("ch", "behind"):
        consumer = connect(daemon).subscribe("t", channel, rdy=2500)
        bodies: list[bytes] = []
        while not set(new) <= set(bodies):
            bodies += _drain(consumer, 1)
        old = [body for body in bodies if body not in new]
        assert [body for body in bodies if body in new] == new
        if channel == "behind":
            assert old == [b"%d" % number for number in range(len(old))]
            assert len(old) == 0 if lost_share == 1.0 else len(old) >= 600
        elif not requeued:
            assert not old
        _settle(consumer)
        assert daemon.channel("t", channel)["depth"] == 0
    daemon.restart()
    assert daemon.channel("t", "ch")["depth"] == 0


@crash_or_not
def test_ephemeral_things_are_gone(make_nsqd: Make, connect: Connect, crash: bool) -> None:
    daemon = make_nsqd()
    connect(daemon).subscribe("t", "c#ephemeral")
    connect(daemon).subscribe("t", "kept")
    connect(daemon).publish("e#ephemeral", b"x")
    daemon.restart(crash=crash)
    assert daemon.topic_names() == {"t"}
    assert [channel["channel_name"] for channel in daemon.topic("t")["channels"]] == ["kept"]


def test_changed_node_id_does_not_make_a_backlog_impossible_to_finish(make_nsqd: Make, connect: Connect) -> None:
    daemon = make_nsqd("--node-id=5")
    connect(daemon).publish("t", b"1", b"2")
    assert daemon.stop() == 0
    daemon.flags = ["--node-id=6"]
    daemon.start()
    connect(daemon).publish("t", b"3")
    consumer = connect(daemon).subscribe("t", rdy=10)
    assert _drain(consumer, 3) == [b"1", b"2", b"3"]
    _settle(consumer)
    assert daemon.channel("t")["in_flight_count"] == 0


def test_a_stop_just_after_answers_keeps_them_all(make_nsqd: Make, connect: Connect) -> None:
    """What a channel would have noted a moment later must not disturb what the stop has written."""
    daemon = make_nsqd()
    for round_number in range(8):
        topic = f"t{round_number}"
        consumer = connect(daemon)
        consumer.publish(topic, *[b"%d" % number for number in range(500)])
        consumer.subscribe(topic, rdy=500, msg_timeout=60_000)
        for number, message in enumerate(consumer.read_messages(500)):
            if number % 5 == 0:
                consumer.REQ(message.id, 3_000_000)
            elif number % 5 < 4:
                consumer.FIN(message.id)
        consumer.assert_usable()
        time.sleep(0.02 * round_number)  # around the time at which finished messages are noted
        assert daemon.stop() == 0
        daemon.start()
        shown = daemon.channel(topic)
        assert (shown["deferred_count"], shown["depth"]) == (100, 100), f"{topic}: {shown}"


def test_a_deleted_topic_stays_deleted_when_the_power_goes(tmp_path: Path) -> None:
    """Its new name, which says that it is to go, is synced although nothing else happens."""
    data_path = tmp_path / "data"
    data_path.mkdir()
    before = Disk(data_path)
    shim = Shim(tmp_path, data_path, record=True)
    with Nsqd(data_path, "--sync-timeout=100ms", environment=shim.environment) as daemon:
        for topic in ("gone", "stays"):
            assert daemon.post("/pub", b"body", topic=topic).status == 200
        eventually(lambda: _has_synced(shim, "t.stays") and _has_synced(shim, "t.gone"))
        assert daemon.post("/topic/delete", topic="gone").status == 200
        eventually(lambda: any(call.kind == "rmdir" for call in shim.trace()))
        before.apply(shim.trace())
    left = tmp_path / "left"
    before.rebuild(left, "posix-min", random.Random(1))
    with Nsqd(left) as daemon:
        assert [topic["topic_name"] for topic in daemon.stats()["topics"]] == ["stays"]


def _has_synced(shim: Shim, directory: str) -> bool:
    calls = list(shim.trace())
    created = (call for call in calls if call.kind == "create" and call.path.endswith(".log"))
    logs = {call.inode for call in created if directory in call.path}
    return any(call.kind == "sync" and call.inode in logs for call in calls)


def test_what_a_killed_nsqd_wrote_is_synced_by_the_next(tmp_path: Path) -> None:
    """This holds for every kind of file, although nothing more happens to it."""
    data_path = tmp_path / "data"
    data_path.mkdir()
    daemon = Nsqd(data_path, "--sync-timeout=1h")
    with daemon:
        for _ in range(2):
            daemon.post("/pub", b"body", topic="t")
        daemon.post("/pub", b"later", topic="t", defer=MUCH_LATER_MS)
        with daemon.connect() as consumer:
            consumer.subscribe("t", rdy=2)
            first, second = consumer.read_messages(2)
            consumer.REQ(first.id, MUCH_LATER_MS)
            consumer.FIN(second.id)
            _settle(consumer)
    directory = topic_directory(data_path, "t")
    kinds = ("*.log", "cursors", "*.journal", "deferred/*.deferred")
    files = {path.stat().st_ino: path.name for kind in kinds for path in directory.glob(kind)}
    assert len(files) == len(kinds), files
    shim = Shim(tmp_path, data_path, record=True)
    with Nsqd(data_path, "--sync-timeout=100ms", environment=shim.environment):
        eventually(lambda: files.keys() <= {call.inode for call in shim.trace() if call.kind == "sync"})
