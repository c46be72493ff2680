"""Checks TLS, compression and authentication, each alone and together, on a real nsqd."""

import asyncio
import random
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from client.pool_rig import address_of
from client.stall_watch import StallWatch
from harness import AuthServer, FaultProxy, Nsqd, until
from harness.auth import GRANT_ALL, granting
from harness.upgrades import Certificate, make_certificate
from nsquark import Config, Consumer, Producer
from nsquark.client.errors import AuthFailed, ConfigError, NotConnected, NsqError, ServerError

SECRET = "s3cret"
WAIT_S = 30.0


def tls_flags(certificate: Certificate) -> list[str]:
    return [f"--tls-cert={certificate[0]}", f"--tls-key={certificate[1]}"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def auth_server() -> Iterator[AuthServer]:
    with AuthServer() as running:
        yield running


@pytest.fixture(scope="module")
def nsqd(certificate: Certificate, auth_server: AuthServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nsqd]:
    """Runs an nsqd that offers everything, and lets nobody in without the secret."""
    flags = tls_flags(certificate)
    with Nsqd(
        tmp_path_factory.mktemp("nsqd"), *flags, f"--auth-http-address={auth_server.address}", "--max-msg-size=4000000"
    ) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def _grants(auth_server: AuthServer) -> None:
    auth_server.status, auth_server.answer = 200, granting(GRANT_ALL)


async def round_trip(nsqd: Nsqd, topic: str, config: Config) -> dict[str, Any]:
    """Sends small and big messages both ways; returns what nsqd says of the consumer's connection."""
    bodies = [b"small", b"compressible " * 100_000, bytes(range(256)) * 4000, *(b"%d" % n for n in range(500))]
    async with Producer(address_of(nsqd), config) as producer:
        await producer.publish(topic, bodies[0])
        await producer.multi_publish(topic, bodies[1:])
    got = []
    async with Consumer(topic, "ch", nsqd=address_of(nsqd), config=config, max_in_flight=100) as consumer:
        async for message in consumer:
            async with message:
                got.append(message.body)
            if len(got) == len(bodies):
                break
        (known,) = nsqd.channel(topic)["clients"]
    assert sorted(got) == sorted(bodies)
    answer: dict[str, Any] = known
    return answer


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("compression", ["none", "deflate", "snappy"])
async def test_everything_arrives(
    nsqd: Nsqd, certificate: Certificate, topic: str, tls: bool, compression: str
) -> None:
    config = Config(
        auth_secret=SECRET,
        tls_v1=tls,
        tls_root_ca_file=certificate[0],
        deflate=compression == "deflate",
        deflate_level=3,
        snappy=compression == "snappy",
    )
    known = await round_trip(nsqd, topic, config)
    assert (known["tls"], known["deflate"], known["snappy"]) == (tls, compression == "deflate", compression == "snappy")
    assert known["authed"]
    assert known["auth_identity"] == "kay"


async def test_a_context_of_ones_own(nsqd: Nsqd, certificate: Certificate, topic: str) -> None:
    context = ssl.create_default_context(cafile=str(certificate[0]))
    known = await round_trip(nsqd, topic, Config(auth_secret=SECRET, tls_v1=True, tls_config=context))
    assert known["tls"]


async def test_a_certificate_that_is_not_trusted(nsqd: Nsqd, topic: str) -> None:
    async with Producer(address_of(nsqd), tls_v1=True, auth_secret=SECRET) as producer:
        with pytest.raises(NotConnected, match=r"TLS failed - .*self.signed certificate"):
            await producer.publish(topic, b"x")
    with pytest.raises(NotConnected, match="TLS failed"):
        await Consumer(topic, "ch", nsqd=address_of(nsqd), tls_v1=True, auth_secret=SECRET).start()
    async with Producer(address_of(nsqd), tls_v1=True, tls_insecure_skip_verify=True, auth_secret=SECRET) as producer:
        await producer.publish(topic, b"x")


async def test_a_certificate_for_another_name(tmp_path: Path, topic: str) -> None:
    other = make_certificate(tmp_path, common_name="elsewhere")
    (tmp_path / "data").mkdir()
    with Nsqd(tmp_path / "data", *tls_flags(other)) as daemon:
        for address in (address_of(daemon), f":{daemon.tcp[1]}"):
            async with Producer(address, tls_v1=True, tls_root_ca_file=other[0]) as producer:
                with pytest.raises(NotConnected, match="TLS failed"):
                    await producer.publish(topic, b"x")


async def test_tls_over_a_unix_socket(certificate: Certificate, tmp_path: Path, topic: str) -> None:
    """Who listens on a path is on this host, so its certificate is one for localhost."""
    with (
        TemporaryDirectory(prefix="nsq") as directory,
        Nsqd(tmp_path, f"--tcp-address={directory}/tcp", *tls_flags(certificate)) as daemon,
    ):
        async with Producer(f"{directory}/tcp", tls_v1=True, tls_root_ca_file=certificate[0]) as producer:
            await producer.publish(topic, b"x")
        assert daemon.topic(topic)["message_count"] == 1


async def test_tls_without_naming_a_host(nsqd: Nsqd, certificate: Certificate, topic: str) -> None:
    async with Producer(
        f":{nsqd.tcp[1]}", tls_v1=True, tls_root_ca_file=certificate[0], auth_secret=SECRET
    ) as producer:
        await producer.publish(topic, b"x")


async def test_tls_files_that_cannot_be_read(nsqd: Nsqd, tmp_path: Path, topic: str) -> None:
    async with Producer(address_of(nsqd), tls_v1=True, tls_root_ca_file=tmp_path / "none") as producer:
        with pytest.raises(ConfigError, match="invalid tls_root_ca_file"):
            await producer.publish(topic, b"x")


async def test_tls_that_nsqd_demands(tmp_path: Path, certificate: Certificate, topic: str) -> None:
    """The nsqd wants to see a client certificate too."""
    flags = [*tls_flags(certificate), "--tls-required=tcp-https"]
    with Nsqd(
        tmp_path, *flags, f"--tls-root-ca-file={certificate[0]}", "--tls-client-auth-policy=require-verify"
    ) as daemon:
        async with Producer(address_of(daemon)) as producer:
            with pytest.raises(NsqError):
                await producer.publish(topic, b"x")
        async with Producer(address_of(daemon), tls_v1=True, tls_root_ca_file=certificate[0]) as producer:
            with pytest.raises(NotConnected):
                await producer.publish(topic, b"x")
        config = Config(tls_v1=True, tls_root_ca_file=certificate[0], tls_cert=certificate[0], tls_key=certificate[1])
        async with Producer(address_of(daemon), config) as producer:
            await producer.publish(topic, b"x")


async def test_a_slow_network_is_not_a_dead_one(nsqd: Nsqd, certificate: Certificate, topic: str) -> None:
    """What goes out waits below TLS: a turn's publishes are encrypted and handed on at once."""
    options: dict[str, Any] = {"auth_secret": SECRET, "tls_v1": True, "tls_root_ca_file": certificate[0]}
    with FaultProxy(nsqd.tcp) as proxy, StallWatch(nsqd) as watch:
        async with Producer("{}:{}".format(*proxy.address), write_timeout="500ms", **options) as producer:
            await producer.ping()
            proxy.up.chunk_bytes, proxy.up.bytes_per_s = 1 << 16, 2e6
            publishes = [producer.publish_nowait(topic, bytes(1_000_000)) for _ in range(10)]
            for _ in range(2):  # so that these are sent
                await asyncio.sleep(0)
            publishes += [producer.publish_nowait(topic, bytes(1_000_000)) for _ in range(2)]
            outcomes = await asyncio.gather(*publishes, return_exceptions=True)
    assert outcomes == [None] * 12 or watch.stood_still


async def test_no_secret(nsqd: Nsqd, topic: str) -> None:
    async with Producer(address_of(nsqd)) as producer:
        with pytest.raises(AuthFailed, match="Auth Required - set auth_secret"):
            await producer.publish(topic, b"x")
    with pytest.raises(AuthFailed, match="Auth Required"):
        await Consumer(topic, "ch", nsqd=address_of(nsqd)).start()


async def test_a_refused_secret(nsqd: Nsqd, auth_server: AuthServer, topic: str) -> None:
    auth_server.status = 403
    async with Producer(address_of(nsqd), auth_secret="wrong") as producer:
        with pytest.raises(AuthFailed, match="Error authenticating E_AUTH_FAILED"):
            await producer.publish(topic, b"x")


async def test_a_topic_that_is_not_granted(nsqd: Nsqd, auth_server: AuthServer, topic: str) -> None:
    auth_server.answer = granting({"topic": "^other$", "channels": [".*"], "permissions": ["publish"]})
    async with Producer(address_of(nsqd), auth_secret=SECRET) as producer:
        with pytest.raises(ServerError) as caught:
            await producer.publish(topic, b"x")
        assert caught.value.code == "E_UNAUTHORIZED"
        await until(lambda: not producer.is_connected)
        await producer.publish("other", b"x")


@pytest.fixture
def long_turns() -> Iterator[None]:
    """Lets a thread run until it waits for something."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1.0)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("long_turns")
@pytest.mark.parametrize("compression", ["deflate", "snappy"])
async def test_event_loops_in_two_threads(
    nsqd: Nsqd, topic: str, compression: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two threads read at the same time, and each gets what was sent to it. With long turns one mostly begins to read
    while the other has read and waits for its turn.
    """
    config = Config(auth_secret=SECRET, **{compression: True})  # type: ignore[arg-type]
    sent = {name: [random.Random(f"{name} {n}").randbytes(4000) for n in range(3000)] for name in "ab"}
    async with Producer(address_of(nsqd), config) as producer:
        for name, bodies in sent.items():
            for begin in range(0, len(bodies), 100):
                await producer.multi_publish(topic + name, bodies[begin : begin + 100])

    async def received(name: str) -> list[bytes]:
        got: list[bytes] = []
        nsqd_address = address_of(nsqd)
        async with Consumer(topic + name, "ch", nsqd=nsqd_address, config=config, max_in_flight=1000) as consumer:
            while len(got) < len(sent[name]) and (message := await consumer.get(WAIT_S)) is not None:
                got.append(message.body)
                message.finish()
        return got

    threads = [asyncio.to_thread(asyncio.run, received(name)) for name in sent]
    got = dict(zip(sent, await asyncio.gather(*threads), strict=True))
    assert "connection lost" not in caplog.text
    damaged = {name: len(set(bodies).difference(sent[name])) for name, bodies in got.items()}
    assert damaged == {"a": 0, "b": 0}
    assert {name: len(set(bodies)) for name, bodies in got.items()} == {"a": 3000, "b": 3000}
