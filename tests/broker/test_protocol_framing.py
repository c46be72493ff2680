"""Sends bytes to the TCP port: the magic, and lines, whose replies keep their order."""

import socket
import time
from collections.abc import Callable

import pytest

from harness import Frame, Nsqd, Wire, body_of, eventually, mpub_body
from harness.wire import ERROR, RESPONSE

LINE_BYTES_MAX = 16384


@pytest.mark.parametrize("magic", [b"  V1", b"V2  ", b"GET ", b"\0\0\0\0", b"PUB "])
def test_another_magic_is_refused(connect: Callable[..., Wire], magic: bytes) -> None:
    connect(magic=magic).expect_error("E_BAD_PROTOCOL")


def test_too_short_a_magic_is_closed_without_a_word(connect: Callable[..., Wire]) -> None:
    client = connect(magic=b"  V")
    client.end_of_input()
    client.expect_closed()


def test_the_magic_is_not_answered_and_may_take_its_time(connect: Callable[..., Wire]) -> None:
    client = connect(magic=b"  ")
    client.expect_silence(0.05)
    client.send(b"V2")
    client.expect_silence(0.05)
    client.assert_usable()


def test_carriage_return_before_the_line_feed_is_dropped(client: Wire, topic: str) -> None:
    client.send(b"NOP\r\nPUB " + topic.encode() + b"\r\n" + body_of(b"x\r\n"))
    client.expect_ok()
    client.subscribe(topic, rdy=1)
    assert client.read_message().body == b"x\r\n"


def test_extra_parameters_are_ignored(client: Wire, topic: str) -> None:
    client.send(b"IDENTIFY some thing\n" + body_of(b"{}"))
    client.send(f"PUB {topic} extra\n".encode() + body_of(b"one"))
    client.send(f"MPUB {topic}  extra\n".encode() + mpub_body([b"two"]))
    client.send(f"DPUB {topic} 0 extra\n".encode() + body_of(b"three"))
    client.send(f"SUB {topic} ch extra\n".encode())
    client.expect_ok(5)
    client.send(b"RDY 5 extra\nNOP extra\n")
    messages = client.read_messages(3)
    assert {message.body for message in messages} == {b"one", b"two", b"three"}
    for message in messages[:2]:
        client.send(b"FIN " + message.id + b" extra\n")
    client.send(b"TOUCH " + messages[2].id + b" extra\nREQ " + messages[2].id + b" 0 extra\n")
    again = client.read_message()
    assert (again.body, again.attempts) == (messages[2].body, 2)
    client.send(b"CLS extra\n")
    client.expect("CLOSE_WAIT")


def test_longest_line(client: Wire) -> None:
    client.send(b"NOP " + b"x" * (LINE_BYTES_MAX - 5) + b"\n")
    client.assert_usable()


def test_line_beyond_the_limit_closes_without_a_frame(client: Wire) -> None:
    client.send(b"NOP " + b"x" * (LINE_BYTES_MAX - 4) + b"\n")
    client.expect_closed()


def test_endless_line_closes_without_a_frame(client: Wire) -> None:
    client.send(b"x" * LINE_BYTES_MAX)
    client.expect_closed()


def _conversation(topic: str) -> bytes:
    """Has one of each kind of command that is answered, in an order that works."""
    name = topic.encode()
    return b"".join(
        [
            b"  V2IDENTIFY\n" + body_of(b'{"client_id":"split"}'),
            b"PUB " + name + b"\n" + body_of(b"a"),
            b"MPUB " + name + b"\n" + mpub_body([b"b\n", b"PUB c\n"]),
            b"DPUB " + name + b" 0\n" + body_of(b"d"),
            b"NOP\r\n",
            b"SUB " + name + b" ch#ephemeral\n",
            b"RDY 4\n",
        ]
    )


def _expect_conversation(client: Wire) -> None:
    client.expect_ok(5)
    bodies = {message.body for message in client.read_messages(4, finish=True)}
    assert bodies == {b"a", b"b\n", b"PUB c\n", b"d"}


def test_split_at_every_byte(connect: Callable[..., Wire], topic: str) -> None:
    for cut in range(1, len(_conversation(f"{topic}_00"))):
        sent = _conversation(f"{topic}_{cut:02}")
        client = connect(magic=b"")
        client.send(sent[:cut])
        time.sleep(0.002)  # so that nsqd reads the two parts apart
        client.send(sent[cut:])
        _expect_conversation(client)
        client.close()


def test_byte_by_byte(connect: Callable[..., Wire], topic: str) -> None:
    client = connect(magic=b"")
    for byte in _conversation(topic):
        client.send(bytes([byte]))
        time.sleep(0.0005)
    _expect_conversation(client)


def test_all_at_once(connect: Callable[..., Wire], topic: str) -> None:
    _expect_conversation(connect(magic=_conversation(topic)))


def test_a_thousand_pipelined_publishes(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.send(b"".join(b"PUB %s\n" % topic.encode() + body_of(b"%d" % number) for number in range(1000)))
    client.expect_ok(1000)
    assert nsqd.topic(topic)["message_count"] == 1000


def test_body_larger_than_any_buffer(client: Wire, topic: str) -> None:
    body = bytes(range(256)) * 4096
    client.publish(topic, body)
    client.subscribe(topic, rdy=1)
    assert client.read_message().body == body


def test_replies_come_in_the_order_of_the_commands(client: Wire, topic: str) -> None:
    unknown = b"0123456789abcdef"
    client.send(
        b"".join(
            [
                f"SUB {topic}_0 ch\n".encode(),
                f"PUB {topic}_1\n".encode() + body_of(b"x" * 100_000),
                b"FIN " + unknown + b"\n",
                f"PUB {topic}_2\n".encode() + body_of(b"y"),
                b"TOUCH " + unknown + b"\n",
                f"MPUB {topic}_3\n".encode() + mpub_body([b"z"] * 100),
                b"REQ " + unknown + b" 0\n",
                f"DPUB {topic}_4 1000\n".encode() + body_of(b"later"),
                b"CLS\n",
                f"PUB {topic}_5\n".encode() + body_of(b"z"),
                b"BOGUS\n",
            ]
        )
    )
    ok = Frame(RESPONSE, b"OK")
    assert [client.read_frame() for _ in range(10)] == [
        ok,
        ok,
        Frame(ERROR, b"E_FIN_FAILED FIN " + unknown + b" failed ID not in flight"),
        ok,
        Frame(ERROR, b"E_TOUCH_FAILED TOUCH " + unknown + b" failed ID not in flight"),
        ok,
        Frame(ERROR, b"E_REQ_FAILED REQ " + unknown + b" failed ID not in flight"),
        ok,
        Frame(RESPONSE, b"CLOSE_WAIT"),
        ok,
    ]
    client.expect_error("E_INVALID invalid command BOGUS")


def test_publishes_before_a_fatal_error_are_kept(nsqd: Nsqd, client: Wire, topic: str) -> None:
    names = [f"{topic}_{number}" for number in range(5)]
    client.send(b"".join(f"PUB {name}\n".encode() + body_of(b"kept") for name in names) + b"PUB\n")
    client.expect_ok(5)
    client.expect_error("E_INVALID PUB insufficient number of parameters")
    for name in names:
        assert nsqd.topic(name)["message_count"] == 1


def test_publish_then_end_of_input_is_still_answered(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.PUB(topic, b"last words")
    client.end_of_input()
    client.expect_ok()
    client.expect_closed()
    assert nsqd.topic(topic)["message_count"] == 1


def test_mpub_trusts_its_inner_sizes(nsqd: Nsqd, client: Wire, topic: str) -> None:
    """The declared size only has to be in range: what follows the last message is the next command."""
    for declared in (1, 4000):
        content = mpub_body([b"one", b"two"])[4:]
        client.send(f"MPUB {topic}\n".encode() + declared.to_bytes(4, "big") + content + b"NOP\n")
        client.expect_ok()
        client.assert_usable()
    assert nsqd.topic(topic)["message_count"] == 4


def test_one_connection_may_publish_and_consume(client: Wire, topic: str) -> None:
    client.subscribe(topic, rdy=1)
    for number in range(20):
        client.PUB(topic, b"%d" % number)
        frames = [client.read_frame(), client.read_frame()]
        assert Frame(RESPONSE, b"OK") in frames
        message = next(frame for frame in frames if frame.kind == 2)
        assert message.data[26:] == b"%d" % number
        client.FIN(message.data[10:26])


def test_a_reader_that_stops_reading_does_not_stop_others(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    stuck = connect()
    stuck.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stuck.subscribe(topic, "stuck", rdy=2000)
    busy = connect().subscribe(topic, "busy", rdy=100, output_buffer_size=-1)
    publisher = connect()
    for _ in range(20):
        publisher.publish(topic, *[b"x" * 10_000] * 100)
    busy.read_messages(2000, finish=True)
    eventually(lambda: nsqd.channel(topic, "busy")["in_flight_count"] == 0)
    assert nsqd.get("/ping").body == b"OK"
