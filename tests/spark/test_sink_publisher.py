"""Publishes as a task does it, without Spark around it: checks TLS, failover, and what an error says."""

import gc
import itertools
import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Nsqd, eventually
from harness.holding import hold
from harness.interrupts import is_below, is_interrupted_at
from harness.upgrades import make_certificate

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from nsquark.spark.sink.options import SinkOptions  # noqa: E402
from nsquark.spark.sink.publisher import OUTSTANDING_MAX, Publisher, PublishFailed  # noqa: E402
from nsquark.spark.sink.rows import Bodies, Deferred  # noqa: E402

from .sink_rig import differences, http_address, log_bodies  # noqa: E402
from .source_rig import on_fixed_port  # noqa: E402

pytestmark = pytest.mark.ours

TOGETHER = 100


def options(*nsqds: str, **others: str) -> SinkOptions:
    return SinkOptions.parse({"nsqd": ",".join(nsqds), "topic": "t"} | others)


def publish(publisher: Publisher, bodies: list[bytes], topic: str = "t") -> None:
    for messages in Bodies(topic, pa.array(bodies, pa.binary())).mpub_bodies(1 << 20, 100):
        publisher.publish(topic, messages, "rows 0 to 9")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_is_used_for_http_and_tcp(make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    flags = (f"--tls-cert={certificate}", f"--tls-key={key}")
    nsqd = make_nsqd(*flags, "--tls-required=tcp-https")
    host, port = nsqd.https
    with Publisher(options(f"https://{host}:{port}", tlsRootCaFile=str(certificate))) as publisher:
        publish(publisher, [b"a", b"b"])
        publisher.flush()
    assert log_bodies(nsqd, "t") == [b"a", b"b"]
    plain = options(http_address(nsqd))
    with pytest.raises(PublishFailed, match="TLS"), Publisher(plain) as publisher:  # noqa: PT012 (flush is what fails)
        publish(publisher, [b"c"])
        publisher.flush()


def test_an_nsqd_that_is_away_at_first_is_left_out(make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> None:
    here, away = (on_fixed_port(make_nsqd(data_path=tmp_path / name)) for name in "ab")
    addresses = http_address(here), http_address(away)
    away.kill()
    with Publisher(options(*addresses)) as publisher:
        publish(publisher, [b"a", b"b"])
        publisher.flush()
    assert differences([here], "t", [b"a", b"b"]) == (0, 0)


def test_who_finds_no_nsqd_leaves_neither_thread_nor_loop_behind(make_nsqd: Callable[..., Nsqd]) -> None:
    nsqd = on_fixed_port(make_nsqd())
    nsqd.kill()
    before = set(threading.enumerate())
    gc.collect()  # what earlier tests have left
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)
        with pytest.raises(PublishFailed, match="no nsqd to publish to"):
            Publisher(options(http_address(nsqd), writeTimeout="10ms")).__enter__()
        gc.collect()
    assert not [str(warning.message) for warning in warned]
    assert set(threading.enumerate()) <= before


def test_an_nsqd_that_dies_hands_over_to_another(make_nsqd: Callable[..., Nsqd], tmp_path: Path) -> None:
    stays, dies = (on_fixed_port(make_nsqd(data_path=tmp_path / name)) for name in "ab")
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


def is_inside(thread: threading.Thread, function: str) -> bool:
    """Tells whether a function of this name is on the thread's stack."""
    return is_below(sys._current_frames().get(thread.ident or 0), function)


def defer_some(publisher: Publisher) -> None:
    publisher.defer([Deferred("t", b"%020d" % number, 60_000) for number in range(TOGETHER)], "rows 0 to 9")


def publish_some(publisher: Publisher) -> None:
    for number in range(TOGETHER):
        publish(publisher, [b"%020d" % number], f"t{number % 7}")


@pytest.mark.parametrize("send", [defer_some, publish_some])
def test_small_messages_do_not_pile_up_before_an_nsqd_that_is_slow(
    make_nsqd: Callable[..., Nsqd], send: Callable[[Publisher], None]
) -> None:
    nsqd = make_nsqd()
    rounds = 3 * OUTSTANDING_MAX // TOGETHER
    sent = 0
    with Publisher(options(http_address(nsqd))) as publisher:
        send(publisher)
        publisher.flush()

        def write() -> None:
            nonlocal sent
            for _ in range(rounds):
                send(publisher)
                sent += TOGETHER

        writer = threading.Thread(target=write)
        hold(nsqd.pid)
        try:
            writer.start()
            eventually(lambda: is_inside(writer, "result") or not writer.is_alive())
            assert OUTSTANDING_MAX - TOGETHER <= sent <= OUTSTANDING_MAX
        finally:
            nsqd.send_signal(signal.SIGCONT)
            writer.join()
        publisher.flush()
    assert sent == rounds * TOGETHER


def test_who_is_interrupted_while_the_last_messages_are_awaited_leaves_no_thread_behind(
    make_nsqd: Callable[..., Nsqd],
) -> None:
    nsqd = make_nsqd()
    before = set(threading.enumerate())
    main = threading.current_thread()

    def interrupt() -> None:
        eventually(lambda: is_inside(main, "__exit__") and is_inside(main, "result"))
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    publisher = Publisher(options(http_address(nsqd))).__enter__()
    try:
        hold(nsqd.pid)
        publish(publisher, [b"a"])
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            publisher.__exit__(None, None, None)
    finally:
        nsqd.send_signal(signal.SIGCONT)
        interrupter.join()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("wait", ["__exit__", "flush"])
def test_who_is_interrupted_at_any_instruction_of_a_wait_leaves_no_thread_behind(
    make_nsqd: Callable[..., Nsqd], wait: str
) -> None:
    nsqd = make_nsqd()
    before = set(threading.enumerate())

    def publish_one() -> None:
        with Publisher(options(http_address(nsqd))) as publisher:
            publish(publisher, [b"a"])
            if wait == "flush":
                publisher.flush()

    for instruction in itertools.count(1):
        is_interrupted = is_interrupted_at("result", instruction, publish_one)
        assert set(threading.enumerate()) <= before
        if not is_interrupted:
            break
    assert instruction > 10
