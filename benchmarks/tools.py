"""Measures our tools beside NSQ's own, on the same nsqd (ours, or `--nsqd`): `PEER_TOOLS=<dir> python -m
benchmarks.tools`.

Each measurement is a program as its user runs it, its start included, on a topic of its own; the two run in turn.
Where the directory has no program of a name, or is not given, ours stands alone.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.broker import Broker

MESSAGES_DEFAULT = 400_000
TIMES_DEFAULT = 3
BODY_BYTES = 100
BATCH = 1000
SINGLE_SHARE = 10
"""Publishing one by one is slow: a tenth of the messages will do."""
WAIT_S = 0.01
END_S_MAX = 600.0
CHANNEL = "bench"
SYNC_INTERVAL = "--sync-interval=250ms"
"""The last messages, too few to make a tool sync by itself, do not wait for half a minute with this."""


@dataclass(frozen=True)
class Tools:
    """Has the programs of one maker."""

    name: str
    directory: Path | None

    def command(self, tool: str, *flags: str) -> list[str]:
        if self.directory is None:
            return [sys.executable, "-m", f"nsquark.tools.{tool}", *flags]
        return [str(self.directory / tool), *flags]

    def has(self, tool: str) -> bool:
        return self.directory is None or (self.directory / tool).exists()


OURS = Tools("ours", None)


@dataclass(frozen=True)
class Lines:
    """Is a file, and knows how many lines it has."""

    path: Path
    count: int


def _write_lines(path: Path, count: int) -> Lines:
    with path.open("wb") as lines:
        for number in range(count):
            lines.write(b"%0*d\n" % (BODY_BYTES, number))
    return Lines(path, count)


class ToolBench:
    """Has what a row needs: an nsqd, messages in it, and a place for files."""

    def __init__(self, broker: Broker, destination: Broker, directory: Path, messages: int) -> None:
        self.broker = broker
        self.destination = destination
        """Is another nsqd, for what publishes messages again."""
        self.directory = directory
        self.messages = messages
        self.lines = _write_lines(directory / "lines", messages)
        self.few_lines = _write_lines(directory / "few", messages // SINGLE_SHARE)
        self._serial = 0

    @property
    def source(self) -> str:
        return "--nsqd-tcp-address={}:{}".format(*self.broker.tcp)

    @property
    def to_destination(self) -> str:
        return "--destination-nsqd-tcp-address={}:{}".format(*self.destination.tcp)

    def topic(self, *, is_filled: bool) -> str:
        """Makes a new topic with a channel, which has all messages if it is to be filled."""
        self._serial += 1
        topic = f"bench_{self._serial}"
        self._post("/topic/create", topic)
        self._post("/channel/create", topic, CHANNEL)
        if is_filled:
            flags = (f"--topic={topic}", self.source, f"--batch={BATCH}")
            with self.lines.path.open("rb") as lines:
                subprocess.run(OURS.command("to_nsq", *flags), stdin=lines, stderr=subprocess.DEVNULL, check=True)
        return topic

    def remove(self, topic: str) -> None:
        self._post("/topic/delete", topic)
        with contextlib.suppress(urllib.error.HTTPError):  # most tools publish nothing there
            self._post("/topic/delete", topic, broker=self.destination)

    def publish(self, command: Sequence[str], lines: Lines) -> float:
        """Returns how many lines per second a program publishes."""
        with lines.path.open("rb") as stdin:
            started_s = time.monotonic()
            subprocess.run(command, stdin=stdin, stderr=subprocess.DEVNULL, check=True)
            return lines.count / (time.monotonic() - started_s)

    def consume(self, command: Sequence[str], topic: str, stdout: Any = subprocess.DEVNULL) -> float:
        """Returns how many messages of a filled topic a program finishes per second."""
        started_s = time.monotonic()
        process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.DEVNULL)
        try:
            while self._unfinished(topic):
                if time.monotonic() - started_s > END_S_MAX:
                    raise SystemExit(f"{command[0]} has not finished in {END_S_MAX} s")
                time.sleep(WAIT_S)
            return self.messages / (time.monotonic() - started_s)
        finally:
            process.terminate()
            process.wait()

    def _unfinished(self, topic: str) -> int:
        stats = self._ask(f"/stats?format=json&include_clients=false&include_mem=false&topic={topic}")
        channel = next(entry for entry in stats["topics"][0]["channels"] if entry["channel_name"] == CHANNEL)
        return int(channel["depth"] + channel["in_flight_count"] + channel["deferred_count"])

    def _ask(self, path: str) -> Any:
        with urllib.request.urlopen("http://{}:{}{}".format(*self.broker.http, path)) as answer:
            return json.load(answer)

    def _post(self, path: str, topic: str, channel: str = "", broker: Broker | None = None) -> None:
        url = "http://{}:{}{}?topic={}{}".format(
            *(broker or self.broker).http, path, topic, f"&channel={channel}" if channel else ""
        )
        urllib.request.urlopen(urllib.request.Request(url, method="POST")).close()


def to_nsq(*ours: str) -> Callable[[ToolBench, Tools], float]:
    def measure(bench: ToolBench, tools: Tools) -> float:
        topic = bench.topic(is_filled=False)
        flags = ours if tools is OURS else ()
        lines = bench.lines if flags else bench.few_lines
        try:
            return bench.publish(tools.command("to_nsq", f"--topic={topic}", bench.source, *flags), lines)
        finally:
            bench.remove(topic)

    return measure


def consuming(tool: str, *flags: str) -> Callable[[ToolBench, Tools], float]:
    def measure(bench: ToolBench, tools: Tools) -> float:
        topic = bench.topic(is_filled=True)
        try:
            with tempfile.TemporaryDirectory(dir=bench.directory) as files:
                own = {"nsq_to_file": [f"--output-dir={files}"], "nsq_to_nsq": [bench.to_destination]}.get(tool, [])
                common = (f"--topic={topic}", f"--channel={CHANNEL}", bench.source)
                return bench.consume(tools.command(tool, *common, *own, *flags), topic)
        finally:
            bench.remove(topic)

    return measure


@dataclass(frozen=True)
class ToolRow:
    """Is one line of the table; `measure` gives messages per second, `target` times NSQ's is to be reached (0:
    none).
    """

    title: str
    tool: str
    measure: Callable[[ToolBench, Tools], float]
    target: float = 0.0


ROWS = (
    ToolRow("to_nsq", "to_nsq", to_nsq()),
    ToolRow(f"to_nsq --batch={BATCH}, NSQ's without", "to_nsq", to_nsq(f"--batch={BATCH}"), 20),
    ToolRow("nsq_to_file", "nsq_to_file", consuming("nsq_to_file", SYNC_INTERVAL), 1.5),
    ToolRow("nsq_to_file --gzip", "nsq_to_file", consuming("nsq_to_file", SYNC_INTERVAL, "--gzip"), 1.5),
    ToolRow(
        "nsq_to_file --max-in-flight=2500",
        "nsq_to_file",
        consuming("nsq_to_file", SYNC_INTERVAL, "--max-in-flight=2500"),
        1.5,
    ),
    ToolRow("nsq_tail", "nsq_tail", consuming("nsq_tail")),
    ToolRow("nsq_to_nsq", "nsq_to_nsq", consuming("nsq_to_nsq"), 1.5),
    ToolRow("nsq_to_nsq --max-in-flight=2500", "nsq_to_nsq", consuming("nsq_to_nsq", "--max-in-flight=2500"), 1.5),
)


def main() -> None:
    options = _options()
    peer = Path(os.environ["PEER_TOOLS"]) if os.environ.get("PEER_TOOLS") else None
    makers = [OURS, *([Tools("NSQ's", peer)] if peer else [])]
    print(f"{options.messages:,} messages of {BODY_BYTES} B, median of {options.times}, messages/s\n")
    print("| | ours | NSQ's | ratio | target |\n|---|---:|---:|---:|---:|")
    program = Path(options.nsqd)
    with Broker(program) as broker, Broker(program) as destination, tempfile.TemporaryDirectory() as directory:
        bench = ToolBench(broker, destination, Path(directory), options.messages)
        for row in ROWS:
            if options.only in row.title:
                print(_line(row, _rates(row, bench, makers, options.times)), flush=True)


def _rates(row: ToolRow, bench: ToolBench, makers: Sequence[Tools], times: int) -> dict[str, float]:
    rates: dict[str, list[float]] = {}
    for _ in range(times):
        for tools in makers:
            if tools.has(row.tool):
                rates.setdefault(tools.name, []).append(row.measure(bench, tools))
    return {name: statistics.median(measured) for name, measured in rates.items()}


def _line(row: ToolRow, rates: dict[str, float]) -> str:
    ours, theirs = rates["ours"], rates.get("NSQ's")
    target = f">= {row.target:g}" if row.target else "-"
    if theirs is None:
        return f"| {row.title} | {ours:,.0f} | - | - | {target} |"
    ratio = ours / theirs
    reached = "" if not row.target else " met" if ratio >= row.target else " MISSED"
    return f"| {row.title} | {ours:,.0f} | {theirs:,.0f} | {ratio:.3g} | {target}{reached} |"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tools", description=__doc__)
    parser.add_argument("--nsqd", default=str(Path(sys.executable).with_name("nsqd")), help="the nsqd under all tools")
    parser.add_argument("--messages", type=int, default=MESSAGES_DEFAULT, help="of each measurement")
    parser.add_argument("--times", type=int, default=TIMES_DEFAULT, help="each measurement is made so often")
    parser.add_argument("--only", default="", help="rows with this in their title")
    return parser.parse_args()


if __name__ == "__main__":
    main()
