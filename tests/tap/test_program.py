"""Checks the program `nsquark tap`: its flags, what outsiders may do, and where it finds what to tap."""

import contextlib
import json
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import FaultProxy, Nsqd, eventually
from harness.lookupd import Nsqlookupd
from nsquark.tap.main import SOURCES_FILE
from nsquark.tap.tap_log import ID_CHARS_MAX, identity_of
from nsquark.tap.window import GENERATIONS, IdWindow
from tap.rig import CHANNEL, Tap, numbered, prepare, publish, running_source, wait_until_finished


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Nsqd]:
    with running_source("ours", tmp_path / "source") as nsqd:
        yield nsqd


def tap_of(tmp_path: Path, source: Nsqd, *flags: str, topic: str = "orders") -> Tap:
    return Tap(tmp_path / "tap", f"--topic={topic}", f"--nsqd-tcp-address={source.tcp_address}", *flags)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "--nsqd-tcp-address or --lookupd-http-address required"),
        (("--nsqd-tcp-address=a:1",), "--topic or --topic-pattern required"),
        (("--nsqd-tcp-address=a:1", "--topic-pattern=."), "--topic-pattern needs --lookupd-http-address"),
        (("--nsqd-tcp-address=a:1", "--topic=x#ephemeral"), "--topic=x#ephemeral is invalid, or ephemeral"),
        (("--nsqd-tcp-address=a:1", "--topic=x", "--channel=c#ephemeral"), "--channel is invalid, or ephemeral"),
        (("--nsqd-tcp-address=a:1", "--topic=x", "--window=0"), "--window should be positive"),
        (("--lookupd-http-address=a:1", "--topic-pattern=("), "invalid --topic-pattern ("),
        (("--nsqd-tcp-address=a:1", "--topic=x", "--http-address=4181"), "--http-address: address 4181"),
    ],
)
def test_flags_that_do_not_fit(flags: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nsquark.tool.main", "tap", f"--data-path={tmp_path}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert sentence in done.stderr


@pytest.mark.parametrize("damage", [b'["\xff:4150"]', b"[", b"[" * 100_000])
def test_a_damaged_list_of_nsqds_is_named(source: Nsqd, tmp_path: Path, damage: bytes) -> None:
    (tmp_path / SOURCES_FILE).write_bytes(damage)
    flags = (f"--data-path={tmp_path}", "--topic=x", f"--nsqd-tcp-address={source.tcp_address}")
    command = [sys.executable, "-m", "nsquark.tool.main", "tap", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert f"{tmp_path / SOURCES_FILE} is damaged" in done.stderr and "Traceback" not in done.stderr


def test_two_taps_do_not_share_a_data_path(source: Nsqd, tmp_path: Path) -> None:
    with tap_of(tmp_path, source) as tap:
        tap.wait_until_connected()
        command = [sys.executable, "-m", "nsquark.tool.main", "tap", *tap.flags, "--http-address=127.0.0.1:0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "failed to lock data-path" in done.stderr


def test_outsiders_read_and_change_nothing(source: Nsqd, tmp_path: Path) -> None:
    prepare(source, "orders", CHANNEL)
    publish(source, "orders", numbered(0, 10))
    with tap_of(tmp_path, source) as tap:
        tap.wait_until_connected()
        wait_until_finished(source, "orders")
        for path in (
            "/pub?topic=orders",
            "/mpub?topic=orders",
            "/topic/delete?topic=orders",
            "/topic/empty?topic=orders",
        ):
            assert tap.of_log(source, "POST", path, b"x").status == 403
        assert tap.of_log(source, "PUT", "/config/log_level", b"debug").status == 403
        assert tap.of_log(source, "POST", "/log/stage?topic=orders&token=t&part=0", b"x").status == 403
        (topic,) = tap.of_log(source, "GET", "/log/info").json()["topics"]
        assert (topic["topic"], topic["count"]) == ("orders", 10)
        assert tap.of_log(source, "GET", "/log/info").json()["nsqd_id"] == source.tcp_address
        assert tap.of_log(source, "GET", "/ping").text == "OK"
        assert tap.get("/ping").text == "OK"
        assert tap.get("/topics").json() == {"topics": ["orders"]}
        assert tap.get("/lookup", topic="no-such").status == 404
        assert tap.stop() == 0, tap.log


def test_topics_and_nsqds_are_found_as_they_come(tmp_path: Path) -> None:
    with Nsqlookupd() as lookupd:
        told = f"--lookupd-tcp-address={lookupd.tcp_address}"
        flags = (f"--lookupd-http-address={lookupd.http_address}", "--topic-pattern=^(orders|clicks)")
        with running_source("ours", tmp_path / "one", told) as first, Tap(tmp_path / "tap", *flags) as tap:
            prepare(first, "other", "c")
            prepare(first, "orders#ephemeral", "c#ephemeral")
            prepare(first, "orders", CHANNEL)
            publish(first, "orders", numbered(0, 100))
            wait_until_finished(first, "orders")
            assert tap.nodes()[first.tcp_address]["topics"] == ["orders"]
            with running_source("ours", tmp_path / "two", told) as second:
                prepare(second, "clicks", CHANNEL)
                prepare(first, "clicks", CHANNEL)
                publish(second, "clicks", numbered(0, 100))
                wait_until_finished(second, "clicks")
                eventually(lambda: set(tap.nodes()[first.tcp_address]["topics"]) == {"orders", "clicks"})
                assert tap.nodes()[second.tcp_address]["topics"] == ["clicks"]
                assert tap.metric("messages_total") == 200
            assert len(first.topic("other")["channels"]) == 1, "what does not match is left alone"


def test_an_nsqd_that_is_not_there_yet_is_tried_again(source: Nsqd, tmp_path: Path) -> None:
    with FaultProxy(source.tcp) as proxy:
        proxy.refusing = True
        with Tap(tmp_path / "tap", "--topic=orders", "--nsqd-tcp-address={}:{}".format(*proxy.address)) as tap:
            eventually(lambda: "tried again later" in tap.log)
            proxy.refusing = False
            tap.wait_until_connected()


def test_ports_of_logs_stay(tmp_path: Path) -> None:
    """The ports of nsqds that are gone stay too: their logs are still read."""
    with running_source("ours", tmp_path / "one") as one, running_source("ours", tmp_path / "two") as two:
        flags = [f"--nsqd-tcp-address={nsqd.tcp_address}" for nsqd in (one, two)]
        with Tap(tmp_path / "tap", "--topic=orders", *flags, f"--http-address=127.0.0.1:{free_ports(3)}") as tap:
            tap.wait_until_connected(2)
            before = {address: node["http_port"] for address, node in tap.nodes().items()}
            own = [flag for flag in tap.flags if flag.startswith("--http-address")]
        with Tap(tmp_path / "tap", "--topic=orders", flags[1], *own) as tap:
            tap.wait_until_connected()
            assert {address: node["http_port"] for address, node in tap.nodes().items()} == before
            assert sorted(before.values()) == [tap.http[1] + 1, tap.http[1] + 2]


def test_an_nsqd_whose_port_could_not_be_stored_is_stored_later(tmp_path: Path) -> None:
    with Nsqlookupd() as lookupd:
        flags = (f"--lookupd-http-address={lookupd.http_address}", "--topic=orders")
        told = f"--lookupd-tcp-address={lookupd.tcp_address}"
        with Tap(tmp_path / "tap", *flags) as tap, running_source("ours", tmp_path / "source", told) as source:
            stored = tmp_path / "tap" / "tap.json"
            stored.mkdir()  # no file can take its place
            prepare(source, "orders", CHANNEL)
            eventually(lambda: f"nsqd {source.tcp_address} is not tapped" in tap.log)
            stored.rmdir()
            tap.wait_until_connected()
            assert json.loads(stored.read_bytes()) == [source.tcp_address]


class SmallTap(Tap):
    """Is a tap that takes two topics, and not ten thousand."""

    def _program(self) -> list[str]:
        return [sys.executable, "-P", "-c", "from nsquark.tap.main import main; main(topics_max=2)"]


def test_only_topics_above_the_most_are_not_tapped(tmp_path: Path) -> None:
    with Nsqlookupd() as lookupd:
        told = f"--lookupd-tcp-address={lookupd.tcp_address}"
        flags = (f"--lookupd-http-address={lookupd.http_address}", "--topic-pattern=.")
        with running_source("ours", tmp_path / "source", told) as source, SmallTap(tmp_path / "tap", *flags) as tap:
            prepare(source, "a", CHANNEL)
            prepare(source, "b", CHANNEL)
            tap.wait_until_connected(2)
            prepare(source, "c", CHANNEL)
            eventually(lambda: f"more than 2 topics: c of {source.tcp_address} and others are not tapped" in tap.log)
            said = [line for line in tap.log.splitlines() if "more than" in line]
            assert [line for line in said if "topics: c of" not in line] == [], "two topics are not too many"
            assert set(tap.nodes()[source.tcp_address]["topics"]) == {"a", "b"}


def free_ports(count: int) -> int:
    """Returns the first of so many ports in a row that nobody uses. They are below those that systems give to whoever
    asks for any, as all other daemons and connections do: else one might be taken before the tap listens there.
    """
    while True:
        first = random.randrange(20_000, 30_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def test_an_address_too_long_for_an_id_is_cut_and_stays_its_own() -> None:
    assert identity_of("nsqd-1.example:4150") == "nsqd-1.example:4150"
    long = [identity_of(f"{'x' * 100}{number}:4150") for number in range(2)]
    assert long[0] != long[1]
    assert {len(identity) for identity in long} == {ID_CHARS_MAX}


def test_the_window_has_the_last_ids_and_not_many_more() -> None:
    window = IdWindow(800)
    ids = [b"%016x" % number for number in range(10_000)]
    for at in range(0, len(ids), 70):
        window.add(ids[at : at + 70])
    assert all(message_id in window for message_id in ids[-800:])
    assert 800 <= len(window) <= 800 + 800 // GENERATIONS
    assert ids[0] not in window
