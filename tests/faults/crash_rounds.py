"""Rounds of kill -9 under load on one data path, and a verdict on every message.

    .venv/bin/python -m tests.faults.crash_rounds --rounds 20

Publishers note what got its OK; consumers note every delivery and every answer they gave. At a random moment nsqd is
killed and started again on the same data path, sometimes killed again while it recovers. After the last round
everything is drained, and once more after a clean restart nothing may be left. Exit code 0 if all promises hold.
"""

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

if __name__ == "__main__":  # pytest knows where the harness is, a plain Python does not
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults.load import Client, Consumer, HttpPublisher, Publisher, Round
from faults.verdict import FAULTS_SHOWN_MAX, REASONS, ChannelJudge, Verdict
from harness import Nsqd, StartError, eventually

TOPICS = ["orders", "clicks", "audit"]
PUBLISHERS = 3
UNSTEADY_CONSUMERS = 2
ROUND_S = (0.4, 2.0)
KILLED_AT_START_SHARE = 0.2
AT_START_S = 0.3
DRAIN_TIMEOUT_S = 60.0
FLAGS = ("--max-bytes-per-file=262144", "--sync-timeout=500ms")
"""Small files, so that many are finished and removed on the way."""


class CrashRun:
    """One data path through all rounds."""

    def __init__(self, data_path: Path, seed: int, round_s: tuple[float, float] = ROUND_S) -> None:
        self.daemon = Nsqd(data_path, *FLAGS)
        self.random = random.Random(seed)
        self.round_s = round_s
        self.verdict = Verdict([ChannelJudge(topic, name) for topic in TOPICS for name in ("steady", "unsteady")])
        self.troubled: dict[str, set[bytes]] = {topic: set() for topic in TOPICS}
        self.kills_at_start = 0
        self.recovery_s = 0.0

    def run(self, rounds: int) -> Verdict:
        print(_row("round", "killed", "sent", "OK", "received", *REASONS, "started"))
        try:
            self._create_channels()
            for number in range(1, rounds + 1):
                self._round(number)
            self._drain(rounds + 1)
            self._check_nothing_left()
        finally:
            self.daemon.kill()
        self.verdict.conclude()
        return self.verdict

    def _create_channels(self) -> None:
        """Before anything is published, so that each channel is owed every message."""
        self.daemon.start()
        for judge in self.verdict.channels:
            with self.daemon.connect() as wire:
                wire.subscribe(judge.topic, judge.channel)

    def _round(self, number: int) -> None:
        one = Round(number, self._publishers(number), self._consumers(number))
        one.start()
        lasts_s = self.random.uniform(*self.round_s)
        time.sleep(lasts_s)
        one.ended = time.time()
        self.daemon.kill()
        one.finish()
        self._start_again()
        self._judge(one, f"{lasts_s:.2f} s")

    def _judge(self, one: Round, ended: str) -> None:
        before, received = self.verdict.reasons, self._received()
        self.verdict.add_round(one)
        repeated = self.verdict.reasons - before
        sent = sum(len(publisher.sent) for publisher in one.publishers)
        acknowledged = sum(len(publisher.acknowledged) for publisher in one.publishers)
        counts = [repeated[reason] for reason in REASONS]
        started = f"{self.recovery_s:.2f} s"
        print(_row(one.number, ended, sent, acknowledged, self._received() - received, *counts, started), flush=True)

    def _received(self) -> int:
        return sum(judge.received for judge in self.verdict.channels)

    def _start_again(self) -> None:
        while self.random.random() < KILLED_AT_START_SHARE:
            self.kills_at_start += 1
            self._kill_while_starting(self.random.uniform(0, AT_START_S))
        begun = time.monotonic()
        self.daemon.start()
        self.recovery_s = time.monotonic() - begun

    def _kill_while_starting(self, after_s: float) -> None:
        timer = threading.Timer(after_s, self.daemon.kill)
        previous = self.daemon.process
        timer.start()
        try:
            self.daemon.start()
        except StartError as error:
            if error.exit_code != -signal.SIGKILL:
                raise
        timer.join()
        assert self.daemon.process is not previous
        self.daemon.kill()

    def _publishers(self, number: int) -> list[Publisher]:
        names = [f"round{number}.publisher{index}" for index in range(PUBLISHERS)]
        publishers = [Publisher(self.daemon, name, TOPICS, self._seed()) for name in names]
        return [*publishers, HttpPublisher(self.daemon, f"round{number}.http", TOPICS, self._seed())]

    def _consumers(self, number: int) -> list[Consumer]:
        consumers: list[Consumer] = []
        for topic in TOPICS:
            name = f"round{number}.{topic}"
            consumers.append(Consumer(self.daemon, f"{name}.steady", topic, "steady", self._seed()))
            consumers += [
                Consumer(self.daemon, f"{name}.unsteady{index}", topic, "unsteady", self._seed(), self.troubled[topic])
                for index in range(UNSTEADY_CONSUMERS)
            ]
        return consumers

    def _seed(self) -> int:
        return self.random.getrandbits(32)

    def _drain(self, number: int) -> None:
        """No more publishing and no more kills: everything must come and be finished."""
        one = Round(number, [], self._consumers(number))
        for consumer in one.consumers:
            consumer.calm = True
        one.start()
        clients: list[Client] = one.clients
        try:
            eventually(
                lambda: self._is_drained(one) or not all(client.is_alive() for client in clients), DRAIN_TIMEOUT_S
            )
        except AssertionError:
            self.verdict.faults.append(f"not drained in {DRAIN_TIMEOUT_S:.0f} s: {self._left()}")
        one.finish()
        self._judge(one, "drained")

    def _is_drained(self, one: Round) -> bool:
        return not self._left() and all(consumer.has_confirmed_all for consumer in one.consumers)

    def _left(self) -> dict[str, dict[str, int]]:
        """What /stats says is still waiting, by channel."""
        left = {}
        for topic in self.daemon.stats()["topics"]:
            for channel in topic["channels"] or []:
                counts = {key: channel[key] for key in ("depth", "in_flight_count", "deferred_count")}
                if any(counts.values()) and topic["topic_name"] in TOPICS:
                    left[f"{topic['topic_name']}:{channel['channel_name']}"] = counts
        return left

    def _check_nothing_left(self) -> None:
        self.daemon.restart()
        if self._left():
            self.verdict.faults.append(f"after a clean restart there is something to deliver again: {self._left()}")
        for judge in self.verdict.channels:
            with self.daemon.connect() as wire:
                wire.subscribe(judge.topic, judge.channel, rdy=100)
                try:
                    wire.expect_silence(0.1)
                except AssertionError as error:
                    self.verdict.faults.append(f"{judge.name}: after a clean restart {str(error)[:200]}")


def _row(*cells: object) -> str:
    return " ".join(f"{cell!s:>{max(8, len(name))}}" for cell, name in zip(cells, _COLUMNS, strict=True))


_COLUMNS = ("round", "killed", "sent", "OK", "received", *REASONS, "started")


def _counts(verdict: Verdict, channel: str) -> str:
    reasons = sum((judge.reasons for judge in verdict.channels if judge.channel == channel), Counter[str]())
    return ", ".join(f"{reason} {reasons[reason]}" for reason in REASONS)


def summary(run: CrashRun) -> str:
    verdict = run.verdict
    lines = [
        f"published {len(verdict.published)}, acknowledged {len(verdict.acknowledged)},"
        f" delivered {sum(judge.received for judge in verdict.channels)} on {len(verdict.channels)} channels",
        f"acknowledged messages lost: {verdict.lost}",
        *(f"delivered again on {name} channels: {_counts(verdict, name)}" for name in ("steady", "unsteady")),
        f"killed again while starting: {run.kills_at_start}",
        f"broken promises: {len(verdict.faults)}",
    ]
    return "\n".join(lines + [f"  {fault}" for fault in verdict.faults[:FAULTS_SHOWN_MAX]])


def main() -> int:
    parser = argparse.ArgumentParser(description="kill -9 under load, again and again")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--data-path", type=Path, help="an empty directory that is kept; by default one that is not")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        print(f"seed {arguments.seed}")
        run = CrashRun(arguments.data_path or Path(temporary), arguments.seed)
        run.run(arguments.rounds)
    print(summary(run))
    return 1 if run.verdict.faults else 0


if __name__ == "__main__":
    sys.exit(main())
