"""Checks the move from NSQ: an nsqd started on the data path of NSQ's nsqd goes on with what is there."""

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from broker.nsq_files import TIMESTAMP_NS, Stored, records, write_messages, write_metadata, write_queue
from faults.shim import Rule, Shim
from harness import Message, Nsqd, StartError, Wire, eventually

pytestmark = pytest.mark.ours

MakeNsqd = Callable[..., Nsqd]
Connect = Callable[..., Wire]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Returns the data path that `make_nsqd` uses by default."""
    path = tmp_path / "data"
    path.mkdir()
    return path


def numbered(prefix: str, count: int, **fields: Any) -> list[Stored]:
    return [Stored(f"{prefix}{number}".encode(), **fields) for number in range(count)]


def consume(connect: Connect, daemon: Nsqd, topic: str, channel: str, count: int) -> list[Message]:
    """Finishes `count` messages and makes sure that no more come."""
    consumer = connect(daemon).subscribe(topic, channel, rdy=min(count, 2500))
    messages = consumer.read_messages(count, finish=True)
    consumer.assert_usable()
    assert daemon.channel(topic, channel)["depth"] == 0
    assert daemon.channel(topic, channel)["in_flight_count"] == 0
    return messages


def bodies(messages: Iterable[Message | Stored]) -> list[bytes]:
    return [message.body for message in messages]


def left_in(data: Path) -> set[str]:
    """Returns what is neither ours nor set aside; a crash may leave a temporary file."""
    names = {path.name for path in data.iterdir() if path.suffix != ".tmp"}
    return names - {"nsquark", "nsq-before-nsquark"}


def test_backlog_of_a_topic_goes_to_its_first_channel(data: Path, make_nsqd: MakeNsqd, connect: Connect) -> None:
    stored = [Stored(b"%d" % number, timestamp_ns=TIMESTAMP_NS + number) for number in range(1000)]
    write_messages(data, "t", stored)
    write_metadata(data, {"t": {}})
    daemon = make_nsqd()
    assert daemon.topic("t")["depth"] == 1000
    messages = consume(connect, daemon, "t", "first", 1000)
    assert [(m.timestamp_ns, m.attempts, m.body) for m in messages] == [(s.timestamp_ns, 1, s.body) for s in stored]
    assert len({message.id for message in messages}) == 1000


def test_each_channel_gets_its_own_backlog_and_the_topics(data: Path, make_nsqd: MakeNsqd, connect: Connect) -> None:
    own = {name: numbered(name, count) for name, count in {"a": 5, "b": 20_000, "c": 0, "d": 3}.items()}
    for name, stored in own.items():
        if stored:
            write_messages(data, f"t:{name}", stored)
    write_messages(data, "t", numbered("topic", 4))
    write_metadata(data, {"t": dict.fromkeys(own, False)})
    daemon = make_nsqd()
    assert daemon.topic("t")["depth"] == 0
    for name, stored in own.items():
        assert daemon.channel("t", name)["depth"] == len(stored) + 4
    daemon.restart(crash=True)
    publisher = connect(daemon)
    publisher.publish("t", b"new")
    for name, stored in own.items():
        messages = consume(connect, daemon, "t", name, len(stored) + 5)
        assert bodies(messages) == bodies([*stored, *numbered("topic", 4), Stored(b"new")])


def test_attempts_go_on(data: Path, make_nsqd: MakeNsqd, connect: Connect) -> None:
    stored = [Stored(b"%d" % number, attempts=number % 4) for number in range(40)]
    write_messages(data, "t:ch", stored)
    write_messages(data, "t:other", stored)
    write_metadata(data, {"t": {"ch": False, "other": False}})
    daemon = make_nsqd()
    assert daemon.channel("t", "ch")["depth"] == 40
    attempts = {message.body: message.attempts for message in consume(connect, daemon, "t", "ch", 40)}
    assert attempts == {message.body: message.attempts + 1 for message in stored}
    daemon.restart(crash=True)
    attempts = {message.body: message.attempts for message in consume(connect, daemon, "t", "other", 40)}
    assert attempts == {message.body: message.attempts + 1 for message in stored}


def test_pauses_are_kept_with_what_they_hold_back(data: Path, make_nsqd: MakeNsqd, connect: Connect) -> None:
    write_messages(data, "stopped", numbered("held", 3))
    write_messages(data, "stopped:ch", numbered("own", 2))
    write_messages(data, "runs:stopped", numbered("own", 2))
    write_metadata(data, {"stopped": {"ch": False}, "runs": {"stopped": True, "free": False}}, paused=["stopped"])
    daemon = make_nsqd()
    topic = daemon.topic("stopped")
    assert (topic["paused"], topic["depth"]) == (True, 3)
    assert bodies(consume(connect, daemon, "stopped", "ch", 2)) == [b"own0", b"own1"]
    late = connect(daemon).subscribe("stopped", "late", rdy=10)
    daemon.post("/topic/unpause", topic="stopped")
    assert bodies(late.read_messages(3)) == [b"held0", b"held1", b"held2"]
    assert {name: daemon.channel("runs", name)["paused"] for name in ("stopped", "free")} == {
        "stopped": True,
        "free": False,
    }
    daemon.post("/channel/unpause", topic="runs", channel="stopped")
    assert bodies(consume(connect, daemon, "runs", "stopped", 2)) == [b"own0", b"own1"]


def test_reading_goes_on_where_nsq_was(data: Path, make_nsqd: MakeNsqd, connect: Connect) -> None:
    """Files wholly read before may still be there; of the first unread one a part was read."""
    read, part = records([b"read"]), records([b"read too"])
    files = [read, part + records([b"1", b"2"]), records([b"3"]), records([b"4", b"5"])]
    write_queue(data, "t", files, first_number=7, depth=5, read=(8, len(part)))
    daemon = make_nsqd()
    assert bodies(consume(connect, daemon, "t", "ch", 5)) == [b"1", b"2", b"3", b"4", b"5"]
    assert "damaged" not in daemon.log


def test_whole_records_behind_a_crash_are_saved(data: Path, make_nsqd: MakeNsqd, connect: Connect) -> None:
    """The meta file is older than the data, the last record is cut short, and another queue lost its meta file."""
    known, unknown, torn = records([b"1", b"2"]), records([b"3"]), records([b"torn"])[:-2]
    write_queue(data, "t", [known + unknown, records([b"4"]) + torn], depth=2, write=(0, len(known)))
    write_queue(data, "lost", [records([b"a"]), records([b"b"])], first_number=3, depth=2)
    (data / "lost.diskqueue.meta.dat").unlink()
    daemon = make_nsqd()
    assert bodies(consume(connect, daemon, "t", "ch", 4)) == [b"1", b"2", b"3", b"4"]
    assert bodies(consume(connect, daemon, "lost", "ch", 2)) == [b"a", b"b"]
    assert "TAKEOVER: t.diskqueue.000001.dat: bytes 31 to 63 are damaged and left out" in daemon.log


def test_damage_costs_no_more_than_what_is_damaged(data: Path, make_nsqd: MakeNsqd, connect: Connect) -> None:
    start, bad, end = records([b"1", b"2"]), records([b"x" * 300]), records([b"3", b"4"])
    wrong_size = b"\x7f\xff\xff\xff" + bad[4:]
    write_queue(data, "t", [start + wrong_size + end, records([b"5"])], depth=6)
    write_queue(data, "zeros", [start + bytes(5000)], depth=2)
    (data / "t.diskqueue.000009.dat.bad").write_bytes(records([b"already given up by NSQ"]))
    daemon = make_nsqd()
    assert bodies(consume(connect, daemon, "t", "ch", 5)) == [b"1", b"2", b"3", b"4", b"5"]
    assert bodies(consume(connect, daemon, "zeros", "ch", 2)) == [b"1", b"2"]
    for report in (
        f"t.diskqueue.000000.dat: bytes {len(start)} to {len(start + bad)} are damaged and left out",
        "t: 5 messages found of 6 that the meta file names",
        "t.diskqueue.000009.dat.bad was set aside by NSQ as damaged: its messages are left out",
    ):
        assert f"TAKEOVER: {report}" in daemon.log


def test_large_messages_are_kept(data: Path, make_nsqd: MakeNsqd, connect: Connect) -> None:
    """They are larger than --max-msg-size, than a piece that is read at once, and than a file."""
    large = [os.urandom(size) for size in (3_000_000, 10, 1_100_000, 0)]
    write_queue(data, "t", [records(large)], depth=4)
    daemon = make_nsqd("--max-msg-size=1024", "--max-bytes-per-file=1000000")
    assert bodies(consume(connect, daemon, "t", "ch", 4)) == large


def test_files_of_nsq_are_set_aside_untouched(data: Path, make_nsqd: MakeNsqd) -> None:
    write_messages(data, "t", numbered("t", 2))
    write_messages(data, "t:ch", numbered("c", 2))
    write_messages(data, "gone#ephemeral:ch", numbered("g", 2))
    write_metadata(data, {"t": {"ch": False}, "empty": {}})
    before = {path.name: path.read_bytes() for path in data.iterdir()}
    daemon = make_nsqd()
    assert daemon.topic_names() == {"t", "empty"}
    aside = data / "nsq-before-nsquark"
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == before
    assert left_in(data) == {"nsqd.dat"}
    assert "nsquark" in json.loads((data / "nsqd.dat").read_bytes())
    daemon.restart()
    assert daemon.channel("t", "ch")["depth"] == 4
    assert "TAKEOVER" not in daemon.log


def test_failing_leaves_everything_of_nsq_as_it_was(data: Path, make_nsqd: MakeNsqd, connect: Connect) -> None:
    """Here a file is in the way of the directory in which the import is prepared."""
    write_messages(data, "t:ch", numbered("c", 2))
    write_metadata(data, {"t": {"ch": True}, "later": {"ch": True}})
    before = {path.name: path.read_bytes() for path in data.iterdir()}
    (data / "nsquark").mkdir()
    (data / "nsquark" / "takeover").mkdir()
    obstacle = data / "nsquark" / "takeover" / "ready.t"
    obstacle.write_text("in the way")
    with pytest.raises(StartError) as caught:
        make_nsqd()
    assert "failed to take over the data of NSQ - " in caught.value.log
    assert {path.name: path.read_bytes() for path in data.iterdir() if path.is_file()} == before
    obstacle.unlink()
    daemon = make_nsqd()
    assert daemon.channel("t", "ch")["paused"] and daemon.channel("later", "ch")["paused"]
    assert daemon.channel("t", "ch")["depth"] == 2


@pytest.mark.parametrize("content", [b"", b"{", b'{"topics":["\xff"]}', b'{"x":' + b"[" * 100_000])
def test_metadata_that_cannot_be_read_refuses_the_start_with_a_sentence(
    data: Path, make_nsqd: MakeNsqd, content: bytes
) -> None:
    (data / "nsqd.dat").write_bytes(content)
    with pytest.raises(StartError) as caught:
        make_nsqd()
    assert f"failed to load metadata - {data}/nsqd.dat cannot be read: " in caught.value.log
    assert "Traceback" not in caught.value.log
    assert (data / "nsqd.dat").read_bytes() == content


def test_channels_in_files_of_windows(data: Path, make_nsqd: MakeNsqd, connect: Connect) -> None:
    write_messages(data, "t;ch", numbered("w", 2))
    assert bodies(consume(connect, make_nsqd(), "t", "ch", 2)) == [b"w0", b"w1"]


def test_nsq_was_used_again_in_between(data: Path, make_nsqd: MakeNsqd, connect: Connect) -> None:
    """What NSQ left comes behind what is here; each channel keeps its place and gets no other's messages."""
    daemon = make_nsqd()
    one, two = connect(daemon).subscribe("t", "one", rdy=1), connect(daemon).subscribe("t", "two")
    connect(daemon).publish("waits", b"old")
    connect(daemon).publish("t", b"old1", b"old2", b"old3")
    one.read_messages(1, finish=True)
    eventually(lambda: daemon.channel("t", "one")["depth"] + daemon.channel("t", "one")["in_flight_count"] == 2)
    requeued = one.read_message()
    one.RDY(0)
    one.REQ(requeued.id, 0)
    eventually(lambda: daemon.channel("t", "one")["requeue_count"] == 1)
    two.close()
    assert daemon.stop() == 0
    write_metadata(data, {"t": {"one": False, "two": True, "three": False}, "waits": {}})
    for name in ("one", "two", "three"):
        write_messages(data, f"t:{name}", [Stored(f"{name} again".encode(), attempts=1)])
    write_messages(data, "t", [Stored(b"topic again")])
    write_messages(data, "waits", [Stored(b"waits again")])
    daemon.start()
    assert daemon.channel("t", "two")["paused"] is True
    daemon.post("/channel/unpause", topic="t", channel="two")
    assert daemon.topic("waits")["depth"] == 2
    expected = {
        "one": {b"old2": 2, b"old3": 1, b"one again": 2, b"topic again": 1},
        "two": {b"old1": 1, b"old2": 1, b"old3": 1, b"two again": 2, b"topic again": 1},
        "three": {b"three again": 2, b"topic again": 1},
    }
    for name, attempts in expected.items():
        messages = consume(connect, daemon, "t", name, len(attempts))
        assert {message.body: message.attempts for message in messages} == attempts
    assert bodies(consume(connect, daemon, "waits", "ch", 2)) == [b"old", b"waits again"]


CRASHING = """\
    #!{python}
    import os, sys
    from nsquark.broker.main import main
    left = [{renames}]
    def crash(event, arguments):
        if event == "os.rename" and {data!r} in str(arguments[0]):
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)
    sys.addaudithook(crash)
    main()
"""


def start_and_crash(data: Path, script: Path, renames: int) -> bool:
    """Starts an nsqd that dies at its n-th rename, as by SIGKILL; False if it started without as many."""
    script.write_text(textwrap.dedent(CRASHING).format(python=sys.executable, renames=renames, data=str(data)))
    command = [sys.executable, str(script), "--tcp-address=127.0.0.1:0", "--http-address=", f"--data-path={data}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "TCP: listening" in line:
                process.kill()
                return False
        assert process.wait() == 9
        return True


def test_a_crash_at_any_point_loses_and_doubles_nothing(
    tmp_path: Path, data: Path, make_nsqd: MakeNsqd, connect: Connect
) -> None:
    """Every step ends in a rename, so dying at each of them tries every state a crash leaves behind."""
    write_messages(data, "t:a", numbered("a", 300, attempts=2))
    write_messages(data, "t:b", numbered("b", 200))
    write_messages(data, "t", numbered("t", 100))
    write_metadata(data, {"t": {"a": False, "b": True}, "n": {"c": True}})
    renames = 0
    while True:
        copy = tmp_path / f"copy{renames}"
        shutil.copytree(data, copy)
        if not start_and_crash(copy, tmp_path / "nsqd.py", renames):
            break
        daemon = make_nsqd(data_path=copy)
        state = {
            topic["topic_name"]: (
                topic["depth"],
                {entry["channel_name"]: (entry["depth"], entry["paused"]) for entry in topic["channels"]},
            )
            for topic in daemon.stats()["topics"]
        }
        assert state == {
            "t": (0, {"a": (400, False), "b": (300, True)}),
            "n": (0, {"c": (0, True)}),
        }, f"after a crash at rename {renames}"
        assert left_in(copy) == {"nsqd.dat"}
        if renames % 4 == 0:
            messages = consume(connect, daemon, "t", "a", 400)
            assert sorted(bodies(messages)) == sorted(bodies(numbered("a", 300) + numbered("t", 100)))
            assert sum(message.attempts for message in messages) == 300 * 3 + 100
        daemon.kill()
        renames += 1
    assert renames > 10


def test_a_damaged_plan_costs_no_message_and_no_start(
    tmp_path: Path, data: Path, make_nsqd: MakeNsqd, connect: Connect
) -> None:
    """The plan tells the start after a crash which of NSQ's files are taken over already."""
    write_messages(data, "t:a", numbered("a", 300))
    write_messages(data, "t", numbered("t", 100))
    write_metadata(data, {"t": {"a": False}})
    plan = Path("nsquark/takeover/ready.t/plan.json")
    for renames in range(100):
        crashed = tmp_path / f"crashed{renames}"
        shutil.copytree(data, crashed)
        assert start_and_crash(crashed, tmp_path / "nsqd.py", renames)
        if (crashed / plan).exists():
            break
    sound = (crashed / plan).read_bytes()
    damages = {
        "a brace": flipped(sound, 0),
        "the name of a field": flipped(sound, sound.index(b"files")),
        "the name of a file": flipped(sound, sound.index(b"diskqueue")),
        "a number": flipped(sound, sound.index(b"[") + 1),
        "a number beyond 64 bits": sound.replace(b",", b"," + b"9" * 20, 1),
        "zeros": bytes(len(sound)),
        "nothing": b"",
    }
    for number, (what, damaged) in enumerate(damages.items()):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(crashed, copy)
        (copy / plan).write_bytes(damaged)
        daemon = make_nsqd(data_path=copy)
        assert f"{plan} is damaged" in daemon.log, what
        got = consume(connect, daemon, "t", "a", daemon.channel("t", "a")["depth"])
        assert set(bodies(got)) == set(bodies(numbered("a", 300) + numbered("t", 100))), what
        assert left_in(copy) == {"nsqd.dat"}
        assert daemon.stop() == 0


def test_a_log_that_the_power_took_is_made_again(tmp_path: Path, data: Path, make_nsqd: MakeNsqd) -> None:
    """It is renamed from one directory into another: a file system may keep that in the first one alone."""
    write_messages(data, "t:a", numbered("a", 300))
    write_metadata(data, {"t": {"a": False}})
    for renames in range(100):
        crashed = tmp_path / f"crashed{renames}"
        shutil.copytree(data, crashed)
        assert start_and_crash(crashed, tmp_path / "nsqd.py", renames)
        if (crashed / "nsquark/takeover/ready.t/plan.json").exists():
            break
    (log,) = crashed.glob("nsquark/takeover/ready.t/*.log")
    log.unlink()
    daemon = make_nsqd(data_path=crashed)
    assert f"{log.name} is gone" in daemon.log
    assert daemon.channel("t", "a")["depth"] == 300
    assert left_in(crashed) == {"nsqd.dat"}


def flipped(content: bytes, at: int) -> bytes:
    """Flips the lowest bit of the byte at an offset."""
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    ("calls", "files"),
    [
        ("write", "nsquark/takeover/*.log"),
        ("sync", "nsquark/takeover/*"),
        ("create", "nsquark/takeover/*/plan.json*"),
        ("rename", "nsquark/topics/*"),
        ("mkdir", "nsq-before-nsquark"),
        ("write", "nsq-before-nsquark/nsqd.dat*"),
    ],
)
def test_a_disk_that_gets_full_refuses_the_start_and_loses_nothing(
    tmp_path: Path, data: Path, connect: Connect, calls: str, files: str
) -> None:
    write_messages(data, "t:a", numbered("a", 300, attempts=2))
    write_messages(data, "t:b", numbered("b", 200))
    write_messages(data, "t", numbered("t", 100))
    write_metadata(data, {"t": {"a": False, "b": True}, "n": {"c": True}})
    shim = Shim(tmp_path, data)
    shim.set_rules(Rule(calls, files, errno.ENOSPC))
    daemon = Nsqd(data, environment=shim.environment)
    for _ in range(2):
        with pytest.raises(StartError) as refused:
            daemon.start()
        assert "failed to take over the data of NSQ - " in refused.value.log
        assert "nothing is lost: start again when this is mended" in refused.value.log
        assert "Traceback" not in refused.value.log
    assert shim.fired()
    shim.set_rules()
    with daemon:
        shown = {name: daemon.channel("t", name) for name in ("a", "b")}
        assert {name: (one["depth"], one["paused"]) for name, one in shown.items()} == {
            "a": (400, False),
            "b": (300, True),
        }
        assert daemon.channel("n", "c")["paused"] is True
        messages = consume(connect, daemon, "t", "a", 400)
        assert sorted(bodies(messages)) == sorted(bodies(numbered("a", 300) + numbered("t", 100)))
        assert left_in(data) == {"nsqd.dat"}


@pytest.mark.skipif("PEER_NSQD" not in os.environ, reason="PEER_NSQD names no nsqd of NSQ")
def test_what_an_nsqd_of_nsq_left(data: Path, make_nsqd: MakeNsqd, connect: Connect) -> None:
    """Messages were in memory, on disk, in flight and deferred when it stopped; some topics and channels were
    paused.
    """
    with Nsqd(data, "--mem-queue-size=100", program=os.environ["PEER_NSQD"]) as peer:
        publisher = connect(peer)
        publisher.publish("alone", *[b"%d" % number for number in range(500)])
        for channel in ("ch", "stopped"):
            connect(peer).subscribe("t", channel)
        peer.post("/channel/pause", topic="t", channel="stopped")
        connect(peer).subscribe("held", "ch")
        peer.post("/topic/pause", topic="held")
        publisher.publish("held", b"held")
        publisher.publish("t", *[b"%d" % number for number in range(1000)])
        publisher.DPUB("t", 600_000, b"deferred")
        publisher.expect_ok()
        eventually(lambda: peer.channel("t", "ch")["depth"] == peer.channel("t", "stopped")["depth"] == 1000)
        consumer = connect(peer).subscribe("t", "ch", rdy=50)
        received = consumer.read_messages(50)
        consumer.RDY(0)
        for message in received[:20]:
            consumer.FIN(message.id)
        eventually(lambda: peer.channel("t", "ch")["in_flight_count"] == 30)
        finished = set(bodies(received[:20]))
        in_flight = {message.body: message.timestamp_ns for message in received[20:]}
        assert peer.stop() == 0
    daemon = make_nsqd()
    expected = {b"%d" % number for number in range(1000)} | {b"deferred"}
    messages = {message.body: message for message in consume(connect, daemon, "t", "ch", 981)}
    assert set(messages) == expected - finished
    assert {body for body, message in messages.items() if message.attempts == 2} == set(in_flight)
    assert {body: messages[body].timestamp_ns for body in in_flight} == in_flight
    assert daemon.channel("t", "stopped")["paused"] is True
    daemon.post("/channel/unpause", topic="t", channel="stopped")
    assert set(bodies(consume(connect, daemon, "t", "stopped", 1001))) == expected
    assert (daemon.topic("held")["paused"], daemon.topic("held")["depth"]) == (True, 1)
    assert len(set(bodies(consume(connect, daemon, "alone", "ch", 500)))) == 500
