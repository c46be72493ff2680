"""Sets the clock wrong, before a restart, after it or in between: delays hold, and message ids stay in their range."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults.shim import Shim
from harness import Nsqd, Wire
from harness.wire import MESSAGE

pytestmark = pytest.mark.ours

Make = Callable[..., Nsqd]
Connect = Callable[..., Wire]

HOUR_S = 3600.0
CENTURY_S = 100 * 365.25 * 86_400
DELAY_MS = 2000
LONG_S = 60.0


@pytest.fixture
def shim(make_nsqd: Make, tmp_path: Path) -> tuple[Shim, Nsqd]:
    data_path = tmp_path / "data"
    data_path.mkdir()
    shim = Shim(tmp_path, data_path)
    daemon = make_nsqd()
    daemon.environment = shim.environment
    daemon.kill()
    return shim, daemon


def _defer_both(daemon: Nsqd, connect: Connect, topic: str = "t") -> float:
    """Requeues a message with a delay and publishes one with it; returns when."""
    publisher = connect(daemon)
    consumer = connect(daemon).subscribe(topic, rdy=1)
    publisher.publish(topic, b"requeued")
    message = consumer.read_message()
    consumer.RDY(0)
    begun = time.monotonic()
    consumer.REQ(message.id, DELAY_MS)
    publisher.DPUB(topic, DELAY_MS, b"deferred")
    publisher.expect("OK")
    for wire in (consumer, publisher):  # the turns that noted both are over
        wire.PUB("settled#ephemeral", b"x")
        while wire.read_frame().kind == MESSAGE:
            pass
    return begun


@pytest.mark.parametrize(
    ("before_s", "after_s", "crash", "reboot"),
    [
        (0.0, -HOUR_S, False, False),
        (0.0, -HOUR_S, True, True),
        (0.0, HOUR_S, True, False),
        (HOUR_S, 0.0, True, False),
        (HOUR_S, 0.0, False, True),
        (CENTURY_S, 0.0, True, True),
    ],
)
def test_no_delay_becomes_longer_over_a_restart(
    shim: tuple[Shim, Nsqd], connect: Connect, before_s: float, after_s: float, crash: bool, reboot: bool
) -> None:
    control, daemon = shim
    control.set_clock(before_s)
    daemon.start()
    begun = _defer_both(daemon, connect)
    if crash:
        daemon.kill()
    else:
        assert daemon.stop() == 0
    if reboot:
        (daemon.data_path / "nsquark" / "clock").unlink()
    control.set_clock(after_s)
    daemon.start()
    consumer = connect(daemon).subscribe("t", rdy=10)
    bodies = {message.body for message in consumer.read_messages(2)}
    assert bodies == {b"requeued", b"deferred"}
    assert (time.monotonic() - begun) * 1000 >= DELAY_MS - 5, "nor is it cut short"


@pytest.mark.parametrize("offset_s", [-HOUR_S, HOUR_S, CENTURY_S])
def test_no_delay_changes_when_the_clock_is_set(shim: tuple[Shim, Nsqd], connect: Connect, offset_s: float) -> None:
    control, daemon = shim
    daemon.start()
    begun = _defer_both(daemon, connect)
    control.set_clock(offset_s)
    consumer = connect(daemon).subscribe("t", rdy=10)
    consumer.read_messages(2)
    assert (time.monotonic() - begun) * 1000 >= DELAY_MS - 5
    begun = _defer_both(daemon, connect, "other")
    control.set_clock(0)
    connect(daemon).subscribe("other", rdy=10).read_messages(2)
    assert (time.monotonic() - begun) * 1000 >= DELAY_MS - 5


@pytest.mark.parametrize("offset_s", [0.9 * CENTURY_S, 2 * CENTURY_S, 2.2 * CENTURY_S])
def test_messages_can_be_finished_after_a_start_far_in_the_future(
    shim: tuple[Shim, Nsqd], connect: Connect, offset_s: float
) -> None:
    control, daemon = shim
    control.set_clock(offset_s)
    daemon.start()
    assert "which is not believed" in daemon.log
    for number in range(3):
        body = b"%d" % number
        connect(daemon).publish("t", body)
        consumer = connect(daemon).subscribe("t", rdy=1)
        message = consumer.read_message()
        assert message.body == body
        consumer.FIN(message.id)
        consumer.assert_usable()
        control.set_clock(0)
        daemon.restart(crash=number == 1)
    assert daemon.channel("t")["depth"] == 0


def test_a_channel_read_by_range_outlives_a_long_stop_and_a_clock_that_is_set(
    shim: tuple[Shim, Nsqd], connect: Connect
) -> None:
    control, daemon = shim
    daemon.start()
    connect(daemon).publish("t", b"one", b"two")
    query: dict[str, Any] = {"topic": "t", "channel": "spark", "owner": "query", "seq": 0, "ttl": 30}
    assert daemon.post("/channel/commit", **query).status == 200
    control.set_clock(HOUR_S)
    _let_it_collect(daemon)
    assert daemon.channel("t", "spark")["depth"] == 2
    assert daemon.stop() == 0
    control.set_clock(2 * HOUR_S)
    daemon.start()
    _let_it_collect(daemon)
    assert daemon.channel("t", "spark")["depth"] == 2


def _let_it_collect(daemon: Nsqd) -> None:
    """Waits until nsqd has looked for what can go: a channel whose owner was there only for a moment is gone."""
    query: dict[str, Any] = {"topic": "t", "channel": "mark", "owner": "nobody", "seq": 0, "ttl": 0.1}
    assert daemon.post("/channel/commit", **query).status == 200
    end = time.monotonic() + LONG_S
    while any(channel["channel_name"] == "mark" for channel in daemon.topic("t")["channels"]):
        assert time.monotonic() < end
        time.sleep(0.05)
