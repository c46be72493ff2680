"""Checks a stop on a disk that fails: what can be closed well is, and the rest is as after a crash."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.shim import Rule, Shim
from harness import Nsqd, Wire, eventually

pytestmark = pytest.mark.ours

Make = Callable[..., Nsqd]
Connect = Callable[..., Wire]

TOPICS = ("first", "second", "third")
CHANNELS = ("early", "late")


@pytest.mark.parametrize("failing", ["t.second/*", "t.second/c.early.journal*"], ids=["topic", "channel"])
def test_what_cannot_be_closed_keeps_nothing_else_from_being_closed(
    make_nsqd: Make, connect: Connect, tmp_path: Path, failing: str
) -> None:
    """A clean stop shows in the attempts: only that notes what was in flight."""
    daemon = make_nsqd()
    assert daemon.stop() == 0
    shim = Shim(tmp_path, daemon.data_path)
    daemon.environment = shim.environment
    daemon.start()
    for topic in TOPICS:
        for channel in CHANNELS:
            connect(daemon).subscribe(topic, channel, rdy=1)
        connect(daemon).publish(topic, b"in flight", b"waits")
    for topic in TOPICS:
        for channel in CHANNELS:
            eventually(lambda topic=topic, channel=channel: daemon.channel(topic, channel)["in_flight_count"] == 1)
    shim.set_rules(Rule("change", f"*/{failing}", errno.EIO))
    assert daemon.stop() == 0, daemon.log
    assert "TOPIC(second): failed to close" in daemon.log
    assert "Traceback" not in daemon.log
    shim.set_rules()
    daemon.start()
    for topic in TOPICS:
        for channel in CHANNELS:
            consumer = connect(daemon).subscribe(topic, channel, rdy=2)
            attempts = {message.body: message.attempts for message in consumer.read_messages(2)}
            assert attempts[b"waits"] == 1
            if topic != "second" or (channel == "late" and "journal" in failing):
                assert attempts[b"in flight"] == 2, (topic, channel)
