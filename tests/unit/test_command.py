"""Checks how a command is read: the words of its line, and the body behind that, however much of it has arrived."""

import pytest

from nsquark.broker.tcp.command import Command
from nsquark.wire.errors import FatalClientError

BODY = b"\0\0\0\5hello"


def command(line: bytes, behind: bytes = b"", *, at_eof: bool = False) -> Command:
    data = bytearray(line + b"\n" + behind)
    return Command(line, data, len(line) + 1, len(data), at_eof)


def refusal(read: object, *arguments: object) -> str:
    with pytest.raises(FatalClientError) as caught:
        read(*arguments)  # type: ignore[operator]
    return caught.value.payload().decode()


def test_a_message_is_found_where_it_stands_and_the_next_command_behind_it() -> None:
    pub = command(b"PUB t", BODY + b"NOP\n")
    assert pub.message(10) == 5
    assert pub.data[pub.next - 5 : pub.next] == b"hello"
    assert pub.data[pub.next :] == b"NOP\n"


def test_a_body_is_copied() -> None:
    auth = command(b"AUTH", BODY)
    assert auth.body(5) == b"hello"
    assert auth.next == auth.end


@pytest.mark.parametrize("arrived", range(len(BODY)))
def test_what_has_not_arrived_is_waited_for_and_nothing_is_passed(arrived: int) -> None:
    for read in ("message", "body"):
        part = command(b"PUB t", BODY[:arrived])
        assert getattr(part, read)(10) is None
        assert part.next == part.pos


@pytest.mark.parametrize(
    ("behind", "said"),
    [
        (b"\0\0", "E_BAD_MESSAGE PUB failed to read message body size"),
        (BODY[:-1], "E_BAD_MESSAGE PUB failed to read message body"),
        (b"\0\0\0\0", "E_BAD_MESSAGE PUB invalid message body size 0"),
        (b"\xff\xff\xff\xff", "E_BAD_MESSAGE PUB invalid message body size -1"),
        (b"\0\0\0\x0b", "E_BAD_MESSAGE PUB message too big 11 > 10"),
    ],
)
def test_a_bad_message_is_refused_in_nsqs_words(behind: bytes, said: str) -> None:
    assert refusal(command(b"PUB t", behind, at_eof=True).message, 10) == said


@pytest.mark.parametrize(
    ("behind", "said"),
    [
        (b"\0\0", "E_BAD_BODY AUTH failed to read body size"),
        (BODY[:-1], "E_BAD_BODY AUTH failed to read body"),
        (b"\0\0\0\0", "E_BAD_BODY AUTH invalid body size 0"),
        (b"\0\0\0\x0b", "E_BAD_BODY AUTH body too big 11 > 10"),
    ],
)
def test_a_bad_body_is_refused_in_nsqs_words(behind: bytes, said: str) -> None:
    assert refusal(command(b"AUTH", behind, at_eof=True).body, 10) == said


def test_words_are_counted_and_read() -> None:
    dpub = command(b"DPUB a/b 12x")
    assert refusal(dpub.require_params, 4) == "E_INVALID DPUB insufficient number of parameters"
    assert refusal(dpub.topic_name, ()) == 'E_BAD_TOPIC DPUB topic name "a/b" is not valid'
    assert refusal(dpub.number, 2, "timeout") == "E_INVALID DPUB could not parse timeout 12x"
    assert command(b"REQ id 007").number(2, "timeout") == 7
