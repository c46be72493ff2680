"""Heartbeats come as agreed, and clients that say nothing are cut off."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator

import pytest

from harness import ClosedError, Frame, Nsqd, Wire, body_of
from harness.wire import HEARTBEAT, MESSAGE, RESPONSE

BEAT = Frame(RESPONSE, HEARTBEAT)

BUSY_MACHINE_S = 20.0
"""What is due after two or three seconds comes within this; the default interval is 30 s."""


def _frames_until_closed(client: Wire) -> Iterator[Frame]:
    with contextlib.suppress(ClosedError):
        while True:
            yield client.read_frame()


def _subscribe(client: Wire, topic: str, interval_ms: int, more: bytes = b"") -> None:
    """Sends IDENTIFY, SUB and more together, so that nsqd has answered all before the first heartbeat is due."""
    body = b'{"heartbeat_interval":%d}' % interval_ms
    client.send(b"IDENTIFY\n" + body_of(body) + f"SUB {topic} ch\n".encode() + more)
    client.expect_ok(2)


class Clock:
    """Tells whether a client that was closed had once been silent for so long that it was right to close it: nsqd
    cannot know that this process was held up.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._last_s, self._longest_s = time.monotonic(), 0.0

    def says_something(self) -> None:
        """Is to be called before the client sends."""
        now_s = time.monotonic()
        self._last_s, self._longest_s = now_s, max(self._longest_s, now_s - self._last_s)

    def was_too_slow(self) -> bool:
        self.says_something()
        return self._longest_s >= self._patience_s


TRIES = 10
"""Machines hold a process up for two seconds now and then, but not always."""


def test_one_heartbeat_per_interval_while_the_client_answers(connect: Callable[..., Wire]) -> None:
    for _ in range(TRIES):
        client, start, clock = connect(), time.monotonic(), Clock(1.9)
        try:
            client.identify(heartbeat_interval=1000)
            for _ in range(3):
                assert client.read_frame() == BEAT
                clock.says_something()
                client.NOP()
        except (ClosedError, ConnectionError):
            if not clock.was_too_slow():
                raise
        else:
            break
    else:
        pytest.fail("held up each time")
    elapsed = time.monotonic() - start
    assert 2.7 < elapsed < BUSY_MACHINE_S


def test_a_silent_client_is_closed_after_two_intervals(connect: Callable[..., Wire], topic: str) -> None:
    for number in range(TRIES):
        silent, talking = connect(), connect()
        start, clock = time.monotonic(), Clock(1.9)
        try:
            for client in (silent, talking):
                _subscribe(client, f"{topic}_{number}", 1000)
            assert silent.read_frame() == BEAT
            assert talking.read_frame() == BEAT
            clock.says_something()
            talking.NOP()
            beats = list(_frames_until_closed(silent))
            assert 1.8 < time.monotonic() - start < BUSY_MACHINE_S
            assert beats in ([], [BEAT])
            assert talking.read_frame() == BEAT
        except (ClosedError, ConnectionError):
            if not clock.was_too_slow():
                raise
        else:
            return
    pytest.fail("held up each time")


def test_a_body_that_never_comes_is_not_waited_for_beyond_the_deadline(client: Wire) -> None:
    start = time.monotonic()
    client.identify(heartbeat_interval=1000)
    client.send(b"PUB t\n\0\0\0\x05ab")
    frames = list(_frames_until_closed(client))
    assert 1.5 < time.monotonic() - start < BUSY_MACHINE_S
    assert all(frame == BEAT or frame.data.startswith(b"E_BAD_MESSAGE") for frame in frames)


def test_heartbeats_come_between_messages(client: Wire, topic: str) -> None:
    """The client's own commands prove that it lives; nsqd's heartbeats come regardless of traffic."""
    start = time.monotonic()
    _subscribe(client, topic, 1000, f"RDY 1\nPUB {topic}\n".encode() + body_of(b"x"))
    frames: list[Frame] = []
    while not frames or frames[-1] != BEAT:
        assert time.monotonic() - start < BUSY_MACHINE_S
        frames.append(client.read_frame())
        if frames[-1].kind == MESSAGE:
            time.sleep(0.02)
            # Closed for its silence if this process was held up; the heartbeats from before that are still to be read.
            with contextlib.suppress(ConnectionError):
                client.FIN(frames[-1].data[10:26])
                client.PUB(topic, b"x")
    assert time.monotonic() - start > 0.9
    assert any(frame.kind == MESSAGE for frame in frames)


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
    # All together, so that nsqd has answered before the first heartbeat is due.
    first = b'{"client_id":"first","heartbeat_interval":3000,"msg_timeout":2000}'
    second = b'{"client_id":"second","heartbeat_interval":30000,"msg_timeout":3000,"feature_negotiation":true}'
    identify = b"IDENTIFY\n" + body_of(first) + b"IDENTIFY\n" + body_of(second)
    client.send(identify + f"SUB {topic} ch\n".encode())
    client.expect_ok()
    assert json.loads(client.read_frame().data)["msg_timeout"] == 3000
    client.expect_ok()
    assert nsqd.channel(topic)["clients"][0]["client_id"] == "second"
    assert client.read_frame() == BEAT


def test_a_client_in_the_closing_state_still_gets_heartbeats(client: Wire, topic: str) -> None:
    body = body_of(b'{"heartbeat_interval":3000}')
    client.send(b"IDENTIFY\n" + body + f"SUB {topic} ch\nCLS\n".encode())
    client.expect_ok(2)
    client.expect("CLOSE_WAIT")
    assert client.read_frame() == BEAT
