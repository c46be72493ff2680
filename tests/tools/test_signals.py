"""Checks what signals do to a tool while it is busy: one ends it in order, one that comes later ends it at once."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from harness import Nsqd, eventually
from harness.holding import hold
from nsquark.base.event_loop import SAME_STOP_S
from tools.rig import Tool, command, is_full


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_twice_at_once_ends_a_tool_in_order(
    nsqd: Nsqd, topic: str, tmp_path: Path, number: signal.Signals
) -> None:
    """`timeout` sends each signal twice: to its child, and to the group that the child is in."""
    nsqd.post("/pub", b"kept", topic=topic)
    flags = (f"--topic={topic}", f"--nsqd-tcp-address={nsqd.tcp_address}", f"--output-dir={tmp_path}")
    tool = Tool("nsq_to_file", *flags, "--sync-interval=1h", "--filename-format=<TOPIC>.log")
    eventually(lambda: any(file.stat().st_size for file in tmp_path.iterdir()))
    hold(nsqd.pid)  # so that stopping takes longer than the signals
    try:
        began_s = time.monotonic()
        while time.monotonic() - began_s < SAME_STOP_S / 4:
            tool.send_signal(number)
            time.sleep(0.001)
    finally:
        os.kill(nsqd.pid, signal.SIGCONT)
    assert tool.wait() == 0, tool.log
    assert "syncing 1 records to disk" in tool.log
    # nsqd may have stood still for longer than the tool waits for its answers.
    eventually(lambda: nsqd.channel(topic, "nsq_to_file")["in_flight_count"] == 0)
    channel = nsqd.channel(topic, "nsq_to_file")
    assert (channel["depth"], channel["requeue_count"]) == (0, 0)


def test_a_second_signal_ends_a_tool_that_does_not_end(nsqd: Nsqd, topic: str) -> None:
    """nsq_tail waits for ever to write to a pipe that nobody reads."""
    nsqd.post("/mpub", b"\n".join([b"x" * 1000] * 2000), topic=topic)
    flags = (f"--topic={topic}", "--channel=ch", "--max-in-flight=2000", f"--nsqd-tcp-address={nsqd.tcp_address}")
    nsqd.post("/channel/create", topic=topic, channel="ch")
    reading, writing = os.pipe()
    with subprocess.Popen(command("nsq_tail", *flags), stdout=writing, stderr=subprocess.DEVNULL) as tail:
        eventually(lambda: is_full(writing))  # with less than that it could print what it has, and end in order
        tail.send_signal(signal.SIGTERM)

        def is_ended() -> bool:
            tail.send_signal(signal.SIGTERM)
            return tail.poll() is not None

        eventually(is_ended)
        assert tail.returncode == -signal.SIGTERM
    os.close(reading)
    os.close(writing)
