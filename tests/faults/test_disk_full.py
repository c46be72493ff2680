"""Checks a full disk: publishers are told, consumers go on, nothing acknowledged is lost, and it ends by itself."""

import contextlib
import errno
import itertools
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faults.shim import DELAY, Rule, Shim
from harness import Frame, Message, Nsqd, Wire, eventually
from nsquark.testing.daemons import HTTP_TIMEOUT_S

pytestmark = pytest.mark.ours

Make = Callable[..., Nsqd]
Connect = Callable[..., Wire]

DISK = "8m"
SMALL_FILES = "--max-bytes-per-file=262144"
BODY_BYTES = 4000
NOT_REACHED = 10_000
"""The disk holds fewer messages than this."""
ERROR = 1
NO_HEARTBEATS, RARE_HEARTBEATS = -1, 60_000
"""What goes on for half a minute on a busy machine would get one among its answers; consumers must have some."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mounts a file system of its own that is quickly full."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def disk(small_disk: Path, make_nsqd: Make) -> Path:
    """Returns the small disk, which is unmounted only after the nsqds that use it are gone."""
    return small_disk


class Filler:
    """Publishes bodies that no other message has, and knows which got their OK."""

    def __init__(self, daemon: Nsqd, topic: str = "t") -> None:
        self.daemon = daemon
        self.topic = topic
        self.acknowledged: list[bytes] = []
        self._numbers = itertools.count()

    def body(self) -> bytes:
        return b"%08d" % next(self._numbers) + b"." * BODY_BYTES

    def fill(self, command: str = "PUB") -> Frame:
        """Publishes until that is refused; the answer then."""
        with self.daemon.connect() as wire:
            wire.identify(heartbeat_interval=NO_HEARTBEATS)
            for _ in range(NOT_REACHED):
                bodies = [self.body() for _ in range(5 if command == "MPUB" else 1)]
                if command == "PUB":
                    wire.PUB(self.topic, bodies[0])
                elif command == "MPUB":
                    wire.MPUB(self.topic, bodies)
                else:
                    wire.DPUB(self.topic, 500, bodies[0])
                answer = wire.read_frame()
                if answer.data != b"OK":
                    with contextlib.suppress(ConnectionResetError):
                        wire.expect_closed()
                    return answer
                self.acknowledged += bodies
        raise AssertionError("the disk is never full")

    def drain(self, channel: str = "ch") -> list[bytes]:
        with self.daemon.connect() as consumer:
            consumer.subscribe(self.topic, channel, rdy=100, msg_timeout=60_000, heartbeat_interval=RARE_HEARTBEATS)
            received = [message.body for message in consumer.read_messages(len(self.acknowledged), finish=True)]
            consumer.expect_silence(0.1)
        return received


def _ping(daemon: Nsqd) -> tuple[int, str]:
    answer = daemon.get("/ping")
    return answer.status, answer.text


@pytest.mark.parametrize("command", ["PUB", "MPUB", "DPUB"])
def test_publishing_is_refused_and_goes_on_when_there_is_space(
    disk: Path, make_nsqd: Make, connect: Connect, command: str
) -> None:
    daemon = make_nsqd(SMALL_FILES, data_path=disk)
    connect(daemon).subscribe("t")
    filler = Filler(daemon)
    if command == "DPUB":
        filler.fill()  # what is deferred needs space once more when it is due
    answer = filler.fill(command)
    assert answer.kind == ERROR
    assert answer.data.startswith(f"E_{command}_FAILED {command} failed ".encode())
    assert b"pace" in answer.data, "the error should name the reason"
    status, text = _ping(daemon)
    assert status == 500 and text.startswith("NOK - ")
    assert sorted(filler.drain()) == sorted(filler.acknowledged)
    with daemon.connect() as publisher:
        eventually(lambda: _accepts(daemon))
        publisher.publish("t", b"again")
    assert _ping(daemon) == (200, "OK")
    assert daemon.is_running


def _accepts(daemon: Nsqd) -> bool:
    """Tells whether a publish of ordinary size is accepted again, on a topic that is consumed."""
    with daemon.connect() as wire:
        wire.PUB("probe", b"." * BODY_BYTES)
        return wire.read_frame().data == b"OK"


def test_http_says_503(disk: Path, make_nsqd: Make, connect: Connect) -> None:
    daemon = make_nsqd(SMALL_FILES, data_path=disk)
    connect(daemon).subscribe("t")
    filler = Filler(daemon)
    filler.fill()
    for path, content in (("/pub", b"." * BODY_BYTES), ("/mpub", b"\n".join([b"." * BODY_BYTES] * 3))):
        answer = daemon.post(path, content, topic="t")
        assert answer.status == 503, answer
    assert _ping(daemon)[0] == 500
    assert filler.drain() == filler.acknowledged
    eventually(lambda: daemon.post("/pub", b"x" * BODY_BYTES, topic="t").status == 200)
    assert _ping(daemon) == (200, "OK")


def test_new_topics_and_channels_are_refused_politely(disk: Path, make_nsqd: Make, connect: Connect) -> None:
    """Topics and channels need space too; whatever is refused must not harm the others."""
    daemon = make_nsqd(SMALL_FILES, data_path=disk)
    connect(daemon).subscribe("t")
    filler = Filler(daemon)
    filler.fill()
    _use_up(disk)
    for number in range(20):
        with daemon.connect() as wire:
            wire.PUB(f"new{number}", b"x" * 100)
            answer = wire.read_frame()
            assert answer.data == b"OK" or answer.data.startswith(b"E_PUB_FAILED PUB failed "), answer
        with daemon.connect() as wire:
            wire.SUB("t", f"new{number}")
            answer = wire.read_frame()
            assert answer.data == b"OK" or answer.data.startswith(b"E_SUB_FAILED SUB failed "), answer
        assert daemon.post("/topic/create", topic=f"created{number}").status in (200, 500, 503)
    (disk / "used_up").unlink()
    assert filler.drain() == filler.acknowledged
    assert "INTERNAL" not in daemon.log and "Traceback" not in daemon.log


def _use_up(disk: Path) -> None:
    """Takes what is left, so that not even a small file fits."""
    with (disk / "used_up").open("wb", buffering=0) as file:

        def is_used_up() -> bool:
            """Tells whether nsqd was not just trying if there is space, and gives some back."""
            with contextlib.suppress(OSError):
                while file.write(b"." * 4096):
                    pass
            return not list(disk.rglob("*.tmp"))

        eventually(is_used_up)
        is_used_up()  # what was given back just before it looked


def test_space_freed_by_others_is_used(disk: Path, make_nsqd: Make, connect: Connect) -> None:
    daemon = make_nsqd(data_path=disk)
    ballast = disk / "ballast"
    ballast.write_bytes(b"." * (4 << 20))
    connect(daemon).subscribe("t")
    filler = Filler(daemon)
    filler.fill()
    assert _ping(daemon)[0] == 500
    ballast.unlink()
    before = len(filler.acknowledged)
    filler.fill()
    assert len(filler.acknowledged) - before > 500
    assert filler.drain() == filler.acknowledged


@pytest.mark.parametrize("crash", [False, True], ids=["clean", "crash"])
def test_restart_at_a_full_disk(disk: Path, make_nsqd: Make, connect: Connect, crash: bool) -> None:
    """nsqd must start where nothing can be written: only consumers can make room."""
    daemon = make_nsqd(SMALL_FILES, data_path=disk)
    consumer = connect(daemon).subscribe("t", rdy=50)
    filler = Filler(daemon)
    filler.fill()
    finished = [message.body for message in consumer.read_messages(50)]
    _use_up(disk)
    if crash:
        daemon.kill()
    else:
        daemon.stop()
    daemon.start()
    (disk / "used_up").unlink()
    assert len(finished) == 50
    assert filler.drain() == filler.acknowledged
    eventually(lambda: _accepts(daemon))


def test_requeues_and_timeouts_work_at_a_full_disk(disk: Path, make_nsqd: Make, connect: Connect) -> None:
    daemon = make_nsqd(SMALL_FILES, "--msg-timeout=1s", data_path=disk)
    consumer = connect(daemon).subscribe("t", heartbeat_interval=RARE_HEARTBEATS)
    filler = Filler(daemon)
    filler.fill()
    _use_up(disk)
    consumer.RDY(10)
    first = consumer.read_messages(10)
    for index, message in enumerate(first):
        if index % 2:
            consumer.REQ(message.id, 100 if index % 4 == 1 else 0)
    waiting = {message.body for message in first}
    deliveries = Counter(waiting)
    while waiting:
        frame = consumer.read_frame()
        if frame.kind == ERROR:  # this process was held up until the message had timed out
            assert frame.data.startswith(b"E_REQ_FAILED"), frame
            continue
        message = Message.parse(frame.data)
        deliveries[message.body] += 1
        assert message.attempts == deliveries[message.body]
        waiting.discard(message.body)
        consumer.REQ(message.id, 2000)
    (disk / "used_up").unlink()
    consumer.close()
    assert sorted(filler.drain()) == sorted(filler.acknowledged)


def test_full_disk_and_consumers_at_once(disk: Path, make_nsqd: Make, connect: Connect) -> None:
    """The disk is full and drained again and again: each acknowledged message comes, in order, once."""
    daemon = make_nsqd(SMALL_FILES, data_path=disk)
    connect(daemon).subscribe("t")
    filler = Filler(daemon)
    for command in ("PUB", "MPUB", "PUB"):
        filler.acknowledged.clear()
        answer = filler.fill(command)
        assert answer.data.startswith(f"E_{command}_FAILED".encode())
        assert filler.drain() == filler.acknowledged
        eventually(lambda: _accepts(daemon))
    eventually(lambda: not list(disk.rglob("*.tmp")))  # nsqd may be trying at this moment whether there is space


def test_max_disk_bytes_with_reject(make_nsqd: Make, connect: Connect) -> None:
    daemon = make_nsqd("--max-disk-bytes=2000000", "--disk-policy=reject", SMALL_FILES)
    connect(daemon).subscribe("t")
    filler = Filler(daemon)
    answer = filler.fill()
    assert answer.kind == ERROR and answer.data.startswith(b"E_PUB_FAILED PUB failed ")
    assert b"max-disk-bytes" in answer.data
    assert 1_700_000 < len(filler.acknowledged) * BODY_BYTES < 2_000_000
    assert daemon.post("/pub", b"." * BODY_BYTES, topic="t").status == 503
    assert _ping(daemon)[0] == 500
    assert filler.drain() == filler.acknowledged
    eventually(lambda: _accepts(daemon))
    assert _ping(daemon) == (200, "OK")


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
def test_max_disk_bytes_with_drop_oldest(make_nsqd: Make, connect: Connect, restart: bool) -> None:
    """Publishing always works; the oldest files go, and channels go on with what is left."""
    daemon = make_nsqd("--max-disk-bytes=2000000", "--disk-policy=drop-oldest", SMALL_FILES)
    early = connect(daemon).subscribe("t", "early", rdy=10)
    publisher = connect(daemon)
    bodies = [b"%08d" % number + b"." * BODY_BYTES for number in range(1500)]
    for body in bodies:
        publisher.publish("t", body)
    held = early.read_messages(10)
    assert [message.body for message in held] == bodies[:10]
    early.RDY(0)
    for message in held[::2]:
        early.REQ(message.id, 0)
    early.assert_usable()
    early.close()
    size = sum(path.stat().st_size for path in daemon.data_path.rglob("*.log"))
    assert size <= 2_000_000
    if restart:
        daemon.restart(crash=True)
    depth = daemon.channel("t", "early")["depth"]
    assert 300 < depth < 600
    with contextlib.closing(connect(daemon).subscribe("t", "early", rdy=100)) as consumer:
        received = []

        def has_taken_all() -> bool:
            with contextlib.suppress(TimeoutError):
                while True:
                    message = consumer.read_message(0.2)
                    received.append(message.body)
                    consumer.FIN(message.id)
            shown = daemon.channel("t", "early")
            return not shown["depth"] and not shown["clients"][0]["in_flight_count"]

        eventually(has_taken_all)
    assert received == bodies[-len(received) :] and len(received) > 300
    assert daemon.channel("t", "early")["depth"] == 0
    assert _ping(daemon) == (200, "OK")


# -- the newest file -------------------------------------------------------------------------------------

LIMIT = "--max-disk-bytes=2000000"


@pytest.mark.parametrize("way", ["consumed", "/channel/empty", "/topic/empty", "restart"])
@pytest.mark.parametrize("flags", [(LIMIT,), (LIMIT, "--disk-policy=drop-oldest")], ids=["reject", "drop-oldest"])
def test_a_finished_newest_file_makes_room(make_nsqd: Make, flags: tuple[str, ...], way: str) -> None:
    """All messages are in one file, which is as large as the limit."""
    daemon = make_nsqd(*flags)
    filler = Filler(daemon)
    if way == "/topic/empty":
        daemon.post("/topic/create", topic="t")
    else:
        _make_channel(daemon)
    for _ in range(450):
        if daemon.post("/pub", filler.body(), topic="t").status != 200:
            break
    if way.startswith("/"):
        assert daemon.post(way, topic="t", channel="ch").status == 200
    else:
        _finish_all(daemon)
        if way == "restart":
            daemon.restart()
        eventually(lambda: not list(daemon.data_path.rglob("*.log")))
    for _ in range(100):
        assert daemon.post("/pub", filler.body(), topic="t").status == 200
    assert _ping(daemon) == (200, "OK")


def _make_channel(daemon: Nsqd) -> None:
    for path in ("/topic/create", "/channel/create"):
        assert daemon.post(path, topic="t", channel="ch").status == 200


def _finish_all(daemon: Nsqd) -> None:
    depth = daemon.channel("t")["depth"]
    with daemon.connect() as consumer:
        consumer.subscribe("t", "ch", rdy=100, msg_timeout=60_000)
        consumer.read_messages(depth, finish=True)
        eventually(lambda: daemon.channel("t")["in_flight_count"] == 0)


def test_a_full_disk_with_one_file_recovers_when_all_is_consumed(disk: Path, make_nsqd: Make) -> None:
    daemon = make_nsqd(data_path=disk)
    _make_channel(daemon)
    filler = Filler(daemon)
    filler.fill()
    assert filler.drain() == filler.acknowledged
    eventually(lambda: daemon.post("/pub", filler.body(), topic="t").status == 200)
    eventually(lambda: _ping(daemon) == (200, "OK"))


def test_held_messages_outlive_a_newest_file_that_makes_room(make_nsqd: Make, connect: Connect) -> None:
    daemon = make_nsqd(LIMIT, "--msg-timeout=10m")
    consumer = connect(daemon).subscribe("t", rdy=1, heartbeat_interval=RARE_HEARTBEATS)
    with daemon.connect() as publisher:
        publisher.publish("t", b"held")
    held = consumer.read_message()
    consumer.RDY(0)
    filler = Filler(daemon)
    for _ in range(1500):
        if daemon.post("/pub", filler.body(), topic="t").status == 200:
            filler.acknowledged.append(b"")
        if len(filler.acknowledged) % 400 == 399:
            _finish_others(daemon)
    consumer.REQ(held.id, 0)
    consumer.RDY(1)
    while (message := consumer.read_message()).body != b"held":
        consumer.FIN(message.id)


def _finish_others(daemon: Nsqd) -> None:
    depth = daemon.channel("t")["depth"]
    with daemon.connect() as other:
        other.subscribe("t", "ch", rdy=100, msg_timeout=60_000)
        other.read_messages(depth, finish=True)


def test_retention_time_is_a_maximum_for_what_is_finished(make_nsqd: Make) -> None:
    daemon = make_nsqd("--retention-time=300ms")
    _make_channel(daemon)
    daemon.post("/pub", b"body", topic="t")
    _finish_all(daemon)
    eventually(lambda: not list(daemon.data_path.rglob("*.log")))
    assert daemon.post("/pub", b"again", topic="t").status == 200
    assert daemon.channel("t")["depth"] == 1
    daemon.restart(crash=True)
    assert daemon.channel("t")["depth"] == 1


# -- to the last byte ------------------------------------------------------------------------------------


@pytest.mark.parametrize("crash", [False, True], ids=["clean", "crash"])
def test_a_disk_that_is_full_to_the_last_byte(disk: Path, make_nsqd: Make, crash: bool) -> None:
    """Syncs go on meanwhile: an index that cannot be stored is no failed sync, and nothing is moved for it."""
    daemon = make_nsqd("--sync-timeout=50ms", "--sync-every=20", "--max-bytes-per-file=262144", data_path=disk)
    _make_channel(daemon)
    (disk / "ballast").write_bytes(bytes(2 << 20))
    filler = Filler(daemon)
    filler.fill()
    _use_up(disk)
    for _ in range(30):
        filler.fill()  # what still fits, and what does not
    (disk / "used_up").unlink()
    (disk / "ballast").unlink()
    eventually(lambda: _accepts(daemon))
    with daemon.connect() as publisher:
        for _ in range(100):
            body = b"%08d" % len(filler.acknowledged)
            publisher.publish("t", body)
            filler.acknowledged.append(body)
    eventually(lambda: _ping(daemon) == (200, "OK"))
    daemon.restart(crash=crash)
    assert filler.drain() == filler.acknowledged
    assert not list(disk.rglob("*.bad"))


def test_refusals_are_logged_once_with_their_reason_and_their_end(disk: Path, make_nsqd: Make) -> None:
    daemon = make_nsqd(SMALL_FILES, data_path=disk)
    _make_channel(daemon)
    filler = Filler(daemon)
    filler.fill()
    for _ in range(20):
        answer = daemon.post("/pub", filler.body(), topic="t")
        assert answer.status == 503
        assert "pace" in answer.json()["message"], "the error should name the reason"
    daemon.wait_for_log("publishes are refused")
    assert daemon.log.count("publishes are refused") == 1
    filler.drain()
    eventually(lambda: _accepts(daemon))
    daemon.wait_for_log("publishes are accepted again")
    found = re.search(r"accepted again, (\d+) messages were refused", daemon.log)
    assert found is not None and int(found[1]) >= 21


def test_a_start_on_a_full_disk_after_a_new_topic_was_refused(disk: Path, make_nsqd: Make) -> None:
    daemon = make_nsqd(SMALL_FILES, data_path=disk)
    _make_channel(daemon)
    filler = Filler(daemon)
    filler.fill()
    _use_up(disk)
    for number in range(5):
        assert daemon.post("/pub", b"x" * 5000, topic=f"new{number}").status == 503
    daemon.kill()
    daemon.start()
    assert filler.drain() == filler.acknowledged
    (disk / "used_up").unlink()
    eventually(lambda: daemon.post("/pub", b"x", topic="new0").status == 200)


def test_while_a_disk_in_trouble_is_tried_out_clients_are_served(make_nsqd: Make, tmp_path: Path) -> None:
    """The sync that tells whether it is well again takes longer here than any client waits."""
    daemon = make_nsqd()
    shim = Shim(tmp_path, daemon.data_path, record=True)
    daemon.environment = shim.environment
    daemon.restart()
    _make_channel(daemon)
    assert daemon.post("/pub", b"before", topic="t").status == 200
    shim.set_rules(Rule("write", "*.log", errno.ENOSPC), Rule("sync", "*/probe*", DELAY, delay_s=2 * HTTP_TIMEOUT_S))
    assert daemon.post("/pub", b"refused", topic="t").status == 503
    eventually(lambda: shim.fired(1))
    assert daemon.get("/ping").status == 500
    _finish_all(daemon)
    daemon.kill()
