"""Runs our tools as their users have them: processes with a command line, pipes and signals."""

import os
import select
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Nsqd, eventually
from harness.lookupd import Nsqlookupd

END_TIMEOUT_S = 60.0


def command(tool: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", f"nsquark.tools.{tool}", *flags]


class Tool:
    """Is a tool that runs. What it writes is collected unless `stdout` says where it goes."""

    def __init__(self, tool: str, *flags: str, **settings: Any) -> None:
        settings.setdefault("stdin", subprocess.DEVNULL)
        settings.setdefault("stdout", subprocess.PIPE)
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            command(tool, *flags), stderr=subprocess.PIPE, **settings
        )
        self.out = bytearray()
        self.log = ""
        self._listeners = [threading.Thread(target=self._collect_log, daemon=True)]
        if self.process.stdout is not None:
            self._listeners.append(threading.Thread(target=self._collect_out, daemon=True))
        for listener in self._listeners:
            listener.start()

    def _collect_out(self) -> None:
        assert self.process.stdout is not None
        while piece := os.read(self.process.stdout.fileno(), 1 << 16):
            self.out += piece

    def _collect_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line.decode(errors="replace")

    @property
    def lines(self) -> list[bytes]:
        return bytes(self.out).splitlines()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait_for_log(self, text: str) -> None:
        eventually(lambda: text in self.log, END_TIMEOUT_S)

    def send(self, data: bytes) -> None:
        """Writes to a stdin that is a pipe."""
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Returns its exit code when it has ended and all that it wrote was read."""
        code = self.process.wait(END_TIMEOUT_S)
        for listener in self._listeners:
            listener.join(END_TIMEOUT_S)
        return code

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.send_signal(number)
        return self.wait()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()


@dataclass(frozen=True)
class Result:
    code: int
    out: bytes
    log: str


def run_tool(tool: str, *flags: str, stdin: bytes = b"") -> Result:
    """Runs a tool to its end."""
    done = subprocess.run(command(tool, *flags), input=stdin, capture_output=True, timeout=END_TIMEOUT_S, check=False)
    return Result(done.returncode, done.stdout, done.stderr.decode(errors="replace"))


def is_full(writing: int) -> bool:
    """Tells whether a pipe is full, so that who has more to write to it waits."""
    return not select.select([], [writing], [], 0)[1]


class Cluster:
    """Runs an nsqlookupd and two nsqds that it knows."""

    def __init__(self, directory: Path, *flags: str, program: str | None = None) -> None:
        self.lookupd = Nsqlookupd()
        self._directory = directory
        self._flags = flags
        self._program = program
        self.nsqds: list[Nsqd] = []

    def start(self) -> None:
        self.lookupd.start()
        for name in ("one", "two"):
            data_path = self._directory / name
            data_path.mkdir()
            flags = (f"--lookupd-tcp-address={self.lookupd.tcp_address}", *self._flags)
            self.nsqds.append(Nsqd(data_path, *flags, program=self._program).start())
        eventually(lambda: len(self.lookupd.nodes()) == 2)

    def end(self) -> None:
        for daemon in (*self.nsqds, self.lookupd):
            daemon.kill()

    def create(self, topic: str, *channels: str) -> None:
        """Makes a topic with these channels on both nsqds, known to nsqlookupd: nothing published later is missed."""
        for nsqd in self.nsqds:
            assert nsqd.post("/topic/create", topic=topic).status == 200
            for channel in channels:
                assert nsqd.post("/channel/create", topic=topic, channel=channel).status == 200
        eventually(lambda: len(self.lookupd.producers(topic)) == 2)

    def publish(self, topic: str, bodies: list[bytes]) -> None:
        """Publishes half of the bodies to each nsqd."""
        middle = len(bodies) // 2
        for nsqd, part in zip(self.nsqds, (bodies[:middle], bodies[middle:]), strict=True):
            if part:
                assert nsqd.post("/mpub", b"\n".join(part), topic=topic).status == 200

    def depth(self, topic: str, channel: str) -> int:
        """Counts what the channel has not finished, on both nsqds, and what is still on its way to it."""
        return sum(unfinished(nsqd, topic, channel) for nsqd in self.nsqds)

    def in_flight(self, topic: str, channel: str) -> int:
        return sum(nsqd.channel(topic, channel)["in_flight_count"] for nsqd in self.nsqds)

    def wait_until_finished(self, topic: str, channel: str) -> None:
        eventually(lambda: self.depth(topic, channel) == 0, END_TIMEOUT_S)

    @property
    def nsqd_flags(self) -> list[str]:
        return [f"--nsqd-tcp-address={nsqd.tcp_address}" for nsqd in self.nsqds]

    @property
    def lookupd_flag(self) -> str:
        return f"--lookupd-http-address={self.lookupd.http_address}"


def unfinished(nsqd: Nsqd, topic: str, channel: str) -> int:
    """Counts what the channel has not finished on one nsqd at one moment, and what is still on its way to it."""
    found = nsqd.topic(topic)
    (entry,) = (entry for entry in found["channels"] if entry["channel_name"] == channel)
    waiting: int = found["depth"] + entry["depth"] + entry["in_flight_count"] + entry["deferred_count"]
    return waiting


def numbered_lines(count: int) -> list[bytes]:
    """Makes lines of different lengths, which name themselves."""
    return [b"line %d %s" % (number, b"x" * (number % 97)) for number in range(count)]
