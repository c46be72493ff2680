"""Calls that fail: every write, sync, rename, open, truncate and so on, one at a time and twice in a row.

    .venv/bin/python -m tests.faults.torture --kinds calls --seconds 60 --seed 1

A case says which call of a workload fails, how, and in which part of nsqd's life. Then the disk is well again: nsqd
must accept publishes and answer /ping with OK. Then it ends, by SIGTERM, by kill -9 or with the power, and all that was
acknowledged before, during and after the fault must come out of the next start.
"""

import contextlib
import errno
import itertools
import random
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from faults.crash_states import Disk
from faults.drain import bad_lines, refused_start, start_and_judge
from faults.fates import COSTS_NOTHING, Accident, Book, Tally, evidence_directory
from faults.script import Script, wait_for_syncs
from faults.shim import KILL, SHORT_WRITE, Rule, Shim
from harness import Nsqd, StartError, eventually, nsqd_program

FLAGS = ("--max-bytes-per-file=8192", "--sync-timeout=100ms")
MODES: tuple[tuple[str, ...], ...] = ((), (), ("--sync-every=1",), ("--max-bytes-per-file=104857600",))
STEPS_BEFORE, STEPS_AFTER = 25, 25
STEPS_DURING_MAX = 120
STEP_S = 0.008
WELL_AGAIN_S = 60.0
SYNCED_S = 3.0
"""After this long everything is synced: it is more than nsqd's own bound with this sync timeout (rebuilt_disks.py)."""
PHASES = ("start", "run", "run", "run", "stop")
ENDINGS = ("SIGTERM", "kill -9", "power")
PATTERNS = ("*", "*", "*/t.orders/*", "*/t.orders/*.log", "*/t.held/*", "*/t.fresh.*", "*.deferred")
"""Some patterns are of one topic, so that also the call that mends the first failure fails."""
CALLS_SEEN = {"write": 90, "sync": 60, "create": 30, "open": 60, "rename": 15, "unlink": 15, "truncate": 3, "mkdir": 8}
"""A run has about this many calls of each kind; a number beyond the last means that nothing fails."""
ERRORS = {
    "write": (errno.ENOSPC, errno.EIO, SHORT_WRITE, errno.EINTR),
    "sync": (errno.EIO, errno.ENOSPC, errno.EINTR),
    "open": (errno.EMFILE, errno.ENFILE, errno.EIO),
    "create": (errno.ENOSPC, errno.EMFILE, errno.EIO),
}
OTHER_ERRORS = (errno.EIO, errno.ENOSPC)


@dataclass(frozen=True)
class CallCase:
    """Says which calls fail: `times` of them, from the one with this number on."""

    kind: str
    number: int
    times: int
    error: int
    phase: str = "run"
    ending: str = "SIGTERM"
    pattern: str = "*"
    flags: tuple[str, ...] = ()

    @property
    def rule(self) -> Rule:
        return Rule(self.kind, self.pattern, self.error, after=self.number, times=self.times)

    def __str__(self) -> str:
        name = {SHORT_WRITE: "short", KILL: "kill -9"}.get(self.error) or errno.errorcode[self.error]
        where = "" if self.pattern == "*" else f" on {self.pattern}"
        mode = "".join(f", {flag}" for flag in self.flags)
        return f"{name} x{self.times} at {self.kind} {self.number}{where} in {self.phase}, then {self.ending}{mode}"


def random_case(rng: random.Random) -> CallCase:
    kind = rng.choices([*CALLS_SEEN], [8, 8, 4, 4, 3, 3, 2, 2])[0]
    phase, pattern, ending = rng.choice(PHASES), rng.choice(PATTERNS), rng.choice(ENDINGS)
    seen = CALLS_SEEN[kind] if phase == "run" else CALLS_SEEN[kind] // 6
    number = rng.randrange(max(3, seen if pattern == "*" else seen // 5))
    error = rng.choice((KILL, *ERRORS.get(kind, OTHER_ERRORS)))
    if kind == "sync" and phase != "run" and ending == "power":
        ending = "kill -9"  # the next nsqd cannot know what pages the last one failed to sync
    return CallCase(kind, number, rng.choice((1, 1, 2, 2, 20)), error, phase, ending, pattern, rng.choice(MODES))


class Run:
    """Tries one case on a data path of its own."""

    def __init__(self, directory: Path, case: CallCase, seed: int, patience_s: float = 0.0) -> None:
        """Goes on for `patience_s` if the call that is to fail is not made in the usual number of steps."""
        self.case = case
        self.seed = seed
        self.patience_s = patience_s
        self.directory = directory
        self.data_path = directory / "data"
        self.data_path.mkdir()
        self.book = Book()
        self.disk = Disk(self.data_path)
        self.shim = Shim(directory, self.data_path, record=case.ending == "power")
        self.daemon = Nsqd(self.data_path, *FLAGS, *case.flags, environment=self.shim.environment)
        self.script = Script(self.daemon, self.book, seed, body_bytes=300)
        self.fired = 0
        self.faults: list[str] = []

    def run(self) -> Tally:
        try:
            tally = self._run()
        except AssertionError as error:
            tally = Tally(rounds=1, faults=[str(error)])
        finally:
            self.script.close()
            self.daemon.kill()
        tally.faults = [f"{self.case}: {fault}" for fault in self.faults + tally.faults]
        return tally

    def _run(self) -> Tally:
        self.daemon.start()
        self.script.set_up()
        assert not self.script.refusals, self.script.refusals
        self.script.run(STEPS_BEFORE, STEP_S)
        if self.case.phase == "run":
            self._disturb_running()
        elif self.case.phase == "stop":
            self._disturb_stopping()
        else:
            refused = self._disturb_starting()
            if refused is not None and refused.refused:
                return refused
        self._is_well_again()
        self.script.run(STEPS_AFTER, STEP_S)
        return self._end()

    def _disturb_running(self) -> None:
        self.shim.set_rules(self.case.rule)
        self.script.fresh_topic()
        patient_until_s = time.monotonic() + self.patience_s
        for number in itertools.count(1):
            self.script.run(1, STEP_S)
            if self.shim.fired() >= self.case.times or not self.daemon.is_running:
                break
            if number >= STEPS_DURING_MAX and (self.shim.fired() or time.monotonic() > patient_until_s):
                break
        if self.daemon.is_running:
            self.script.run(5, STEP_S)
        self._end_fault()
        self._start_if_killed()
        self.script.run(5, STEP_S)

    def _disturb_stopping(self) -> None:
        self.shim.set_rules(self.case.rule)
        self.script.close()
        self._note_log(self.daemon.stop() > 0)
        self._end_fault()
        self.daemon.start()

    def _disturb_starting(self) -> Tally | None:
        """A start may be refused while the disk fails, with a sentence; after that it may not."""
        self.script.close()
        self.daemon.kill()
        self.shim.set_rules(self.case.rule)
        refused = None
        try:
            self.daemon.start()
        except StartError as error:
            refused = refused_start(error) if self.case.error != KILL else Tally()
            refused.faults = [f"{fault} (while starting)" for fault in refused.faults]
            self._end_fault()
            self.daemon.start()
        self._end_fault()
        self._start_if_killed()
        return refused

    def _start_if_killed(self) -> None:
        """Starts it again if the call was to kill it, which may have come just after a start had ended well."""
        if self.case.error == KILL:
            self.script.close()
            self.daemon.kill()
            self.daemon.start()

    def _end_fault(self) -> None:
        self.fired += self.shim.fired()
        self.shim.set_rules()

    def _is_well_again(self) -> None:
        def is_well() -> bool:
            self.script.pub_all_topics()
            return _answers_ok(self.daemon)

        before = len(self.script.refusals)
        eventually(is_well, WELL_AGAIN_S, 0.2)
        eventually(lambda: self.script.pub_all_topics() == 0, WELL_AGAIN_S, 0.2)
        del self.script.refusals[before:]

    def _note_log(self, failed: bool = False) -> None:
        self.faults += bad_lines(self.daemon.log)
        if failed and "FATAL" not in self.daemon.log and "ERROR" not in self.daemon.log:
            self.faults.append("SIGTERM ends with an exit code and without a word")

    def _end(self) -> Tally:
        if self.case.ending == "SIGTERM":
            self.script.close()
            if self.daemon.stop() != 0:
                self.faults.append("SIGTERM after the fault has ended: " + self.daemon.log[-300:])
        elif self.case.ending == "power":
            time.sleep(SYNCED_S)
            return self._cut_power(wait_for_syncs(self.daemon, SYNCED_S))
        self.daemon.kill()
        self._note_log()
        return self._judge(self.data_path, COSTS_NOTHING)

    def _cut_power(self, ended_s: float) -> Tally:
        self.daemon.kill()
        self._note_log()
        self.disk.apply(self.shim.trace())
        left = self.directory / "left"
        self.disk.rebuild(left, "posix-min", random.Random(self.seed))
        return self._judge(left, Accident(ended_s, SYNCED_S, SYNCED_S, may_double_deferred=True))

    def _judge(self, data_path: Path, accident: Accident) -> Tally:
        kept = tempfile.mkdtemp(prefix="case", dir=evidence_directory()) if evidence_directory() else None
        if kept is not None:
            shutil.copytree(data_path, f"{kept}/data")
        tally = start_and_judge(Nsqd(data_path, *FLAGS), self.book, accident)
        if kept is not None and tally.is_good:
            shutil.rmtree(kept)
        elif kept is not None:
            tally.faults.append(f"kept in {kept}")
        return tally


def _answers_ok(daemon: Nsqd) -> bool:
    """Tells whether all is well; while idle connections are still being closed, a new one may be refused."""
    with contextlib.suppress(ConnectionError):
        return daemon.get("/ping").text == "OK"
    return False


def rounds(seed: int) -> Iterator[Tally]:
    rng = random.Random(seed)
    while True:
        case = random_case(rng)
        with tempfile.TemporaryDirectory(prefix="calls") as directory:
            yield Run(Path(directory), case, rng.getrandbits(32)).run()


# -- no descriptor left ----------------------------------------------------------------------------------

DESCRIPTORS_MAX = 120
CONNECTIONS_MAX = 400
CONNECT_TIMEOUT_S = 2.0


def descriptor_rounds(seed: int) -> Iterator[Tally]:
    rng = random.Random(seed)
    while True:
        yield check_descriptors(rng.getrandbits(32), kill=rng.random() < 0.5)


def check_descriptors(seed: int, *, kill: bool) -> Tally:
    """Idle connections take every descriptor nsqd may have, while the script goes on; then they end."""
    with tempfile.TemporaryDirectory(prefix="descriptors") as name:
        directory = Path(name)
        program = directory / "nsqd"
        program.write_text(f'#!/bin/sh\nulimit -n {DESCRIPTORS_MAX}\nexec {nsqd_program()} "$@"\n')
        program.chmod(0o755)
        (directory / "data").mkdir()
        daemon = Nsqd(directory / "data", *FLAGS, program=str(program))
        try:
            tally = _exhaust(daemon, seed, kill)
        except AssertionError as error:
            tally = Tally(rounds=1, faults=[str(error), *bad_lines(daemon.log)])
        finally:
            daemon.kill()
    tally.faults = [f"descriptors, {'kill -9' if kill else 'SIGTERM'}, seed {seed}: {one}" for one in tally.faults]
    return tally


def _exhaust(daemon: Nsqd, seed: int, kill: bool) -> Tally:
    book = Book()
    faults: list[str] = []
    daemon.start()
    script = Script(daemon, book, seed, body_bytes=300)
    script.set_up()
    script.run(STEPS_BEFORE, STEP_S)
    with contextlib.ExitStack() as idle:
        for _ in range(CONNECTIONS_MAX):
            try:
                idle.callback(socket.create_connection(daemon.tcp, CONNECT_TIMEOUT_S).close)
            except OSError:
                break
        script.run(STEPS_DURING_MAX // 2, STEP_S)
    eventually(lambda: script.pub_all_topics() == 0 and _answers_ok(daemon), WELL_AGAIN_S, 0.2)
    script.run(STEPS_AFTER, STEP_S)
    script.close()
    if not kill and daemon.stop() != 0:
        faults.append("SIGTERM: " + daemon.log[-300:])
    daemon.kill()
    faults += bad_lines(daemon.log)
    tally = start_and_judge(Nsqd(daemon.data_path, *FLAGS), book)
    tally.faults = faults + tally.faults
    return tally
