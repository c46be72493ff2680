"""Reads from an nsqd that is none, or a bad one: whatever it answers, reading ends with an error of ours, in time."""

import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from xxhash import xxh32_intdigest

from nsquark.log.writer import encode_header
from nsquark.spark.endpoint import Endpoint, NsqdError, Refused, Unreachable, WrongAddress
from nsquark.spark.nsqd_http import Finder, RangeNsqd, identify
from nsquark.spark.options import Access, SourceOptions
from nsquark.spark.sink.options import SinkOptions
from nsquark.spark.sink.publisher import tcp_addresses
from nsquark.spark.source.channel import SourceChannel
from nsquark.spark.source.offsets import Key, Range
from nsquark.spark.source.plan import DataLost, Planner, RangePartition
from nsquark.spark.source.range_rows import SCHEMA, RangeRowReader
from nsquark.wire.batch_format import HEAD, HEADER_BYTES, MAGIC, TAIL, VERSION, StoredBatch

ID = "11111111-2222-3333-4444-555555555555"
READ_TIMEOUT_S = 1.0
ANSWER_TIMEOUT = "30s"
"""Holds for those that answer, on a busy machine too."""
LOW, HIGH = 1000, 2000

Script = Callable[[str], Iterable[bytes]]


class Hostile:
    """Answers each request with the bytes that the script gives for its target, for as long as somebody reads them."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                head = b""
                while b"\r\n\r\n" not in head:
                    data = connection.recv(65536)
                    if not data:
                        return
                    head += data
                target = head.split(b" ")[1].decode()
                self.requests.append(head)
                for piece in self.script(target):
                    connection.sendall(piece)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass  # closed with something unread, it would be a reset, which may come before the answer is read
            except OSError:
                return


@pytest.fixture
def hostile() -> Iterator[Callable[[Script], Hostile]]:
    servers: list[Hostile] = []

    def make(script: Script) -> Hostile:
        servers.append(Hostile(script))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def answer(fields: Any, status: int = 200) -> bytes:
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


STREAM = b"HTTP/1.1 200 OK\r\nX-Nsquark-Id: " + ID.encode() + b"\r\nConnection: close\r\n\r\n"


def dripping(data: bytes) -> Iterator[bytes]:
    for byte in itertools.cycle(data):
        yield bytes((byte,))
        time.sleep(0.05)


def record(seq: int, body: bytes = b"x") -> bytes:
    framed = struct.pack(">iqH", 2, seq, 1) + b"%016x" % seq + body
    return struct.pack(">i", len(framed)) + framed


def batch(first: int, records: Iterable[bytes], messages: int | None = None) -> bytes:
    found = list(records)
    payload = b"".join(found)
    header = StoredBatch(0, first, len(found) if messages is None else messages, len(payload), 0, 1, 0, bytes(16))
    return encode_header(header, payload) + payload


def stalled(seconds: float) -> bytes:
    """Returns nothing, after a while."""
    time.sleep(seconds)
    return b""


def announced(first: int, payload_bytes: int) -> bytes:
    """Makes the header of a batch of one message, whose payload is still to come."""
    tail = TAIL.pack(1, payload_bytes, 0, first, 0, 1, 0, bytes(16))
    return HEAD.pack(MAGIC, VERSION, 0, HEADER_BYTES, xxh32_intdigest(tail, 0)) + tail


def messages(low: int, high: int) -> bytes:
    return batch(low, [record(seq) for seq in range(low, high)])


def options(address: str, **more: str) -> SourceOptions:
    return SourceOptions.parse({"nsqd": address, "topic": "t", "readTimeout": ANSWER_TIMEOUT, **more})


def read(address: str, count: int = HIGH - LOW, **more: str) -> int:
    partition = RangePartition(Key("t", ID), address, LOW, HIGH, count)
    return sum(found.num_rows for found in RangeRowReader(options(address, **more), SCHEMA, partition).batches())


def within(seconds: float, work: Callable[[], Any]) -> Exception:
    """Returns the error that ends the work, in far less time than the server would go on for."""
    began = time.monotonic()
    with pytest.raises(NsqdError) as raised:
        work()
    assert time.monotonic() - began < seconds + 20
    return raised.value


# -- single answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pieces",
    [
        lambda: dripping(b"HTTP/1.1 200 OK\r\n"),
        lambda: itertools.chain([b"HTTP/1.1 200 OK\r\n"], dripping(b"X-A: b\r\n")),
        lambda: itertools.chain([b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"], dripping(b" ")),
        lambda: itertools.chain([b"HTTP/1.1 404 X\r\nTransfer-Encoding: chunked\r\n\r\n"], dripping(b"1\r\n \r\n")),
        list,
        lambda: [b"\0" * 100],
        lambda: [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{}"],
    ],
    ids=["status", "headers", "body", "chunks", "nothing", "zeros", "cut off"],
)
def test_answers_that_drip_or_break_off(
    hostile: Callable[[Script], Hostile], pieces: Callable[[], Iterable[bytes]]
) -> None:
    server = hostile(lambda target: pieces())
    asked = Endpoint(server.address, Access(), 0.5)
    assert isinstance(within(0.5, lambda: asked.ask("/log/info")), Unreachable)


def test_answers_without_end(hostile: Callable[[Script], Hostile]) -> None:
    server = hostile(lambda target: itertools.chain([b"HTTP/1.1 200 OK\r\n\r\n"], itertools.repeat(b" " * 65536)))
    error = within(5, lambda: Endpoint(server.address, Access(), answer_bytes_max=1 << 20).ask("/log/info"))
    assert "with more than 1 MiB" in str(error)


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b"\xff", b'{"nsqd_id":', b'{"more":' + b"[" * 100_000, b'{"nsqd_id":' + b"9" * 5000 + b"}"],
    ids=lambda body: body[:12].decode("latin-1"),
)
@pytest.mark.parametrize("status", [200, 400, 503])
def test_no_json(hostile: Callable[[Script], Hostile], body: bytes, status: int) -> None:
    server = hostile(lambda target: [answer(body, status)])
    assert isinstance(within(5, lambda: identify(server.address, Access())), (WrongAddress, Refused))


@pytest.mark.parametrize("nsqd_id", [None, 7, [], "", "x" * 100_000, "a\x1b[2J"], ids=lambda value: repr(value)[:12])
def test_ids_that_are_none(hostile: Callable[[Script], Hostile], nsqd_id: object) -> None:
    server = hostile(lambda target: [answer({"nsqd_id": nsqd_id, "topics": []})])
    assert isinstance(within(5, lambda: identify(server.address, Access())), WrongAddress)


@pytest.mark.parametrize("port", [None, "x", -1, 0, 65536, 10**30, True, [1]])
def test_https_ports_that_are_none(hostile: Callable[[Script], Hostile], port: object) -> None:
    server = hostile(lambda target: [answer({"message": "TLS_REQUIRED", "https_port": port}, 403)])
    within(5, lambda: Finder(options(server.address)).find())


JUNK: list[Any] = [None, "x", -1, 1.5, 2**63, [], {}]


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_junk_where_numbers_belong(hostile: Callable[[Script], Hostile], junk: object) -> None:
    fields = {"topic": "t", "first": junk, "next": junk, "seq": junk, "position": junk, "topics": [{"topic": "t"}]}
    server = hostile(lambda target: [answer({**fields, "nsqd_id": ID})])
    nsqd = RangeNsqd(server.address, Access(), ID)
    hold = SourceChannel(options(server.address, channel="c"))
    for work in (
        nsqd.topic_names,
        lambda: nsqd.topics(lambda _: True),
        lambda: nsqd.head("t"),
        lambda: nsqd.first_at(["t"], ts_ms=0),
        lambda: hold.commit_keys(nsqd, "owner", {Key("t", ID): 0}),
    ):
        assert isinstance(within(5, work), WrongAddress)


@pytest.mark.parametrize(
    "changed",
    [
        *({"count": junk} for junk in JUNK),
        {"from": LOW - 1},
        {"to": HIGH + 1},
        {"parts": [{"from": LOW - 1, "to": HIGH, "count": 1, "bytes": 1}]},
        {"parts": [{"from": LOW, "to": HIGH + 1, "count": 1, "bytes": 1}]},
        {"parts": [{"from": LOW, "to": HIGH, "count": HIGH, "bytes": 1}]},
        {"parts": [{"from": LOW, "to": HIGH, "count": 1, "bytes": 1}] * 2},
        {"parts": [{"from": LOW, "to": LOW, "count": 0, "bytes": 0}] * 5000},
        {"parts": "x"},
        {"removed": "x"},
        {"removed": {"from": "x"}},
        {"next": None},
    ],
    ids=lambda changed: repr(changed)[:40],
)
def test_plans_that_cannot_be(hostile: Callable[[Script], Hostile], changed: dict[str, Any]) -> None:
    part = {"from": LOW, "to": HIGH, "count": 10, "bytes": 10}
    plan = {"topic": "t", **part, "parts": [part], "removed": None, "next": HIGH, **changed}
    server = hostile(lambda target: [answer({"nsqd_id": ID, "plans": [plan]})])
    nsqd = RangeNsqd(server.address, Access(), ID)
    planner = Planner(options(server.address))
    if "from" in changed:
        plan["parts"] = [{**part, **changed}]
    assert isinstance(within(5, lambda: planner.partitions({Key("t", ID): Range(LOW, HIGH)}, {ID: nsqd})), WrongAddress)


@pytest.mark.parametrize(
    "producers",
    [
        None,
        "x",
        [None],
        [{"broadcast_address": 1, "http_port": 1}],
        [{"broadcast_address": "a", "http_port": "x"}],
        [{"broadcast_address": "a", "http_port": 99999}],
        [{"broadcast_address": f"h{number}", "http_port": 1} for number in range(60_000)],
    ],
    ids=lambda value: repr(value)[:30],
)
def test_producers_that_cannot_be(hostile: Callable[[Script], Hostile], producers: object) -> None:
    server = hostile(lambda target: [answer({"channels": [], "producers": producers})])
    finder = Finder(SourceOptions.parse({"lookupd": server.address, "topic": "t"}))
    assert isinstance(within(5, finder.find), WrongAddress)


@pytest.mark.parametrize(
    "host",
    ["a" * 64, "h" * 70_000, ".", "a..b", "x\r\nHost: y", "\x1b[2J", "a b", ""],
    ids=lambda host: ascii(host[:9]),
)
def test_hosts_that_cannot_be(hostile: Callable[[Script], Hostile], host: str) -> None:
    """A producer that nsqlookupd cannot have meant is left out like one that does not answer, and named in a line."""
    producers = [{"broadcast_address": host, "http_port": 1}]
    server = hostile(lambda target: [answer({"channels": [], "producers": producers})])
    finder = Finder(SourceOptions.parse({"lookupd": server.address, "topic": "t"}))
    assert finder.find() == {}
    [(address, reason)] = finder.unreachable.items()
    assert (address + reason).isprintable()
    assert len(address) < 300


@pytest.mark.parametrize("port", [None, "x", -1, 99999, [], 10**30])
def test_tcp_ports_that_are_none(hostile: Callable[[Script], Hostile], port: object) -> None:
    server = hostile(lambda target: [answer({"tcp_port": port})])
    assert isinstance(within(5, lambda: tcp_addresses(SinkOptions.parse({"nsqd": server.address}))), WrongAddress)


# -- ranges ----------------------------------------------------------------------------------------------


def reading(*pieces: bytes, then: Callable[[], Iterable[bytes]] = lambda: ()) -> Script:
    """Makes the script of an nsqd that is known by its id, and streams these pieces."""

    def script(target: str) -> Iterable[bytes]:
        if target.startswith("/log/read"):
            return itertools.chain([STREAM], pieces, then())
        return [answer({"nsqd_id": ID, "message": "TOPIC_NOT_FOUND"}, 404)]

    return script


def test_a_range_as_it_should_be(hostile: Callable[[Script], Hostile]) -> None:
    """This range can be read, so that the tests below fail for what they change."""
    server = hostile(reading(messages(LOW - 5, LOW + 100), messages(LOW + 100, HIGH + 5)))
    assert read(server.address) == HIGH - LOW


def endless(piece: bytes) -> Callable[[], Iterable[bytes]]:
    return lambda: itertools.repeat(piece)


@pytest.mark.parametrize(
    ("then", "says"),
    [
        (endless(messages(HIGH, HIGH + 10)), "where those from"),
        (endless(messages(LOW - 20, LOW)), "where those from"),
        (endless(messages(LOW, LOW + 10)), "where those from"),
        (endless(batch(LOW, [])), "where those from"),
        (endless(batch(LOW, [], messages=10)), "a batch of 10 messages has 0"),
        (endless(batch(LOW, [record(LOW)], messages=2**31)), "a batch of 2147483648 messages has 1"),
        (endless(batch(LOW, [b"\0" * 50])), "is no record of a message"),
        (lambda: (batch(2**63 - 1 - n, [record(1)]) for n in itertools.count()), "where those from"),
        (lambda: (batch(LOW + n, [record(LOW + n), record(LOW + n)]) for n in itertools.count()), "planned with 1000"),
        (lambda: [announced(LOW, 2**31), b"\0" * (2 << 20)], "at most"),
    ],
    ids=["above", "below", "again", "empty", "without records", "too few records", "junk", "far", "overlaps", "huge"],
)
def test_batches_that_cannot_be(
    hostile: Callable[[Script], Hostile], then: Callable[[], Iterable[bytes]], says: str
) -> None:
    server = hostile(reading(then=then))
    assert says in str(within(READ_TIMEOUT_S, lambda: read(server.address)))


@pytest.mark.parametrize(
    "then",
    [
        endless(b"\0" * 65536),
        endless(messages(LOW, LOW + 10)[:-1] + b"\xff"),
        lambda: dripping(b"\0"),
        lambda: dripping(messages(LOW, LOW + 10)),
        lambda: itertools.chain([announced(LOW, 9 << 20)], dripping(b"\0")),
        lambda: map(stalled, [READ_TIMEOUT_S * 2]),
    ],
    ids=["zeros", "wrong checksums", "dripping zeros", "dripping batch", "dripping payload", "silence"],
)
def test_what_brings_no_message_ends_with_the_read_timeout(
    hostile: Callable[[Script], Hostile], then: Callable[[], Iterable[bytes]]
) -> None:
    server = hostile(reading(then=then))
    error = within(READ_TIMEOUT_S, lambda: read(server.address, readTimeout=f"{READ_TIMEOUT_S}s"))
    assert isinstance(error, Unreachable)
    assert "raise readTimeout" in str(error)


@pytest.mark.parametrize("removed_to", [None, "x", -1, 0, LOW, 1.5, [], LOW - 1], ids=repr)
@pytest.mark.parametrize("fails", ["true", "false"])
def test_removed_but_not_up_to_where(hostile: Callable[[Script], Hostile], removed_to: object, fails: str) -> None:
    refusal = answer({"nsqd_id": ID, "message": "REMOVED", "removed_to": removed_to}, 410)
    server = hostile(lambda target: [refusal])
    error = within(READ_TIMEOUT_S, lambda: read(server.address, failOnDataLoss=fails))
    assert "but not up to where" in str(error)


def test_removed_up_to_somewhere(hostile: Callable[[Script], Hostile]) -> None:
    server = hostile(lambda target: [answer({"nsqd_id": ID, "message": "REMOVED", "removed_to": 2**70}, 410)])
    assert isinstance(within(READ_TIMEOUT_S, lambda: read(server.address)), DataLost)
    assert read(server.address, failOnDataLoss="false") == 0


def test_another_id_in_the_stream(hostile: Callable[[Script], Hostile]) -> None:
    script = reading(messages(LOW, HIGH))
    server = hostile(lambda target: [piece.replace(b"1111", b"2222") for piece in script(target)])
    error = within(READ_TIMEOUT_S, lambda: read(server.address, readTimeout=f"{READ_TIMEOUT_S}s"))
    assert isinstance(error, Unreachable)


def test_what_it_says_is_told_in_one_printable_line(hostile: Callable[[Script], Hostile]) -> None:
    said = {"message": "NO\x1b[2J", "reason": "x\n" * 100_000}
    server = hostile(lambda target: [answer(said, 400)])
    text = str(within(5, lambda: Endpoint(server.address, Access()).ask("/log/info")))
    assert text.isprintable()
    assert len(text) < 3000


def test_a_secret_is_not_sent_before_it_is_asked_for(hostile: Callable[[Script], Hostile]) -> None:
    """The server may be the plain port of an nsqd that requires TLS, to which nsqlookupd sends."""
    server = hostile(lambda target: [answer({"message": "TLS_REQUIRED", "https_port": 1}, 403)])
    finder = Finder(options(server.address, authSecret="hush-hush"))
    assert isinstance(within(5, finder.find), WrongAddress)
    assert server.requests
    assert not any(b"hush-hush" in head for head in server.requests)
    server.script = lambda target: [answer({"message": "AUTH_REQUIRED"}, 401)]
    assert isinstance(within(5, finder.find), Refused)
    assert [b"Bearer hush-hush" in head for head in server.requests[-2:]] == [False, True]
