"""Publishes to topics whose files cannot be opened are refused, and that costs nobody else anything."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from faults.data_files import topic_directory
from faults.shim import DELAY, Rule, Shim
from harness import Nsqd, Wire, eventually
from harness.wire import ERROR
from nsquark.log.cache import ChunkCache
from nsquark.log.cursors import CursorFile
from nsquark.log.services import LogSettings, LogShared

pytestmark = pytest.mark.ours

Connect = Callable[..., Wire]

BODY = b"x" * 10_000
TRIES = 20
LIMIT = ("--max-disk-bytes=150000",)
"""Less than what the topic's files have, counted TRIES times."""


def _make_deferred_unreadable(directory: Path) -> None:
    (directory / "deferred" / "1.deferred").mkdir()


def _make_channel_unreadable(directory: Path) -> None:
    """Changes a channel's state to what a later version might write."""
    _change_slot(directory, 1, b"no state of a channel")


def _change_slot(directory: Path, number: int, state: bytes) -> None:
    shared = LogShared(
        LogSettings(), 0, ChunkCache(0), lambda call: None, lambda seconds, call: None, lambda text: None
    )
    cursors = CursorFile(shared, directory / "cursors")
    slot = cursors.load()[number]
    slot.state = state
    cursors.write(slot)
    cursors.close()


def _make_topic_unreadable(directory: Path) -> None:
    """Changes the topic's own state to what a later version might write."""
    _change_slot(directory, 0, b"no state of a topic")


def _make_journal_unreadable(directory: Path) -> None:
    """Takes the journal of the channel that is opened last."""
    path = directory / "c.ch2.journal"
    path.unlink()
    path.mkdir()


def _make_segment_unreadable(directory: Path) -> None:
    (directory / f"{1 << 52:020d}.log").mkdir()


def _make_mark_unreadable(directory: Path) -> None:
    (directory / "removed").mkdir()


def _make_kept_unreadable(directory: Path) -> None:
    (directory / "kept").mkdir()


@pytest.fixture(params=[_make_deferred_unreadable, _make_channel_unreadable], ids=["an OSError", "another error"])
def unopened(request: pytest.FixtureRequest, make_nsqd: Callable[..., Nsqd]) -> Nsqd:
    """Runs an nsqd that could not open the topic `t`."""
    daemon = make_nsqd(*LIMIT)
    assert daemon.post("/pub", BODY, topic="t", defer=600_000).status == 200
    for _ in range(5):
        assert daemon.post("/pub", BODY, topic="t").status == 200
    assert daemon.post("/channel/create", topic="t", channel="ch").status == 200
    assert daemon.stop() == 0
    request.param(topic_directory(daemon.data_path, "t"))
    daemon.start()
    assert "TOPIC(t): cannot be opened, it is not served" in daemon.log
    return daemon


def _used_bytes(daemon: Nsqd) -> int:
    used: int = daemon.get("/log/info").json()["disk"]["used_bytes"]
    return used


def test_publishes_to_it_leave_the_others_their_disk(unopened: Nsqd) -> None:
    before = _used_bytes(unopened)
    for _ in range(TRIES):
        reply = unopened.post("/pub", BODY, topic="t")
        assert reply.status == 503 and "DISK_ERROR" in reply.text
    assert _used_bytes(unopened) == before
    assert unopened.post("/pub", BODY, topic="other").status == 200
    assert unopened.topic_names() == {"other"}


@pytest.mark.parametrize("word", ["PUB", "SUB"])
def test_its_clients_are_told(unopened: Nsqd, connect: Connect, word: str) -> None:
    client = connect(unopened)
    if word == "PUB":
        client.PUB("t", b"body")
    else:
        client.SUB("t", "ch")
    kind, text = client.read_frame()
    assert kind == ERROR and text.startswith(f"E_{word}_FAILED {word} failed ".encode())
    client.expect_closed()
    assert unopened.stop() == 0
    assert "Traceback" not in unopened.log


def test_what_was_opened_of_it_is_closed(unopened: Nsqd) -> None:
    descriptors = Path(f"/proc/{unopened.pid}/fd")
    before, used = len(os.listdir(descriptors)), _used_bytes(unopened)
    _wait_for_tries(unopened, 2)
    eventually(lambda: len(os.listdir(descriptors)) <= before)
    assert _used_bytes(unopened) == used


def _wait_for_tries(daemon: Nsqd, more: int) -> None:
    """Waits until nsqd has tried so many times more to open the topic `t`."""
    tried = daemon.log.count("TOPIC(t): cannot be opened")
    eventually(lambda: daemon.log.count("TOPIC(t): cannot be opened") >= tried + more)


@pytest.mark.parametrize(
    "accident",
    [
        _make_deferred_unreadable,
        _make_channel_unreadable,
        _make_topic_unreadable,
        _make_journal_unreadable,
        _make_segment_unreadable,
        _make_mark_unreadable,
        _make_kept_unreadable,
    ],
)
def test_none_of_its_files_is_synced(
    make_nsqd: Callable[..., Nsqd], connect: Connect, tmp_path: Path, accident: Callable[[Path], None]
) -> None:
    """If one of them was still known when the topic is opened again, and its sync failed, a copy of it would take the
    name of the file that is used by then.
    """
    daemon = make_nsqd("--sync-timeout=50ms")
    assert daemon.post("/pub", BODY, topic="t", defer=600_000).status == 200
    directory = topic_directory(daemon.data_path, "t")
    consumers = [connect(daemon).subscribe("t", channel, rdy=1) for channel in ("ch1", "ch2")]
    assert daemon.post("/pub", BODY, topic="t").status == 200
    for consumer in consumers:
        consumer.REQ(consumer.read_message().id, 600_000)
    eventually(lambda: len(list(directory.glob("*.journal"))) == len(consumers))
    daemon.kill()
    accident(directory)
    shim = Shim(tmp_path, daemon.data_path)
    daemon.environment = shim.environment
    shim.set_rules(Rule("sync", "*/t.t/*", errno.EIO), Rule("sync", "*/t.other/*", DELAY))
    daemon.start()
    assert "TOPIC(t): cannot be opened, it is not served" in daemon.log
    _wait_for_tries(daemon, 1)
    assert daemon.post("/pub", BODY, topic="other").status == 200
    eventually(lambda: shim.fired(1))
    assert not shim.fired(0)


READS: dict[str, dict[str, object]] = {
    "/log/info": {},
    "/log/plan": {"from": 0, "to": 9},
    "/log/read": {"from": 0, "to": 9},
    "/log/at": {"ts": 0},
    "/channel/messages": {"channel": "ch"},
}


def test_it_is_not_said_to_be_missing(unopened: Nsqd) -> None:
    """A reader that is told that there is no such topic takes it for deleted, and goes on without it."""
    for path, query in READS.items():
        reply = unopened.get(path, topic="t", **query)
        assert (path, reply.status, reply.json()["message"]) == (path, 503, "DISK_ERROR")
        assert "could not be opened" in reply.json()["reason"]


VERBS = [
    *(f"/topic/{verb}" for verb in ("create", "delete", "empty", "pause", "unpause")),
    *(f"/channel/{verb}" for verb in ("create", "delete", "empty", "pause", "unpause", "seek", "commit")),
    *("/log/stage", "/log/append", "/log/abort", "/pub", "/mpub"),
]


def test_verbs_for_it_are_refused(unopened: Nsqd) -> None:
    query = {"channel": "ch", "to": 0, "seq": 0, "owner": "me", "ttl": 60, "token": "0" * 32, "part": 0, "parts": 1}
    for path in VERBS:
        reply = unopened.post(path, BODY, topic="t", count=1, **query)
        assert (path, reply.status) == (path, 503) and "DISK_ERROR" in reply.text
    assert topic_directory(unopened.data_path, "t").exists()


def test_of_many_topics_only_it_is_refused(unopened: Nsqd) -> None:
    assert unopened.post("/pub", BODY, topic="other").status == 200
    ranges = [{"topic": name, "from": 0, "to": 9} for name in ("t", "other", "none")]
    plans = unopened.post("/log/plan", msgspec.json.encode({"ranges": ranges})).json()["plans"]
    assert [plan.get("status", 200) for plan in plans] == [503, 200, 404]
    places = unopened.post("/log/at?ts=0", msgspec.json.encode({"topics": ["t", "other", "none"]})).json()["places"]
    assert [place.get("status", 200) for place in places] == [503, 200, 404]


@pytest.fixture
def shimmed(make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> tuple[Nsqd, Shim]:
    """Runs an nsqd that may not open a file of the topic `t`, which has one message."""
    daemon = make_nsqd()
    assert daemon.post("/pub", BODY, topic="t").status == 200
    assert daemon.stop() == 0
    shim = Shim(tmp_path, daemon.data_path)
    daemon.environment = shim.environment
    shim.set_rules(Rule("open", "*/t.t/cursors", errno.EACCES))
    daemon.start()
    assert "TOPIC(t): cannot be opened, it is not served" in daemon.log
    return daemon, shim


def test_while_it_is_read_the_others_are_served(shimmed: tuple[Nsqd, Shim], connect: Connect) -> None:
    """Reading all of a large topic takes seconds, of a slow disk more."""
    daemon, shim = shimmed
    shim.set_rules(Rule("read", "*/t.t/*.log", DELAY, times=1, delay_s=10))
    eventually(shim.fired)
    connect(daemon).publish("other", BODY)
    assert "TOPIC(t): opened" not in daemon.log
    assert daemon.post("/pub", BODY, topic="t").status == 503
    eventually(lambda: "TOPIC(t): opened" in daemon.log)
    assert daemon.topic("t")["depth"] == 1
    connect(daemon).publish("t", BODY)
    assert daemon.stop() == 0


def test_a_stop_while_it_is_read(shimmed: tuple[Nsqd, Shim]) -> None:
    daemon, shim = shimmed
    shim.set_rules(Rule("read", "*/t.t/*.log", DELAY, times=1, delay_s=3))
    eventually(shim.fired)
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log and "INTERNAL" not in daemon.log
    daemon.start()
    assert daemon.topic("t")["depth"] == 1
