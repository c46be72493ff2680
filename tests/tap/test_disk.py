"""Checks a tap whose disk is full: it takes no more and loses nothing, and goes on when readers have made room."""

import re
from pathlib import Path

import pytest

from harness import Nsqd, eventually
from nsquark.tap.window import GENERATIONS
from tap.rig import (
    CHANNEL,
    DRAIN_TIMEOUT_S,
    WHOSE,
    Tap,
    numbered,
    prepare,
    publish,
    running_source,
    unfinished,
    wait_until_finished,
)

TOPIC = "orders"
MESSAGES = 12_000
SMALL = ("--max-disk-bytes=400000", "--max-bytes-per-file=50000", "--max-in-flight=100", "--window=1000")
PATIENT = "--consumer-opt=msg_timeout,60s"
"""Lets no message come again that a slow tap has stored and not yet finished: behind the small window it would be
stored twice.
"""


def info(tap: Tap, source: Nsqd) -> tuple[int, int]:
    """Returns how many messages the log has now, and the number after the last one."""
    (topic,) = tap.of_log(source, "GET", "/log/info").json()["topics"]
    return int(topic["count"]), int(topic["next"])


def commit(tap: Tap, source: Nsqd, seq: int) -> None:
    target = f"/channel/commit?topic={TOPIC}&channel=reader&owner=test&ttl=600&seq={seq}"
    reply = tap.of_log(source, "POST", target)
    assert reply.status == 200, reply.text


def wait_until_paused(tap: Tap, source: Nsqd) -> None:
    eventually(lambda: tap.metric("paused") == 1, DRAIN_TIMEOUT_S)
    eventually(lambda: source.channel(TOPIC, CHANNEL)["in_flight_count"] == 0)


@pytest.mark.parametrize("whose", WHOSE)
def test_at_its_limit_it_takes_no_more_until_readers_have_read(whose: str, tmp_path: Path) -> None:
    flags = (f"--topic={TOPIC}", *SMALL, PATIENT)
    with running_source(whose, tmp_path / "source") as source:
        prepare(source, TOPIC, CHANNEL)
        publish(source, TOPIC, numbered(0, MESSAGES))
        with Tap(tmp_path / "tap", f"--nsqd-tcp-address={source.tcp_address}", *flags) as tap:
            wait_until_paused(tap, source)
            eventually(lambda: [client["ready_count"] for client in source.channel(TOPIC, CHANNEL)["clients"]] == [0])
            eventually(lambda: "RDY 0" in tap.log)
            assert tap.get("/ping").status == 500
            stored, end = info(tap, source)
            assert 0 < stored < MESSAGES
            assert unfinished(source, TOPIC) == MESSAGES - stored, "nothing is lost"

            def is_read_on() -> bool:
                commit(tap, source, info(tap, source)[1])
                return tap.metric("messages_total") == MESSAGES

            eventually(is_read_on, DRAIN_TIMEOUT_S, 0.1)
            wait_until_finished(source, TOPIC)
            eventually(lambda: tap.get("/ping").status == 200)
            assert tap.metric("paused") == 0
            assert info(tap, source)[1] > end
            assert tap.stop() == 0, tap.log


def test_it_stops_in_order_while_its_disk_is_full(tmp_path: Path) -> None:
    with running_source("ours", tmp_path / "source") as source:
        prepare(source, TOPIC, CHANNEL)
        publish(source, TOPIC, numbered(0, MESSAGES))
        flags = (f"--topic={TOPIC}", f"--nsqd-tcp-address={source.tcp_address}")
        with Tap(tmp_path / "tap", *flags, *SMALL, PATIENT) as tap:
            wait_until_paused(tap, source)
            assert tap.stop() == 0, tap.log
        with Tap(tmp_path / "tap", *flags) as tap:
            wait_until_finished(source, TOPIC)
            assert info(tap, source)[0] == MESSAGES


def test_the_window_is_kept_when_all_was_read(tmp_path: Path) -> None:
    with running_source("ours", tmp_path / "source") as source:
        prepare(source, TOPIC, CHANNEL)
        flags = (f"--topic={TOPIC}", f"--nsqd-tcp-address={source.tcp_address}", "--max-bytes-per-file=50000")
        with Tap(tmp_path / "tap", *flags, "--window=3000") as tap:
            tap.wait_until_connected()
            publish(source, TOPIC, numbered(0, 10_000))
            wait_until_finished(source, TOPIC)
            commit(tap, source, info(tap, source)[1])
            eventually(lambda: info(tap, source)[0] < 5000)
            assert info(tap, source)[0] >= 3000
        with Tap(tmp_path / "tap", *flags, "--window=3000") as tap:
            read = eventually(lambda: re.search(r"the log has the ids of the last (\d+) messages", tap.log))
            assert 3000 <= int(read[1]) <= 3000 + 3000 // GENERATIONS, "whole batches are read"
