"""Checks nsq_stat as a process: its lines in a pipe, its table in a terminal."""

import contextlib
import os
import pty
import re
import select
import signal
import socket
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import Nsqd, eventually
from nsquark.tools.cluster import ChannelCounters, TopicCounters
from nsquark.tools.nsq_stat import HEADER, line
from nsquark.tools.stat_watch import Totals
from tools.rig import Cluster, Tool, command, numbered_lines, run_tool

Start = Callable[..., Tool]

PATIENCE = "--http-client-request-timeout=1m"
"""nsq_stat ends when an answer takes longer than this; its own five seconds are little on a busy machine."""


def test_a_line() -> None:
    before = ChannelCounters("c", depth=100, message_count=1000)
    now = ChannelCounters("c", 90, 30, 5, 4, 3, 2, 1025, 7)
    # 25 came in 2 s, and 10 fewer are waiting; NSQ cuts the fractions off.
    assert line(before, now, 2.0) == (
        "     12      17 |      90      60      30     5     4 |       3       2         1025       7\n"
    )
    assert line(now, before, 2.0).startswith("    -12     -17 |")


def test_lines_have_the_width_of_the_header() -> None:
    rows = HEADER.splitlines()
    assert len({len(row) for row in [*rows, line(ChannelCounters(), ChannelCounters(), 1.0).rstrip("\n")]}) == 1


def test_reports_add_up_all_nsqds(cluster: Cluster, topic: str) -> None:
    cluster.create(topic, "ch")
    cluster.publish(topic, numbered_lines(7))
    eventually(lambda: sum(nsqd.channel(topic)["depth"] for nsqd in cluster.nsqds) == 7)
    row = "      0       0 |       7       7       0     0     0 |       0       0            7       0\n"
    direct = [f"--nsqd-http-address={nsqd.http_address}" for nsqd in cluster.nsqds]
    for source in ([cluster.lookupd_flag], direct):
        flags = (f"--topic={topic}", "--channel=ch", *source, "--interval=10ms", "--count=27", PATIENCE)
        result = run_tool("nsq_stat", *flags)
        assert (result.code, result.log) == (0, "")
        # A header every 25 polls, of which the first makes no line.
        assert result.out.decode() == HEADER + row * 24 + HEADER + row * 3


def test_rates(cluster: Cluster, start: Start, topic: str) -> None:
    cluster.create(topic, "ch")
    tool = start("nsq_stat", f"--topic={topic}", "--channel=ch", cluster.lookupd_flag, "--interval=500ms", PATIENCE)
    eventually(lambda: tool.out)
    cluster.publish(topic, numbered_lines(101))
    eventually(lambda: b" |     101     101 " in tool.out)
    assert tool.stop() == 0
    # A poll may come between the publishes to the two nsqds, and then two lines share the messages.
    rates = [tuple(map(int, row.partition(b"|")[0].split())) for row in tool.lines if row.startswith(b" ")]
    assert sum(ingress for ingress, _ in rates) == 202, "101 in half a second"
    assert not any(egress for _, egress in rates)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_well(cluster: Cluster, start: Start, topic: str, number: int) -> None:
    cluster.create(topic, "ch")
    tool = start("nsq_stat", f"--topic={topic}", "--channel=ch", cluster.lookupd_flag, "--interval=1h", PATIENCE)
    eventually(lambda: tool.out)
    assert tool.stop(number) == 0
    assert (bytes(tool.out), tool.log) == (HEADER.encode(), "")


def test_a_reader_that_goes_ends_it(cluster: Cluster, topic: str) -> None:
    cluster.create(topic, "ch")
    flags = (f"--topic={topic}", "--channel=ch", cluster.lookupd_flag, "--interval=10ms", PATIENCE)
    arguments = command("nsq_stat", *flags)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == -signal.SIGPIPE
        assert process.stderr.read() == b""


def test_a_poll_that_fails_ends_it(cluster: Cluster, topic: str) -> None:
    cluster.create(topic, "ch")

    def failure(*flags: str) -> str:
        result = run_tool("nsq_stat", *flags, PATIENCE)
        assert (result.code, result.out) == (1, b"")
        return re.sub(r"^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d ", "", result.log)

    nsqd = f"--nsqd-http-address={cluster.nsqds[0].http_address}"
    missing = f"ERROR: failed to find channel(no) in stats metadata for topic({topic})\n"
    assert failure(f"--topic={topic}", "--channel=no", nsqd) == missing
    assert failure(f"--topic={topic}", "--channel=no", cluster.lookupd_flag) == missing
    assert failure("--topic=no", "--channel=ch", nsqd).startswith(
        "ERROR: failed to get nsqd stats - failed to query any nsqd: "
    )
    assert failure("--topic=no", "--channel=ch", cluster.lookupd_flag).startswith(
        "ERROR: failed to get topic producers - failed to query any nsqlookupd: "
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port
        unreachable = f"--nsqd-http-address=127.0.0.1:{taken.getsockname()[1]}"
        assert failure(f"--topic={topic}", "--channel=ch", unreachable).startswith(
            "ERROR: failed to get topic producers - failed to query any nsqd: "
        )
        assert failure(f"--topic={topic}", "--channel=ch", nsqd, unreachable).startswith(
            "ERROR: failed to get topic producers - "
        ), "one that cannot be reached is an error, too"


def test_an_nsqd_that_goes_away_ends_it(make_nsqd: Callable[..., Nsqd], start: Start, topic: str) -> None:
    nsqd = make_nsqd()
    nsqd.keep_ports()  # also while it is gone: nobody else is to answer there
    nsqd.post("/topic/create", topic=topic)
    nsqd.post("/channel/create", topic=topic, channel="ch")
    flags = (f"--topic={topic}", "--channel=ch", f"--nsqd-http-address={nsqd.http_address}", "--interval=50ms")
    tool = start("nsq_stat", *flags, PATIENCE)
    eventually(lambda: len(tool.lines) > 3)
    nsqd.kill()
    assert tool.wait() == 1
    assert "ERROR: failed to get topic producers - failed to query any nsqd: " in tool.log


# -- the table -------------------------------------------------------------------------------------------


def topic_stats(name: str, messages: int, depth: int, *channels: ChannelCounters) -> TopicCounters:
    return TopicCounters(name, depth=depth, message_count=messages, channels=list(channels))


def channel_stats(name: str, messages: int, depth: int) -> ChannelCounters:
    return ChannelCounters(name, depth=depth, message_count=messages)


def test_totals_over_nsqds_and_their_rates() -> None:
    totals = Totals()
    one = [topic_stats("t", 10, 0, channel_stats("a", 10, 5)), topic_stats("u", 0, 0)]
    two = [topic_stats("t", 20, 0, channel_stats("a", 20, 5), channel_stats("b", 2, 2))]
    totals.update([one, two], 0.0)
    assert [(row.topic, row.channel, row.came_per_s) for row in totals.rows("name")] == [
        ("t", "", None),
        ("t", "a", None),
        ("t", "b", None),
        ("u", "", None),
    ]
    two = [topic_stats("t", 60, 0, channel_stats("a", 60, 0), channel_stats("b", 2, 2))]
    totals.update([one, two], 2.0)
    rows = {row.channel: row for row in totals.rows("rate") if row.topic == "t"}
    assert (rows["a"].came_per_s, rows["a"].went_per_s) == (20.0, 22.5)
    assert (rows["b"].came_per_s, rows["b"].went_per_s) == (0.0, 0.0)
    assert rows["a"].now.message_count == 70
    assert totals.rows("rate")[0].channel == "a"
    assert totals.rows("depth")[0].channel == "a"
    totals.update([one], 2.0)
    assert next(row for row in totals.rows("name") if row.channel == "a").came_per_s is None, "an nsqd went away"


def test_totals_of_one_topic_and_channel() -> None:
    totals = Totals("t", "a")
    totals.update(
        [[topic_stats("t", 1, 0, channel_stats("a", 1, 1), channel_stats("b", 1, 1)), topic_stats("u", 1, 1)]], 0
    )
    assert [(row.topic, row.channel) for row in totals.rows("name")] == [("t", "a")]


class Terminal:
    """Runs a tool in a terminal of its own, and knows what it shows there."""

    def __init__(self, *flags: str) -> None:
        self.fd, inside = pty.openpty()
        termios.tcsetwinsize(self.fd, (40, 80))
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.settings = termios.tcgetattr(self.fd)
        self.process = subprocess.Popen(
            command("nsq_stat", *flags),
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env={**environment, "TERM": "xterm"},
        )
        os.close(inside)
        self.shown = ""

    def see(self, pattern: str) -> str:
        """Waits until the screen, as it was drawn last, has this."""
        deadline_s = time.monotonic() + 60
        while not (found := re.search(pattern, self.screen)):
            assert time.monotonic() < deadline_s, self.screen
            if select.select([self.fd], [], [], 0.1)[0]:
                self.shown += os.read(self.fd, 1 << 16).decode()
        return found[0]

    @property
    def screen(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.shown.rpartition("\x1b[H")[2])

    def press(self, key: str) -> None:
        os.write(self.fd, key.encode())

    def wait(self) -> int:
        """Returns its exit code when it has ended and all that it wrote was read; Linux tells the end of that by EIO.

        It is read meanwhile: a program whose terminal takes nothing more would wait for that, and never end.
        """
        deadline_s = time.monotonic() + 60
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline_s:
                if select.select([self.fd], [], [], 0.1)[0]:
                    self.shown += os.read(self.fd, 1 << 16).decode()
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.fd)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    open_ones: list[Terminal] = []

    def make(*flags: str) -> Terminal:
        open_ones.append(Terminal(*flags))
        return open_ones[-1]

    yield make
    for each in open_ones:
        each.close()


def test_the_table_shows_all_and_q_leaves(cluster: Cluster, terminal: Callable[..., Terminal], topic: str) -> None:
    cluster.create(f"{topic}.a", "one", "two")
    cluster.create(f"{topic}.b", "ch")
    cluster.publish(f"{topic}.b", numbered_lines(1500))
    shown = terminal("--watch", cluster.lookupd_flag, "--interval=100ms")
    shown.see(r"2 nsqds, every 0.1 s, by rate")
    shown.see(rf"{topic}\.b +ch +\d+ +\d+ +1500 +0 +0 +0 +0 +1500 +0")
    shown.see(rf"{topic}\.a +two +0 +0 +0 ")
    shown.press("n")
    names = shown.see(rf"by name(?s:.*){topic}\.a +one(?s:.*){topic}\.b +ch")
    assert names.index(f"{topic}.a") < names.index(f"{topic}.b")
    shown.press("d")
    depths = shown.see(rf"by depth(?s:.*){topic}\.b +ch(?s:.*){topic}\.a +one")
    assert depths.index(f"{topic}.b") < depths.index(f"{topic}.a")
    shown.press("q")
    assert shown.wait() == 0
    assert termios.tcgetattr(shown.fd) == shown.settings
    assert "\x1b[?1049l" in shown.shown and "\x1b[?25h" in shown.shown, "the old screen and its cursor are back"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_table_goes_with_a_signal(
    cluster: Cluster, terminal: Callable[..., Terminal], topic: str, number: int
) -> None:
    cluster.create(topic, "ch")
    shown = terminal("--watch", f"--topic={topic}", *(f"--nsqd-http-address={n.http_address}" for n in cluster.nsqds))
    shown.see(rf"{topic} +ch ")
    shown.process.send_signal(number)
    assert shown.wait() == 0
    assert termios.tcgetattr(shown.fd) == shown.settings


def test_the_table_says_which_nsqd_is_missing(
    make_nsqd: Callable[..., Nsqd], terminal: Callable[..., Terminal], topic: str, tmp_path: Path
) -> None:
    one, two = (make_nsqd(data_path=tmp_path / name) for name in ("one", "two"))
    one.post("/topic/create", topic=topic)
    two.keep_ports()  # also while it is down: nobody else is to answer there
    addresses = [nsqd.http_address for nsqd in (one, two)]
    shown = terminal("--watch", *(f"--nsqd-http-address={address}" for address in addresses), "--interval=100ms")
    shown.see("2 nsqds")
    two.kill()
    shown.see("1 nsqds")
    shown.see(rf"{addresses[1]}: .*refused")
    shown.see(topic)
    shown.press("q")
    assert shown.wait() == 0


def test_a_table_needs_a_terminal(cluster: Cluster) -> None:
    result = run_tool("nsq_stat", "--watch", cluster.lookupd_flag)
    assert result.code == 1
    assert result.log.endswith("--watch needs a terminal\n")
