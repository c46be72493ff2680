"""Checks nsqlookupd's HTTP API, byte for byte; with NSQLOOKUPD set, the same of another nsqlookupd."""

import re
import socket
import time
from collections.abc import Callable

import pytest

from harness import StartError, eventually
from harness.lookupd import LookupWire, Nsqlookupd, nsqlookupd_is_ours

ours = pytest.mark.skipif(not nsqlookupd_is_ours(), reason="NSQ's nsqlookupd does not have this")

NEVER = -6795364578871345152


@pytest.fixture
def fresh(make_lookupd: Callable[..., Nsqlookupd]) -> Nsqlookupd:
    return make_lookupd()


def peer_text(wire: LookupWire, broadcast: str = "10.0.0.1") -> str:
    return (
        f'"remote_address":"{wire.name}","hostname":"h","broadcast_address":"{broadcast}",'
        '"tcp_port":4150,"http_port":4151,"version":"1.3.0"'
    )


# -- success ---------------------------------------------------------------------------------------------


def test_bodies_of_an_empty_database(fresh: Nsqlookupd) -> None:
    assert fresh.get("/ping").body == b"OK"
    assert fresh.get("/info").body == b'{"version":"1.3.0"}'
    assert fresh.get("/topics").body == b'{"topics":[]}'
    assert fresh.get("/channels", topic="t").body == b'{"channels":[]}'
    assert fresh.get("/nodes").body == b'{"producers":[]}'
    assert fresh.get("/debug").body == b"{}"


def test_bodies_of_one_registration(fresh: Nsqlookupd) -> None:
    with fresh.connect() as wire:
        wire.identify()
        assert fresh.get("/nodes").text == f'{{"producers":[{{{peer_text(wire)},"tombstones":[],"topics":[]}}]}}'
        wire.ask(b"REGISTER t c\n")
        assert fresh.get("/topics").body == b'{"topics":["t"]}'
        assert fresh.get("/channels", topic="t").body == b'{"channels":["c"]}'
        assert fresh.get("/lookup", topic="t").text == f'{{"channels":["c"],"producers":[{{{peer_text(wire)}}}]}}'
        assert (
            fresh.get("/nodes").text == f'{{"producers":[{{{peer_text(wire)},"tombstones":[false],"topics":["t"]}}]}}'
        )
    eventually(lambda: fresh.get("/nodes").body == b'{"producers":[]}')
    assert fresh.get("/lookup", topic="t").body == b'{"channels":["c"],"producers":[]}'


def test_text_of_peers_is_escaped_as_go_does(fresh: Nsqlookupd) -> None:
    with fresh.connect() as wire:
        wire.identify(broadcast_address='<a href="x">&\u2028\xe9\\')
        shown = '\\u003ca href=\\"x\\"\\u003e\\u0026\\u2028\xe9\\\\'
        assert fresh.get("/nodes").text == f'{{"producers":[{{{peer_text(wire, shown)},"tombstones":[],"topics":[]}}]}}'


def test_debug_is_the_whole_table_sorted(fresh: Nsqlookupd) -> None:
    with fresh.connect() as wire:
        wire.identify()
        wire.ask(b"REGISTER t c\n")
        fresh.post("/topic/create", topic="nobody")
        before = time.time_ns()
        fresh.post("/topic/tombstone", topic="t", node="10.0.0.1:4151")
        answer = fresh.get("/debug")
        row = (
            '[{"broadcast_address":"10.0.0.1","hostname":"h","http_port":4151,"id":"%s","last_update":T,'
            '"tcp_port":4150,"tombstoned":%s,"tombstoned_at":%s,"version":"1.3.0"}]'
        )
        live, dead = row % (wire.name, "false", NEVER), row % (wire.name, "true", "T")
        times = [int(number) for number in re.findall(r"\d{19}", answer.text.replace(str(NEVER), ""))]
        text = re.sub(r"(?<!-)\b\d{19}\b", "T", answer.text)
        assert text == f'{{"channel:t:c":{live},"client::":{live},"topic:t:":{dead}}}'
        assert all(abs(number - before) < 60e9 for number in times)


def headers_of(lookupd: Nsqlookupd, request: bytes) -> tuple[bytes, dict[bytes, bytes], bytes]:
    with socket.create_connection(lookupd.http, timeout=20) as connection:
        connection.sendall(request + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = b""
        while data := connection.recv(65536):
            received += data
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    return first, dict(line.split(b": ", 1) for line in lines), body


JSON = b"application/json; charset=utf-8"
HEADERS = {
    b"GET /ping": (b"200 OK", b"text/plain; charset=utf-8", False),
    b"GET /info": (b"200 OK", JSON, True),
    b"GET /topics": (b"200 OK", JSON, True),
    b"GET /channels?topic=x": (b"200 OK", JSON, True),
    b"GET /lookup?topic=x": (b"404 Not Found", JSON, True),
    b"GET /nodes": (b"200 OK", JSON, True),
    b"POST /topic/create?topic=headers": (b"200 OK", None, True),
    b"GET /nowhere": (b"404 Not Found", JSON, True),
    b"GET /topic/create": (b"405 Method Not Allowed", JSON, True),
}


@pytest.mark.parametrize("request_line", HEADERS)
def test_headers(lookupd: Nsqlookupd, request_line: bytes) -> None:
    status, content_type, is_nsq = HEADERS[request_line]
    first, headers, body = headers_of(lookupd, request_line)
    assert first == b"HTTP/1.1 " + status
    assert headers.get(b"Content-Type") == content_type
    assert headers.get(b"X-Nsq-Content-Type") == (b"nsq; version=1.0" if is_nsq else None)
    assert headers[b"Content-Length"] == str(len(body)).encode()


# -- errors ----------------------------------------------------------------------------------------------

REFUSED = {
    "GET /channels": (400, "MISSING_ARG_TOPIC"),
    "GET /lookup": (400, "MISSING_ARG_TOPIC"),
    "GET /lookup?topic=": (404, "TOPIC_NOT_FOUND"),
    "GET /lookup?topic=unknown": (404, "TOPIC_NOT_FOUND"),
    "GET /lookup?topic=%zz": (400, "INVALID_REQUEST"),
    "GET /lookup?topic=a;b": (400, "INVALID_REQUEST"),
    "GET /channels?topic=%": (400, "INVALID_REQUEST"),
    "POST /topic/create": (400, "MISSING_ARG_TOPIC"),
    "POST /topic/create?topic=": (400, "INVALID_ARG_TOPIC"),
    "POST /topic/create?topic=a!": (400, "INVALID_ARG_TOPIC"),
    "POST /topic/create?topic=%zz": (400, "INVALID_REQUEST"),
    "POST /topic/delete": (400, "MISSING_ARG_TOPIC"),
    "POST /topic/tombstone": (400, "MISSING_ARG_TOPIC"),
    "POST /topic/tombstone?topic=a": (400, "MISSING_ARG_NODE"),
    "POST /channel/create": (400, "MISSING_ARG_TOPIC"),
    "POST /channel/create?topic=t": (400, "MISSING_ARG_CHANNEL"),
    "POST /channel/create?topic=!": (400, "INVALID_ARG_TOPIC"),
    "POST /channel/create?topic=t&channel=!": (400, "INVALID_ARG_CHANNEL"),
    "POST /channel/delete?topic=t&channel=unknown": (404, "CHANNEL_NOT_FOUND"),
    "POST /channel/delete?topic=!&channel=c": (400, "INVALID_ARG_TOPIC"),
    "POST /channel/delete?topic=t": (400, "MISSING_ARG_CHANNEL"),
    "GET /nowhere": (404, "NOT_FOUND"),
    "GET /": (404, "NOT_FOUND"),
    "GET /topic/create?topic=t": (405, "METHOD_NOT_ALLOWED"),
    "POST /ping": (405, "METHOD_NOT_ALLOWED"),
}


@pytest.mark.parametrize("line", REFUSED)
def test_refusals(lookupd: Nsqlookupd, line: str) -> None:
    method, target = line.split()
    status, code = REFUSED[line]
    answer = lookupd.request(method, target)
    assert (answer.status, answer.text) == (status, f'{{"message":"{code}"}}')


@pytest.mark.parametrize(
    "target",
    [
        "/topic/delete?topic=never",
        "/topic/delete?topic=not!valid",
        "/topic/tombstone?topic=never&node=nobody",
        "/topic/tombstone?topic=&node=",
    ],
)
def test_what_matches_nothing_is_still_done(lookupd: Nsqlookupd, target: str) -> None:
    answer = lookupd.request("POST", target)
    assert (answer.status, answer.body) == (200, b"")


def test_a_misspelt_path_is_redirected(lookupd: Nsqlookupd) -> None:
    answer = lookupd.request("GET", "/Lookup/?topic=t")
    assert (answer.status, answer.headers["Location"]) == (301, "/lookup?topic=t")


# -- what operators do -----------------------------------------------------------------------------------


def test_created_names_are_listed_and_deleted_ones_are_not(lookupd: Nsqlookupd) -> None:
    lookupd.post("/channel/create", topic="made", channel="c1")
    lookupd.post("/channel/create", topic="made", channel="c2")
    assert lookupd.get("/lookup", topic="made").json()["producers"] == []
    assert lookupd.channels("made") == {"c1", "c2"}
    assert lookupd.post("/channel/delete", topic="made", channel="c1").body == b""
    assert lookupd.channels("made") == {"c2"}
    lookupd.post("/topic/delete", topic="made")
    assert "made" not in lookupd.topics()
    assert lookupd.channels("made") == set()


def test_a_deleted_topic_comes_back_with_its_nsqd(lookupd: Nsqlookupd, wire: LookupWire) -> None:
    wire.identify()
    wire.ask(b"REGISTER back c\n")
    lookupd.post("/topic/delete", topic="back")
    assert lookupd.get("/lookup", topic="back").status == 404
    wire.ask(b"PING\n")
    assert lookupd.get("/lookup", topic="back").status == 404
    wire.ask(b"REGISTER back\n")
    assert lookupd.producers("back") == {("10.0.0.1", 4150)}
    assert lookupd.channels("back") == set()


def test_a_tombstone_hides_until_its_lifetime_ends(make_lookupd: Callable[..., Nsqlookupd]) -> None:
    lifetime_s = 1.0
    lookupd = make_lookupd(f"--tombstone-lifetime={lifetime_s:g}s")
    with lookupd.connect() as wire:
        wire.identify()
        wire.ask(b"REGISTER t\n")

        def hides() -> bool:
            """Tells whether all was seen before the lifetime ended."""
            began_s = time.monotonic()
            lookupd.post("/topic/tombstone", topic="t", node="10.0.0.1:4151")
            seen = lookupd.producers("t"), lookupd.nodes()[0]["tombstones"]
            if time.monotonic() - began_s >= lifetime_s:
                return False
            assert seen == (set(), [True])
            return True

        while not hides():
            pass
        eventually(lambda: lookupd.producers("t") == {("10.0.0.1", 4150)})
        assert lookupd.nodes()[0]["tombstones"] == [False]


def test_silence_hides_and_a_ping_shows_again(make_lookupd: Callable[..., Nsqlookupd]) -> None:
    timeout_s = 1.0
    lookupd = make_lookupd(f"--inactive-producer-timeout={timeout_s:g}s")
    with lookupd.connect() as wire:
        wire.identify()
        wire.ask(b"REGISTER t c\n")

        def ping_shows() -> bool:
            """Tells whether the producer was looked for before its silence was too long again."""
            began_s = time.monotonic()
            wire.ask(b"PING\n")
            seen = lookupd.producers("t")
            if time.monotonic() - began_s >= timeout_s:
                return False
            assert seen == {("10.0.0.1", 4150)}
            return True

        while not ping_shows():
            pass
        eventually(lambda: lookupd.producers("t") == set())
        assert lookupd.nodes() == []
        assert lookupd.topics() == {"t"}
        wire.ask(b"REGISTER t d\n")
        assert lookupd.producers("t") == set()
        while not ping_shows():
            pass


# -- what only this project's has ------------------------------------------------------------------------


@ours
def test_there_is_no_go_profiler(lookupd: Nsqlookupd) -> None:
    assert lookupd.get("/debug/pprof").status == 404
    assert lookupd.get("/debug/pprof/heap").status == 404


@ours
def test_metrics(fresh: Nsqlookupd) -> None:
    with fresh.connect() as wire:
        wire.identify()
        wire.ask(b"REGISTER t c\n")
        fresh.get("/lookup", topic="t")
        fresh.get("/lookup", topic="u")
        text = fresh.get("/metrics").text
    for line in (
        "nsqlookupd_topics 1",
        "nsqlookupd_channels 1",
        "nsqlookupd_producers 1",
        'nsqlookupd_registrations{category="channel"} 1',
        'nsqlookupd_registrations{category="topic"} 1',
        "nsqlookupd_tcp_connections 1",
        'nsqlookupd_tcp_commands_total{command="REGISTER"} 1',
        'nsqlookupd_http_requests_total{path="/lookup",status="200"} 1',
        'nsqlookupd_http_requests_total{path="/lookup",status="404"} 1',
        "# TYPE nsqlookupd_producers gauge",
    ):
        assert line in text.splitlines()


@ours
@pytest.mark.parametrize(
    "noise",
    [
        b"\x00\xff\xfe\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /topic/create?topic=t HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 1_000_000,
        b"  V1IDENTIFY\n\xff\xff\xff\xff",
    ],
)
def test_noise_on_the_http_port_is_refused_and_harmless(lookupd: Nsqlookupd, noise: bytes) -> None:
    with socket.create_connection(lookupd.http, timeout=20) as connection:
        try:
            connection.sendall(noise)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65536)
        except ConnectionError:
            answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert lookupd.get("/ping").body == b"OK"


def test_a_port_in_use_is_fatal(lookupd: Nsqlookupd) -> None:
    with pytest.raises(StartError) as failure:
        Nsqlookupd(f"--tcp-address={lookupd.tcp_address}").start()
    assert failure.value.exit_code == 1
    assert "FATAL: " in failure.value.log
    assert lookupd.tcp_address in failure.value.log
