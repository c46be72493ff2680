"""Publishes that are repeated on one connection take a short way: nothing is answered or kept differently for that."""

import itertools
import random
import re
import socket

import pytest

from harness import Nsqd, Wire

MAX_MSG_SIZE = 100
NSQD_FLAGS = (f"--max-msg-size={MAX_MSG_SIZE}",)
BODIES = (b"a", b"bb", b"\r\n\r\n", b"POST /pub HTTP/1.1\r\n\r\n", b"x" * MAX_MSG_SIZE)
LAST = b"GET /ping HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
ANSWER = re.compile(rb"HTTP/1.1 (\d+) [^\r]*\r\n(?:[^\r]+\r\n)*?Content-Length: (\d+)\r\n(?:[^\r]+\r\n)*\r\n")


def _pub(topic: str, body: bytes, header: bytes = b"") -> bytes:
    line = f"POST /pub?topic={topic} HTTP/1.1".encode()
    return b"%b\r\nHost: a\r\n%bContent-Length: %d\r\nAccept: */*\r\n\r\n%b" % (line, header, len(body), body)


def _chunked(topic: str, body: bytes) -> bytes:
    line = f"POST /pub?topic={topic} HTTP/1.1".encode()
    return b"%b\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (line, len(body), body)


def _exchange(nsqd: Nsqd, pieces: list[bytes]) -> list[tuple[int, bytes]]:
    """Statuses and bodies of all answers until the connection is closed."""
    with socket.create_connection(nsqd.http, timeout=30) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            client.sendall(piece)
        received = b""
        while more := client.recv(65536):
            received += more
    answers: list[tuple[int, bytes]] = []
    while received:
        head = ANSWER.match(received)
        assert head is not None, received
        end = head.end() + int(head[2])
        answers.append((int(head[1]), received[head.end() : end]))
        received = received[end:]
    return answers


@pytest.mark.parametrize("seed", range(20))
def test_answers_and_messages_are_those_of_single_requests(nsqd: Nsqd, client: Wire, topic: str, seed: int) -> None:
    choose = random.Random(seed)
    other = f"{topic}_other"
    requests: list[bytes] = []
    expected: list[tuple[int, bytes]] = []
    published: list[bytes] = []
    for number in range(40):
        body = (b"%d " % number + choose.choice(BODIES))[:MAX_MSG_SIZE]
        kind = choose.random()
        if kind < 0.7:
            requests.append(_pub(topic, body))
            published.append(body)
        elif kind < 0.75:
            requests.append(_pub(other, body))
        elif kind < 0.8:
            requests.append(_chunked(topic, body))
            published.append(body)
        elif kind < 0.85:
            requests.append(_pub(topic, body, b"Content-Type: text/plain\r\n"))
            published.append(body)
        elif kind < 0.9:
            requests.append(_pub(topic, b""))
            expected.append((400, b'{"message":"MSG_EMPTY"}'))
            continue
        else:
            requests.append(b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n")
        expected.append((200, b"OK"))
    requests.append(LAST)
    expected.append((200, b"OK"))
    stream = b"".join(requests)
    if seed % 2:
        cuts = sorted({choose.randrange(len(stream)) for _ in range(30)} | {0, len(stream)})
        pieces = [stream[start:end] for start, end in itertools.pairwise(cuts)]
    else:
        pieces = requests
    assert _exchange(nsqd, pieces) == expected
    client.subscribe(topic, rdy=100)
    assert [message.body for message in client.read_messages(len(published), finish=True)] == published


def test_a_message_over_the_limit_is_refused(nsqd: Nsqd, topic: str) -> None:
    pieces = [_pub(topic, b"x"), _pub(topic, b"y"), _pub(topic, b"z"), _pub(topic, b"x" * (MAX_MSG_SIZE + 1))]
    assert _exchange(nsqd, pieces) == [(200, b"OK")] * 3 + [(413, b'{"message":"MSG_TOO_BIG"}')]


def test_a_topic_that_was_deleted_is_made_again(nsqd: Nsqd, topic: str) -> None:
    with socket.create_connection(nsqd.http, timeout=30) as client:
        for _ in range(2):
            for _ in range(5):
                client.sendall(_pub(topic, b"hello"))
                assert client.recv(4096).endswith(b"\r\n\r\nOK")
            assert nsqd.post("/topic/delete", topic=topic).status == 200
            assert topic not in [found["topic_name"] for found in nsqd.stats()["topics"]]
