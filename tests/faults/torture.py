"""Makes every kind of fault for a while, with a verdict on every message: `make torture SECONDS=600 SEED=1`.

    .venv/bin/python -m tests.faults.torture --seconds 600 --seed 1 [--kinds kills,power,calls]

The time is shared among the kinds. At the end a table says what was done and what came of it, in Markdown; the exit
code is 1 if any promise was broken. TORTURE_KEEP=<directory> keeps the data paths on which that happened, where the
kind can. PEER_NSQD=<path> runs kill -9 under load on that nsqd too, beside ours.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # pytest knows where the harness is, a plain Python does not
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults import damage, failing_calls, histories, real_disks, rebuilt_disks
from faults.fates import Tally
from faults.shim import NoCompiler, library

SECONDS = 600
JOBS = 2
"""Workers mostly wait, for processes to start and for syncs."""
SHOWN_MAX = 1000
SHOWN_PER_ROUND_MAX = 5
FAULT_CHARS_MAX = 600
PEER = "peer"
COLUMNS = ("kind", "rounds", "acknowledged", "lost", "invented", "repeated", "starts refused without a sentence")


@dataclass(frozen=True)
class Kind:
    """Is one kind of fault: `rounds(seed)` yields verdicts for as long as it is asked to."""

    name: str
    rounds: Callable[[int], Iterator[Tally]]
    weight: float
    says: str


KINDS = (
    Kind("kills", histories.rounds, 3, "kill -9 under load, while starting and stopping; SIGSTOP; the clock set"),
    Kind("power", rebuilt_disks.rounds, 4, "power cuts at recorded calls, three models, both sync modes"),
    Kind("ext4", real_disks.ext4_rounds, 1, "a real ext4 shut down without flushing"),
    Kind("xfs", real_disks.xfs_rounds, 1, "a real xfs shut down without flushing"),
    Kind("damage", damage.rounds, 2, "a flipped bit, a page of zeros, a cut or unreadable file, in every kind of file"),
    Kind("calls", failing_calls.rounds, 4, "calls that fail by number, then SIGTERM, kill -9 or a power cut"),
    Kind("full", real_disks.full_rounds, 1, "a file system filled to the last byte"),
    Kind("descriptors", failing_calls.descriptor_rounds, 1, "no file descriptor left"),
)
"""The table in docs/reliability.md has a row for each of these."""


def all_kinds() -> list[Kind]:
    """Lists all kinds; with PEER_NSQD also kill -9 on that nsqd, whose losses are no fault of ours."""
    peer = os.environ.get("PEER_NSQD")
    if not peer:
        return list(KINDS)
    says = "kill -9 under load, on PEER_NSQD"
    return [KINDS[0], Kind(PEER, lambda seed: histories.peer_rounds(peer, seed), 1, says), *KINDS[1:]]


def run_kind(name: str, seconds: float, seed: int) -> Tally | str:
    """Rounds until the time is over, at least one, or why there are none here. Faults are printed as they are found."""
    kind = next(kind for kind in all_kinds() if kind.name == name)
    total = Tally()
    ends_s = time.monotonic() + seconds
    print(f"{name}: {kind.says}, for {seconds:.0f} s, seed {seed}", flush=True)
    try:
        while not total.rounds or time.monotonic() < ends_s:
            for tally in _with_failures(kind, seed + total.rounds):
                for fault in tally.faults[:SHOWN_PER_ROUND_MAX]:
                    if len(total.faults) < SHOWN_MAX:
                        print(f"  {name}: {fault[:FAULT_CHARS_MAX]}", flush=True)
                total += tally
                if time.monotonic() > ends_s:
                    break
    except (NoCompiler, real_disks.NotHere) as reason:
        return str(reason)
    return total


def _with_failures(kind: Kind, seed: int) -> Iterator[Tally]:
    """Counts a round that cannot be brought to its end as a fault too; the next begins with another seed."""
    try:
        yield from kind.rounds(seed)
    except (NoCompiler, real_disks.NotHere):
        raise
    except Exception as error:
        yield Tally(rounds=1, faults=[f"seed {seed}: {type(error).__name__} at {_place_of(error)}: {error}"])


def _place_of(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def table(outcomes: dict[Kind, Tally | str]) -> str:
    lines, skipped = [row(*COLUMNS), "|---" * len(COLUMNS) + "|"], []
    for kind, tally in outcomes.items():
        if isinstance(tally, str):
            skipped.append(f"{kind.name}: not run here: {tally}")
            continue
        counts = (tally.rounds, tally.acknowledged, tally.lost, tally.invented, tally.repeated, tally.refused)
        lines.append(row(kind.says, *counts))
    return "\n".join([*lines, *skipped])


def main() -> int:
    parser = argparse.ArgumentParser(description="all faults, a verdict on every message")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--kinds", default=",".join(kind.name for kind in all_kinds()), help="separated by commas")
    parser.add_argument("--jobs", type=int, default=JOBS, help="how many kinds run at once")
    arguments = parser.parse_args()
    kinds = [kind for kind in all_kinds() if kind.name in arguments.kinds.split(",")]
    jobs = min(arguments.jobs, len(kinds))
    per_weight_s = arguments.seconds * jobs / sum(kind.weight for kind in kinds)
    print(f"seed {arguments.seed}", flush=True)
    with contextlib.suppress(NoCompiler):
        library()  # once, for all of them
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        running = {
            kind: pool.submit(run_kind, kind.name, min(arguments.seconds, kind.weight * per_weight_s), arguments.seed)
            for kind in sorted(kinds, key=lambda kind: -kind.weight)
        }
        outcomes = {kind: running[kind].result() for kind in kinds}
    print("\n" + table(outcomes))
    ours = [tally for kind, tally in outcomes.items() if kind.name != PEER and isinstance(tally, Tally)]
    faults = sum(len(tally.faults) for tally in ours)
    print(f"\nbroken promises: {faults}")
    return 0 if all(tally.is_good for tally in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
