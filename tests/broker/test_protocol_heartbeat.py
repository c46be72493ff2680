"""Heartbeats come as agreed, and clients that say nothing are cut off."""

import contextlib
import time
from collections.abc import Callable, Iterator

from harness import ClosedError, Frame, Nsqd, Wire
from harness.wire import HEARTBEAT, MESSAGE, RESPONSE

BEAT = Frame(RESPONSE, HEARTBEAT)

BUSY_MACHINE_S = 20.0
"""What is due after two or three seconds comes within this; the default interval is 30 s."""


def _frames_until_closed(client: Wire) -> Iterator[Frame]:
    with contextlib.suppress(ClosedError):
        while True:
            yield client.read_frame()


def test_one_heartbeat_per_interval_while_the_client_answers(client: Wire) -> None:
    start = time.monotonic()
    client.identify(heartbeat_interval=1000)
    for _ in range(3):
        assert client.read_frame() == BEAT
        client.NOP()
    elapsed = time.monotonic() - start
    assert 2.7 < elapsed < BUSY_MACHINE_S


def test_a_silent_client_is_closed_after_two_intervals(connect: Callable[..., Wire], topic: str) -> None:
    silent, talking = connect(), connect()
    start = time.monotonic()
    for client in (silent, talking):
        client.subscribe(topic, heartbeat_interval=1000)
    assert silent.read_frame() == BEAT
    assert talking.read_frame() == BEAT
    talking.NOP()
    beats = list(_frames_until_closed(silent))
    assert 1.8 < time.monotonic() - start < BUSY_MACHINE_S
    assert beats in ([], [BEAT])
    assert talking.read_frame() == BEAT


def test_a_body_that_never_comes_is_not_waited_for_beyond_the_deadline(client: Wire) -> None:
    start = time.monotonic()
    client.identify(heartbeat_interval=1000)
    client.send(b"PUB t\n\0\0\0\x05ab")
    frames = list(_frames_until_closed(client))
    assert 1.5 < time.monotonic() - start < BUSY_MACHINE_S
    assert all(frame == BEAT or frame.data.startswith(b"E_BAD_MESSAGE") for frame in frames)


def test_heartbeats_come_between_messages(client: Wire, topic: str) -> None:
    """The client's own commands prove that it lives; nsqd's heartbeats come regardless of traffic."""
    client.subscribe(topic, rdy=1, heartbeat_interval=1000)
    kinds = []
    deadline = time.monotonic() + 1.6
    client.PUB(topic, b"x")
    while time.monotonic() < deadline:
        frame = client.read_frame()
        kinds.append(frame)
        if frame.kind == MESSAGE:
            client.FIN(frame.data[10:26])
            time.sleep(0.02)
            client.PUB(topic, b"x")
    assert kinds.count(BEAT) in (1, 2), "two if this process was held up"


def test_no_heartbeats_when_disabled(client: Wire) -> None:
    client.identify(heartbeat_interval=-1)
    client.expect_silence(2.3)
    client.assert_usable()


def test_sub_needs_heartbeats(client: Wire, topic: str) -> None:
    client.identify(heartbeat_interval=-1)
    client.SUB(topic, "ch")
    client.expect_error("E_INVALID cannot SUB with heartbeats disabled")


def test_heartbeats_are_checked_before_the_parameters_of_sub(client: Wire) -> None:
    client.identify(heartbeat_interval=-1)
    client.command("SUB")
    client.expect_error("E_INVALID cannot SUB with heartbeats disabled")


def test_a_second_identify_changes_the_metadata_but_not_the_heartbeats(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.identify(client_id="first", heartbeat_interval=3000, msg_timeout=2000)
    answer = client.identify(client_id="second", heartbeat_interval=30000, msg_timeout=3000)
    assert answer["msg_timeout"] == 3000
    client.SUB(topic, "ch")
    client.expect_ok()
    assert nsqd.channel(topic)["clients"][0]["client_id"] == "second"
    assert client.read_frame() == BEAT


def test_a_client_in_the_closing_state_still_gets_heartbeats(client: Wire, topic: str) -> None:
    client.subscribe(topic, heartbeat_interval=3000)
    client.CLS()
    client.expect("CLOSE_WAIT")
    assert client.read_frame() == BEAT
