"""Cuts the power: nsqd's calls are recorded under a workload, and nsqd is started on disks as they may be after a
cut.

    .venv/bin/python -m tests.faults.torture --kinds power --seconds 60 --seed 1

Each recording is cut at random calls, and just before and after every kind of call that promises something. For each
cut and each model of crash_states.py a disk is rebuilt, a real nsqd is started on it, and all its channels are drained.
"""

import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from broker.nsq_files import Stored, write_messages, write_metadata
from faults.crash_states import MODELS, Disk
from faults.drain import start_and_judge
from faults.fates import Accident, Book, Tally, evidence_directory
from faults.script import LIVELY, Script
from faults.shim import Call, Shim
from harness import Nsqd
from nsquark.broker.upkeep import TICK_S
from nsquark.log.syncer import LAG_ALLOWED_S

SYNC_TIMEOUT_S = 0.2
UNSYNCED_S = 2 * SYNC_TIMEOUT_S + LAG_ALLOWED_S + TICK_S
"""nsqd's own bound, without any grace for the machine: a change may just miss the round that is under way, and beyond
this publishers are slowed, so that each OK waits for its sync."""
FLAGS = ("--max-bytes-per-file=16384", f"--sync-timeout={int(SYNC_TIMEOUT_S * 1000)}ms")
MODES: dict[str, tuple[str, ...]] = {"default": (), "sync-every=1": ("--sync-every=1",)}
TURNING_POINTS = ("sync", "rename", "unlink", "create", "mkdir")
FLAG_SETS: tuple[tuple[str, ...], ...] = ((), (), ("--retention-time=1s",), ("--max-bytes-per-file=104857600",))
MINUTE_ENDS_AT_S = 57.5
"""nsqd's clock starts here: files of deferred messages are of a minute, and one should end on the way."""
STEPS = 150
STEP_S = 0.012


@dataclass
class Recording:
    """Is a workload that was run once, and what its nsqds did to the disk."""

    book: Book
    before: Disk
    calls: list[Call]
    mode: str
    flags: tuple[str, ...]
    lag_s: float
    """Syncs may be late by this for no fault of nsqd's: the slowest of them, and the slowest answer."""
    clock_s: float
    """nsqd's clock was ahead by this."""
    down: list[tuple[float, float]]
    """It was restarted or stopped from the one time to the other: nobody synced meanwhile."""

    def accident(self, cut: int, model: str) -> Accident:
        """Says what a power cut after this many calls may cost."""
        at_s = self.calls[cut - 1].time_s if cut else 0.0
        if model == "journal":
            return Accident(at_s)
        unsynced_s = UNSYNCED_S + self.lag_s
        for began_s, ended_s in self.down:
            if began_s <= at_s <= ended_s + unsynced_s:
                unsynced_s += ended_s - began_s
        grace_s = 0.0 if self.mode == "sync-every=1" else unsynced_s
        return Accident(at_s, grace_s, unsynced_s, may_double_deferred=True)

    def cuts(self, rng: random.Random, count: int) -> list[int]:
        """Chooses the end, and `count` cuts before it: half anywhere, half at calls after which something may be
        relied on.
        """
        end = len(self.calls)
        chosen = {rng.randrange(end) for _ in range(count // 2)}
        turning = [index for index, call in enumerate(self.calls) if call.kind in TURNING_POINTS]
        beside = {index + step for index in turning for step in (0, 1)} - chosen - {end}
        chosen.update(rng.sample(sorted(beside), min(count - len(chosen), len(beside))))
        return [*sorted(chosen), end]


def record(directory: Path, mode: str, seed: int, *flags: str, takeover: bool = False, steps: int = STEPS) -> Recording:
    """Runs the script, with a kill and a restart on the way, and a clean stop at the end."""
    rng = random.Random(seed)
    data_path = directory / "data"
    data_path.mkdir(parents=True)
    book = Book()
    if takeover:
        _leave_nsq_files(data_path, book)
    before = Disk(data_path)
    shim = Shim(directory, data_path, record=True)
    clock_s = MINUTE_ENDS_AT_S - time.time() % 60
    shim.set_clock(clock_s)
    flags = (*FLAGS, *MODES[mode], *flags)
    daemon = Nsqd(data_path, *flags, environment=shim.environment)
    down: list[tuple[float, float]] = []
    with daemon:
        script = Script(daemon, book, seed)
        script.set_up()
        script.run(steps, STEP_S)
        script.close()
        slowest_answer_s = script.slowest_answer_s
        if rng.random() < 0.5:
            began_s = time.time()
            daemon.restart(crash=rng.random() < 0.7)
            down.append((began_s, time.time()))
            again = Script(daemon, book, seed + 1)
            again.run(steps // 2, STEP_S)
            again.close()
            slowest_answer_s = max(slowest_answer_s, again.slowest_answer_s)
        began_s = time.time()
        daemon.stop()
        down.append((began_s, time.time()))
    assert not script.refusals, script.refusals[:3]
    calls = list(shim.trace())
    lag_s = _slowest_sync_s(calls) + slowest_answer_s
    return Recording(book, before, calls, mode, flags, lag_s, clock_s, down)


def _leave_nsq_files(data_path: Path, book: Book) -> None:
    bodies = [b"nsq/%d" % number for number in range(300)]
    book.found("old", bodies)
    book.add_channel("old", LIVELY, made_s=0.0)
    write_metadata(data_path, {"old": {LIVELY: False}})
    write_messages(data_path, "old", [Stored(body) for body in bodies[:200]])
    write_messages(data_path, f"old:{LIVELY}", [Stored(body) for body in bodies[200:]])


def _slowest_sync_s(calls: list[Call]) -> float:
    begun: dict[int, float] = {}
    slowest_s = 0.0
    for call in calls:
        if call.kind == "sync begins":
            begun[call.size] = call.time_s
        elif call.kind == "sync":
            slowest_s = max(slowest_s, call.time_s - begun.pop(call.size, call.time_s))
    return slowest_s


def check_cuts(recording: Recording, cuts: list[int], models: tuple[str, ...], seed: int) -> Iterator[Tally]:
    """Gives a verdict for each cut and model. The recording's disk is used up by it."""
    done = 0
    for cut in cuts:
        recording.before.apply(recording.calls[done:cut])
        done = cut
        for model in models:
            yield _check(recording, cut, model, f"{seed}/{cut}/{model}")


def _check(recording: Recording, cut: int, model: str, seed: str) -> Tally:
    where = f"{recording.mode}, {model}, after call {cut} of {len(recording.calls)}"
    with tempfile.TemporaryDirectory(prefix="disk") as directory:
        data_path = Path(directory) / "data"
        recording.before.rebuild(data_path, model, random.Random(seed))
        shim = Shim(Path(directory), data_path)
        shim.set_clock(recording.clock_s)
        daemon = Nsqd(data_path, *recording.flags, environment=shim.environment)
        tally = start_and_judge(daemon, recording.book, recording.accident(cut, model))
    if not tally.is_good and evidence_directory():
        kept = Path(tempfile.mkdtemp(prefix="disk", dir=evidence_directory()))
        recording.before.rebuild(kept, model, random.Random(seed))
        where += f", kept in {kept}"
    tally.faults = [f"{where}: {fault}" for fault in tally.faults]
    return tally


def rounds(seed: int) -> Iterator[Tally]:
    """Recordings without end, each cut a few times."""
    rng = random.Random(seed)
    while True:
        for mode in MODES:
            with tempfile.TemporaryDirectory() as directory:
                flags, takeover = rng.choice(FLAG_SETS), rng.random() < 0.3
                recording = record(Path(directory), mode, rng.getrandbits(32), *flags, takeover=takeover)
                yield from check_cuts(recording, recording.cuts(rng, 10), MODELS, rng.getrandbits(32))
