"""Checks every error frame of the protocol to the letter, and whether the connection survives it."""

import struct
from collections.abc import Callable

import pytest

from harness import Nsqd, Wire, body_of, mpub_body

MAX_MSG_SIZE = 1000
MAX_BODY_SIZE = 5000
MPUB_COUNT_MAX = (MAX_BODY_SIZE - 4) // 5
NSQD_FLAGS = (f"--max-msg-size={MAX_MSG_SIZE}", f"--max-body-size={MAX_BODY_SIZE}", "--max-rdy-count=100")

UNKNOWN_ID = b"0123456789abcdef"
LONG_NAME = "x" * 65


def i32(*numbers: int) -> bytes:
    return struct.pack(f">{len(numbers)}i", *numbers)


def mpub(*parts: bytes, size: int | None = None) -> bytes:
    """Encodes an MPUB with its parts as given, and a body size that fits unless told otherwise."""
    content = b"".join(parts)
    return b"MPUB t\n" + i32(len(content) if size is None else size) + content


UNKNOWN_COMMANDS = [
    (b"BOGUS\n", "E_INVALID invalid command BOGUS"),
    (b"BOGUS a b\n", "E_INVALID invalid command BOGUS"),
    (b"pub t\n", "E_INVALID invalid command pub"),
    (b"\n", "E_INVALID invalid command "),
    (b"\r\n", "E_INVALID invalid command "),
    (b" NOP\n", "E_INVALID invalid command "),
    (b"NOP\t\n", "E_INVALID invalid command NOP\t"),
    (b"NOP\r\r\n", "E_INVALID invalid command NOP\r"),
]

WRONG_STATE = [
    (b"RDY 1\n", "E_INVALID cannot RDY in current state"),
    (b"RDY x\n", "E_INVALID cannot RDY in current state"),
    (b"FIN " + UNKNOWN_ID + b"\n", "E_INVALID cannot FIN in current state"),
    (b"FIN\n", "E_INVALID cannot FIN in current state"),
    (b"REQ " + UNKNOWN_ID + b" 0\n", "E_INVALID cannot REQ in current state"),
    (b"TOUCH " + UNKNOWN_ID + b"\n", "E_INVALID cannot TOUCH in current state"),
    (b"CLS\n", "E_INVALID cannot CLS in current state"),
]

PUB_ERRORS = [
    (b"PUB\n", "E_INVALID PUB insufficient number of parameters"),
    (b"PUB \n", 'E_BAD_TOPIC PUB topic name "" is not valid'),
    (b"PUB a$b\n", 'E_BAD_TOPIC PUB topic name "a$b" is not valid'),
    (b"PUB #ephemeral\n", 'E_BAD_TOPIC PUB topic name "#ephemeral" is not valid'),
    (b"PUB a#ephemeralx\n", 'E_BAD_TOPIC PUB topic name "a#ephemeralx" is not valid'),
    (b"PUB a#other\n", 'E_BAD_TOPIC PUB topic name "a#other" is not valid'),
    (f"PUB {LONG_NAME}\n".encode(), f'E_BAD_TOPIC PUB topic name "{LONG_NAME}" is not valid'),
    (b'PUB a"b\\c\n', 'E_BAD_TOPIC PUB topic name "a\\"b\\\\c" is not valid'),
    (b"PUB a\x00\x07\xff\tb\n", 'E_BAD_TOPIC PUB topic name "a\\x00\\a\\xff\\tb" is not valid'),
    ("PUB é\u200b\n".encode(), 'E_BAD_TOPIC PUB topic name "é\\u200b" is not valid'),
    (b"PUB t\n" + i32(0), "E_BAD_MESSAGE PUB invalid message body size 0"),
    (b"PUB t\n" + i32(-1), "E_BAD_MESSAGE PUB invalid message body size -1"),
    (b"PUB t\n" + i32(-(2**31)), "E_BAD_MESSAGE PUB invalid message body size -2147483648"),
    (
        b"PUB t\n" + i32(MAX_MSG_SIZE + 1),
        f"E_BAD_MESSAGE PUB message too big {MAX_MSG_SIZE + 1} > {MAX_MSG_SIZE}",
    ),
    (b"PUB t\n" + i32(2**31 - 1), f"E_BAD_MESSAGE PUB message too big 2147483647 > {MAX_MSG_SIZE}"),
]

MPUB_ERRORS = [
    (b"MPUB\n", "E_INVALID MPUB insufficient number of parameters"),
    (b"MPUB a$b\n", 'E_BAD_TOPIC E_BAD_TOPIC MPUB topic name "a$b" is not valid'),
    (b"MPUB \n", 'E_BAD_TOPIC E_BAD_TOPIC MPUB topic name "" is not valid'),
    (mpub(size=0), "E_BAD_BODY MPUB invalid body size 0"),
    (mpub(size=-7), "E_BAD_BODY MPUB invalid body size -7"),
    (mpub(size=MAX_BODY_SIZE + 1), f"E_BAD_BODY MPUB body too big {MAX_BODY_SIZE + 1} > {MAX_BODY_SIZE}"),
    (mpub(i32(0)), "E_BAD_BODY MPUB invalid message count 0"),
    (mpub(i32(-1)), "E_BAD_BODY MPUB invalid message count -1"),
    (mpub(i32(MPUB_COUNT_MAX + 1)), f"E_BAD_BODY MPUB invalid message count {MPUB_COUNT_MAX + 1}"),
    (mpub(i32(2**31 - 1)), "E_BAD_BODY MPUB invalid message count 2147483647"),
    (mpub(i32(1), i32(0)), "E_BAD_MESSAGE MPUB invalid message(0) body size 0"),
    (
        mpub(i32(3), body_of(b"a"), body_of(b"b"), i32(-5)),
        "E_BAD_MESSAGE MPUB invalid message(2) body size -5",
    ),
    (
        mpub(i32(2), body_of(b"a"), i32(MAX_MSG_SIZE + 1)),
        f"E_BAD_MESSAGE MPUB message too big {MAX_MSG_SIZE + 1} > {MAX_MSG_SIZE}",
    ),
]

DPUB_ERRORS = [
    (b"DPUB\n", "E_INVALID DPUB insufficient number of parameters"),
    (b"DPUB t\n", "E_INVALID DPUB insufficient number of parameters"),
    (b"DPUB a$b 1\n", 'E_BAD_TOPIC DPUB topic name "a$b" is not valid'),
    (b"DPUB a$b x\n", 'E_BAD_TOPIC DPUB topic name "a$b" is not valid'),
    (b"DPUB t x\n", "E_INVALID DPUB could not parse timeout x"),
    (b"DPUB t -1\n", "E_INVALID DPUB could not parse timeout -1"),
    (b"DPUB t +1\n", "E_INVALID DPUB could not parse timeout +1"),
    (b"DPUB t 1.5\n", "E_INVALID DPUB could not parse timeout 1.5"),
    (b"DPUB t 0x1\n", "E_INVALID DPUB could not parse timeout 0x1"),
    (b"DPUB t 3600001\n", "E_INVALID DPUB timeout 3600001 out of range 0-3600000"),
    (b"DPUB t 18446744073709551615\n", "E_INVALID DPUB timeout 18446744073709551615 out of range 0-3600000"),
    (b"DPUB t 1\n" + i32(0), "E_BAD_MESSAGE DPUB invalid message body size 0"),
    (b"DPUB t 1\n" + i32(-1), "E_BAD_MESSAGE DPUB invalid message body size -1"),
    (
        b"DPUB t 1\n" + i32(MAX_MSG_SIZE + 1),
        f"E_BAD_MESSAGE DPUB message too big {MAX_MSG_SIZE + 1} > {MAX_MSG_SIZE}",
    ),
]

SUB_ERRORS = [
    (b"SUB\n", "E_INVALID SUB insufficient number of parameters"),
    (b"SUB t\n", "E_INVALID SUB insufficient number of parameters"),
    (b"SUB a$b c\n", 'E_BAD_TOPIC SUB topic name "a$b" is not valid'),
    (b"SUB a$b c$d\n", 'E_BAD_TOPIC SUB topic name "a$b" is not valid'),
    (b"SUB  c\n", 'E_BAD_TOPIC SUB topic name "" is not valid'),
    (b"SUB t c$d\n", 'E_BAD_CHANNEL SUB channel name "c$d" is not valid'),
    (b"SUB t  c\n", 'E_BAD_CHANNEL SUB channel name "" is not valid'),
    (b"SUB t \n", 'E_BAD_CHANNEL SUB channel name "" is not valid'),
    (f"SUB t {LONG_NAME}\n".encode(), f'E_BAD_CHANNEL SUB channel name "{LONG_NAME}" is not valid'),
]

AUTH_ERRORS = [
    (b"AUTH x\n", "E_INVALID AUTH invalid number of parameters"),
    (b"AUTH \n", "E_INVALID AUTH invalid number of parameters"),
    (b"AUTH\n" + i32(0), "E_BAD_BODY AUTH invalid body size 0"),
    (b"AUTH\n" + i32(-3), "E_BAD_BODY AUTH invalid body size -3"),
    (
        b"AUTH\n" + i32(MAX_BODY_SIZE + 1),
        f"E_BAD_BODY AUTH body too big {MAX_BODY_SIZE + 1} > {MAX_BODY_SIZE}",
    ),
    (b"AUTH\n" + body_of(b"secret"), "E_AUTH_DISABLED AUTH disabled"),
]

IDENTIFY_ERRORS = [
    (b"IDENTIFY\n" + i32(0), "E_BAD_BODY IDENTIFY invalid body size 0"),
    (b"IDENTIFY\n" + i32(-1), "E_BAD_BODY IDENTIFY invalid body size -1"),
    (
        b"IDENTIFY\n" + i32(MAX_BODY_SIZE + 1),
        f"E_BAD_BODY IDENTIFY body too big {MAX_BODY_SIZE + 1} > {MAX_BODY_SIZE}",
    ),
]

FRESH = [
    *UNKNOWN_COMMANDS,
    *WRONG_STATE,
    *PUB_ERRORS,
    *MPUB_ERRORS,
    *DPUB_ERRORS,
    *SUB_ERRORS,
    *AUTH_ERRORS,
    *IDENTIFY_ERRORS,
]


@pytest.mark.parametrize(("sent", "error"), FRESH, ids=repr)
def test_fatal_error_on_a_fresh_connection(client: Wire, sent: bytes, error: str) -> None:
    client.send(sent)
    client.expect_error(error)


CUT_SHORT = [
    (b"PUB t\n", "E_BAD_MESSAGE PUB failed to read message body size"),
    (b"PUB t\n\0\0", "E_BAD_MESSAGE PUB failed to read message body size"),
    (b"PUB t\n" + i32(5) + b"four", "E_BAD_MESSAGE PUB failed to read message body"),
    (b"DPUB t 1\n\0", "E_BAD_MESSAGE DPUB failed to read message body size"),
    (b"DPUB t 1\n" + i32(5), "E_BAD_MESSAGE DPUB failed to read message body"),
    (b"MPUB t\n\0\0\0", "E_BAD_BODY MPUB failed to read body size"),
    (mpub(size=20), "E_BAD_BODY MPUB failed to read message count"),
    (mpub(i32(2), body_of(b"a"), b"\0", size=40), "E_BAD_MESSAGE MPUB failed to read message(1) body size"),
    (mpub(i32(2), body_of(b"a"), i32(5), b"b", size=40), "E_BAD_MESSAGE MPUB failed to read message body"),
    (b"IDENTIFY\n\0\0", "E_BAD_BODY IDENTIFY failed to read body size"),
    (b"IDENTIFY\n" + i32(9) + b"{}", "E_BAD_BODY IDENTIFY failed to read body"),
    (b"AUTH\n\0\0", "E_BAD_BODY AUTH failed to read body size"),
    (b"AUTH\n" + i32(9) + b"se", "E_BAD_BODY AUTH failed to read body"),
]


@pytest.mark.parametrize(("sent", "error"), CUT_SHORT, ids=repr)
def test_fatal_error_when_the_input_ends_inside_a_body(client: Wire, sent: bytes, error: str) -> None:
    client.send(sent)
    client.end_of_input()
    client.expect_error(error)


WHEN_SUBSCRIBED = [
    (b"SUB t c\n", "E_INVALID cannot SUB in current state"),
    (b"IDENTIFY\n" + body_of(b"{}"), "E_INVALID cannot IDENTIFY in current state"),
    (b"AUTH\n" + body_of(b"s"), "E_INVALID cannot AUTH in current state"),
    (b"RDY x\n", "E_INVALID RDY could not parse count x"),
    (b"RDY -1\n", "E_INVALID RDY could not parse count -1"),
    (b"RDY 1.5\n", "E_INVALID RDY could not parse count 1.5"),
    (b"RDY 101\n", "E_INVALID RDY count 101 out of range 0-100"),
    (b"RDY 18446744073709551615\n", "E_INVALID RDY count -1 out of range 0-100"),
    (b"FIN\n", "E_INVALID FIN insufficient number of params"),
    (b"FIN \n", "E_INVALID invalid message ID"),
    (b"FIN 0123456789abcde\n", "E_INVALID invalid message ID"),
    (b"FIN 0123456789abcdef0\n", "E_INVALID invalid message ID"),
    (b"REQ\n", "E_INVALID REQ insufficient number of params"),
    (b"REQ " + UNKNOWN_ID + b"\n", "E_INVALID REQ insufficient number of params"),
    (b"REQ 0123 5\n", "E_INVALID invalid message ID"),
    (b"REQ " + UNKNOWN_ID + b" x\n", "E_INVALID REQ could not parse timeout x"),
    (b"REQ " + UNKNOWN_ID + b" -1\n", "E_INVALID REQ could not parse timeout -1"),
    (b"TOUCH\n", "E_INVALID TOUCH insufficient number of params"),
    (b"TOUCH 0123\n", "E_INVALID invalid message ID"),
]


@pytest.mark.parametrize(("sent", "error"), WHEN_SUBSCRIBED, ids=repr)
def test_fatal_error_of_a_consumer(client: Wire, topic: str, sent: bytes, error: str) -> None:
    client.subscribe(topic)
    client.send(sent)
    client.expect_error(error)


NOT_FATAL = [
    (b"FIN " + UNKNOWN_ID + b"\n", b"E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight"),
    (b"REQ " + UNKNOWN_ID + b" 0\n", b"E_REQ_FAILED REQ 0123456789abcdef failed ID not in flight"),
    (b"REQ " + UNKNOWN_ID + b" \n", b"E_REQ_FAILED REQ 0123456789abcdef failed ID not in flight"),
    (b"REQ " + UNKNOWN_ID + b" 99999999\n", b"E_REQ_FAILED REQ 0123456789abcdef failed ID not in flight"),
    (b"TOUCH " + UNKNOWN_ID + b"\n", b"E_TOUCH_FAILED TOUCH 0123456789abcdef failed ID not in flight"),
]


@pytest.mark.parametrize(("sent", "error"), NOT_FATAL, ids=repr)
def test_error_that_leaves_the_connection_usable(client: Wire, topic: str, sent: bytes, error: bytes) -> None:
    client.subscribe(topic)
    client.send(sent)
    client.expect_error(error, fatal=False)
    client.assert_usable()


@pytest.mark.parametrize(
    "odd_id",
    [b"not-a-hex-number", b"\x01\x02\xff\xfe~!@#$%^&*()_"[:16], b"FFFFFFFFFFFFFFFF", b"----------------"],
)
@pytest.mark.parametrize("verb", ["FIN", "REQ", "TOUCH"])
def test_sixteen_arbitrary_bytes_are_an_id(client: Wire, topic: str, odd_id: bytes, verb: str) -> None:
    client.subscribe(topic)
    client.send(verb.encode() + b" " + odd_id + b" 0\n")
    client.expect_error(f"E_{verb}_FAILED {verb} ".encode() + odd_id + b" failed ID not in flight", fatal=False)
    client.assert_usable()


@pytest.mark.parametrize("verb", ["FIN", "REQ", "TOUCH"])
def test_a_message_of_another_consumer(connect: Callable[..., Wire], topic: str, verb: str) -> None:
    owner, other = connect().subscribe(topic, rdy=1), connect().subscribe(topic)
    other.publish(topic, b"mine")
    message = owner.read_message()
    other.send(verb.encode() + b" " + message.id + b" 0\n")
    shown = message.id.decode()
    other.expect_error(f"E_{verb}_FAILED {verb} {shown} failed client does not own message", fatal=False)
    other.assert_usable()
    owner.FIN(message.id)
    owner.assert_usable()


def test_too_many_consumers_of_a_channel(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire]) -> None:
    daemon = make_nsqd("--max-channel-consumers=2")
    for _ in range(2):
        connect(daemon).subscribe("t", "c")
    third = connect(daemon)
    third.SUB("t", "c")
    third.expect_error("E_SUB_FAILED SUB failed consumers for t:c exceeds limit of 2")
    connect(daemon).subscribe("t", "other")


def test_body_of_exactly_the_limit_is_accepted(client: Wire, topic: str) -> None:
    client.publish(topic, b"x" * MAX_MSG_SIZE)
    client.DPUB(topic, 3600000, b"x" * MAX_MSG_SIZE)
    client.expect_ok()
    bodies = [b"x" * MAX_MSG_SIZE] * 4
    bodies.append(b"x" * (MAX_BODY_SIZE - 4 - 4 * (MAX_MSG_SIZE + 4) - 4))
    assert len(mpub_body(bodies)) == 4 + MAX_BODY_SIZE
    client.publish(topic, *bodies)


def test_most_messages_an_mpub_may_count(client: Wire, nsqd: Nsqd, topic: str) -> None:
    client.publish(topic, *[b"x"] * MPUB_COUNT_MAX)
    assert nsqd.topic(topic)["message_count"] == MPUB_COUNT_MAX


def test_rdy_of_exactly_the_limit_is_accepted(client: Wire, topic: str) -> None:
    client.subscribe(topic, rdy=100)
    client.assert_usable()


def test_malformed_mpub_publishes_nothing_but_makes_the_topic(nsqd: Nsqd, client: Wire, topic: str) -> None:
    client.send(f"MPUB {topic}\n".encode() + body_of(i32(2) + body_of(b"good") + i32(0)))
    client.expect_error("E_BAD_MESSAGE MPUB invalid message(1) body size 0")
    assert nsqd.topic(topic)["message_count"] == 0


@pytest.mark.parametrize("line", ["PUB {}", "DPUB {} 5"])
def test_malformed_pub_does_not_make_the_topic(nsqd: Nsqd, client: Wire, topic: str, line: str) -> None:
    client.send(line.format(topic).encode() + b"\n" + i32(0))
    client.expect_error(f"E_BAD_MESSAGE {line.split()[0]} invalid message body size 0")
    assert topic not in nsqd.topic_names()
