"""Checks TLS, deflate and snappy, as IDENTIFY switches them on."""

import os
import shutil
import signal
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import FaultProxy, Frame, Nsqd, Wire
from harness.holding import hold
from harness.upgrades import make_certificate, use_deflate, use_snappy, use_tls
from harness.waiting import eventually
from harness.wire import RESPONSE

SLOW_TO_DEFLATE = os.urandom(1_000_000)
"""Is more than one turn of the event loop can encode."""
SNAPPY_OK = bytes.fromhex("ff060000734e61507059 010e0000 26982bcf 00000006 00000000 4f4b".replace(" ", ""))
PLAIN_BYTES_MAX = 64 << 10
"""Is how much nsqd decodes at a time."""
COMPRESSIBLE = b"the same again, " * 20_000

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")


@pytest.fixture(scope="module")
def tls_nsqd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nsqd]:
    flags = tls_flags(make_certificate(tmp_path_factory.mktemp("certificate")))
    with Nsqd(tmp_path_factory.mktemp("nsqd"), *flags) as daemon:
        yield daemon


def _exchange(client: Wire, topic: str) -> None:
    """Sends enough in both directions to show that both are coded as agreed."""
    client.publish(topic, b"small")
    client.publish(topic, COMPRESSIBLE, b"x", bytes(range(256)) * 100)
    client.subscribe(topic, rdy=10)
    bodies = {message.body for message in client.read_messages(4, finish=True)}
    assert bodies == {b"small", COMPRESSIBLE, b"x", bytes(range(256)) * 100}
    client.CLS()
    client.expect("CLOSE_WAIT")


@pytest.mark.parametrize(("asked", "granted"), [(0, 6), (1, 1), (5, 5), (9, 6), (-3, 6)])
def test_deflate(nsqd: Nsqd, client: Wire, topic: str, asked: int, granted: int) -> None:
    answer = client.identify(deflate=True, deflate_level=asked)
    assert (answer["deflate"], answer["deflate_level"], answer["snappy"]) == (True, granted, False)
    use_deflate(client)
    client.expect_ok()
    _exchange(client, topic)
    shown = nsqd.channel(topic)["clients"][0]
    assert (shown["deflate"], shown["snappy"]) == (True, False)


def test_snappy(nsqd: Nsqd, client: Wire, topic: str) -> None:
    answer = client.identify(snappy=True)
    assert (answer["deflate"], answer["snappy"]) == (False, True)
    use_snappy(client)
    client.expect_ok()
    assert client.socket.received == SNAPPY_OK  # type: ignore[attr-defined]
    _exchange(client, topic)
    shown = nsqd.channel(topic)["clients"][0]
    assert (shown["deflate"], shown["snappy"]) == (False, True)


def test_both_compressions_are_refused(client: Wire) -> None:
    client.IDENTIFY(feature_negotiation=True, snappy=True, deflate=True)
    client.expect_error("E_IDENTIFY_FAILED cannot enable both deflate and snappy compression")


@pytest.mark.parametrize(("off", "granted"), [("snappy", "deflate"), ("deflate", "snappy")])
def test_asking_for_both_grants_the_one_that_is_allowed(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], off: str, granted: str
) -> None:
    answer = connect(make_nsqd(f"--{off}=false")).identify(snappy=True, deflate=True)
    assert (answer[off], answer[granted]) == (False, True)


@needs_openssl
def test_tls(tls_nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    client = connect(tls_nsqd)
    assert client.identify(tls_v1=True)["tls_v1"] is True
    use_tls(client)
    client.expect_ok()
    _exchange(client, topic)
    shown = tls_nsqd.channel(topic)["clients"][0]
    assert shown["tls"] is True
    assert shown["tls_version"] == "TLS1.3"
    assert shown["tls_cipher_suite"].startswith("Unknown 486")
    assert shown["tls_negotiated_protocol"] == ""
    assert shown["tls_negotiated_protocol_is_mutual"] is True


@needs_openssl
def test_tls_is_the_clients_choice(tls_nsqd: Nsqd, connect: Callable[..., Wire], topic: str) -> None:
    client = connect(tls_nsqd)
    assert client.identify()["tls_v1"] is False
    _exchange(client, topic)


@needs_openssl
@pytest.mark.parametrize("compression", ["deflate", "snappy"])
def test_compression_inside_tls(tls_nsqd: Nsqd, connect: Callable[..., Wire], topic: str, compression: str) -> None:
    client = connect(tls_nsqd)
    client.IDENTIFY(feature_negotiation=True, tls_v1=True, **{compression: True})
    client.read_frame()
    use_tls(client)
    client.expect_ok()
    (use_deflate if compression == "deflate" else use_snappy)(client)
    client.expect_ok()
    _exchange(client, topic)


@needs_openssl
@pytest.mark.parametrize("chunk_bytes", [7, 4099])
@pytest.mark.parametrize("compression", [None, "deflate", "snappy"])
def test_records_may_be_cut_anywhere(
    tls_nsqd: Nsqd, connect: Callable[..., Wire], topic: str, compression: str | None, chunk_bytes: int
) -> None:
    sizes = [0, 1, 2, 15_000, 16_384, 16_385] + [200_000] * (chunk_bytes > 1000)
    bodies = [str(number).encode() + os.urandom(size) for number, size in enumerate(sizes)]
    with FaultProxy(tls_nsqd.tcp) as proxy, Wire(proxy.address) as client:
        proxy.up.chunk_bytes = chunk_bytes
        client.IDENTIFY(feature_negotiation=True, tls_v1=True, **{compression: True} if compression else {})
        client.read_frame()
        use_tls(client)
        client.expect_ok()
        if compression:
            (use_deflate if compression == "deflate" else use_snappy)(client)
            client.expect_ok()
        for body in bodies:
            client.PUB(topic, body)
        for _ in bodies:
            client.expect_ok()
        client.MPUB(topic, bodies)
        client.expect_ok()
    reader = connect(tls_nsqd)
    reader.subscribe(topic, rdy=100)
    assert [message.body for message in reader.read_messages(2 * len(bodies), finish=True)] == bodies + bodies


@needs_openssl
@pytest.mark.parametrize("first_bytes", [1, 10, 1000])
def test_what_is_left_of_the_last_record_is_read_too(
    tls_nsqd: Nsqd, connect: Callable[..., Wire], topic: str, first_bytes: int
) -> None:
    client = connect(tls_nsqd)
    client.identify(tls_v1=True)
    use_tls(client)
    client.expect_ok()
    head = f"PUB {topic}\n".encode()
    body_bytes = first_bytes + PLAIN_BYTES_MAX - len(head) - 4
    command = head + struct.pack(">I", body_bytes) + os.urandom(body_bytes)
    hold(tls_nsqd.pid)  # so that all of it is read at once, and the decrypted bytes are cut
    try:
        client.send(command[:first_bytes])
        client.send(command[first_bytes:])
    finally:
        os.kill(tls_nsqd.pid, signal.SIGCONT)
    client.expect_ok()


@needs_openssl
def test_a_client_that_does_not_begin_tls(tls_nsqd: Nsqd, connect: Callable[..., Wire]) -> None:
    client = connect(tls_nsqd)
    client.identify(tls_v1=True)
    client.send(b"NOP\n" * 10)
    frame = client.read_frame()
    assert frame.kind == 1
    assert frame.data.startswith(b"E_IDENTIFY_FAILED IDENTIFY failed ")
    client.expect_closed()


@needs_openssl
def test_https(tls_nsqd: Nsqd) -> None:
    import urllib.request

    context = ssl._create_unverified_context()
    host, port = tls_nsqd.https
    with urllib.request.urlopen(f"https://{host}:{port}/ping", context=context, timeout=20) as answer:
        assert answer.read() == b"OK"
    assert tls_nsqd.get("/ping").body == b"OK"


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    return make_certificate(tmp_path)


def tls_flags(certificate: tuple[Path, Path]) -> tuple[str, ...]:
    return f"--tls-cert={certificate[0]}", f"--tls-key={certificate[1]}"


@needs_openssl
def test_tls_required(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], certificate: tuple[Path, Path]
) -> None:
    daemon = make_nsqd(
        *tls_flags(certificate),
        "--tls-required=true",
    )
    for line, word in [("PUB t", "PUB"), ("NOP", "NOP"), ("BOGUS", "BOGUS"), ("SUB", "SUB")]:
        client = connect(daemon)
        client.command(line)
        client.expect_error(f"E_INVALID cannot {word} in current state (TLS required)")
    reply = daemon.get("/ping")
    assert reply.status == 403
    assert reply.body == b'{"message": "TLS_REQUIRED", "https_port": %d}' % daemon.https[1]
    assert reply.headers["X-NSQ-Content-Type"] == "nsq; version=1.0"
    assert reply.headers["Content-Type"] == "application/json; charset=utf-8"
    client = connect(daemon)
    client.identify(tls_v1=True)
    use_tls(client)
    client.expect_ok()
    _exchange(client, "t")


@needs_openssl
def test_tls_required_on_tcp_only(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], certificate: tuple[Path, Path]
) -> None:
    daemon = make_nsqd(
        *tls_flags(certificate),
        "--tls-required=tcp-https",
    )
    client = connect(daemon)
    client.NOP()
    client.expect_error("E_INVALID cannot NOP in current state (TLS required)")
    assert daemon.get("/ping").body == b"OK"


@needs_openssl
def test_client_certificate_required(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], certificate: tuple[Path, Path]
) -> None:
    daemon = make_nsqd(
        *tls_flags(certificate),
        "--tls-client-auth-policy=require-verify",
        f"--tls-root-ca-file={certificate[0]}",
    )
    client = connect(daemon)
    client.NOP()
    client.expect_error("E_INVALID cannot NOP in current state (TLS required)")
    client = connect(daemon)
    client.identify(tls_v1=True)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(*certificate)
    use_tls(client, context)
    client.expect_ok()
    _exchange(client, "t")


def test_pipelining_without_an_upgrade_is_fine(client: Wire, topic: str) -> None:
    client.IDENTIFY(feature_negotiation=True)
    client.PUB(topic, b"at once")
    assert client.read_frame().data.startswith(b'{"max_rdy_count"')
    assert client.read_frame() == Frame(RESPONSE, b"OK")


def test_a_client_that_leaves_while_much_is_encoded_for_it(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], topic: str
) -> None:
    daemon = make_nsqd()
    for _ in range(3):
        connect(daemon).publish(topic, SLOW_TO_DEFLATE)
        client = connect(daemon)
        client.identify(deflate=True)
        leave = client.socket
        use_deflate(client)
        client.expect_ok()
        client.subscribe(topic, rdy=0)
        leave.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.RDY(1)
        leave.close()  # resets the connection: nsqd reads RDY first, and then that it is gone
        eventually(lambda: not daemon.channel(topic)["clients"])
    assert daemon.channel(topic)["in_flight_count"] == 3
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log, daemon.log
