"""Checks the files of the whole nsqd: its id, its format and its counter. It starts without them where nothing is at
risk.
"""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.data_files import flip_byte
from faults.shim import Rule, Shim
from harness import Nsqd, Wire, eventually, mpub_messages
from harness.nsqd import StartError

pytestmark = pytest.mark.ours

Make = Callable[..., Nsqd]
Connect = Callable[..., Wire]


def _stopped(make_nsqd: Make, connect: Connect) -> Nsqd:
    daemon = make_nsqd()
    connect(daemon).publish("t", b"one", b"two")
    assert daemon.stop() == 0
    return daemon


def _node(daemon: Nsqd) -> Path:
    return daemon.data_path / "nsquark" / "node.json"


def _id(path: Path) -> str:
    found: str = json.loads(path.read_bytes())["id"]
    return found


def _assert_served(daemon: Nsqd, connect: Connect) -> None:
    consumer = connect(daemon).subscribe("t", rdy=10)
    assert [message.body for message in consumer.read_messages(2, finish=True)] == [b"one", b"two"]


@pytest.mark.parametrize("name", ["node.json", "node.json.copy"])
@pytest.mark.parametrize("at", [0, 8, 20, -3])
def test_a_flipped_bit_in_the_id_is_mended_from_its_copy(make_nsqd: Make, connect: Connect, name: str, at: int) -> None:
    daemon = _stopped(make_nsqd, connect)
    before = _id(_node(daemon))
    path = _node(daemon).with_name(name)
    flip_byte(path, at)
    daemon.start()
    assert f"{name}): damaged; restored from its copy" in daemon.log
    assert _id(_node(daemon)) == _id(_node(daemon).with_name("node.json.copy")) == before
    _assert_served(daemon, connect)


def test_a_node_file_of_format_1_is_taken_up(make_nsqd: Make, connect: Connect) -> None:
    daemon = _stopped(make_nsqd, connect)
    _node(daemon).write_bytes(b'{"id":"6dd8ad2b-5e1a-4b1e-8a4a-6ed0d2a3a0c4","format":1}')
    _node(daemon).with_name("node.json.copy").unlink()
    daemon.start()
    for path in (_node(daemon), _node(daemon).with_name("node.json.copy")):
        assert _id(path) == "6dd8ad2b-5e1a-4b1e-8a4a-6ed0d2a3a0c4"
        assert json.loads(path.read_bytes())["format"] == 2


def test_without_an_id_it_says_what_to_do_and_that_helps(make_nsqd: Make, connect: Connect) -> None:
    daemon = _stopped(make_nsqd, connect)
    flip_byte(_node(daemon), 8)
    _node(daemon).with_name("node.json.copy").unlink()
    with pytest.raises(StartError, match=r"the id of this nsqd is lost, its messages are not.*backup.*echo"):
        daemon.start()
    _node(daemon).write_bytes(b'{"id": "written by hand"}\n')
    daemon.start()
    _assert_served(daemon, connect)
    assert _id(_node(daemon)) == "written by hand"


def test_a_later_format_is_refused_with_a_sentence(make_nsqd: Make, connect: Connect) -> None:
    daemon = _stopped(make_nsqd, connect)
    shutil.copytree(daemon.data_path, daemon.data_path.with_name("before"))
    for path in (_node(daemon), _node(daemon).with_name("node.json.copy")):
        path.write_bytes(b'{"id":"6dd8ad2b-5e1a-4b1e-8a4a-6ed0d2a3a0c4","format":99}')
    with pytest.raises(StartError, match=r"written by a later version: its format is 99"):
        daemon.start()


@pytest.mark.parametrize("at", [29, -1], ids=["body", "check"])
@pytest.mark.parametrize("both", [False, True])
def test_a_damaged_counter_is_made_anew(make_nsqd: Make, connect: Connect, both: bool, at: int) -> None:
    daemon = _stopped(make_nsqd, connect)
    path = daemon.data_path / "nsquark" / "sequence"
    flip_byte(path, at)
    if both:
        flip_byte(path, 5)
    daemon.start()
    assert ("SEQUENCE" in daemon.log and "damaged" in daemon.log) == both
    consumer = connect(daemon).subscribe("t", rdy=10)
    connect(daemon).publish("t", b"three")
    messages = consumer.read_messages(3, finish=True)
    assert [message.body for message in messages] == [b"one", b"two", b"three"]
    assert len({message.id for message in messages}) == 3


@pytest.mark.parametrize("name", ["node.json", "sequence", "clock", "topics/t.t/removed", "topics/t.t/tokens"])
def test_a_file_that_cannot_be_read_does_not_stop_the_start(
    make_nsqd: Make, connect: Connect, tmp_path: Path, name: str
) -> None:
    daemon = _stopped(make_nsqd, connect)
    before = _id(_node(daemon))
    path = daemon.data_path / "nsquark" / name
    if not path.exists():
        path.write_bytes(b"x" * 24)
    content = path.read_bytes()
    shim = Shim(tmp_path, daemon.data_path)
    shim.set_rules(Rule("read", f"*{name}", errno.EIO))
    daemon.environment = shim.environment
    daemon.start()
    _assert_served(daemon, connect)
    assert shim.fired() or name.endswith("tokens"), "tokens are read when they are needed"
    assert _id(_node(daemon).with_name("node.json.copy")) == before
    if shim.fired() and name != "clock":
        assert "cannot be read" in daemon.log
        assert path.with_name(path.name + ".bad").read_bytes() == content


@pytest.mark.parametrize("name", ["clock", "runs", "sequence", "node.json"])
def test_what_is_no_file_refuses_the_start_with_a_sentence(make_nsqd: Callable[..., Nsqd], name: str) -> None:
    daemon = make_nsqd()
    assert daemon.stop() == 0
    path = daemon.data_path / "nsquark" / name
    path.unlink()
    path.mkdir()
    with pytest.raises(StartError) as refused:
        daemon.start()
    assert str(path) in refused.value.log and "FATAL" in refused.value.log
    assert "Traceback" not in refused.value.log
    path.rmdir()
    daemon.start()


def test_without_sequence_numbers_publishes_are_refused_and_ping_says_so(
    make_nsqd: Make, connect: Connect, tmp_path: Path
) -> None:
    """The file that reserves numbers cannot be written; consumers are served, and it ends by itself."""
    daemon = _stopped(make_nsqd, connect)
    shim = Shim(tmp_path, daemon.data_path)
    shim.set_rules(Rule("write", "*/sequence*", errno.EIO))
    daemon.environment = shim.environment
    daemon.start()
    daemon.post("/log/stage", mpub_messages([b"staged"]), topic="t", token="token", part=0)
    assert daemon.post("/log/append", topic="t", token="token").status == 503
    assert daemon.get("/ping").status == 500
    for _ in range(3):
        assert daemon.post("/pub", b"three", topic="t").status == 503
    fired = shim.fired()
    eventually(lambda: shim.fired() > fired + 1)  # it was tried again, by nsqd itself
    assert daemon.get("/ping").status == 500
    daemon.wait_for_log("publishes are refused")
    assert daemon.log.count("publishes are refused") == 1
    shim.set_rules()
    eventually(lambda: daemon.get("/ping").status == 200)
    assert daemon.post("/log/append", topic="t", token="token").status == 200
    _assert_served(daemon, connect)
    assert "INTERNAL" not in daemon.log and "Traceback" not in daemon.log


@pytest.mark.parametrize("name", ["7.log", "\u00b2\u00b3.log", "notes.log", "deferred/\u00b2.deferred"])
def test_files_that_are_not_ours_are_left_alone(make_nsqd: Callable[..., Nsqd], name: str) -> None:
    daemon = make_nsqd()
    daemon.post("/pub", b"now", topic="t")
    daemon.post("/pub", b"later", topic="t", defer=600_000)
    assert daemon.stop() == 0
    path = daemon.data_path / "nsquark" / "topics" / "t.t" / name
    path.write_bytes(b"something else")
    daemon.start()
    assert daemon.topic("t")["depth"] == 1
    assert path.read_bytes() == b"something else"
