"""A history is rounds of load on one data path, each ended by an accident, and a verdict on every message.

    .venv/bin/python -m tests.faults.torture --kinds kills --seconds 60 --seed 1

Publishers note what got its OK; consumers note every delivery and every answer they gave; beside them one client does
everything else clients do (script.py). At a random moment nsqd is killed, or stopped, or killed while it stops, and
started again on the same data path, sometimes killed again while it recovers. In some histories it is also frozen for a
while, and its clock is set, while it runs and between runs. After the last round everything is drained, and once more
after a clean restart nothing may be left.
"""

import contextlib
import io
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from faults.drain import bad_lines, drain_and_judge
from faults.fates import Book, Tally
from faults.load import Client, Consumer, HttpPublisher, Publisher, Round
from faults.script import Script
from faults.shim import DELAY, Rule, Shim
from faults.verdict import REASONS, ChannelJudge, Verdict
from harness import Nsqd, StartError, eventually

TOPICS = ["orders", "clicks", "audit"]
PUBLISHERS = 3
UNSTEADY_CONSUMERS = 2
ROUND_S = (0.4, 2.0)
ROUNDS = (2, 5)
PUBLISHED_MIN, PUBLISHED_TIMEOUT_S = 600, 30.0
POLL_S = 0.01
KILLED_AT_START_SHARE = 0.2
AT_START_S = 0.3
AT_STOP_S = 0.1
FROZEN_S = (0.05, 1.2)
DRAIN_TIMEOUT_S = 60.0
FLAGS = ("--max-bytes-per-file=262144", "--sync-timeout=500ms")
"""Files are small, so that many are finished and removed on the way."""
CLOCKS_S = (-86_400.0, -3_600.0, -60.0, 0.0, 61.0, 3_600.0, 86_400.0, 5e9)
"""nsqd's clock is ahead by one of these; the last is more than a hundred years."""
SLOW_SYNC_S = 0.03
FLAG_SETS: tuple[tuple[str, ...], ...] = (
    (),
    ("--sync-every=1",),
    ("--max-bytes-per-file=8192",),
    ("--max-bytes-per-file=8192", "--retention-time=1s"),
    ("--max-bytes-per-file=8192", "--retention-bytes=50000"),
)
SCRIPT_STEP_S = 0.01
ENDINGS = ("kill", "kill", "kill", "kill while stopping", "stop")


@dataclass(frozen=True)
class Plan:
    """Says what happens in a history besides kill -9 under load."""

    freezes: bool = False
    sets_clock: bool = False
    has_slow_disk: bool = False
    has_script: bool = True
    endings: tuple[str, ...] = ENDINGS
    flags: tuple[str, ...] = FLAGS
    program: str | None = None
    round_s: tuple[float, float] = ROUND_S


ONLY_KILLS = Plan(has_script=False, endings=("kill",))


class ScriptThread(threading.Thread):
    """Runs the script beside the load, from one start of nsqd to its end."""

    def __init__(self, script: Script) -> None:
        super().__init__(daemon=True)
        self.script = script
        self.stopping = threading.Event()

    def run(self) -> None:
        if not self.script.book.channels:
            self.script.set_up()
        while not self.stopping.is_set():
            self.script.run(1, SCRIPT_STEP_S)

    def finish(self) -> None:
        self.stopping.set()
        self.join(30)
        assert not self.is_alive(), "the script hangs"
        self.script.close()


class History:
    """Leads one data path through all rounds."""

    def __init__(self, directory: Path, seed: int, plan: Plan = ONLY_KILLS) -> None:
        data_path = directory / "data"
        data_path.mkdir()
        self.plan = plan
        self.random = random.Random(seed)
        self.shim = Shim(directory, data_path) if plan.sets_clock or plan.has_slow_disk else None
        if self.shim is not None and plan.has_slow_disk:
            self.shim.set_rules(Rule("sync", "*", DELAY, delay_s=SLOW_SYNC_S))
        environment = self.shim.environment if self.shim is not None else {}
        self.daemon = Nsqd(data_path, *plan.flags, program=plan.program, environment=environment)
        self.verdict = Verdict([ChannelJudge(topic, name) for topic in TOPICS for name in ("steady", "unsteady")])
        self.verdict.set_clock_is_set(plan.sets_clock)
        self.script = Script(self.daemon, Book(), seed, prefix="script.") if plan.has_script else None
        self.troubled: dict[str, set[bytes]] = {topic: set() for topic in TOPICS}
        self.kills_at_start = 0
        self.recovery_s = 0.0
        self.tally = Tally()

    def run(self, rounds: int) -> Tally:
        print(_row("round", "ended", "sent", "OK", "received", *REASONS, "started"))
        try:
            self._create_channels()
            for number in range(1, rounds + 1):
                self._round(number)
            self._drain(rounds + 1)
            self._check_nothing_left()
        except StartError as error:
            self.verdict.faults.append(f"does not start: {str(error)[-500:]}")
            self.tally.refused += "FATAL" not in error.log
        finally:
            self.daemon.kill()
        self.verdict.conclude()
        self.tally += self.verdict.tally(rounds)
        return self.tally

    def _create_channels(self) -> None:
        """Makes the channels before anything is published, so that each is owed every message."""
        self.daemon.start()
        for judge in self.verdict.channels:
            with self.daemon.connect() as wire:
                wire.subscribe(judge.topic, judge.channel)

    def _round(self, number: int) -> None:
        self._set_clock()
        one = Round(number, self._publishers(number), self._consumers(number))
        script = ScriptThread(self.script) if self.script is not None else None
        one.start()
        if script is not None:
            script.start()
        lasts_s = self.random.uniform(*self.plan.round_s)
        self._live(lasts_s)
        self._wait_for_publishes(one)
        one.ended = time.time()
        ending = self._end()
        one.finish()
        if script is not None:
            script.finish()
        self.tally.faults += bad_lines(self.daemon.log)
        self._start_again()
        self._judge(one, ending)

    def _live(self, lasts_s: float) -> None:
        """Does to nsqd what happens before the round's end."""
        time.sleep(lasts_s / 2)
        if self.plan.freezes and self.random.random() < 0.5:
            self.daemon.send_signal(signal.SIGSTOP)
            time.sleep(self.random.uniform(*FROZEN_S))
            self.daemon.send_signal(signal.SIGCONT)
        self._set_clock()
        time.sleep(lasts_s / 2)

    def _wait_for_publishes(self, one: Round) -> None:
        """Lets the round last until it has some load behind it, which takes longer on a busy machine."""
        deadline = time.monotonic() + PUBLISHED_TIMEOUT_S
        while sum(len(publisher.acknowledged) for publisher in one.publishers) < PUBLISHED_MIN:
            if time.monotonic() > deadline or not all(publisher.is_alive() for publisher in one.publishers):
                break
            time.sleep(POLL_S)

    def _set_clock(self) -> None:
        if self.shim is not None and self.plan.sets_clock and self.random.random() < 0.7:
            self.shim.set_clock(self.random.choice(CLOCKS_S))

    def _end(self) -> str:
        ending = self.random.choice(self.plan.endings)
        if ending == "stop":
            if self.daemon.stop() != 0:
                self.verdict.faults.append("SIGTERM: " + self.daemon.log[-300:])
        elif ending == "kill while stopping":
            self.daemon.send_signal(signal.SIGTERM)
            time.sleep(self.random.uniform(0, AT_STOP_S))
        self.daemon.kill()
        return ending

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
        """Lets everything come and be finished, without further publishes and kills."""
        if self.shim is not None:
            self.shim.set_clock(0)
        for topic in TOPICS:
            self.daemon.post("/topic/unpause", topic=topic)
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
        """Returns what /stats says is still waiting, by channel."""
        left = {}
        for topic in self.daemon.stats()["topics"]:
            for channel in topic["channels"] or []:
                counts = {key: channel[key] for key in ("depth", "in_flight_count", "deferred_count")}
                if any(counts.values()) and topic["topic_name"] in TOPICS:
                    left[f"{topic['topic_name']}:{channel['channel_name']}"] = counts
        return left

    def _check_nothing_left(self) -> None:
        if self.script is not None:
            self.tally += drain_and_judge(self.daemon, self.script.book)
            self.daemon.start()
        else:
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


_COLUMNS = ("round", "ended", "sent", "OK", "received", *REASONS, "started")


def _counts(verdict: Verdict, channel: str) -> str:
    reasons = sum((judge.reasons for judge in verdict.channels if judge.channel == channel), Counter[str]())
    return ", ".join(f"{reason} {reasons[reason]}" for reason in REASONS)


def summary(history: History) -> str:
    verdict = history.verdict
    lines = [
        f"published {len(verdict.published)}, acknowledged {len(verdict.acknowledged)},"
        f" delivered {sum(judge.received for judge in verdict.channels)} on {len(verdict.channels)} channels",
        f"acknowledged messages lost: {verdict.lost}",
        *(f"delivered again on {name} channels: {_counts(verdict, name)}" for name in ("steady", "unsteady")),
        f"killed again while starting: {history.kills_at_start}",
        f"in all: {history.tally}",
    ]
    return "\n".join(lines)


def rounds(seed: int) -> Iterator[Tally]:
    """Histories without end, of all sorts."""
    rng = random.Random(seed)
    while True:
        freezes, sets_clock, has_slow_disk = (rng.random() < share for share in (0.4, 0.4, 0.2))
        plan = Plan(freezes, sets_clock, has_slow_disk, flags=(*FLAGS, *rng.choice(FLAG_SETS)))
        yield one_history(rng.getrandbits(32), rng.randint(*ROUNDS), plan)


def peer_rounds(program: str, seed: int) -> Iterator[Tally]:
    """Kills another nsqd under load: only losses and inventions count, since the rest is our own promise."""
    rng = random.Random(seed)
    while True:
        plan = Plan(has_script=False, endings=("kill",), program=program)
        tally = one_history(rng.getrandbits(32), rng.randint(*ROUNDS), plan)
        tally.faults = []
        yield tally


def one_history(seed: int, rounds: int, plan: Plan) -> Tally:
    with tempfile.TemporaryDirectory(prefix="history") as directory, contextlib.redirect_stdout(io.StringIO()):
        history = History(Path(directory), seed, plan)
        tally = history.run(rounds)
    traits = [name for name in ("freezes", "sets_clock", "has_slow_disk") if getattr(plan, name)]
    what = " ".join([f"history {seed} of {rounds} rounds", *traits, *plan.flags])
    tally.faults = [f"{what}: {fault}" for fault in tally.faults]
    return tally
