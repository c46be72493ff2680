"""Makes what a greedy client sends: an endless flood of some kind, on one connection or on ever new ones."""

import itertools
import json
import re
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness import Nsqd, body_of, mpub_body
from harness.upgrades import SNAPPY_STREAM_START, masked_crc32c, trusting_anything
from harness.wire import MAGIC

SEND_BYTES = 256 << 10
UNKNOWN_ID = b"0123456789abcdef"
TOPICS = 300
LINES = 2_500_000
IDENTIFY_BYTES = 5_000_000
KEYS = 350_000
MANY_TOPICS, CHANNELS_EACH = 50, 100
"""Together these are 5,000 channels."""
KEPT = 1_000
"""Messages that are there for a flood."""
MINUTES = 59
ENDED = b""
"""Ends a flood that goes on with a new connection."""

Connect = Callable[[Nsqd], socket.socket]
"""Opens a flood's connection, up to where the flood begins."""
Make = Callable[[], Iterator[bytes]]
Answer = Callable[[bytes], bytes]
"""Returns what is sent for what was received."""


@dataclass(frozen=True)
class Flood:
    connect: Connect
    make: Make
    prepare: Callable[[Nsqd], None] | None = None
    """Is done once, before the flood begins."""
    answer: Answer | None = None


def _plain(nsqd: Nsqd) -> socket.socket:
    wire = nsqd.connect()
    wire.identify(heartbeat_interval=-1)
    return wire.socket


def _subscribed(nsqd: Nsqd) -> socket.socket:
    return nsqd.connect().subscribe("flood", rdy=1, heartbeat_interval=60_000).socket


def _http(nsqd: Nsqd) -> socket.socket:
    return socket.create_connection(nsqd.http)


def _upgraded(**fields: object) -> Connect:
    def connect(nsqd: Nsqd) -> socket.socket:
        wire = nsqd.connect()
        wire.identify(heartbeat_interval=-1, **fields)
        if fields.get("tls_v1"):
            wire.socket = trusting_anything().wrap_socket(wire.socket)
        wire.take_pending() or wire.receive()  # OK, in whatever form it comes
        return wire.socket

    return connect


def _https(nsqd: Nsqd) -> socket.socket:
    return trusting_anything().wrap_socket(socket.create_connection(nsqd.https))


def _forever(data: bytes) -> Iterator[bytes]:
    while True:
        yield data


def _repeated(piece: bytes, size: int = SEND_BYTES) -> Iterator[bytes]:
    return _forever(piece * (size // len(piece) + 1))


def _empty_snappy_chunks() -> Iterator[bytes]:
    yield SNAPPY_STREAM_START
    yield from _repeated(b"\x01\x04\0\0" + struct.pack("<I", masked_crc32c(b"")))


def _skipped_snappy_chunks() -> Iterator[bytes]:
    yield SNAPPY_STREAM_START
    yield from _repeated(b"\xfe\0\0\0")


def _deflated_nops() -> Iterator[bytes]:
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    while True:
        yield deflate.compress(b"NOP\n" * 5_000_000) + deflate.flush(zlib.Z_SYNC_FLUSH)


def _identify_of_many_keys() -> Iterator[bytes]:
    fields = json.dumps({f"k{number}": 0 for number in range(KEYS)})
    return _forever(b"IDENTIFY\n" + body_of(fields.encode()))


def _identify_of_many_lists() -> Iterator[bytes]:
    body = b'{"x":[' + b"[]," * (IDENTIFY_BYTES // 3) + b"[]]}"
    return _forever(b"IDENTIFY\n" + body_of(body))


def _identify_of_one_string() -> Iterator[bytes]:
    return _forever(b"IDENTIFY\n" + body_of(b'{"user_agent":"' + b"x" * IDENTIFY_BYTES + b'"}'))


def _lines() -> Iterator[bytes]:
    body = b"x\n" * LINES
    return _forever(b"POST /mpub?topic=lines HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))


def _tiny_chunks() -> Iterator[bytes]:
    head = b"POST /mpub?topic=chunks HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return _forever(head + b"2\r\nx\n\r\n" * 200_000 + b"0\r\n\r\n")


def _cycle(count: int) -> Iterator[int]:
    while True:
        yield from range(count)


FLOODS: dict[str, Flood] = {
    "NOP": Flood(_plain, lambda: _repeated(b"NOP\n")),
    "pipelined 404s": Flood(_http, lambda: _repeated(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")),
    "empty snappy chunks": Flood(_upgraded(snappy=True), _empty_snappy_chunks),
    "skipped snappy chunks": Flood(_upgraded(snappy=True), _skipped_snappy_chunks),
    "IDENTIFY, 5 MB of keys": Flood(_plain, _identify_of_many_keys),
    "IDENTIFY, 5 MB of lists": Flood(_plain, _identify_of_many_lists),
    "IDENTIFY, 5 MB string": Flood(_plain, _identify_of_one_string),
    "/mpub of 2.5M lines": Flood(_http, _lines),
    "MPUB of 1M messages": Flood(_plain, lambda: _forever(b"MPUB many\n" + mpub_body([b"x"] * 1_000_000))),
    "MPUB of 65,536 messages": Flood(_plain, lambda: _forever(b"MPUB many\n" + mpub_body([b"x"] * 65_536))),
    "PUB to 300 topics": Flood(
        _plain,
        lambda: _repeated(b"".join(b"PUB t%d\n" % number + body_of(b"x") for number in range(TOPICS))),
    ),
    "PUB to one topic": Flood(_plain, lambda: _repeated(b"PUB t\n" + body_of(b"x"))),
    "DPUB": Flood(_plain, lambda: _repeated(b"DPUB later 600000\n" + body_of(b"x"))),
    "TOUCH of unknown": Flood(_subscribed, lambda: _repeated(b"TOUCH " + UNKNOWN_ID + b"\n")),
    "FIN of unknown": Flood(_subscribed, lambda: _repeated(b"FIN " + UNKNOWN_ID + b"\n")),
    "RDY": Flood(_subscribed, lambda: _repeated(b"RDY 1\n")),
    "deflated NOPs": Flood(_upgraded(deflate=True), _deflated_nops),
    "TLS, NOPs": Flood(_upgraded(tls_v1=True), lambda: _repeated(b"NOP\n")),
    "TLS, a byte a record": Flood(_upgraded(tls_v1=True), lambda: (b"NOP\n"[at : at + 1] for at in _cycle(4))),
    "HTTPS, pipelined 404s": Flood(_https, lambda: _repeated(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")),
    "/mpub in 2-byte chunks": Flood(_http, _tiny_chunks),
}


# -- what needs more than the same bytes again and again -------------------------------------------------


def _request(method: str, target: str, body: bytes = b"") -> bytes:
    return (
        b"%b %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (method.encode(), target.encode(), len(body))
        + body
    )


def _each(*pieces: bytes) -> Make:
    """Sends the pieces over and over, on one connection."""
    return lambda: _repeated(b"".join(pieces))


def _once(*pieces: bytes) -> Make:
    """Sends the pieces, then the same on a new connection."""
    return lambda: iter((b"".join(pieces), ENDED))


def _ask_all(nsqd: Nsqd, requests: list[bytes]) -> None:
    """Asks pipelined, in parts whose answers fit a socket."""
    with socket.create_connection(nsqd.http) as connection:
        for at in range(0, len(requests), 100):
            part, received = requests[at : at + 100], b""
            connection.sendall(b"".join(part))
            while received.count(b"HTTP/1.1 200 OK\r\n") < len(part) or not received.endswith(b"\r\n\r\n"):
                received += connection.recv(1 << 16)


def _with_many_channels(nsqd: Nsqd) -> None:
    names = list(itertools.product(range(MANY_TOPICS), range(CHANNELS_EACH)))
    _ask_all(nsqd, [_request("POST", f"/topic/create?topic=wide{topic}") for topic in range(MANY_TOPICS)])
    _ask_all(nsqd, [_request("POST", f"/channel/create?topic=wide{topic}&channel=c{each}") for topic, each in names])


def _with_kept(nsqd: Nsqd) -> None:
    nsqd.post("/topic/create", topic="kept")
    nsqd.post("/channel/create", topic="kept", channel="ch")
    for _ in range(KEPT // 10):
        nsqd.post("/mpub", b"x\n" * 10, topic="kept")


_held: list[socket.socket] = []


def _with_held(nsqd: Nsqd) -> None:
    """Has messages in flight to a consumer that answers none of them."""
    _with_kept(nsqd)
    _held[:] = [_consuming(nsqd)]


def _consuming(nsqd: Nsqd) -> socket.socket:
    return nsqd.connect().subscribe("kept", rdy=KEPT, heartbeat_interval=60_000).socket


def _stranger(nsqd: Nsqd) -> socket.socket:
    return socket.create_connection(nsqd.tcp)


_MESSAGE_ID = re.compile(rb"\x00\x00\x00\x02.{10}([0-9a-f]{16})", re.DOTALL)


def _requeue_all(received: bytes) -> bytes:
    return b"".join(b"REQ %b 0\n" % each for each in _MESSAGE_ID.findall(received))


_number = itertools.count()


def _new_subscription() -> Iterator[bytes]:
    yield MAGIC + b"SUB storm n%d#ephemeral\n" % next(_number)
    yield ENDED


def _plans() -> bytes:
    topics = [f"wide{number % MANY_TOPICS}" for number in range(4096)]
    ranges = [{"topic": topic, "from": 0, "to": 1 << 40, "parts": 1000} for topic in topics]
    return _request("POST", "/log/plan", json.dumps({"ranges": ranges}).encode())


def _trailers() -> bytes:
    head = b"POST /pub?topic=trailers HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    return head + b"a:b\r\n" * 5000 + b"\r\n"


def _dripped_head() -> Iterator[bytes]:
    yield b"GET /ping HTTP/1.1\r\nHost: x\r\n"
    for number in range(5000):
        yield b"a%d:b\r\n" % number
    yield ENDED


FLOODS |= {
    "RDY 0 and 1": Flood(_consuming, _each(b"RDY 0\n", b"RDY 1\n"), _with_kept),
    "REQ 0": Flood(_consuming, lambda: iter(()), _with_kept, _requeue_all),
    "SUB and CLS": Flood(_stranger, _once(MAGIC, b"SUB storm ch\n", b"RDY 1\n", b"CLS\n")),
    "SUB to new channels": Flood(_stranger, _new_subscription),
    "TLS handshakes": Flood(_upgraded(tls_v1=True), _once(b"NOP\n")),
    "HTTPS handshakes": Flood(_https, _once(b"GET /ping HTTP/1.0\r\n\r\n")),
    "DPUB to 59 minutes of 300 topics": Flood(
        _plain,
        _each(*(b"DPUB t%d %d\n" % (n % TOPICS, n % MINUTES * 60_000 + 60_000) + body_of(b"x") for n in range(5_900))),
    ),
    "/channel/messages": Flood(
        _http, _each(_request("GET", "/channel/messages?topic=kept&channel=ch&state=in_flight&limit=1000")), _with_held
    ),
    "/log/read of a message": Flood(
        _http, _each(_request("GET", "/log/read?topic=kept&from=0&max_messages=1")), _with_kept
    ),
    "/log/plan of 4,096 ranges": Flood(_http, _each(_plans()), _with_many_channels),
    "/log/info of all": Flood(_http, _each(_request("GET", "/log/info")), _with_many_channels),
    "/stats of 5,000 channels": Flood(_http, _each(_request("GET", "/stats?format=json")), _with_many_channels),
    "/stats as text": Flood(_http, _each(_request("GET", "/stats?format=text")), _with_many_channels),
    "/metrics of 5,000 channels": Flood(_http, _each(_request("GET", "/metrics")), _with_many_channels),
    "trailers": Flood(_http, _each(_trailers())),
    "a head in drips": Flood(_http, _dripped_head),
    "pause and unpause": Flood(
        _http,
        _each(_request("POST", "/topic/pause?topic=kept"), _request("POST", "/topic/unpause?topic=kept")),
        _with_kept,
    ),
    "topics made and deleted": Flood(
        _http, _each(_request("POST", "/topic/create?topic=gone"), _request("POST", "/topic/delete?topic=gone"))
    ),
    "channels made and deleted": Flood(
        _http,
        _each(
            _request("POST", "/channel/create?topic=kept&channel=gone"),
            _request("POST", "/channel/delete?topic=kept&channel=gone"),
        ),
        _with_kept,
    ),
    "/topic/empty": Flood(_http, _each(_request("POST", "/topic/empty?topic=kept")), _with_kept),
    "/channel/seek": Flood(_http, _each(_request("POST", "/channel/seek?topic=kept&channel=ch&to=oldest")), _with_kept),
    "/log/stage and abort": Flood(
        _http,
        _each(
            _request("POST", "/log/stage?topic=kept&token=t&part=0", mpub_body([b"x"] * 1000)[4:]),
            _request("POST", "/log/abort?topic=kept&token=t"),
        ),
        _with_kept,
    ),
}
