"""Checks that a channel which is deleted while the disk fails, or nsqd is killed, harms neither its topic nor the
channels that come after it.
"""

import errno
import http.client
from collections.abc import Callable

import pytest

from faults.data_files import topic_directory
from faults.shim import KILL, Rule, Shim
from harness import Nsqd, Wire, eventually

pytestmark = pytest.mark.ours

Connect = Callable[..., Wire]

MUCH_LATER_MS = 600_000
RECORD_BYTES = 32


def _journal_two_messages(daemon: Nsqd, connect: Connect) -> None:
    """Lets channel `c` requeue a message for long and finish the one behind it; its journal tells both."""
    consumer = connect(daemon).subscribe("t", "c", rdy=2)
    connect(daemon).publish("t", b"1", b"2")
    first, second = consumer.read_messages(2)
    consumer.REQ(first.id, MUCH_LATER_MS)
    consumer.FIN(second.id)
    journal = topic_directory(daemon.data_path, "t") / "c.c.journal"
    eventually(lambda: journal.exists() and journal.stat().st_size >= 2 * RECORD_BYTES)


def _refuse_cursors(daemon: Nsqd, shim: Shim) -> None:
    """Lets the cursor file fail to sync: nothing is written to it until it has been written anew, which fails too."""
    shim.set_rules(Rule("sync", "*/cursors", errno.EIO, times=1), Rule("create", "*/cursors.anew", errno.EIO))
    daemon.post("/topic/pause", topic="t")
    daemon.post("/topic/unpause", topic="t")
    daemon.wait_for_log("could not be written anew")


def _channels(daemon: Nsqd) -> set[str]:
    return {channel["channel_name"] for channel in daemon.topic("t")["channels"]}


@pytest.mark.parametrize("fault", ["kill -9", "EIO"])
def test_a_new_channel_knows_nothing_of_one_that_had_its_name(
    daemon: Nsqd, shim: Shim, connect: Connect, fault: str
) -> None:
    _journal_two_messages(daemon, connect)
    shim.set_rules(Rule("unlink", "*.journal", KILL if fault == "kill -9" else errno.EIO, times=1))
    try:
        daemon.post("/channel/delete", topic="t", channel="c")
    except (OSError, http.client.HTTPException):
        assert fault == "kill -9"
    assert shim.fired() == 1
    shim.set_rules()
    if fault == "kill -9":
        daemon.restart(crash=True)
    assert _channels(daemon) == set()
    assert daemon.post("/channel/create", topic="t", channel="c", start="oldest").status == 200
    assert daemon.channel("t", "c")["depth"] == 2
    consumer = connect(daemon).subscribe("t", "c", rdy=2)
    assert [(message.body, message.attempts) for message in consumer.read_messages(2)] == [(b"1", 1), (b"2", 1)]


def test_a_topic_whose_last_channel_left_a_file_keeps_its_messages(daemon: Nsqd, shim: Shim, connect: Connect) -> None:
    _journal_two_messages(daemon, connect)
    shim.set_rules(Rule("unlink", "*.journal", errno.EIO, times=1))
    daemon.post("/channel/delete", topic="t", channel="c")
    assert shim.fired() == 1
    connect(daemon).publish("t", b"3")
    assert daemon.topic("t")["depth"] == 1
    assert connect(daemon).subscribe("t", "next", rdy=1).read_message().body == b"3"


def test_a_topic_without_channels_keeps_its_messages_although_its_state_could_not_be_stored(
    daemon: Nsqd, shim: Shim, connect: Connect
) -> None:
    daemon.post("/topic/create", topic="t")
    daemon.post("/channel/create", topic="t", channel="c")
    _refuse_cursors(daemon, shim)
    daemon.post("/channel/delete", topic="t", channel="c")
    shim.set_rules()
    daemon.wait_for_log("written anew after a failed sync")
    eventually(lambda: daemon.get("/ping").text == "OK")
    connect(daemon).publish("t", b"kept")
    daemon.restart(crash=True)
    assert _channels(daemon) == set()
    assert connect(daemon).subscribe("t", "next", rdy=1).read_message().body == b"kept"


def test_a_consumer_that_goes_while_its_channel_cannot_be_deleted_durably_is_forgotten(
    daemon: Nsqd, shim: Shim, connect: Connect
) -> None:
    consumer = connect(daemon).subscribe("t", "c#ephemeral")
    _refuse_cursors(daemon, shim)
    consumer.close()
    eventually(lambda: 'nsqd_connections{kind="tcp"} 0\n' in daemon.get("/metrics").text)
    assert _channels(daemon) == set()


def test_a_slot_is_freed_once(daemon: Nsqd, shim: Shim, connect: Connect) -> None:
    """A slot was free when the rest of freeing it failed: the next channel has it, and must not lose it."""
    daemon.post("/topic/create", topic="t")
    daemon.post("/channel/create", topic="t", channel="first")
    shim.set_rules(Rule("unlink", "*/cursors.*", errno.EIO, times=1))
    daemon.post("/channel/delete", topic="t", channel="first")
    assert shim.fired() == 1
    shim.set_rules()
    daemon.post("/channel/create", topic="t", channel="second")
    daemon.restart()
    assert _channels(daemon) == {"second"}
