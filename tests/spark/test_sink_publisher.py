"""Publishing as a task does it, without Spark around it: TLS, failover, what an error says."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Nsqd
from harness.upgrades import make_certificate

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from nsquark.spark.sink.options import SinkOptions  # noqa: E402
from nsquark.spark.sink.publisher import Publisher, PublishFailed  # noqa: E402
from nsquark.spark.sink.rows import Bodies, Deferred  # noqa: E402

from .sink_rig import differences, http_address, log_bodies  # noqa: E402

pytestmark = pytest.mark.ours


def options(*nsqds: str, **others: str) -> SinkOptions:
    return SinkOptions.parse({"nsqd": ",".join(nsqds), "topic": "t"} | others)


def publish(publisher: Publisher, bodies: list[bytes], topic: str = "t") -> None:
    for messages in Bodies(topic, pa.array(bodies, pa.binary())).chunks(1 << 20, 100):
        publisher.publish(topic, messages, "rows 0 to 9")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_is_used_for_http_and_tcp(make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    flags = (f"--tls-cert={certificate}", f"--tls-key={key}", "--https-address=127.0.0.1:0")
    nsqd = make_nsqd(*flags, "--tls-required=tcp-https")
    host, port = nsqd.https
    with Publisher(options(f"https://{host}:{port}", tlsRootCaFile=str(certificate))) as publisher:
        publish(publisher, [b"a", b"b"])
        publisher.flush()
    assert log_bodies(nsqd, "t") == [b"a", b"b"]
    plain = options(http_address(nsqd), writeTimeout="2s")
    with pytest.raises(PublishFailed, match="TLS"), Publisher(plain) as publisher:  # noqa: PT012 (flush is what fails)
        publish(publisher, [b"c"])
        publisher.flush()


def test_an_nsqd_that_is_away_at_first_is_left_out(make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> None:
    here, away = (make_nsqd(data_path=tmp_path / name) for name in "ab")
    addresses = http_address(here), http_address(away)
    away.kill()
    with Publisher(options(*addresses)) as publisher:
        publish(publisher, [b"a", b"b"])
        publisher.flush()
    assert differences([here], "t", [b"a", b"b"]) == (0, 0)


def test_an_nsqd_that_dies_hands_over_to_another(make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> None:
    stays, dies = (make_nsqd(data_path=tmp_path / name) for name in "ab")
    bodies = [b"%d" % number for number in range(20_000)]
    with Publisher(options(http_address(stays), http_address(dies))) as publisher:
        publish(publisher, bodies[:5000])
        publisher.flush()
        publish(publisher, bodies[5000:10_000])
        dies.kill()
        publish(publisher, bodies[10_000:])
        publisher.flush()
    assert log_bodies(stays, "t")
    dies.start()
    missing, _ = differences([stays, dies], "t", bodies)
    assert missing == 0


def test_what_nsqd_refuses_is_told_with_its_rows(make_nsqd: Callable[..., Nsqd]) -> None:
    nsqd = make_nsqd("--max-msg-size=100", "--max-req-timeout=1m")
    with Publisher(options(http_address(nsqd))) as publisher:
        publish(publisher, [b"a", b"x" * 101])
        with pytest.raises(
            PublishFailed, match=r"\(topic t, rows 0 to 9\): .*E_BAD_MESSAGE .*too big 101 > 100.*maxMessageBytes=100"
        ):
            publisher.flush()
        publisher.defer([Deferred("t", b"a", 10), Deferred("t", b"b", 61_000)], "rows 5 to 6")
        with pytest.raises(PublishFailed, match=r"\(rows 5 to 6\): .*E_INVALID DPUB timeout 61000 out of range"):
            publisher.flush()
