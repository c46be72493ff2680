"""Checks that who does not read what nsqd answers is not listened to, and is cut off in the end."""

import contextlib
import select
import socket
import time
from collections.abc import Callable

import pytest

from harness import ClosedError, Frame, Nsqd, Wire, body_of, eventually, mpub_body
from harness.wire import HEARTBEAT, RESPONSE

pytestmark = pytest.mark.ours

PATIENCE_S = 5.0
"""For so long nsqd waits for a client to read, if it wants no heartbeats."""
NSQD_FLAGS = (f"--max-heartbeat-interval={PATIENCE_S:g}s",)
NOT_TAKEN_S = 1.0
"""A socket that takes nothing for so long is not read."""
SENT_BYTES_MAX = 64 << 20
IDENTIFY = b"IDENTIFY\n" + body_of(b'{"feature_negotiation":true,"heartbeat_interval":-1}')

COMMANDS = {
    "PUB": b"PUB unread#ephemeral\n" + body_of(b"x"),
    "MPUB": b"MPUB unread#ephemeral\n" + mpub_body([b"x"]),
    "IDENTIFY": IDENTIFY,
}


def _send_without_reading(connection: socket.socket, command: bytes) -> int:
    """Sends until nothing more is taken; returns how many bytes were."""
    data, sent = memoryview(command * (1 + (1 << 18) // len(command))), 0
    connection.setblocking(False)
    while sent < SENT_BYTES_MAX and select.select([], [connection], [], NOT_TAKEN_S)[1]:
        sent += connection.send(data[sent % len(command) :])
    return sent


def _read_late(connect: Callable[..., Wire], command: bytes) -> tuple[Wire, int]:
    """Sends a command until no more is taken, and only then reads the answers; returns how much of the last one is
    still to be sent. Begins anew where this process was held up for so long that it was rightly cut off.
    """
    for _ in range(10):
        client = connect()
        client.identify(heartbeat_interval=-1)
        start = time.monotonic()
        try:
            sent = _send_without_reading(client.socket, command)
            assert sent < SENT_BYTES_MAX
            for _ in range(sent // len(command)):
                assert client.read_frame().kind == RESPONSE
        except (ClosedError, ConnectionError):
            if time.monotonic() - start < PATIENCE_S:
                raise
        else:
            return client, -sent % len(command)
    raise AssertionError("held up each time")


@pytest.mark.parametrize("word", COMMANDS)
def test_commands_wait_while_their_answers_are_not_read(connect: Callable[..., Wire], word: str) -> None:
    command = COMMANDS[word]
    client, begun = _read_late(connect, command)
    client.send(command[-begun:] if begun else b"")
    assert not begun or client.read_frame().kind == RESPONSE
    client.assert_usable()


def test_errors_are_answers_too(client: Wire, topic: str) -> None:
    client.subscribe(topic)
    assert _send_without_reading(client.socket, b"FIN 0123456789abcdef\n") < SENT_BYTES_MAX


def test_a_client_that_does_not_read_is_cut_off_though_it_wants_no_heartbeats(nsqd: Nsqd, client: Wire) -> None:
    client.identify(heartbeat_interval=-1)
    _send_without_reading(client.socket, IDENTIFY)
    nsqd.wait_for_log("answers and messages are not read, closing")


def test_a_client_that_reads_late_is_not_cut_off(connect: Callable[..., Wire]) -> None:
    client, begun = _read_late(connect, IDENTIFY)
    client.expect_silence(PATIENCE_S + 1)
    client.send(IDENTIFY[-begun:] if begun else IDENTIFY)
    client.read_frame()
    client.assert_usable()


def test_a_consumer_that_does_not_read_may_still_finish(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], topic: str
) -> None:
    """Its messages fill the socket; that must not keep it from answering those that it has."""
    nsqd = make_nsqd()
    client = connect(nsqd)
    client.subscribe(topic, rdy=200, heartbeat_interval=60_000)  # it is not cut off, however long this takes
    with nsqd.connect() as publisher:
        publisher.identify(heartbeat_interval=-1)
        for _ in range(100):
            publisher.publish(topic, b"x" * 200_000)
    first = client.read_message()
    eventually(lambda: nsqd.channel(topic)["in_flight_count"] > 1)
    client.NOP()
    client.FIN(first.id)
    eventually(lambda: nsqd.channel(topic)["clients"][0]["finish_count"] == 1)


def test_heartbeats_that_are_switched_on_later_do_come(connect: Callable[..., Wire], topic: str) -> None:
    client = connect()
    client.identify(heartbeat_interval=-1)
    # Together, so that nsqd has answered both before the first heartbeat is due.
    client.send(b"IDENTIFY\n" + body_of(b'{"heartbeat_interval":3000}') + f"SUB {topic} ch\n".encode())
    client.expect_ok(2)
    assert client.read_frame() == Frame(RESPONSE, HEARTBEAT)
    with contextlib.suppress(ClosedError):
        while True:  # it is silent, so it is closed
            assert client.read_frame() == Frame(RESPONSE, HEARTBEAT)
