"""Checks TLS in detail: certificates, versions, what /stats shows, clients that break off, and openssl's own client."""

import http.client
import json
import shutil
import socket
import ssl
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import AuthServer, Frame, Message, Nsqd, StartError, Wire, body_of, eventually
from harness.upgrades import Certificate, make_certificate, trusting_anything, use_deflate, use_snappy, use_tls
from harness.wire import ERROR, HEARTBEAT, MAGIC, MESSAGE, RESPONSE, ClosedError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")

TLS_ALERT = b"\x15\x03"
GARBAGE_HELLOS = {
    "no TLS": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(100),
    "a record of noise": b"\x16\x03\x01\x00\x40" + bytes(range(64)),
    "a hello cut short by another record": b"\x16\x03\x01\x00\x05\x01\x00\x01\xfc\x03\x17\x03\x03\x00\x01x",
    "a record too long": b"\x16\x03\x01\xff\xff" + bytes(65535),
    "SSL 2": b"\x80\x2e\x01\x00\x02" + bytes(41),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def own(directory: Path) -> Certificate:
    """Makes the server's certificate, which also signs those of clients."""
    return make_certificate(directory, rsa=True)


@pytest.fixture(scope="module")
def known_client(directory: Path, own: Certificate) -> Certificate:
    return make_certificate(directory, "kay", signed_by=own)


@pytest.fixture(scope="module")
def unknown_client(directory: Path) -> Certificate:
    return make_certificate(directory, "stranger")


def _flags(own: Certificate, *more: str) -> list[str]:
    return [f"--tls-cert={own[0]}", f"--tls-key={own[1]}", *more]


@pytest.fixture(scope="module")
def nsqd(own: Certificate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nsqd]:
    with Nsqd(tmp_path_factory.mktemp("nsqd"), *_flags(own)) as daemon:
        yield daemon
        assert daemon.stop() == 0, daemon.log
        assert "Traceback" not in daemon.log, daemon.log


def _upgraded(client: Wire, context: ssl.SSLContext | None = None, **fields: object) -> Wire:
    client.identify(tls_v1=True, **fields)
    use_tls(client, context)
    client.expect_ok()
    return client


def _only(version: ssl.TLSVersion) -> ssl.SSLContext:
    context = trusting_anything()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = version
    return context


# -- versions and ciphers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "cipher", "shown"),
    [
        (ssl.TLSVersion.TLSv1_2, "ECDHE-RSA-AES128-GCM-SHA256", ("TLS1.2", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256")),
        (ssl.TLSVersion.TLSv1_2, "ECDHE-RSA-AES256-SHA", ("TLS1.2", "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA")),
        (ssl.TLSVersion.TLSv1_2, "AES128-SHA", ("TLS1.2", "TLS_RSA_WITH_AES_128_CBC_SHA")),
        (ssl.TLSVersion.TLSv1_2, "ECDHE-RSA-AES256-GCM-SHA384", ("TLS1.2", f"Unknown {0xC030}")),
        (ssl.TLSVersion.TLSv1_1, "ECDHE-RSA-AES128-SHA", ("TLS1.1", "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA")),
        (ssl.TLSVersion.TLSv1, "ECDHE-RSA-AES128-SHA", ("TLS1.0", "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA")),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_stats_shows(
    nsqd: Nsqd, client: Wire, topic: str, version: ssl.TLSVersion, cipher: str, shown: tuple[str, str]
) -> None:
    context = _only(version)
    context.set_ciphers(f"{cipher}:@SECLEVEL=0")
    _upgraded(client, context).subscribe(topic)
    entry = nsqd.channel(topic)["clients"][0]
    assert (entry["tls"], entry["tls_version"], entry["tls_cipher_suite"]) == (True, *shown)


@pytest.mark.parametrize("least", ["tls1.2", "tls1.3"])
def test_least_version(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], own: Certificate, least: str
) -> None:
    daemon = make_nsqd(*_flags(own, f"--tls-min-version={least}"))
    older, same = {
        "tls1.2": (ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2),
        "tls1.3": (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3),
    }[least]
    context = _only(older)
    context.set_ciphers("ALL:@SECLEVEL=0")
    client = connect(daemon)
    client.identify(tls_v1=True)
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        use_tls(client, context)
    _upgraded(connect(daemon), _only(same)).assert_usable()
    daemon.wait_for_log("IDENTIFY failed tls: ")


# -- client certificates ---------------------------------------------------------------------------------


@pytest.mark.ours
@pytest.mark.parametrize("policy", ["require", "require-verify"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
def test_client_certificates(
    make_nsqd: Callable[..., Nsqd],
    connect: Callable[..., Wire],
    own: Certificate,
    known_client: Certificate,
    unknown_client: Certificate,
    policy: str,
    version: ssl.TLSVersion,
) -> None:
    """NSQ takes any certificate with `require`; here both words mean one that the authorities have signed."""
    daemon = make_nsqd(*_flags(own, f"--tls-client-auth-policy={policy}", f"--tls-root-ca-file={own[0]}"))
    assert ("checks certificates as require-verify does" in daemon.log) is (policy == "require")
    context = _only(version)
    context.load_cert_chain(*known_client)
    _upgraded(connect(daemon), context).assert_usable()
    stranger = _only(version)
    stranger.load_cert_chain(*unknown_client)
    for refused, reason in (
        (stranger, "certificate verify failed"),
        (_only(version), "peer did not return a certificate"),
    ):
        with pytest.raises((ssl.SSLError, ClosedError, ConnectionError)):
            _upgraded(connect(daemon), refused)
        daemon.wait_for_log(f"E_IDENTIFY_FAILED IDENTIFY failed tls: {reason}")


def test_any_other_policy_only_requires_tls(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], own: Certificate
) -> None:
    daemon = make_nsqd(*_flags(own, "--tls-client-auth-policy=maybe"))
    plain = connect(daemon)
    plain.NOP()
    plain.expect_error("E_INVALID cannot NOP in current state (TLS required)")
    _upgraded(connect(daemon)).assert_usable()


def test_common_name_goes_to_the_auth_server(
    make_nsqd: Callable[..., Nsqd], connect: Callable[..., Wire], own: Certificate, known_client: Certificate
) -> None:
    with AuthServer() as server:
        daemon = make_nsqd(
            *_flags(own, "--tls-client-auth-policy=require-verify", f"--tls-root-ca-file={own[0]}"),
            f"--auth-http-address={server.address}",
            "--http-client-request-timeout=60s",  # the server is a thread of this process, which may be held up
        )
        client = _upgraded(connect(daemon), trusting_anything(known_client))
        client.AUTH("s")
        client.read_frame()
        assert server.queries == [{"common_name": "kay", "remote_ip": "127.0.0.1", "secret": "s", "tls": "true"}]


def test_https_wants_the_certificate_too(
    make_nsqd: Callable[..., Nsqd], own: Certificate, known_client: Certificate
) -> None:
    daemon = make_nsqd(*_flags(own, "--tls-client-auth-policy=require-verify", f"--tls-root-ca-file={own[0]}"))
    with_certificate = http.client.HTTPSConnection(*daemon.https, context=trusting_anything(known_client), timeout=20)
    _ping(with_certificate)
    with_certificate.close()
    without = http.client.HTTPSConnection(*daemon.https, context=trusting_anything(), timeout=20)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        _ping(without)
    without.close()


def _ping(connection: http.client.HTTPSConnection) -> None:
    connection.request("GET", "/ping")
    assert connection.getresponse().read() == b"OK"


# -- the HTTP port where TLS is required -----------------------------------------------------------------


def test_plain_http_is_refused_whatever_is_asked(make_nsqd: Callable[..., Nsqd], own: Certificate) -> None:
    daemon = make_nsqd(*_flags(own, "--tls-required"))
    refusal = {"message": "TLS_REQUIRED", "https_port": daemon.https[1]}
    for reply in (
        daemon.get("/no/such/path"),
        daemon.post("/pub", b"x", topic="t"),
        daemon.post("/mpub", bytes(100_000), topic="t"),
        daemon.get("/stats", format="json"),
        daemon.put("/config/log_level", b"debug"),
    ):
        assert (reply.status, json.loads(reply.body)) == (403, refusal)
    https = http.client.HTTPSConnection(*daemon.https, context=trusting_anything(), timeout=20)
    https.request("POST", "/pub?topic=t", b"x")
    assert https.getresponse().read() == b"OK"
    https.request("GET", "/stats?format=json")
    assert [topic["topic_name"] for topic in json.loads(https.getresponse().read())["topics"]] == ["t"]
    https.close()


# -- start-up --------------------------------------------------------------------------------------------


def test_flags_that_do_not_fit(make_nsqd: Callable[..., Nsqd], own: Certificate, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    build = "failed to instantiate nsqd - failed to build TLS config - "
    required = "failed to instantiate nsqd - cannot require TLS client connections without TLS key and cert"
    for flags, text in (
        ([f"--tls-cert={own[0]}"], build),
        ([f"--tls-cert={own[0]}", f"--tls-key={tmp_path}/missing"], build),
        ([f"--tls-cert={empty}", f"--tls-key={own[1]}"], build),
        (_flags(own, f"--tls-root-ca-file={empty}"), build),
        (_flags(own, f"--tls-root-ca-file={tmp_path}/missing", "--tls-client-auth-policy=require"), build),
        (["--tls-required"], required),
        (["--tls-required=tcp-https"], required),
        (["--tls-client-auth-policy=require"], required),
    ):
        with pytest.raises(StartError) as failure:
            make_nsqd(*flags)
        assert failure.value.exit_code == 1
        assert text in failure.value.log, flags


def test_no_https_without_an_address(make_nsqd: Callable[..., Nsqd], own: Certificate) -> None:
    daemon = make_nsqd(*_flags(own, "--https-address="))
    assert "HTTPS: listening" not in daemon.log
    assert daemon.get("/ping").body == b"OK"


# -- clients that do not do as they should ---------------------------------------------------------------


@pytest.mark.parametrize("hello", GARBAGE_HELLOS.values(), ids=GARBAGE_HELLOS.keys())
def test_garbage_hello(connect: Callable[..., Wire], hello: bytes) -> None:
    """The error to a garbage hello comes in clear; OpenSSL may say goodbye in its own way first."""
    client = connect()
    client.identify(tls_v1=True)
    client.send(hello)
    received = b""
    try:
        while True:
            received += client.receive()
    except ClosedError:
        pass
    if received.startswith(TLS_ALERT):
        received = received[7:]
    if received:  # lost where unread bytes reset the connection
        assert received[8:].startswith(b"E_IDENTIFY_FAILED IDENTIFY failed tls: ")
    other = connect()
    _upgraded(other).assert_usable()


def test_a_handshake_that_stops_is_ended(nsqd: Nsqd, connect: Callable[..., Wire]) -> None:
    client = connect()
    client.identify(tls_v1=True)
    client.send(b"\x16\x03\x01\x01\x00\x01")
    frame = client.read_frame()
    assert frame.data.startswith(b"E_IDENTIFY_FAILED IDENTIFY failed ")
    client.expect_closed()


def test_the_end_of_input_within_a_handshake(connect: Callable[..., Wire]) -> None:
    client = connect()
    client.identify(tls_v1=True)
    client.end_of_input()
    assert client.read_frame().data == b"E_IDENTIFY_FAILED IDENTIFY failed EOF"
    client.expect_closed()


def test_what_is_sent_too_early_is_lost(nsqd: Nsqd, client: Wire, topic: str) -> None:
    body = json.dumps({"feature_negotiation": True, "tls_v1": True}).encode()
    client.send(b"IDENTIFY\n" + body_of(body) + f"PUB {topic}\n".encode() + body_of(b"early"))
    assert client.read_frame().data.startswith(b'{"max_rdy_count"')
    use_tls(client)
    client.expect_ok()
    client.assert_usable()
    assert topic not in nsqd.topic_names()


@pytest.mark.ours
def test_tls_within_tls_is_refused(client: Wire) -> None:
    _upgraded(client)
    client.IDENTIFY(feature_negotiation=True, tls_v1=True)
    assert client.read_frame().data.startswith(b'{"max_rdy_count"')
    client.expect_error("E_IDENTIFY_FAILED IDENTIFY failed the connection is upgraded already")


def test_a_second_identify_changes_the_settings_only(nsqd: Nsqd, client: Wire, topic: str) -> None:
    _upgraded(client)
    assert client.identify(client_id="again", tls_v1=False)["tls_v1"] is False
    client.subscribe(topic)
    entry = nsqd.channel(topic)["clients"][0]
    assert (entry["client_id"], entry["tls"]) == ("again", True)


@pytest.mark.parametrize("compression", ["", "deflate", "snappy"])
def test_heartbeats_large_messages_and_a_polite_end(client: Wire, topic: str, compression: str) -> None:
    fields: dict[str, Any] = {compression: True} if compression else {}
    _upgraded(client, heartbeat_interval=4000, **fields)
    if compression:
        (use_deflate if compression == "deflate" else use_snappy)(client)
        client.expect_ok()
    large = bytes(range(256)) * 800
    client.MPUB(topic, [large, large, b"small"])
    client.SUB(topic, "ch")
    client.RDY(3)
    replies, beats = 0, 0
    sizes: list[int] = []
    while len(sizes) < 3 or not beats:  # the heartbeat comes first if this process is held up
        kind, data = client.read_frame()
        if data == HEARTBEAT:
            beats += 1
            client.NOP()
        elif kind == MESSAGE:
            message = Message.parse(data)
            sizes.append(len(message.body))
            client.FIN(message.id)
        else:
            assert (kind, data) == (RESPONSE, b"OK")
            replies += 1
    assert (replies, sorted(sizes)) == (2, [5, len(large), len(large)])
    client.command("BOGUS")
    while (frame := client.read_frame()).data == HEARTBEAT:
        continue
    assert frame == Frame(ERROR, b"E_INVALID invalid command BOGUS")
    client.expect_closed()


@pytest.mark.ours
def test_python_sees_the_server_close_tls(nsqd: Nsqd) -> None:
    """The server sends a close_notify, without which a client cannot tell the end from an attack."""
    raw = socket.create_connection(nsqd.tcp, timeout=20)
    wire = Wire.__new__(Wire)
    wire.timeout_s, wire.socket, wire._pending = 20, raw, bytearray()
    wire.send(MAGIC)
    wire.identify(tls_v1=True)
    wire.socket = trusting_anything().wrap_socket(raw, server_hostname="localhost", suppress_ragged_eofs=False)
    wire.expect_ok()
    wire.command("BOGUS")
    assert wire.read_frame().data == b"E_INVALID invalid command BOGUS"
    assert wire.socket.recv(1) == b""
    wire.close()


def test_openssl_s_client(nsqd: Nsqd, own: Certificate) -> None:
    """The HTTPS session is of openssl's own client, which checks the server's certificate."""
    host, port = nsqd.https
    result = subprocess.run(
        ["openssl", "s_client", "-connect", f"{host}:{port}", "-CAfile", str(own[0]), "-verify_return_error", "-quiet"],
        input=b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(b"HTTP/1.1 200 OK\r\n")
    assert result.stdout.endswith(b"\r\n\r\nOK")


def test_openssl_s_client_through_identify(nsqd: Nsqd, topic: str) -> None:
    """openssl cannot speak NSQ before TLS, so a relay does that part and then only passes bytes."""
    listener = socket.create_server(("127.0.0.1", 0))
    openssl = subprocess.Popen(
        ["openssl", "s_client", "-connect", f"127.0.0.1:{listener.getsockname()[1]}", "-quiet"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with listener, listener.accept()[0] as near, nsqd.connect() as far:
        far.identify(tls_v1=True)
        _relay(near, far.socket)
        assert openssl.stdin is not None and openssl.stdout is not None
        ok = b"\x00\x00\x00\x06\x00\x00\x00\x00OK"
        assert openssl.stdout.read(len(ok)) == ok
        openssl.stdin.write(f"PUB {topic}\n".encode() + body_of(b"from openssl"))
        openssl.stdin.flush()
        assert openssl.stdout.read(len(ok)) == ok
        openssl.kill()
        openssl.wait()
    eventually(lambda: nsqd.topic(topic)["message_count"] == 1)


def _relay(one: socket.socket, other: socket.socket) -> None:
    import threading

    def copy(source: socket.socket, target: socket.socket) -> None:
        try:
            source.settimeout(None)
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            return

    for pair in ((one, other), (other, one)):
        threading.Thread(target=copy, args=pair, daemon=True).start()


@pytest.mark.ours
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_a_key_that_everybody_can_read_is_warned_of(
    make_nsqd: Callable[..., Nsqd], tmp_path: Path, own: Certificate, mode: int
) -> None:
    key = tmp_path / "key.pem"
    key.write_bytes(own[1].read_bytes())
    key.chmod(mode)
    daemon = make_nsqd(f"--tls-cert={own[0]}", f"--tls-key={key}")
    assert ("can be read by every user" in daemon.log) == (mode == 0o644)
