"""Checks /pub and /mpub."""

import http.client
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from harness import HttpReply, Nsqd, Wire, body_of, mpub_messages

MAX_MSG_SIZE = 1000
MAX_BODY_SIZE = 5000
NSQD_FLAGS = (f"--max-msg-size={MAX_MSG_SIZE}", f"--max-body-size={MAX_BODY_SIZE}", "--max-req-timeout=60s")


def assert_error(reply: HttpReply, status: int, code: str) -> None:
    assert (reply.status, reply.body) == (status, b'{"message":"%s"}' % code.encode())
    assert reply.headers["Content-Type"] == "application/json; charset=utf-8"
    assert reply.headers["X-NSQ-Content-Type"] == "nsq; version=1.0"


def _bodies(client: Wire, topic: str, count: int) -> list[bytes]:
    client.subscribe(topic, rdy=100)
    return sorted(message.body for message in client.read_messages(count, finish=True))


def _chunks(*pieces: bytes) -> Iterator[bytes]:
    yield from pieces


def test_pub(client: Wire, nsqd: Nsqd, topic: str) -> None:
    reply = nsqd.post("/pub", b"hello\nworld\n", topic=topic)
    assert (reply.status, reply.body) == (200, b"OK")
    assert reply.headers["X-NSQ-Content-Type"] == "nsq; version=1.0"
    assert reply.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert reply.headers["Content-Length"] == "2"
    assert _bodies(client, topic, 1) == [b"hello\nworld\n"]


def test_pub_with_a_chunked_body(client: Wire, nsqd: Nsqd, topic: str) -> None:
    reply = nsqd.request("POST", f"/pub?topic={topic}", _chunks(b"in ", b"pieces"))
    assert reply.body == b"OK"
    assert _bodies(client, topic, 1) == [b"in pieces"]


def test_pub_of_exactly_the_limit(nsqd: Nsqd, topic: str) -> None:
    assert nsqd.post("/pub", b"x" * MAX_MSG_SIZE, topic=topic).body == b"OK"
    assert nsqd.request("POST", f"/pub?topic={topic}", _chunks(b"x" * MAX_MSG_SIZE)).body == b"OK"


def test_pub_deferred(client: Wire, nsqd: Nsqd, topic: str) -> None:
    client.subscribe(topic, rdy=1)
    start = time.monotonic()
    assert nsqd.post("/pub", b"later", topic=topic, defer=300).body == b"OK"
    assert client.read_message().body == b"later"
    assert time.monotonic() - start >= 0.295


@pytest.mark.parametrize("defer", ["0", "60000", "+5", "0" * 5000 + "7"], ids=lambda defer: defer[:20])
def test_pub_defer_accepted(nsqd: Nsqd, topic: str, defer: str) -> None:
    assert nsqd.post("/pub", b"x", topic=topic, defer=defer).body == b"OK"


@pytest.mark.parametrize(
    "defer",
    ["", "x", "-1", "60001", "1.5", "0x10", "1_0", "9223372036854775808", " 5", "9" * 4301],
    ids=lambda defer: defer[:20],
)
def test_pub_defer_refused_after_making_the_topic(nsqd: Nsqd, topic: str, defer: str) -> None:
    assert_error(nsqd.post("/pub", b"x", topic=topic, defer=defer), 400, "INVALID_DEFER")
    assert nsqd.topic(topic)["message_count"] == 0


def test_pub_errors(nsqd: Nsqd, topic: str) -> None:
    big = b"x" * (MAX_MSG_SIZE + 1)
    assert_error(nsqd.post("/pub", big, topic=topic), 413, "MSG_TOO_BIG")
    assert_error(nsqd.request("POST", f"/pub?topic={topic}", _chunks(big)), 413, "MSG_TOO_BIG")
    assert_error(nsqd.post("/pub", b"", topic=topic), 400, "MSG_EMPTY")
    assert topic not in nsqd.topic_names()
    assert_error(nsqd.post("/pub", b"x"), 400, "MISSING_ARG_TOPIC")
    assert_error(nsqd.post("/pub", b"x", topic=""), 400, "INVALID_TOPIC")
    assert_error(nsqd.post("/pub", b"x", topic="a$b"), 400, "INVALID_TOPIC")
    assert_error(nsqd.post("/pub", b"x", topic="x" * 65), 400, "INVALID_TOPIC")


def test_pub_checks_in_order(nsqd: Nsqd) -> None:
    assert_error(nsqd.post("/pub", b"x" * (MAX_MSG_SIZE + 1)), 413, "MSG_TOO_BIG")
    assert_error(nsqd.post("/pub", b""), 400, "MSG_EMPTY")
    assert_error(nsqd.post("/pub", b"x", topic="a$b", defer="x"), 400, "INVALID_TOPIC")


def test_too_big_a_declared_length_closes_the_connection(nsqd: Nsqd, topic: str) -> None:
    """The connection is closed at once: the body need not come."""
    with socket.create_connection(nsqd.http, timeout=20) as connection:
        connection.sendall(
            b"POST /pub?topic=%s HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n" % topic.encode()
        )
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"\r\nConnection: close\r\n" in answer
    assert answer.endswith(b'{"message":"MSG_TOO_BIG"}')


@pytest.mark.parametrize("query", ["topic=%zz", "topic=a;b=c", "topic=t&x=%", "topic=t;"])
def test_bad_query(nsqd: Nsqd, query: str) -> None:
    assert_error(nsqd.request("POST", f"/pub?{query}", b"x"), 400, "INVALID_REQUEST")
    assert_error(nsqd.request("POST", f"/mpub?{query}", b"x"), 400, "INVALID_REQUEST")
    assert_error(nsqd.request("POST", f"/topic/create?{query}"), 400, "INVALID_REQUEST")
    assert_error(nsqd.request("POST", f"/channel/create?{query}"), 400, "INVALID_REQUEST")


def test_first_of_a_repeated_parameter_counts(nsqd: Nsqd, topic: str) -> None:
    nsqd.request("POST", f"/pub?topic={topic}&topic={topic}_second", b"x")
    names = nsqd.topic_names()
    assert topic in names
    assert f"{topic}_second" not in names


def test_parameters_do_not_come_from_a_form(nsqd: Nsqd) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    assert_error(nsqd.request("POST", "/pub", b"topic=x", headers), 400, "MISSING_ARG_TOPIC")


def test_mpub_text(client: Wire, nsqd: Nsqd, topic: str) -> None:
    reply = nsqd.post("/mpub", b"one\n\ntwo\r\n\n\nthree", topic=topic)
    assert (reply.status, reply.body) == (200, b"OK")
    assert _bodies(client, topic, 3) == [b"one", b"three", b"two\r"]
    assert nsqd.topic(topic)["message_count"] == 3


@pytest.mark.parametrize("binary", ["false", "0"])
def test_mpub_text_when_asked_for(client: Wire, nsqd: Nsqd, topic: str, binary: str) -> None:
    assert nsqd.post("/mpub", b"a\nb\n", topic=topic, binary=binary).body == b"OK"
    assert _bodies(client, topic, 2) == [b"a", b"b"]


@pytest.mark.parametrize("body", [b"", b"\n", b"\n\n\n"])
def test_mpub_of_nothing_is_fine_and_makes_the_topic(nsqd: Nsqd, topic: str, body: bytes) -> None:
    assert nsqd.post("/mpub", body, topic=topic).body == b"OK"
    assert nsqd.topic(topic)["message_count"] == 0


@pytest.mark.parametrize("binary", ["true", "1", "yes", "", "FALSE"])
def test_mpub_binary(client: Wire, nsqd: Nsqd, topic: str, binary: str) -> None:
    bodies = [b"a\nb", b"\0", b"c" * MAX_MSG_SIZE]
    assert nsqd.post("/mpub", mpub_messages(bodies) + b"ignored", topic=topic, binary=binary).body == b"OK"
    assert _bodies(client, topic, 3) == sorted(bodies)


def test_mpub_text_too_big(nsqd: Nsqd, topic: str) -> None:
    long_line = b"ok\n" + b"x" * (MAX_MSG_SIZE + 1) + b"\nok\n"
    assert_error(nsqd.post("/mpub", long_line, topic=topic), 413, "MSG_TOO_BIG")
    assert nsqd.topic(topic)["message_count"] == 0
    many_lines = b"x" * 99 + b"\n"
    assert_error(nsqd.post("/mpub", many_lines * 51, topic=topic), 413, "BODY_TOO_BIG")
    reply = nsqd.request("POST", f"/mpub?topic={topic}", _chunks(many_lines * 30, many_lines * 30))
    assert_error(reply, 413, "BODY_TOO_BIG")
    assert nsqd.topic(topic)["message_count"] == 0
    assert nsqd.post("/mpub", many_lines * 50, topic=topic).body == b"OK"


def i32(*numbers: int) -> bytes:
    return struct.pack(f">{len(numbers)}i", *numbers)


BAD_BINARY = [
    (b"", "BAD_BODY"),
    (b"\0\0", "BAD_BODY"),
    (i32(0), "BAD_BODY"),
    (i32(-1), "BAD_BODY"),
    (i32(1000), "BAD_BODY"),
    (i32(1), "BAD_MESSAGE"),
    (i32(1, 0), "BAD_MESSAGE"),
    (i32(1, -1), "BAD_MESSAGE"),
    (i32(1, 5) + b"four", "BAD_MESSAGE"),
    (i32(1, MAX_MSG_SIZE + 1), "BAD_MESSAGE"),
    (i32(2) + body_of(b"good"), "BAD_MESSAGE"),
]


@pytest.mark.parametrize(("body", "code"), BAD_BINARY, ids=repr)
def test_mpub_binary_malformed(nsqd: Nsqd, topic: str, body: bytes, code: str) -> None:
    assert_error(nsqd.post("/mpub", body, topic=topic, binary="true"), 413, code)
    assert nsqd.topic(topic)["message_count"] == 0


def test_mpub_errors(nsqd: Nsqd, topic: str) -> None:
    assert_error(nsqd.post("/mpub", b"x" * (MAX_BODY_SIZE + 1)), 413, "BODY_TOO_BIG")
    assert_error(nsqd.post("/mpub", b"x"), 400, "MISSING_ARG_TOPIC")
    assert_error(nsqd.post("/mpub", b"x", topic="a$b"), 400, "INVALID_TOPIC")
    assert_error(nsqd.post("/mpub", b"x", topic=""), 400, "INVALID_TOPIC")


def test_many_publishes_on_one_connection(nsqd: Nsqd, topic: str) -> None:
    connection = http.client.HTTPConnection(*nsqd.http, timeout=20)
    for number in range(100):
        connection.request("POST", f"/pub?topic={topic}", b"%d" % number)
        assert connection.getresponse().read() == b"OK"
    connection.close()
    assert nsqd.topic(topic)["message_count"] == 100


def test_http_publisher_is_not_a_producer_in_stats(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    daemon.post("/pub", b"x", topic="t")
    assert daemon.stats()["producers"] is None


MANY = 70_000
"""One turn takes fewer messages than this."""


@pytest.mark.parametrize("binary", ["false", "true"])
def test_a_long_mpub_is_published_whole_and_in_order(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], topic: str, binary: str
) -> None:
    nsqd = make_nsqd()
    bodies = [b"%d" % number for number in range(MANY)]
    body = mpub_messages(bodies) if binary == "true" else b"\n".join(bodies) + b"\n\n"
    assert nsqd.post("/mpub", body, topic=topic, binary=binary).body == b"OK"
    assert nsqd.post("/pub", b"last", topic=topic).body == b"OK"
    client = connect(nsqd).subscribe(topic, rdy=2000, heartbeat_interval=60_000)  # none in between, however slow it is
    assert [message.body for message in client.read_messages(MANY + 1, finish=True)] == [*bodies, b"last"]


def test_of_a_long_mpub_nothing_is_published_if_a_line_is_too_big(make_nsqd: Callable[..., Nsqd], topic: str) -> None:
    nsqd = make_nsqd()
    body = b"x\n" * MANY + b"y" * (1024 * 1024 + 1)
    assert_error(nsqd.post("/mpub", body, topic=topic), 413, "MSG_TOO_BIG")
    assert nsqd.topic(topic)["message_count"] == 0
