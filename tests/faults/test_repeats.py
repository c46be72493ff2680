"""Checks what comes again after kill -9 although it was finished, while other messages are held."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.drain import drain
from harness import Nsqd, Wire
from harness.wire import RESPONSE, Message

pytestmark = pytest.mark.ours

MESSAGES = 40_000
BATCH = 2_000
RDY = 2_500
NOTE_MS = 200
"""What is finished above a held message is noted more often than this."""
NOTES = 3
"""After so many notes all is noted that was finished before."""
NO_HEARTBEATS, RARE_HEARTBEATS = -1, 60_000
REPEATED_MAX = 2_500


def consume(daemon: Nsqd, is_finished: Callable[[int], bool]) -> set[bytes]:
    """Publishes everything, finishes what is to be finished, and has that confirmed; the bodies of it."""
    finished: set[bytes] = set()
    with daemon.connect() as publisher, daemon.connect() as consumer:
        publisher.identify(heartbeat_interval=NO_HEARTBEATS)
        consumer.subscribe("t", rdy=RDY, msg_timeout=600_000, heartbeat_interval=RARE_HEARTBEATS)
        for start in range(0, MESSAGES, BATCH):
            publisher.publish("t", *[b"%d" % number for number in range(start, start + BATCH)])
            done = []
            for _ in range(BATCH):
                message = consumer.read_message()
                if is_finished(int(message.body)):
                    done.append(message)
            consumer.send(b"".join(b"FIN %b\n" % message.id for message in done))
            finished |= {message.body for message in done}
        confirm(consumer)
        wait_for_notes(daemon)
        daemon.kill()
    return finished


def confirm(consumer: Wire) -> None:
    """Waits for the answer to a later command: what was sent before it is carried out, and noted."""
    consumer.PUB("barrier#ephemeral", b"x")
    while (frame := consumer.read_frame()).kind != RESPONSE:
        assert Message.parse(frame.data).body


def wait_for_notes(daemon: Nsqd) -> None:
    """Waits until nsqd has made its notes, which it makes by its own clock: it may have stood still for a while."""
    with daemon.connect() as wire:
        wire.subscribe("clock", rdy=1)
        for _ in range(NOTES):
            wire.DPUB("clock", NOTE_MS, b"x")
            wire.expect_ok()
            wire.FIN(wire.read_message().id)


@pytest.mark.parametrize(
    "is_finished",
    [
        pytest.param(lambda number: number > 0, id="one message is held"),
        pytest.param(lambda number: number % 1000 > 0, id="one of a thousand is held"),
        pytest.param(lambda number: number % 100 > 0, id="one of a hundred is held"),
    ],
)
def test_finished_above_a_held_message_stays_finished(
    make_nsqd: Callable[..., Nsqd], is_finished: Callable[[int], bool]
) -> None:
    daemon = make_nsqd()
    finished = consume(daemon, is_finished)
    daemon.start()
    came = {received.body for received in drain(daemon, [("t", "ch")])["t", "ch"]}
    assert not {b"%d" % number for number in range(MESSAGES)} - finished - came, "lost"
    repeated = len(finished & came)
    assert repeated <= REPEATED_MAX, f"{repeated} of {len(finished)} finished messages came again"


def test_notes_of_what_is_finished_do_not_pile_up(make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> None:
    """While messages are finished about as they come there is nothing to note."""
    daemon = make_nsqd()
    with daemon.connect() as publisher, daemon.connect() as consumer:
        consumer.subscribe("t", rdy=RDY)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            publisher.publish("t", *[b"x"] * 100)
            messages = consumer.read_messages(100)
            consumer.send(b"".join(b"FIN %b\n" % message.id for message in reversed(messages)))
        confirm(consumer)
    assert not list((tmp_path / "data").rglob("*.journal"))


@pytest.mark.parametrize("crash", [False, True])
def test_a_small_window_gets_past_all_that_is_finished(make_nsqd: Callable[..., Nsqd], crash: bool) -> None:
    """However many messages a start knows to be finished, the next new one is found at once."""
    daemon = make_nsqd()
    with daemon.connect() as consumer:
        consumer.publish("t", *[b"%d" % number for number in range(RDY)])
        consumer.subscribe("t", rdy=RDY, msg_timeout=600_000)
        for message in consumer.read_messages(RDY)[1:]:
            consumer.FIN(message.id)
        confirm(consumer)
        wait_for_notes(daemon)
    daemon.restart(crash=crash)
    with daemon.connect() as consumer:
        consumer.publish("t", b"new")
        consumer.subscribe("t", rdy=1)
        assert {message.body for message in consumer.read_messages(2, finish=True)} == {b"0", b"new"}
        confirm(consumer)
    assert "INTERNAL" not in daemon.log
