"""Clients that others wrote work over TLS, with compression and with AUTH.

pynsq can do all of it, gnsq too except that its producer does not compress; ansq has AUTH only.
"""

import asyncio
import json
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import AuthServer, Nsqd, until
from harness.upgrades import make_certificate

STEP_TIMEOUT_S = 30
SCRIPT = Path(__file__).with_name("gnsq_script.py")
SECRET = "hush"

# Against NSQ's own nsqd 1.3.0 these time out in pynsq; why is not known.
ours = pytest.mark.ours
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
TLS: dict[str, Any] = {"tls_v1": True}
OPTIONS = [
    pytest.param({"deflate": True}, id="deflate"),
    pytest.param({"snappy": True}, id="snappy"),
    pytest.param(TLS, id="TLS", marks=needs_openssl),
    pytest.param({**TLS, "snappy": True}, id="TLS and snappy", marks=[needs_openssl, ours]),
    pytest.param({**TLS, "deflate": True}, id="TLS and deflate", marks=[needs_openssl, ours]),
]


@pytest.fixture(scope="module")
def auth() -> Iterator[AuthServer]:
    with AuthServer() as running:
        yield running


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path] | None:
    return make_certificate(tmp_path_factory.mktemp("certificate")) if shutil.which("openssl") else None


@pytest.fixture(scope="module")
def nsqd(
    auth: AuthServer, certificate: tuple[Path, Path] | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nsqd]:
    flags = [f"--auth-http-address={auth.address}"]
    if certificate is not None:
        flags += [f"--tls-cert={certificate[0]}", f"--tls-key={certificate[1]}"]
    with Nsqd(tmp_path_factory.mktemp("nsqd"), *flags) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log, daemon.log


@pytest.mark.parametrize("options", OPTIONS)
async def test_pynsq(
    nsqd: Nsqd, auth: AuthServer, certificate: tuple[Path, Path] | None, topic: str, options: dict[str, Any]
) -> None:
    nsq = pytest.importorskip("nsq")
    if "snappy" in options:
        pytest.importorskip("snappy")
    if "tls_v1" in options:
        assert certificate is not None
        options = {**options, "tls_options": {"ca_certs": str(certificate[0])}}
    options = {**options, "auth_secret": SECRET}
    auth.queries.clear()
    bodies = [b"small", b"the same again, " * 20_000, bytes(range(256)) * 100]
    writer = nsq.Writer([f"127.0.0.1:{nsqd.tcp[1]}"], **options)
    await until(lambda: any(conn.state == "CONNECTED" for conn in writer.conns.values()))
    answers: list[Any] = []
    writer.mpub(topic, bodies, callback=lambda conn, data: answers.append(data))
    await until(lambda: bool(answers))
    assert answers == [b"OK"]
    seen: list[bytes] = []

    def handler(message: Any) -> bool:
        seen.append(message.body)
        return True

    reader = nsq.Reader(
        topic=topic,
        channel="ch",
        nsqd_tcp_addresses=[f"127.0.0.1:{nsqd.tcp[1]}"],
        message_handler=handler,
        max_in_flight=10,
        **options,
    )
    await until(lambda: len(seen) == len(bodies))
    assert sorted(seen) == sorted(bodies)
    shown = nsqd.channel(topic)["clients"][0]
    for feature in ("snappy", "deflate"):
        assert shown[feature] is bool(options.get(feature))
    assert (shown["tls"], shown["authed"], shown["auth_identity"]) == ("tls_v1" in options, True, "kay")
    assert {query["secret"] for query in auth.queries} == {SECRET}
    reader.close()
    for conn in list(writer.conns.values()):
        conn.close()


@pytest.mark.parametrize("options", OPTIONS)
def test_gnsq(nsqd: Nsqd, certificate: tuple[Path, Path] | None, topic: str, options: dict[str, Any]) -> None:
    pytest.importorskip("gnsq")
    if "tls_v1" in options:
        assert certificate is not None
        options = {**options, "tls_options": {"ca_certs": str(certificate[0]), "cert_reqs": ssl.CERT_REQUIRED}}
    if "snappy" in options:
        pytest.importorskip("snappy")
    result = subprocess.run(
        [
            *[sys.executable, str(SCRIPT), f"127.0.0.1:{nsqd.tcp[1]}", topic],
            json.dumps({**options, "auth_secret": SECRET}),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)) == 7


async def test_ansq(nsqd: Nsqd, topic: str) -> None:
    """Its readers and writers have no option for a secret; its connections have."""
    ansq = pytest.importorskip("ansq")
    connection = await ansq.open_connection("127.0.0.1", nsqd.tcp[1])
    answer = await connection.auth(SECRET)
    assert json.loads(answer.body)["identity"] == "kay"
    connection._is_authorized = True  # ansq forgets to note it, and would refuse to send anything
    assert (await connection.pub(topic, "x")).is_ok
    await connection.subscribe(topic, "ch", 1)
    message = await asyncio.wait_for(connection.message_queue.get(), STEP_TIMEOUT_S)
    assert message.body == b"x"
    await message.fin()
    assert nsqd.channel(topic)["clients"][0]["auth_identity"] == "kay"
    await connection.close()
