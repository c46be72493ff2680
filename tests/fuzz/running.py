"""Runs all fuzzers, and tells what they found."""

import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from fuzz import parsers
from fuzz.targets import CORPUS, SocketTarget, lookupd_targets, nsqd_targets
from fuzz.witness import LookupWitness, Witness
from harness import Nsqd
from harness.lookupd import Nsqlookupd

TRACEBACK = "Traceback"
LOGGED_LINES_MAX = 20
PARSER_BATCH = 50
INPUTS_MIN = 10
"""Each target gets so many inputs at least, however little it can do in its time."""


@dataclass
class Row:
    """Counts what one target was sent, and what became of it."""

    name: str
    inputs: int = 0
    connections: int = 0
    findings: list[str] = field(default_factory=list)


@dataclass
class Report:
    rows: list[Row]
    crashes: int = 0
    tracebacks: list[str] = field(default_factory=list)
    harmed: int = 0

    @property
    def findings(self) -> list[str]:
        return [f"{row.name}: {finding}" for row in self.rows for finding in row.findings]

    @property
    def is_clean(self) -> bool:
        return not (self.findings or self.crashes or self.tracebacks or self.harmed)

    def __str__(self) -> str:
        lines = [f"{row.name:18} {row.inputs:12,} inputs {row.connections:10,} connections" for row in self.rows]
        total = sum(row.inputs for row in self.rows)
        lines.append(f"{'all':18} {total:12,} inputs")
        lines.append(f"crashes {self.crashes}, tracebacks in the logs {len(self.tracebacks)}, ")
        lines[-1] += f"other clients' messages harmed {self.harmed}, other findings {len(self.findings)}"
        return "\n".join(lines + self.findings + self.tracebacks)


def run(seconds: float, seed: int, directory: Path) -> Report:
    """Runs all targets at once for so long, each in a process of its own."""
    with Nsqd(directory) as nsqd, Nsqlookupd() as lookupd:
        witness, registered = Witness(nsqd), LookupWitness(lookupd)
        witness.start()
        jobs: list[tuple[str, Callable[..., Row], Any]] = [
            (target.name, _run_target, target)
            for target in [*nsqd_targets(nsqd.tcp, nsqd.http), *lookupd_targets(lookupd.tcp, lookupd.http)]
        ]
        jobs.append(("parsers", _run_parsers, None))
        rows = _in_processes(jobs, seconds, seed)
        crashes = (not nsqd.is_running) + (not lookupd.is_running)
        harmed = witness.stop() + (registered.stop() if lookupd.is_running else 1)
        tracebacks = _tracebacks(nsqd.log) + _tracebacks(lookupd.log)
        if nsqd.is_running:
            crashes += nsqd.stop() != 0
        if lookupd.is_running:
            crashes += lookupd.stop() != 0
    return Report(rows, crashes, tracebacks, harmed)


def _in_processes(jobs: list[tuple[str, Callable[..., Row], Any]], seconds: float, seed: int) -> list[Row]:
    context = multiprocessing.get_context("fork")
    outcomes: Any = context.Queue()
    running = {}
    for number, (name, work, target) in enumerate(jobs):
        arguments = (outcomes, work, name, target, seconds, seed + number)
        running[name] = context.Process(target=_report, args=arguments, daemon=True)
        running[name].start()
    rows: dict[str, Row] = {}
    while len(rows) < len(running):
        try:
            row = outcomes.get(timeout=1.0)
            rows[row.name] = row
        except Exception:  # nothing for a second: has one died?
            for name, process in running.items():
                if name not in rows and process.exitcode:
                    rows[name] = Row(name, findings=[f"the process ended with {process.exitcode}, seed {seed}"])
    for process in running.values():
        process.join()
    return [rows[name] for name, _, _ in jobs]


def _report(outcomes: Any, work: Callable[..., Row], name: str, target: Any, seconds: float, seed: int) -> None:
    outcomes.put(work(name, target, seconds, seed))


def _run_target(name: str, target: SocketTarget, seconds: float, seed: int) -> Row:
    random, deadline = Random(seed), time.monotonic() + seconds
    findings = []
    try:
        target.replay()
        while time.monotonic() < deadline or target.tally.inputs < INPUTS_MIN:
            target.run(random)
    except OSError as error:
        findings.append(f"no connection: {error!r}")
    tally = target.tally
    findings += [f"not ended after {data[:200]!r}: {_keep(name, data)}" for data in tally.hangs]
    return Row(name, tally.inputs, tally.connections, findings)


def _run_parsers(name: str, target: None, seconds: float, seed: int) -> Row:
    row, deadline = Row(name), time.monotonic() + seconds
    number = seed
    while time.monotonic() < deadline and not row.findings:
        for _ in range(PARSER_BATCH):
            number += 1
            for parser in parsers.PARSERS:
                try:
                    parser(Random(number))
                except Exception:
                    row.findings.append(f"{parser.__name__}, seed {number}: {traceback.format_exc()}")
                row.inputs += 1
    return row


def _keep(name: str, data: bytes) -> Path:
    """Puts an input into the corpus, so that it is tried first from now on."""
    directory = CORPUS / name
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"found-{abs(hash(data)):x}"
    path.write_bytes(data)
    return path


def _tracebacks(log: str) -> list[str]:
    """Finds tracebacks in a log, each with the lines behind it."""
    lines = log.splitlines()
    starts = [at for at, line in enumerate(lines) if TRACEBACK in line]
    return ["\n".join(lines[at : at + LOGGED_LINES_MAX]) for at in starts]
