"""Beside clients that take without giving (floods, half-open connections, bombs) nsqd stays small and at work."""

import contextlib
import http.client
import os
import resource
import shutil
import signal
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import MAGIC, Nsqd, Wire, eventually
from harness.holding import hold
from harness.upgrades import make_certificate, use_deflate, use_snappy, use_tls
from harness.wire import ClosedError

HALF_OPEN_CONNECTIONS = 2000
HALF_OPEN_BYTES_MAX = 80_000
"""Each costs a session, its transport and, if it has come that far, OpenSSL's state, which is most of it."""
BOMB_BYTES = 200 << 20
BOMB_GROWTH_BYTES_MAX = 20 << 20
PARTIAL_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200)


def _resident_bytes(nsqd: Nsqd) -> int:
    pages = int(Path(f"/proc/{nsqd.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _publish_rate(client: Wire, topic: str, seconds: float = 0.5) -> int:
    """Returns acknowledged publishes per second, made one at a time."""
    count, end = 0, time.monotonic() + seconds
    while not count or time.monotonic() < end:
        client.publish(topic, b"x" * 200)
        count += 1
    return int(count / seconds)


@pytest.fixture
def _many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < HALF_OPEN_CONNECTIONS + 500:
        pytest.skip(f"this process may have {hard} open files only")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- counts and times ------------------------------------------------------------------------------------


@pytest.mark.ours
def test_max_connections(make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], topic: str) -> None:
    daemon = make_nsqd("--max-connections=3")
    clients = [connect(daemon) for _ in range(3)]
    for client in clients:
        client.publish(topic, b"x")
    for _ in range(5):
        connect(daemon).expect_closed()
    clients[0].close()
    eventually(lambda: _is_usable(connect(daemon)))
    clients[1].assert_usable()


def _is_usable(client: Wire) -> bool:
    try:
        client.assert_usable()
    except (ClosedError, OSError):
        return False
    return True


@pytest.mark.ours
@pytest.mark.parametrize("sent", [b"", b"  V"], ids=repr)
def test_a_client_without_magic_is_closed(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], sent: bytes
) -> None:
    """It is closed within the longest heartbeat interval, after which nsqd would miss any other client's first word
    too.
    """
    daemon = make_nsqd("--max-heartbeat-interval=1s")

    def made_in_time() -> Wire | None:
        """Connects; if this process is held up before it says the magic, in vain."""
        client: Wire = connect(daemon)
        return client if _is_usable(client) else None

    proper = eventually(made_in_time)
    silent = connect(daemon, magic=sent)
    silent.expect_closed()
    proper.assert_usable()


# -- half-open connections -------------------------------------------------------------------------------


@pytest.mark.ours
@pytest.mark.usefixtures("_many_files")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
@pytest.mark.parametrize("stage", ["connected", "identified", "half a hello", "half a hello to HTTPS"])
def test_half_open_connections(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], tmp_path: Path, topic: str, stage: str
) -> None:
    certificate, key = make_certificate(tmp_path)
    daemon = make_nsqd(f"--tls-cert={certificate}", f"--tls-key={key}")
    daemon.put("/config/log_level", b"warn")
    worker = connect(daemon)
    worker.identify(heartbeat_interval=-1)
    rate_before = _publish_rate(worker, topic)
    before = _resident_bytes(daemon)
    with contextlib.ExitStack() as opened:
        for _ in range(HALF_OPEN_CONNECTIONS):
            opened.enter_context(_half_open(daemon, stage))
        rate_during = _publish_rate(worker, topic)
        grown = _resident_bytes(daemon) - before
        assert daemon.get("/ping").body == b"OK"
        print(
            f"{HALF_OPEN_CONNECTIONS} connections, {stage}: {grown / HALF_OPEN_CONNECTIONS / 1000:.1f} KB each; "
            f"PUB/s {rate_before} before, {rate_during} during"
        )
        assert grown < HALF_OPEN_CONNECTIONS * HALF_OPEN_BYTES_MAX
    worker.assert_usable()


@contextlib.contextmanager
def _half_open(daemon: Nsqd, stage: str) -> Iterator[None]:
    if stage.endswith("HTTPS"):
        with socket.create_connection(daemon.https) as connection:
            connection.sendall(PARTIAL_HELLO)
            yield
        return
    with Wire(daemon.tcp, magic=b"" if stage == "connected" else MAGIC) as client:
        if stage != "connected":
            client.identify(tls_v1=True)
        if stage == "half a hello":
            client.send(PARTIAL_HELLO)
        yield


# -- bombs -----------------------------------------------------------------------------------------------


def _raw_deflate(piece: bytes, times: int) -> bytes:
    """Compresses a piece once: after a full flush nothing refers to what came before, so it can be repeated."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    return (deflate.compress(piece) + deflate.flush(zlib.Z_FULL_FLUSH)) * times


@pytest.mark.ours
@pytest.mark.parametrize("secured", [False, True], ids=["plain", "inside TLS"])
@pytest.mark.parametrize("kind", ["zeros", "an endless line", "a message that is too big", "a body without end"])
def test_deflate_bomb(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], tmp_path: Path, topic: str, kind: str, secured: bool
) -> None:
    """A few hundred kilobytes that become 200 MB are cut where a plain client would be, and cost no more memory."""
    flags = []
    if secured:
        certificate, key = make_certificate(tmp_path)
        flags = [f"--tls-cert={certificate}", f"--tls-key={key}"]
    daemon = make_nsqd(*flags)
    client = connect(daemon)
    client.identify(deflate=True, tls_v1=secured)
    if secured:
        use_tls(client)
        client.expect_ok()
    raw = client.socket
    use_deflate(client)
    client.expect_ok()
    before = _resident_bytes(daemon)
    start, filling = {
        "zeros": (b"", b"\0"),
        "an endless line": (b"PUB ", b"t"),
        "a message that is too big": (f"PUB {topic}\n".encode() + b"\x0c\x00\x00\x00", b"x"),
        "a body without end": (f"MPUB {topic}\n".encode() + b"\x00\x40\x00\x00\x00\x0f\x00\x00", b"\0\0\0\1"),
    }[kind]
    encoded = client.socket.encode(start)  # type: ignore[attr-defined]
    bomb = encoded + _raw_deflate(filling * (65536 // len(filling)), BOMB_BYTES // 65536)
    assert len(bomb) < BOMB_BYTES // 200
    peak = before
    with contextlib.suppress(OSError):
        for at in range(0, len(bomb), 16384):
            raw.sendall(bomb[at : at + 16384])
            peak = max(peak, _resident_bytes(daemon))
    with contextlib.suppress(ClosedError, OSError):
        while True:
            client.receive()
    peak = max(peak, _resident_bytes(daemon))
    print(f"{kind}: {len(bomb)} bytes that would become {BOMB_BYTES}; memory grew by {(peak - before) / 1e6:.1f} MB")
    assert peak - before < BOMB_GROWTH_BYTES_MAX
    connect(daemon).assert_usable()


@pytest.mark.ours
def test_a_bomb_of_commands_lets_others_work(nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    """Millions of small commands in a few bytes are carried out, a portion at a time."""
    bomber, worker = connect(), connect()
    rate_before = _publish_rate(worker, topic)
    bomber.identify(deflate=True)
    raw = bomber.socket
    use_deflate(bomber)
    bomber.expect_ok()
    before = _resident_bytes(nsqd)
    raw.sendall(_raw_deflate(b"NOP\n" * 16384, (20 << 20) // 65536))
    rate_during = _publish_rate(worker, topic)
    grown = _resident_bytes(nsqd) - before
    print(f"20 MB of NOP in one go: PUB/s {rate_before} before, {rate_during} during; memory +{grown / 1e6:.1f} MB")
    assert rate_during > 0
    assert grown < BOMB_GROWTH_BYTES_MAX


def test_snappy_of_garbage(connect: Callable[..., Wire]) -> None:
    client = connect()
    client.identify(snappy=True)
    raw = client.socket
    use_snappy(client)
    client.expect_ok()
    raw.sendall(b"\xff\x06\x00\x00sNaPpY" + b"\x00\x09\x00\x00" + b"garbage!!")
    client.expect_closed()
    connect().assert_usable()


@pytest.mark.parametrize("kind", ["tcp", "http"])
def test_a_thousand_may_connect_at_once(make_nsqd: Callable[..., Nsqd], kind: str) -> None:
    """While nsqd is busy, clients wait to be accepted; with a short queue they would wait for a second or more."""
    daemon = make_nsqd()
    hold(daemon.pid)
    with contextlib.ExitStack() as opened:
        opened.callback(os.kill, daemon.pid, signal.SIGCONT)
        for _ in range(1000):
            opened.enter_context(socket.create_connection(getattr(daemon, kind), timeout=0.9))


@pytest.mark.parametrize("kind", ["tcp", "http"])
def test_connections_that_are_reset_at_once_leave_nothing(make_nsqd: Callable[..., Nsqd], kind: str) -> None:
    daemon = make_nsqd()
    daemon.get("/ping")
    before = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    hold(daemon.pid)
    for _ in range(50):
        connection = socket.create_connection(getattr(daemon, kind), timeout=20)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    os.kill(daemon.pid, signal.SIGCONT)
    eventually(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= before)
    assert "Traceback" not in daemon.log


def test_a_body_in_tiny_chunks_takes_little_memory(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    daemon.get("/ping")
    before = _resident_bytes(daemon)
    with socket.create_connection(daemon.http, timeout=60) as connection:
        head = b"POST /mpub?topic=t#ephemeral HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b"2\r\nxx\r\n" * 2_000_000)
        eventually(lambda: daemon.get("/ping").status == 200)
        assert _resident_bytes(daemon) - before < 25 << 20


COST_SAMPLES = 5


def _make_channels(daemon: Nsqd, topics: int, channels: int) -> None:
    connection = http.client.HTTPConnection(*daemon.http, timeout=60)
    for number in range(topics):
        connection.request("POST", f"/topic/create?topic=t{number}%23ephemeral")
        connection.getresponse().read()
        for channel in range(channels):
            connection.request("POST", f"/channel/create?topic=t{number}%23ephemeral&channel=c{channel}%23ephemeral")
            connection.getresponse().read()
    connection.close()


def _cost_of_stats_s(daemon: Nsqd) -> float:
    daemon.stats()
    before = _cpu_s(daemon)
    for _ in range(COST_SAMPLES):
        daemon.stats()
    return max((_cpu_s(daemon) - before) / COST_SAMPLES, 0.005)


def test_a_flood_of_stats_by_a_client_that_leaves_costs_little(make_nsqd: Callable[..., Nsqd]) -> None:
    """Of many requests on a connection two are worked on, for as long as somebody waits for their answers."""
    daemon = make_nsqd()
    _make_channels(daemon, 100, 10)
    one_s = _cost_of_stats_s(daemon)
    before = _cpu_s(daemon)
    with socket.create_connection(daemon.http) as connection:
        connection.sendall(b"GET /stats?format=json HTTP/1.1\r\nHost: x\r\n\r\n" * 256)
    daemon.get("/ping")
    assert daemon.stats()["health"] == "OK"
    assert _cpu_s(daemon) - before < 30 * one_s


def test_many_who_ask_for_stats_at_once_share_a_collection(make_nsqd: Callable[..., Nsqd]) -> None:
    daemon = make_nsqd()
    _make_channels(daemon, 300, 10)
    one_s = _cost_of_stats_s(daemon)
    before = _cpu_s(daemon)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(daemon.http, timeout=60)) for _ in range(50)]
        hold(daemon.pid)  # else this process may be held up between two questions
        stack.callback(os.kill, daemon.pid, signal.SIGCONT)
        for connection in connections:
            connection.sendall(b"GET /stats?format=json HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        os.kill(daemon.pid, signal.SIGCONT)
        for connection in connections:
            while connection.recv(1 << 20):
                pass
    assert _cpu_s(daemon) - before < 25 * one_s


def _cpu_s(daemon: Nsqd) -> float:
    """Returns the CPU time of nsqd's event loop."""
    return int(Path(f"/proc/{daemon.pid}/task/{daemon.pid}/schedstat").read_text().split()[0]) / 1e9
