"""Checks damaged files: what is damaged is reported and left out, everything else is served."""

from collections.abc import Callable
from pathlib import Path

import pytest

from faults.data_files import append, cut, flip_byte, segments
from harness import Nsqd, Wire, eventually

pytestmark = pytest.mark.ours

Make = Callable[..., Nsqd]
Connect = Callable[..., Wire]

SMALL_FILES = "--max-bytes-per-file=65536"
SMALL_CACHE = "--cache-bytes=65536"
"""With so small a cache messages are read from the files even before a restart."""
BATCHES = 300


def _publish_batches(daemon: Nsqd, connect: Connect, count: int = BATCHES, size: int = 1000) -> list[bytes]:
    """Makes one batch of the log for each message, since each waits for its OK."""
    publisher = connect(daemon)
    bodies = [b"%06d" % number + b"." * size for number in range(count)]
    for body in bodies:
        publisher.publish("t", body)
    return bodies


def _receive_all(daemon: Nsqd, connect: Connect, count: int, channel: str = "ch") -> list[bytes]:
    """Returns everything the channel has, in order; then it must be empty."""
    consumer = connect(daemon).subscribe("t", channel, rdy=100)
    bodies = [message.body for message in consumer.read_messages(count, finish=True)]
    consumer.expect_silence(0.1)
    eventually(lambda: daemon.channel("t", channel)["depth"] == 0)
    return bodies


def _file_with(daemon: Nsqd, body: bytes) -> tuple[Path, int]:
    """Returns the file that holds a body, and where."""
    for path in segments(daemon.data_path, "t"):
        at = path.read_bytes().find(body)
        if at >= 0:
            return path, at
    raise AssertionError("the body is in no file")


@pytest.mark.parametrize("torn_bytes", [1, 40, 600, 1033])
def test_torn_tail_is_cut_and_reported(make_nsqd: Make, connect: Connect, torn_bytes: int) -> None:
    """The last write did not reach the disk as a whole: the batch is gone, and only that batch."""
    daemon = make_nsqd()
    bodies = _publish_batches(daemon, connect, 20)
    daemon.kill()
    path, at = _file_with(daemon, bodies[-1])
    cut(path, at + len(bodies[-1]) - torn_bytes)
    daemon.start()
    assert "torn end" in daemon.log and path.name in daemon.log
    connect(daemon).publish("t", b"after")
    assert _receive_all(daemon, connect, 20) == [*bodies[:-1], b"after"]
    daemon.restart(crash=True)
    assert "set aside" not in daemon.log


@pytest.mark.parametrize(
    "garbage", [b"\x00" * 5000, b"NQB1" * 500, bytes(range(256)) * 3], ids=["zeros", "magic", "bytes"]
)
def test_garbage_at_the_end_is_cut_and_reported(make_nsqd: Make, connect: Connect, garbage: bytes) -> None:
    daemon = make_nsqd()
    bodies = _publish_batches(daemon, connect, 20)
    daemon.kill()
    append(segments(daemon.data_path, "t")[-1], garbage)
    daemon.start()
    assert "torn end" in daemon.log
    connect(daemon).publish("t", b"after")
    assert _receive_all(daemon, connect, 21) == [*bodies, b"after"]


def test_flipped_byte_found_at_the_start(make_nsqd: Make, connect: Connect) -> None:
    """After a crash the newest part is checked: the damaged batch is left out, the others are served."""
    daemon = make_nsqd()
    bodies = _publish_batches(daemon, connect, 50)
    daemon.kill()
    path, at = _file_with(daemon, bodies[20])
    flip_byte(path, at + 500)
    daemon.start()
    assert "set aside" in daemon.log and path.name in daemon.log
    assert daemon.topic("t")["depth"] == 49
    assert _receive_all(daemon, connect, 49) == bodies[:20] + bodies[21:]
    assert list(path.parent.glob("*.bad")), "what was damaged should be kept for a look at it"


@pytest.mark.parametrize("where", ["body", "header"])
def test_flipped_byte_found_when_reading(make_nsqd: Make, connect: Connect, where: str) -> None:
    """After a clean stop data is trusted until it is read: then the damage shows, and the channel goes on behind it."""
    daemon = make_nsqd(SMALL_FILES)
    bodies = _publish_batches(daemon, connect)
    assert daemon.stop() == 0
    assert len(segments(daemon.data_path, "t")) > 3
    path, at = _file_with(daemon, bodies[150])
    flip_byte(path, at + 500 if where == "body" else at - 70)
    daemon.start()
    assert _receive_all(daemon, connect, BATCHES - 1) == bodies[:150] + bodies[151:]
    eventually(lambda: "damaged" in daemon.log and path.name in daemon.log)


@pytest.mark.parametrize("number", [0, 149, 299], ids=["first", "middle", "last"])
def test_flipped_byte_while_running(make_nsqd: Make, connect: Connect, number: int) -> None:
    """The disk changes a byte under a running nsqd; two channels meet the damage."""
    daemon = make_nsqd(SMALL_FILES, SMALL_CACHE)
    connect(daemon).subscribe("t", "other")
    connect(daemon).subscribe("t", "ch")
    bodies = _publish_batches(daemon, connect)
    connect(daemon).publish("t", *[b"%03d" % index + b"!" * 1000 for index in range(100)])  # out of the cache
    path, at = _file_with(daemon, bodies[number])
    flip_byte(path, at + 500)
    for channel in ("ch", "other"):
        received = _receive_all(daemon, connect, BATCHES - 1 + 100, channel)
        assert received[: BATCHES - 1] == bodies[:number] + bodies[number + 1 :]
    daemon.wait_for_log("damaged")


@pytest.mark.parametrize("crash", [False, True], ids=["clean", "crash"])
def test_without_index_files_everything_is_served(make_nsqd: Make, connect: Connect, crash: bool) -> None:
    daemon = make_nsqd(SMALL_FILES)
    bodies = _publish_batches(daemon, connect)
    indexes = [path.with_suffix(".idx") for path in segments(daemon.data_path, "t")]
    eventually(lambda: any(path.exists() for path in indexes))
    if crash:
        daemon.kill()
    else:
        assert daemon.stop() == 0
    for path in indexes:
        path.unlink(missing_ok=True)
    daemon.start()
    assert daemon.topic("t")["depth"] == BATCHES
    assert _receive_all(daemon, connect, BATCHES) == bodies


def test_damaged_index_files_are_not_trusted(make_nsqd: Make, connect: Connect) -> None:
    daemon = make_nsqd(SMALL_FILES)
    bodies = _publish_batches(daemon, connect)
    assert daemon.stop() == 0
    for path in segments(daemon.data_path, "t"):
        index = path.with_suffix(".idx")
        if index.exists():
            flip_byte(index, index.stat().st_size // 2)
    daemon.start()
    assert _receive_all(daemon, connect, BATCHES) == bodies


def test_missing_segment_in_the_middle(make_nsqd: Make, connect: Connect) -> None:
    daemon = make_nsqd(SMALL_FILES)
    bodies = _publish_batches(daemon, connect)
    assert daemon.stop() == 0
    path, _ = _file_with(daemon, bodies[150])
    content = path.read_bytes()
    gone = [body for body in bodies if body in content]
    path.unlink()
    daemon.start()
    left = [body for body in bodies if body not in gone]
    assert _receive_all(daemon, connect, len(left)) == left


def test_other_topics_are_not_touched_by_damage(make_nsqd: Make, connect: Connect) -> None:
    daemon = make_nsqd()
    _publish_batches(daemon, connect, 20)
    connect(daemon).publish("healthy", b"one", b"two")
    daemon.kill()
    (path,) = segments(daemon.data_path, "t")
    path.write_bytes(b"nothing that was ever written here" * 100)
    daemon.start()
    assert path.name in daemon.log
    consumer = connect(daemon).subscribe("healthy", rdy=10)
    assert [message.body for message in consumer.read_messages(2, finish=True)] == [b"one", b"two"]
    connect(daemon).publish("t", b"after")
    assert _receive_all(daemon, connect, 1) == [b"after"]


@pytest.mark.parametrize("damage", ["cut", "flip", "garbage"])
def test_damaged_cursor_file_loses_no_message(make_nsqd: Make, connect: Connect, damage: str) -> None:
    """Each state is stored twice, so one damaged place falls back to the one before it."""
    daemon = make_nsqd()
    consumer = connect(daemon).subscribe("t", rdy=5)
    bodies = _publish_batches(daemon, connect, 20, size=10)
    messages = consumer.read_messages(5)
    consumer.RDY(0)
    for message in messages:
        consumer.FIN(message.id)
        consumer.assert_usable()
    daemon.kill()
    (path,) = daemon.data_path.rglob("cursors")
    if damage == "cut":
        cut(path, path.stat().st_size - 20)
    elif damage == "flip":
        flip_byte(path, 2 * 1024 + 20)
    else:
        append(path, b"garbage" * 1000)
    daemon.start()
    depth = daemon.channel("t")["depth"]
    assert 15 <= depth <= 20
    assert _receive_all(daemon, connect, depth) == bodies[-depth:]


def test_damaged_journal_loses_no_message(make_nsqd: Make, connect: Connect) -> None:
    daemon = make_nsqd()
    consumer = connect(daemon).subscribe("t", rdy=20)
    bodies = _publish_batches(daemon, connect, 20, size=10)
    for message in consumer.read_messages(20):
        consumer.REQ(message.id, 600_000)
        consumer.assert_usable()
    daemon.kill()
    (path,) = daemon.data_path.rglob("*.journal")
    flip_byte(path, path.stat().st_size // 2)
    append(path, b"garbage")
    daemon.start()
    counts = daemon.channel("t")
    assert counts["depth"] + counts["deferred_count"] == 20
    consumer = connect(daemon).subscribe("t", rdy=20)
    assert {message.body for message in consumer.read_messages(counts["depth"], finish=True)} < set(bodies)
