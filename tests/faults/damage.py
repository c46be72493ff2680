"""Makes bad disks: a flipped bit, a page of zeros, a file that was cut or cannot be read, in every kind of file nsqd
has.

    .venv/bin/python -m tests.faults.torture --kinds damage --seconds 60 --seed 1

A stopped data path with everything in it is copied, one file is damaged, and nsqd is started. It must start, or say in
a sentence what to do. Other topics are whole; the damaged one may miss what was in the damaged record or, if a file
cannot be read, in that file. Nothing may be invented, and what is lost must be named in the log.
"""

import errno
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from faults.drain import drain_and_judge, refused_start
from faults.fates import NOT_COUNTED, Accident, Book, Tally, evidence_directory
from faults.flood import NO_HEARTBEATS, finish_many
from faults.shim import Rule, Shim
from harness import Nsqd, StartError, Wire, eventually, mpub_messages
from nsquark.wire.batch_format import StoredBatch, scan

FLAGS = ("--max-bytes-per-file=16384", "--sync-timeout=100ms")
PAGE_BYTES = 4096
LATER_MS = 600_000
MUCH_LATER_S = 3600.0
"""nsqd is started as if the machine had slept for so long, so that all that was deferred is due."""
RECORD_HEAD_BYTES = 120
"""In no file is what precedes a message longer than this."""
HURT, WHOLE, PARKED = "hurt", "whole", "parked"
CHANNEL, STILL = "ch", "still"
SKIPPED_RANGES = 80
PARKED_MESSAGES = 3
PASSING_BATCH = 2000
PASSING_BATCHES_MAX = 200
"""So many are finished beside the held ones that these are parked, and their segment goes."""
KINDS = {
    "segment": "*.log",
    "index": "*.idx",
    "cursors": "cursors",
    "state": "cursors.*.[01]",
    "journal": "*.journal",
    "deferred": "*.deferred",
    "kept": "kept",
    "removed": "removed",
    "tokens": "tokens",
    "sequence": "sequence",
    "node": "node.json",
    "copy of node": "node.json.copy",
    "clock": "clock",
    "runs": "runs",
    "deleted": "deleted/t.*",
    "nsqd.dat": "nsqd.dat",
}
DAMAGES = ("flip", "flip", "head", "page", "cut", "empty", "EIO")
UNNOTICED = ("cut", "empty")
"""Nothing tells how long a file was, if it ends with a whole record."""
HEAD_BYTES = 64
"""This damage is at the beginning of a file, where a format may have what the rest depends on."""


@dataclass(frozen=True)
class DamageCase:
    kind: str
    damage: str

    def __str__(self) -> str:
        return f"{self.damage} in {self.kind}"


class Sample:
    """Has a data path that was stopped, and the book of what is in it. `parked` makes kept messages, and takes
    seconds.
    """

    def __init__(self, directory: Path, seed: int, *, parked: bool) -> None:
        self.directory = directory
        self.data_path = directory / "sample"
        self.data_path.mkdir()
        self.book = Book()
        self._random = random.Random(seed)
        with Nsqd(self.data_path, *FLAGS) as daemon:
            for topic in (HURT, WHOLE):
                self._fill(daemon, topic)
            self._outgrow(daemon)
            daemon.post("/pub", b"gone", topic="gone")
            daemon.post("/topic/delete", topic="gone")
            if parked:
                self._park(daemon)
            if self._random.random() < 0.5:
                daemon.stop()

    def _fill(self, daemon: Nsqd, topic: str) -> None:
        """Makes a backlog over several files, messages requeued and deferred, finished ones between, a token."""
        consumer = daemon.connect().subscribe(topic, CHANNEL, msg_timeout=60_000)
        self.book.add_channel(topic, CHANNEL)
        self._pass_some(daemon, consumer, topic)
        with daemon.connect() as publisher:
            for number in range(90):
                bodies = [f"{topic}/{number}/{index}/".encode().ljust(150, b".") for index in range(number % 4 + 1)]
                self.book.send(topic, bodies)
                publisher.publish(topic, *bodies)
                self.book.acknowledge(bodies)
            for number in range(40):
                body = f"{topic}/deferred/{number}/".encode().ljust(100, b".")
                self.book.send(topic, [body], deferred=True)
                publisher.DPUB(topic, LATER_MS + self._random.randint(0, 120_000), body)
                publisher.expect_ok()
                self.book.acknowledge([body])
        self._append_once(daemon, topic, "later")
        consumer.RDY(60)
        self._answer_some(consumer)
        consumer.close()

    def _pass_some(self, daemon: Nsqd, consumer: Wire, topic: str) -> None:
        """Finishes messages, so that their segment goes: its tokens and its end are then in small files."""
        bodies = self._append_once(daemon, topic, "first")
        with daemon.connect() as publisher:
            for number in range(120):
                bodies.append(f"{topic}/passing/{number}/".encode().ljust(150, b"."))
                self.book.send(topic, bodies[-1:])
                publisher.publish(topic, bodies[-1])
                self.book.acknowledge(bodies[-1:])
        consumer.RDY(len(bodies))
        for message in consumer.read_messages(len(bodies)):
            self.book.release(CHANNEL, message.body)
            consumer.FIN(message.id)
        consumer.RDY(0)
        eventually((self.data_path / "nsquark" / "topics" / f"t.{topic}" / "tokens").exists)

    def _append_once(self, daemon: Nsqd, topic: str, token: str) -> list[bytes]:
        bodies = [f"{topic}/{token}/{number}/".encode() for number in range(20)]
        self.book.send(topic, bodies)
        for path, body in (("/log/stage", mpub_messages(bodies)), ("/log/append", b"")):
            assert daemon.post(path, body, topic=topic, token=token, part=0).status == 200
        self.book.acknowledge(bodies, synced=True)
        return bodies

    def _answer_some(self, consumer: Wire) -> None:
        for number, message in enumerate(consumer.read_messages(60)):
            if number % 3 == 0:
                consumer.REQ(message.id, LATER_MS)
            elif number > 10:
                self.book.release(CHANNEL, message.body)
                consumer.FIN(message.id)

    def _outgrow(self, daemon: Nsqd) -> None:
        """Makes a channel stand still and skip so many ranges that its state has a file of its own."""
        topic = HURT
        daemon.post("/channel/create", topic=topic, channel=STILL)
        self.book.add_channel(topic, STILL)
        for number in range(SKIPPED_RANGES):
            emptied, kept = (f"{topic}/{word}/{number}/".encode() for word in ("emptied", "kept"))
            daemon.post("/topic/pause", topic=topic)
            self._pub(daemon, topic, emptied)
            for channel in (STILL, CHANNEL):
                self.book.release(channel, emptied)
            daemon.post("/topic/empty", topic=topic)
            daemon.post("/topic/unpause", topic=topic)
            self._pub(daemon, topic, kept)
        assert self.files("state"), "its state fits"

    def _pub(self, daemon: Nsqd, topic: str, body: bytes) -> None:
        self.book.send(topic, [body])
        assert daemon.post("/pub", body, topic=topic).status == 200
        self.book.acknowledge([body])

    def _park(self, daemon: Nsqd) -> None:
        consumer = daemon.connect().subscribe(PARKED, CHANNEL, msg_timeout=600_000)
        self.book.add_channel(PARKED, CHANNEL)
        held = [f"{PARKED}/{number}/".encode() for number in range(PARKED_MESSAGES)]
        self.book.send(PARKED, held)
        with daemon.connect() as publisher:
            publisher.identify(heartbeat_interval=NO_HEARTBEATS)
            publisher.publish(PARKED, *held)
            self.book.acknowledge(held)
            consumer.RDY(PARKED_MESSAGES)
            consumer.read_messages(PARKED_MESSAGES)
            consumer.RDY(2000)
            kept = self.data_path / "nsquark" / "topics" / f"t.{PARKED}" / "kept"
            for _ in range(PASSING_BATCHES_MAX):
                publisher.publish(PARKED, *[NOT_COUNTED] * PASSING_BATCH)
                finish_many(consumer, PASSING_BATCH)
                if kept.exists():
                    break
        eventually(kept.exists)
        consumer.close()

    def files(self, kind: str) -> list[Path]:
        """Lists files relative to the data path; those of a topic are of the one to be hurt, or of the parked one."""
        found = [path.relative_to(self.data_path) for path in self.data_path.rglob(KINDS[kind])]
        return [path for path in found if f"t.{WHOLE}" not in path.parts and "nsq-before" not in str(path)]


def check(sample: Sample, case: DamageCase, rng: random.Random) -> Tally | None:
    """Tries one damage; returns None if the sample has no such file."""
    files = [path for path in sample.files(case.kind) if (sample.data_path / path).stat().st_size]
    if not files:
        return None
    hurt = [path for path in files if f"t.{HURT}" in path.parts]
    path = rng.choice(sorted(hurt if hurt and rng.random() < 0.8 else files))
    work = Path(tempfile.mkdtemp(prefix="damage"))
    try:
        data_path = work / "data"
        shutil.copytree(sample.data_path, data_path)
        before = (data_path / path).read_bytes()
        span = _damage(data_path / path, case.damage, rng)
        excused = _excused(case, before, span, sample.book)
        shim = Shim(work, data_path)
        shim.set_slept(MUCH_LATER_S)
        if case.damage == "EIO":
            shim.set_rules(Rule("read", str(path), errno.EIO))
        daemon = Nsqd(data_path, *FLAGS, environment=shim.environment)
        tally = _judge(sample, daemon, case, path.name, Accident(excused=frozenset(excused)))
        if not tally.is_good and evidence_directory():
            kept = Path(tempfile.mkdtemp(prefix="damage", dir=evidence_directory()))
            shutil.copytree(sample.data_path, kept / "data")
            if case.damage != "EIO":
                _rewrite(kept / "data" / path, before, case.damage, span)
            tally.faults.append(f"kept in {kept}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    tally.faults = [f"{case}, {path} bytes {span[0]} to {span[1]}: {fault}" for fault in tally.faults]
    return tally


def _damage(path: Path, damage: str, rng: random.Random) -> tuple[int, int]:
    """Damages a file; returns the bytes that are no longer what they were."""
    before = path.read_bytes()
    if damage == "EIO":
        return 0, len(before)
    at = rng.randrange(len(before))
    if damage == "empty":
        span = (0, len(before))
    elif damage == "cut":
        span = (at, len(before))
    elif damage == "head":
        at = rng.randrange(min(HEAD_BYTES, len(before)))
        span = (at, at + 1)
    elif damage == "flip":
        used = [index for index in range(len(before)) if before[index]] or [at]
        at = rng.choice(used) if rng.random() < 0.9 else at
        span = (at, at + 1)
    else:
        begin = at - at % PAGE_BYTES
        span = (begin, min(begin + PAGE_BYTES, len(before)))
    _rewrite(path, before, damage, span)
    return span


def _rewrite(path: Path, before: bytes, damage: str, span: tuple[int, int]) -> None:
    content = bytearray(before)
    if damage in ("flip", "head"):
        content[span[0]] ^= 1 << (span[0] % 8)
    elif damage in ("cut", "empty"):
        del content[span[0] :]
    else:
        content[span[0] : span[1]] = bytes(span[1] - span[0])
    path.write_bytes(content)


def _excused(case: DamageCase, before: bytes, span: tuple[int, int], book: Book) -> set[bytes]:
    """Returns the messages that were in the damaged bytes."""
    if case.kind == "segment":
        for item in scan(memoryview(before), 0):
            if isinstance(item, StoredBatch) and item.offset < span[1] and item.end > span[0]:
                span = (min(span[0], item.offset), max(span[1], item.end))
    elif case.kind == "journal":  # it has no bodies, only what is known of parked and requeued messages
        return {body for body, fate in book.fates.items() if fate.topic == PARKED}
    elif case.kind not in ("deferred", "kept"):
        return set()
    found = set()
    for body in book.fates:
        at = before.find(body)
        if at >= 0 and at - RECORD_HEAD_BYTES < span[1] and at + len(body) > span[0]:
            found.add(body)
    return found


def _judge(sample: Sample, daemon: Nsqd, case: DamageCase, name: str, accident: Accident) -> Tally:
    try:
        daemon.start()
        tally = drain_and_judge(daemon, sample.book, accident)
    except StartError as error:
        tally = refused_start(error)
        if not tally.refused and name in error.log:
            tally.faults = []  # it says which file it is about
        return tally
    finally:
        daemon.kill()
    if tally.excused and name not in daemon.log and case.damage not in UNNOTICED:
        tally.faults.append(f"{tally.excused} messages are gone and the log does not say so")
    return tally


def rounds(seed: int) -> Iterator[Tally]:
    """Samples without end, each damaged some fifty times."""
    rng = random.Random(seed)
    while True:
        with tempfile.TemporaryDirectory(prefix="sample") as directory:
            sample = Sample(Path(directory), rng.getrandbits(32), parked=True)
            cases = [DamageCase(kind, damage) for kind in KINDS for damage in DAMAGES]
            rng.shuffle(cases)
            for case in cases:
                tally = check(sample, case, rng)
                if tally is not None:
                    yield tally
