import contextlib
import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from harness import Nsqd, eventually
from tools.rig import Cluster, Tool, command, numbered_lines, run_tool

NSQD_FLAGS = ("--max-msg-size=100000",)
SINGLE_AND_BATCH = pytest.mark.parametrize("batch", [(), ("--batch=300",)], ids=["single", "batch"])


def to_nsq(nsqd: Nsqd, topic: str, stdin: bytes, *flags: str) -> None:
    result = run_tool("to_nsq", f"--topic={topic}", f"--nsqd-tcp-address={nsqd.tcp_address}", *flags, stdin=stdin)
    assert result.code == 0, result.log


def bodies(nsqd: Nsqd, topic: str) -> list[bytes]:
    """Returns what the topic has, in its order, read by nsq_tail into a pipe."""
    count = nsqd.topic(topic)["depth"]
    tail = run_tool(
        "nsq_tail", f"--topic={topic}", "--channel=all", f"-n={count}", f"--nsqd-tcp-address={nsqd.tcp_address}"
    )
    assert tail.code == 0, tail.log
    return tail.out.splitlines()


@SINGLE_AND_BATCH
def test_every_nsqd_gets_every_line_in_order(cluster: Cluster, topic: str, batch: tuple[str, ...]) -> None:
    lines = numbered_lines(10_000)
    result = run_tool("to_nsq", f"--topic={topic}", *cluster.nsqd_flags, *batch, stdin=b"\n".join(lines) + b"\n")
    assert (result.code, result.out) == (0, b""), result.log
    for nsqd in cluster.nsqds:
        assert bodies(nsqd, topic) == lines


@SINGLE_AND_BATCH
def test_the_last_line_needs_no_newline_and_empty_ones_are_skipped(
    nsqd: Nsqd, topic: str, batch: tuple[str, ...]
) -> None:
    to_nsq(nsqd, topic, b"\none\n\n\ntwo\nthree", *batch)
    assert bodies(nsqd, topic) == [b"one", b"two", b"three"]


def test_other_delimiters(nsqd: Nsqd, topic: str) -> None:
    to_nsq(nsqd, topic, b"a b,c,,d", "--delimiter=,")
    assert bodies(nsqd, topic) == [b"a b", b"c", b"d"]


def test_nothing_on_stdin_needs_no_nsqd() -> None:
    assert run_tool("to_nsq", "--topic=x", "--nsqd-tcp-address=127.0.0.1:1").code == 0


@SINGLE_AND_BATCH
def test_lines_are_published_as_they_come(
    nsqd: Nsqd, topic: str, start: Callable[..., Tool], batch: tuple[str, ...]
) -> None:
    publisher = start(
        "to_nsq", f"--topic={topic}", f"--nsqd-tcp-address={nsqd.tcp_address}", *batch, stdin=subprocess.PIPE
    )
    publisher.send(b"first\nsecond\nthi")
    eventually(lambda: nsqd.topic(topic)["message_count"] == 2)
    publisher.send(b"rd\nnever ended")
    eventually(lambda: nsqd.topic(topic)["message_count"] == 3)
    assert publisher.stop(signal.SIGTERM) == 0
    assert bodies(nsqd, topic) == [b"first", b"second", b"third"]


@SINGLE_AND_BATCH
def test_what_stands_before_a_message_that_is_too_big_is_published(
    nsqd: Nsqd, topic: str, batch: tuple[str, ...]
) -> None:
    lines = [*numbered_lines(1000), b"x" * 100_001, b"behind it"]
    result = run_tool(
        "to_nsq", f"--topic={topic}", f"--nsqd-tcp-address={nsqd.tcp_address}", *batch, stdin=b"\n".join(lines)
    )
    assert result.code == 1
    assert "1000 messages were published before this:" in result.log
    assert "a body of 100001 bytes" in result.log.splitlines()[-1]
    assert bodies(nsqd, topic) == lines[:1000]


@SINGLE_AND_BATCH
def test_an_nsqd_that_goes_away_ends_it(
    make_nsqd: Callable[..., Nsqd], topic: str, start: Callable[..., Tool], batch: tuple[str, ...]
) -> None:
    nsqd = make_nsqd()
    nsqd.keep_ports()  # also while it is away: nobody else is to answer there
    publisher = start(
        "to_nsq", f"--topic={topic}", f"--nsqd-tcp-address={nsqd.tcp_address}", *batch, stdin=subprocess.PIPE
    )
    publisher.send(b"one\ntwo\n")
    eventually(lambda: nsqd.topic(topic)["message_count"] == 2)
    nsqd.kill()
    publisher.wait_for_log("connection lost")
    publisher.send(b"three\n")
    assert publisher.wait() == 1
    assert "2 messages were published before this:" in publisher.log
    assert "Connection refused" in publisher.log.splitlines()[-1]
    nsqd.start()
    assert bodies(nsqd, topic) == [b"one", b"two"]


def test_a_bad_topic_is_refused_before_anything_is_sent(nsqd: Nsqd) -> None:
    result = run_tool("to_nsq", "--topic=t$", f"--nsqd-tcp-address={nsqd.tcp_address}", stdin=b"a\n")
    assert result.code == 1
    assert "t$" in result.log.splitlines()[-1]


def test_rate_holds_messages_back(nsqd: Nsqd, topic: str) -> None:
    started_s = time.monotonic()
    to_nsq(nsqd, topic, b"".join(b"%d\n" % number for number in range(11)), "--rate=10", "--batch=100")
    assert time.monotonic() - started_s >= 1.0  # one at once, then ten at ten a second
    assert bodies(nsqd, topic) == [b"%d" % number for number in range(11)]


def test_a_terminal_sees_progress(nsqd: Nsqd, topic: str) -> None:
    ours, theirs = pty.openpty()
    flags = (f"--topic={topic}", f"--nsqd-tcp-address={nsqd.tcp_address}", "--batch=10")
    process = subprocess.Popen(command("to_nsq", *flags), stdin=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    process.communicate(b"one\ntwo\n")
    shown = b""
    with contextlib.suppress(OSError):  # by which Linux tells the end
        while piece := os.read(ours, 65536):
            shown += piece
    os.close(ours)
    assert process.returncode == 0
    assert b"2 messages published" in shown
