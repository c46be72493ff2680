"""Sends garbage to both ports: the one who sent it may suffer, nobody else."""

import random
import socket
import struct
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import MAGIC, Message, Nsqd, Wire, body_of, mpub_body
from harness.wire import HEARTBEAT, MESSAGE

GIANT = 2**31 - 1
VERBS = [
    b"IDENTIFY",
    b"AUTH",
    b"PUB",
    b"MPUB",
    b"DPUB",
    b"SUB",
    b"RDY",
    b"FIN",
    b"REQ",
    b"TOUCH",
    b"CLS",
    b"NOP",
]


class Bystander:
    """Is a well-behaved pair of clients that must not notice anything."""

    def __init__(self, nsqd: Nsqd):
        self.nsqd = nsqd
        self.publisher = nsqd.connect()
        self.publisher.identify(heartbeat_interval=-1)
        # Only `check` reads: a heartbeat would be in its way, as often as it comes.
        self.consumer = nsqd.connect().subscribe("bystander", rdy=1, heartbeat_interval=60_000)
        self._count = 0

    def check(self) -> None:
        self._count += 1
        body = b"unharmed %d" % self._count
        self.publisher.publish("bystander", body)
        while (frame := self.consumer.read_frame()).data == HEARTBEAT:
            self.consumer.NOP()
        message = Message.parse(frame.data)
        assert (frame.kind, message.body) == (MESSAGE, body)
        self.consumer.FIN(message.id)
        reply = self.nsqd.get("/ping")
        assert (reply.status, reply.body) == (200, b"OK")


@pytest.fixture(scope="module")
def bystander(nsqd: Nsqd) -> Iterator[Bystander]:
    pair = Bystander(nsqd)
    yield pair
    pair.publisher.close()
    pair.consumer.close()


def pour(address: tuple[str, int], data: bytes, *, wait: bool = True) -> bytes:
    """Sends, ends the input, and takes what comes until the close; nothing after a reset."""
    answer = b""
    with socket.create_connection(address, timeout=20) as connection:
        try:
            connection.sendall(data)
            if not wait:
                return b""
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                answer += piece
        except TimeoutError:
            raise
        except OSError:
            return b""
    return answer


def assert_frames(data: bytes) -> None:
    """Asserts that what came back is whole frames of known types."""
    position = 0
    while position < len(data):
        size, kind = struct.unpack_from(">ii", data, position)
        assert kind in (0, 1, 2)
        position += 4 + size
    assert position == len(data)


@pytest.mark.parametrize("seed", range(10))
def test_noise_on_the_tcp_port(nsqd: Nsqd, bystander: Bystander, seed: int) -> None:
    noise = random.Random(seed)
    for _ in range(10):
        assert_frames(pour(nsqd.tcp, noise.randbytes(noise.randrange(1, 5000))))
        assert_frames(pour(nsqd.tcp, MAGIC + noise.randbytes(noise.randrange(1, 50_000))))
    bystander.check()


@pytest.mark.parametrize("seed", range(5))
def test_noise_on_the_http_port(nsqd: Nsqd, bystander: Bystander, seed: int) -> None:
    noise = random.Random(seed)
    before = nsqd.topic_names()
    for _ in range(10):
        for data in (
            noise.randbytes(noise.randrange(1, 5000)),
            b"GET " + noise.randbytes(100) + b"\r\n\r\n",
            b"POST /pub?topic=noise HTTP/1.1\r\n" + noise.randbytes(200) + b"\r\n\r\n",
        ):
            answer = pour(nsqd.http, data)
            assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), answer
    assert nsqd.topic_names() == before
    bystander.check()


words = st.one_of(
    st.sampled_from([*VERBS, b"", b"t", b"ch", b"1", b"-1", b"99999999999999999999", b"0123456789abcdef"]),
    st.binary(max_size=20),
)
sizes = st.one_of(st.integers(-5, 40), st.sampled_from([GIANT, -GIANT - 1, 2**20, 2**20 + 1, 5 * 2**20 + 1]))
bodies = st.builds(lambda size, data: struct.pack(">i", size) + data, sizes, st.binary(max_size=40))
commands = st.builds(
    lambda verb, parameters, body: b" ".join([verb, *parameters]) + b"\n" + body,
    st.one_of(st.sampled_from(VERBS), words),
    st.lists(words, max_size=3),
    st.one_of(st.just(b""), bodies),
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(script=st.lists(commands, max_size=5), subscribed=st.booleans())
def test_commands_that_nearly_make_sense(
    nsqd: Nsqd, bystander: Bystander, script: list[bytes], subscribed: bool
) -> None:
    start = MAGIC + (b"SUB nearly#ephemeral ch#ephemeral\nRDY 5\n" if subscribed else b"")
    assert_frames(pour(nsqd.tcp, start + b"".join(script)))
    bystander.check()


CONVERSATION = b"".join(
    [
        MAGIC,
        b"IDENTIFY\n" + body_of(b'{"client_id":"partial"}'),
        b"PUB partial#ephemeral\n" + body_of(b"0123456789"),
        b"MPUB partial#ephemeral\n" + mpub_body([b"abc", b"def"]),
        b"DPUB partial#ephemeral 5\n" + body_of(b"later"),
        b"SUB partial#ephemeral ch#ephemeral\nRDY 1\nCLS\n",
    ]
)


@pytest.mark.parametrize("politely", [True, False])
def test_closing_anywhere_in_a_conversation(nsqd: Nsqd, bystander: Bystander, politely: bool) -> None:
    for length in range(len(CONVERSATION)):
        answer = pour(nsqd.tcp, CONVERSATION[:length], wait=politely)
        assert_frames(answer)
    bystander.check()


def test_reset_in_the_middle_of_a_body(nsqd: Nsqd, bystander: Bystander) -> None:
    for _ in range(20):
        with nsqd.connect() as client:
            client.send(b"PUB reset\n" + struct.pack(">i", 1000) + b"x" * 500)
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    bystander.check()
    assert "reset" not in nsqd.topic_names()


CLIENTS = 60
"""Each declares a MiB or more: if that were set aside at once, all together could not be overlooked."""


@pytest.mark.parametrize(
    "start",
    [
        b"PUB giant\n" + struct.pack(">i", 2**20),
        b"MPUB giant\n" + struct.pack(">ii", 5 * 2**20, 1_048_575),
        b"MPUB giant\n" + struct.pack(">iii", 5 * 2**20, 1, 2**20),
        b"DPUB giant 1\n" + struct.pack(">i", 2**20),
        b"IDENTIFY\n" + struct.pack(">i", 5 * 2**20),
        b"AUTH\n" + struct.pack(">i", 5 * 2**20),
    ],
    ids=repr,
)
def test_large_sizes_declared_and_little_sent(nsqd: Nsqd, bystander: Bystander, start: bytes) -> None:
    before = _resident_bytes(nsqd)
    waiting = [nsqd.connect() for _ in range(CLIENTS)]
    for client in waiting:
        client.send(start + b"little")
    bystander.check()
    grown = _resident_bytes(nsqd) - before
    for client in waiting:
        client.close()
    bystander.check()
    declared = CLIENTS * 2**20
    assert grown < declared // 4, f"{CLIENTS} clients that declared {declared >> 20} MiB or more cost {grown >> 20} MiB"


def _resident_bytes(nsqd: Nsqd) -> int:
    with open(f"/proc/{nsqd.pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /pub?topic=giant HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\nlittle",
        b"POST /pub?topic=giant HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /pub?topic=giant HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST /pub?topic=giant HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFF\r\nlittle",
        b"POST /pub?topic=giant HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnot a size\r\n",
        b"POST /mpub?topic=giant&binary=true HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\n" + b"\x7f" * 8,
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /ping HTTP/1.1\r\n" + b"X-Header: y\r\n" * 200_000 + b"\r\n",
        b"GET /ping HTTP/1.1\r\nX: " + b"y" * 2_000_000 + b"\r\n\r\n",
        b"GET /stats?format=json&topic=" + b"%ff" * 100 + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /ping HTTP/1.1\r\n\0: \0\r\n\r\n",
        b"\r\n" * 10_000,
        b"GET",
        b"",
    ],
    ids=lambda data: repr(data[:60]),
)
def test_bad_http(nsqd: Nsqd, bystander: Bystander, request_bytes: bytes) -> None:
    pour(nsqd.http, request_bytes)
    bystander.check()
    assert "giant" not in nsqd.topic_names() or nsqd.topic("giant")["message_count"] == 0


def test_many_connections_that_say_nothing(nsqd: Nsqd, bystander: Bystander) -> None:
    idle = [socket.create_connection(nsqd.tcp, timeout=20) for _ in range(100)]
    idle += [socket.create_connection(nsqd.http, timeout=20) for _ in range(100)]
    bystander.check()
    for connection in idle:
        connection.close()
    bystander.check()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    name=st.text(max_size=80),
    path=st.sampled_from(["/pub", "/mpub", "/topic/delete", "/topic/pause", "/stats"]),
)
def test_any_text_as_a_topic_over_http(nsqd: Nsqd, name: str, path: str) -> None:
    name = name.encode("utf-8", "replace").decode()
    reply = nsqd.get(path, topic=name) if path == "/stats" else nsqd.post(path, b"x", topic=name)
    assert reply.status in (200, 400, 404)


def test_replies_of_a_pipelining_client_that_never_reads(
    nsqd: Nsqd, bystander: Bystander, connect: Callable[..., Wire]
) -> None:
    """Thousands of answers pile up for a client that takes none of them: nsqd stops reading from it."""
    client = connect()
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.subscribe("neverreads", rdy=0)
    client.socket.settimeout(0.5)
    with pytest.raises((TimeoutError, ConnectionError)):
        client.socket.sendall(b"FIN 0123456789abcdef\n" * 5_000_000)
    bystander.check()
