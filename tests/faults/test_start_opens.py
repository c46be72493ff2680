"""Checks that a file which cannot be opened when nsqd starts costs no message: its topic waits until it can be."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faults.data_files import topic_directory
from faults.shim import Rule, Shim
from harness import Nsqd, StartError, Wire, eventually
from nsquark.log.files import PAGE_BYTES
from nsquark.log.services import READ_TRIES

pytestmark = pytest.mark.ours

COUNT = 20
HELD = 5
LATER_MS = 1000
FLAGS = ("--max-bytes-per-file=4096", "--sync-timeout=100ms")
LARGE = b"x" * 900_000
PAGES_MANY = 1500
"""So many pages, tried for as long as one, would take longer than a start may."""
FILES = ["*", "*.log", "cursors", "*.journal", "*.deferred"]


@pytest.fixture
def daemon(shim: Shim) -> Iterator[Nsqd]:
    daemon = Nsqd(shim.root, *FLAGS, environment=shim.environment).start()
    yield daemon
    daemon.kill()


@pytest.fixture
def bodies(daemon: Nsqd, connect: Callable[..., Wire]) -> set[bytes]:
    """Publishes to the topic `t`, in several files: new messages, requeued ones and a deferred one. nsqd is killed."""
    bodies = {b"%02d " % number + b"x" * 1000 for number in range(COUNT)}
    assert daemon.post("/topic/create", topic="t").status == 200
    assert daemon.post("/channel/create", topic="t", channel="c").status == 200
    for body in sorted(bodies):
        connect(daemon).publish("t", body)
    consumer = connect(daemon).subscribe("t", "c", rdy=HELD)
    for message in consumer.read_messages(HELD):
        consumer.REQ(message.id, LATER_MS)
    consumer.RDY(0)
    assert daemon.post("/pub", b"deferred", topic="t", defer=LATER_MS).status == 200
    eventually(lambda: list(topic_directory(daemon.data_path, "t").glob("*.journal")))
    daemon.kill()
    return bodies | {b"deferred"}


def _drained(daemon: Nsqd, connect: Callable[..., Wire], count: int) -> set[bytes]:
    consumer = connect(daemon).subscribe("t", "c", rdy=count)
    return {message.body for message in consumer.read_messages(count, finish=True)}


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("files", FILES)
def test_its_topic_waits_for_it_and_the_others_do_not(
    daemon: Nsqd, shim: Shim, bodies: set[bytes], connect: Callable[..., Wire], files: str, error: int
) -> None:
    shim.set_rules(Rule("open", f"*/t.t/{files}", error))
    daemon.start()
    assert "TOPIC(t): cannot be opened, it is not served" in daemon.log
    assert f"{topic_directory(daemon.data_path, 't')}/" in daemon.log and "move this file away" in daemon.log
    assert daemon.post("/pub", b"refused", topic="t").status == 503
    assert daemon.post("/pub", b"taken", topic="other").status == 200
    assert daemon.get("/ping").text == "OK"
    shim.set_rules()
    daemon.wait_for_log("TOPIC(t): opened")
    assert _drained(daemon, connect, len(bodies)) == bodies


@pytest.mark.parametrize("files", FILES)
def test_a_later_start_finds_all(
    daemon: Nsqd, shim: Shim, bodies: set[bytes], connect: Callable[..., Wire], files: str
) -> None:
    """A channel that had gone on without a file would not come back to its messages."""
    shim.set_rules(Rule("open", f"*/t.t/{files}", errno.EIO))
    daemon.start()
    consumer = connect(daemon)
    consumer.SUB("t", "c")
    assert consumer.read_frame()[1].startswith(b"E_SUB_FAILED")
    assert daemon.stop() == 0
    shim.set_rules()
    daemon.start()
    assert _drained(daemon, connect, len(bodies)) == bodies


def test_a_segment_that_is_moved_away_lets_the_rest_be_served(
    daemon: Nsqd, shim: Shim, bodies: set[bytes], connect: Callable[..., Wire], tmp_path: Path
) -> None:
    path = sorted(topic_directory(daemon.data_path, "t").glob("*.log"))[0]
    content = path.read_bytes()
    shim.set_rules(Rule("open", f"*/{path.name}", errno.EIO))
    daemon.start()
    path.rename(tmp_path / path.name)
    daemon.wait_for_log("TOPIC(t): opened")
    rest = {body for body in bodies if body not in content}
    assert rest and rest != bodies
    assert _drained(daemon, connect, len(rest)) == rest


def test_publishes_to_the_topic_do_not_try_it_again_and_again(daemon: Nsqd, shim: Shim, bodies: set[bytes]) -> None:
    """Opening a topic may take long, and all other topics wait meanwhile."""
    shim.set_rules(Rule("open", "*/t.t/cursors", errno.EIO))
    daemon.start()
    tried = daemon.log.count("TOPIC(t): cannot be opened")
    for _ in range(200):
        assert daemon.post("/pub", b"refused", topic="t").status == 503
    assert shim.fired() - tried < 100


@pytest.mark.parametrize("files", FILES)
def test_files_that_cannot_be_read_for_a_moment_cost_nothing(
    daemon: Nsqd, shim: Shim, bodies: set[bytes], connect: Callable[..., Wire], files: str
) -> None:
    shim.set_rules(Rule("read", f"*/t.t/{files}", errno.EIO, times=20))
    daemon.start()
    assert shim.fired() == 20
    assert _drained(daemon, connect, len(bodies)) == bodies


def test_many_pages_that_cannot_be_read_do_not_hold_the_start(
    daemon: Nsqd, shim: Shim, connect: Callable[..., Wire]
) -> None:
    """Each page is waited for, but not all of them one after another."""
    for _ in range(PAGES_MANY * PAGE_BYTES // len(LARGE)):
        connect(daemon).publish("t", LARGE)
    daemon.kill()
    for index in topic_directory(daemon.data_path, "t").glob("*.idx"):
        index.unlink()  # a segment that has one by now would not be read
    shim.set_rules(Rule("read", "*/t.t/*.log", errno.EIO))
    daemon.start()
    assert shim.fired() > PAGES_MANY // 2
    assert daemon.post("/pub", b"taken", topic="t").status == 200


@pytest.mark.parametrize("name", ["node.json", "sequence", "runs"])
def test_a_file_of_nsqd_itself_refuses_the_start_with_a_sentence(
    daemon: Nsqd, shim: Shim, bodies: set[bytes], connect: Callable[..., Wire], name: str
) -> None:
    shim.set_rules(Rule("open", f"*/{name}", errno.EIO))
    with pytest.raises(StartError) as refused:
        daemon.start()
    assert f"nsquark/{name}" in refused.value.log and "move this file away" in refused.value.log
    assert "Traceback" not in refused.value.log
    shim.set_rules()
    daemon.start()
    assert _drained(daemon, connect, len(bodies)) == bodies


def away(topic: str) -> tuple[Rule, Rule]:
    """Rules for a disk that does not answer: neither are its pages read, nor anything written to it."""
    return Rule("read", f"*/t.{topic}/*", errno.EIO), Rule("change", f"*/t.{topic}/*", errno.EIO)


def test_a_disk_that_is_away_at_a_start_costs_nothing(
    daemon: Nsqd, shim: Shim, bodies: set[bytes], connect: Callable[..., Wire]
) -> None:
    shim.set_rules(*away("t"))
    daemon.start()
    assert "TOPIC(t): cannot be opened, it is not served" in daemon.log
    assert daemon.post("/pub", b"taken", topic="other").status == 200
    shim.set_rules()
    daemon.wait_for_log("TOPIC(t): opened")
    assert _drained(daemon, connect, len(bodies)) == bodies


def test_a_disk_that_is_away_while_nsqd_runs_costs_nothing(
    daemon: Nsqd, shim: Shim, bodies: set[bytes], connect: Callable[..., Wire]
) -> None:
    daemon.start()
    shim.set_rules(*away("t"))
    consumer = connect(daemon).subscribe("t", "c", rdy=len(bodies))
    eventually(lambda: daemon.log.count(".log): reading at ") > 2 * READ_TRIES, 60.0)
    shim.set_rules()
    assert {message.body for message in consumer.read_messages(len(bodies), finish=True)} == bodies
