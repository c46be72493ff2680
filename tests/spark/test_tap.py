"""Checks Spark on `nsquark tap`: each message that a tapped nsqd delivers is one row, whoever is killed meanwhile."""

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness import FaultProxy, Nsqd, eventually
from spark.source_rig import QUERY_TIMEOUT_S, WORKER_WAS_LATE, Stream, reader, stream_reader
from tap.rig import (
    CHANNEL,
    DRAIN_TIMEOUT_S,
    WHOSE,
    Row,
    Tap,
    numbered,
    prepare,
    publish,
    running_source,
    unfinished,
    wait_until_finished,
    witnessed,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC = "orders"
TIMEOUT_S = 600
"""The tests wait for several processes and for Spark, each of which is slow on a busy machine."""

pytestmark = pytest.mark.timeout(TIMEOUT_S)


@pytest.fixture(params=WHOSE)
def whose(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def source(whose: str, tmp_path: Path) -> Iterator[Nsqd]:
    with running_source(whose, tmp_path / "source", "--mem-queue-size=500", "--sync-timeout=50ms") as nsqd:
        prepare(nsqd, TOPIC)
        yield nsqd


@pytest.fixture
def make_tap(tmp_path: Path) -> Iterator[Callable[..., Tap]]:
    """Starts taps on one data path, one after another."""
    taps: list[Tap] = []

    def make(source: Nsqd | str, *flags: str) -> Tap:
        address = source if isinstance(source, str) else source.tcp_address
        taps.append(Tap(tmp_path / "tap", f"--topic={TOPIC}", f"--nsqd-tcp-address={address}", *flags))
        return taps[-1].start()

    yield make
    for tap in taps:
        tap.kill()


def rows(spark: "SparkSession", tap: Tap, **options: str) -> list[Row]:
    """Returns all rows of the topic, in the order of their ids, with what is compared to frames of NSQ."""
    frame = reader(spark, "", TOPIC, lookupd=tap.http_address, **options).load()
    found = frame.selectExpr("id", "unix_micros(timestamp) us", "body").collect()
    return sorted((row.id, row.us, bytes(row.body)) for row in found)


def test_each_nsqd_is_a_source_of_its_own(spark: "SparkSession", whose: str, tmp_path: Path) -> None:
    names = ("one", "two")
    with (
        running_source(whose, tmp_path / names[0]) as one,
        running_source(whose, tmp_path / names[1]) as two,
        Tap(
            tmp_path / "tap", f"--topic={TOPIC}", *(f"--nsqd-tcp-address={nsqd.tcp_address}" for nsqd in (one, two))
        ) as tap,
    ):
        expected: dict[str, list[Row]] = {}
        for nsqd, bodies in ((one, numbered(0, 3000)), (two, numbered(3000, 4000))):
            prepare(nsqd, TOPIC)
            publish(nsqd, TOPIC, bodies)
            expected[nsqd.tcp_address] = witnessed(nsqd, TOPIC, len(bodies))
            wait_until_finished(nsqd, TOPIC)
        frame = reader(spark, "", TOPIC, lookupd=tap.http_address, expectedNsqds=",".join(expected)).load()
        read = frame.selectExpr("nsqd", "id", "unix_micros(timestamp) us", "body").collect()
        for address, messages in expected.items():
            assert sorted((row.id, row.us, bytes(row.body)) for row in read if row.nsqd == address) == messages
        assert len(read) == 4000
        ports = ",".join(f"127.0.0.1:{node['http_port']}" for node in tap.nodes().values())
        assert reader(spark, ports, TOPIC).load().count() == 4000
        assert tap.stop() == 0, tap.log


def test_a_tap_that_is_killed_again_and_again(
    spark: "SparkSession", source: Nsqd, make_tap: Callable[..., Tap]
) -> None:
    chance = random.Random(7)
    bodies = numbered(0, 20_000)
    publishing = threading.Thread(target=publish, args=(source, TOPIC, bodies))
    publishing.start()

    def is_far_enough(tap: Tap, wanted: int) -> bool:
        is_done = not publishing.is_alive() and not unfinished(source, TOPIC)
        return is_done or tap.metric("messages_total") >= wanted

    for _ in range(6):
        tap = make_tap(source, "--max-in-flight=200", "--max-bytes-per-file=200000")
        wanted = chance.randrange(200, 2500)
        eventually(lambda tap=tap, wanted=wanted: is_far_enough(tap, wanted), DRAIN_TIMEOUT_S)
        tap.kill()
    publishing.join()
    tap = make_tap(source)
    wait_until_finished(source, TOPIC)
    expected = witnessed(source, TOPIC, len(bodies))
    assert [body for _, _, body in sorted(expected, key=lambda row: row[2])] == sorted(bodies)
    assert rows(spark, tap) == expected
    assert tap.stop() == 0, tap.log


@pytest.mark.parametrize("kills_tap", [False, True], ids=["connection cut", "tap killed"])
def test_what_was_stored_and_not_finished_comes_again_and_is_dropped(
    spark: "SparkSession", source: Nsqd, make_tap: Callable[..., Tap], kills_tap: bool
) -> None:
    """No FIN reaches nsqd, so all that is stored comes again: from the memory of the tap, or from its log."""
    with FaultProxy(source.tcp) as proxy:
        address = "{}:{}".format(*proxy.address)
        tap = make_tap(address)
        tap.wait_until_connected()
        eventually(
            lambda: [client["ready_count"] >= 700 for client in source.channel(TOPIC, CHANNEL)["clients"]] == [True]
        )
        proxy.up.stalled = True
        publish(source, TOPIC, numbered(0, 700))
        eventually(lambda: tap.metric("messages_total") == 700, DRAIN_TIMEOUT_S)
        # Those that are stored for longer than msg_timeout come again and again.
        assert unfinished(source, TOPIC) == 700, "nothing was finished"
        if kills_tap:
            tap.kill()
        proxy.cut()
        proxy.heal()
        if kills_tap:
            tap = make_tap(address)
        wait_until_finished(source, TOPIC)
        assert tap.metric("redeliveries_total") >= 700
        publish(source, TOPIC, numbered(700, 800))
        wait_until_finished(source, TOPIC)
        assert rows(spark, tap) == witnessed(source, TOPIC, 800)


def test_an_nsqd_that_is_killed(spark: "SparkSession", whose: str, source: Nsqd, make_tap: Callable[..., Tap]) -> None:
    """What NSQ's nsqd loses with its memory is lost; what it delivers, also what it delivers twice, is a row, once."""
    tap = make_tap(source, "--max-in-flight=200")
    published: list[bytes] = []
    for number in range(4):
        bodies = numbered(number * 4000, (number + 1) * 4000)
        publish(source, TOPIC, bodies)
        published += bodies
        eventually(lambda number=number: tap.metric("messages_total") >= number * 1000 + 500, DRAIN_TIMEOUT_S)
        source.restart(crash=True)
        tap.wait_until_connected()
    last = numbered(16_000, 17_000)
    publish(source, TOPIC, last)
    wait_until_finished(source, TOPIC)
    read = rows(spark, tap)
    stored = [body for _, _, body in read]
    assert len({message_id for message_id, _, _ in read}) == len(read)
    assert len(set(stored)) == len(stored)
    assert set(last) <= set(stored) <= {*published, *last}
    assert tap.metric("messages_total") == len(stored)
    if whose == "ours":
        assert sorted(stored) == sorted([*published, *last])


def test_a_full_disk_stops_the_tap_and_a_query_that_reads_lets_it_go_on(
    spark: "SparkSession", source: Nsqd, make_tap: Callable[..., Tap], tmp_path: Path
) -> None:
    bodies = numbered(0, 12_000)
    publish(source, TOPIC, bodies)
    flags = ("--max-disk-bytes=400000", "--max-bytes-per-file=50000", "--max-in-flight=100", "--window=1000")
    # A message that a slow tap has stored and not yet finished must not come again behind the small window.
    tap = make_tap(source, *flags, "--consumer-opt=msg_timeout,60s")
    eventually(lambda: tap.metric("paused") == 1, DRAIN_TIMEOUT_S)
    eventually(lambda: source.channel(TOPIC, CHANNEL)["in_flight_count"] == 0)
    eventually(lambda: [client["ready_count"] for client in source.channel(TOPIC, CHANNEL)["clients"]] == [0])
    eventually(lambda: "RDY 0" in tap.log)
    assert tap.get("/ping").status == 500
    stored = int(tap.metric("messages_total"))
    assert 0 < stored < len(bodies)
    assert unfinished(source, TOPIC) == len(bodies) - stored, "nothing is lost"
    stream = Stream(spark, tmp_path)
    builder = stream_reader(spark, "", TOPIC, lookupd=tap.http_address, startingOffsets="earliest", channel="spark")
    query = stream.start(builder)

    def is_all_read() -> bool:
        nonlocal query
        if not query.isActive:
            assert WORKER_WAS_LATE in str(query.exception())
            query = stream.start(builder)
        return stream.bodies() == sorted(bodies)

    try:
        eventually(is_all_read, 2 * QUERY_TIMEOUT_S, 0.3)
    finally:
        query.stop()
    wait_until_finished(source, TOPIC)
    eventually(lambda: tap.metric("paused") == 0 and tap.get("/ping").status == 200)
    assert tap.metric("messages_total") == len(bodies)


def test_a_query_goes_on_over_restarts_of_the_tap(
    spark: "SparkSession", source: Nsqd, make_tap: Callable[..., Tap], tmp_path: Path
) -> None:
    stream = Stream(spark, tmp_path)
    bodies = numbered(0, 6000)
    for number in range(3):
        publish(source, TOPIC, bodies[number * 2000 : number * 2000 + 1000])  # while no tap runs
        tap = make_tap(source)
        publish(source, TOPIC, bodies[number * 2000 + 1000 : (number + 1) * 2000])
        wait_until_finished(source, TOPIC)
        stream.run(stream_reader(spark, "", TOPIC, lookupd=tap.http_address, startingOffsets="earliest"))
        assert stream.bodies() == sorted(bodies[: (number + 1) * 2000])
        if number == 1:
            tap.kill()
        else:
            assert tap.stop() == 0, tap.log
